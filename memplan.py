"""Where memory lies: lifetimes in, addresses out (Memo, arXiv 2407.12117, sections 4.2 and 4.3).

A training step's requests repeat exactly, so their addresses can be computed once (offline dynamic
storage allocation). Request i has a size S_i and a half-open lifetime; it is to get an offset A_i:

    min M   s.t.   A_i + S_i <= M;   for lifetimes that overlap, with a binary z_ij:
                   A_i + S_i <= A_j + z_ij*U   and   A_j + S_j <= A_i + (1 - z_ij)*U

`solve` is exact where it can be, and says so. No plan is below the largest sum of live sizes; most
often an order of placing meets it, and is optimal. Where a gap remains: two depth-first searches
from the bottom up, which may also prove that nothing lower exists (`pack`), of thousands of
requests for those at nearly full moments first (`pack_core`); the mixed-integer program above with
what makes it solvable (`milp_offsets`); and a search over orders, until time is up. Time splits
where nothing lives, and each part is solved alone. `check` trusts none of it.

`solve_levels` is the paper's second level: requests that live and die within one pass of a layer
are solved for that pass (equal passes once), and the step is then solved with each pass as one
block.

`StepMemory` records a step's requests, plans them, and serves later steps from one arena at the
planned addresses, through an allocator that delegates all else to PyTorch's, on a CPU or a GPU.
`simulate` finds the requests of a step that no machine at hand could run.

    python memplan.py TRACE.csv [--capacity N] [--time-limit S] [--out PLAN.csv] [--plot PLAN.png]

TRACE.csv has the columns id,lower,upper,size; PLAN.csv has offset beside them.

Left out: alignment other than that of the sizes, and requests whose address is given.

Legend: n requests, U an upper bound of M, live set: requests that are alive at one time.
"""
import argparse
import bisect
import csv
import ctypes
import functools
import hashlib
import itertools
import math
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array


@dataclass(frozen=True)
class Request:
    lower: int  # first moment alive
    upper: int  # first moment dead
    size: int


@dataclass
class Plan:
    offsets: list[int]
    peak: int
    lower_bound: int  # the largest sum of live sizes, or better
    method: str  # what found it
    seconds: float = 0.0
    levels: list["Plan"] = field(default_factory=list)  # of solve_levels: one a different pass

    @property
    def optimal(self) -> bool:
        return self.peak == self.lower_bound

    def __str__(self) -> str:
        gap = self.peak / self.lower_bound - 1 if self.lower_bound else 0.0
        proof = "proved optimal" if self.optimal else f"gap {gap:.2%}"
        return (f"{len(self.offsets)} requests, peak {self.peak:,}, lower bound "
                f"{self.lower_bound:,}, {proof}, {self.method}, {self.seconds:.2f} s")


def check(requests: list[Request], offsets: list[int], peak: int) -> None:
    """Raise ValueError if two requests that live together overlap, or one leaves [0, peak). Simple
    enough to be believed: what lives is kept in the order of addresses, and who is born must fit
    between its two neighbours."""
    alive: list[tuple[int, int]] = []  # (offset, request)
    for _, birth, i in sorted([(r.upper, 0, i) for i, r in enumerate(requests)]
                              + [(r.lower, 1, i) for i, r in enumerate(requests)]):
        r, here = requests[i], (offsets[i], i)
        at = bisect.bisect(alive, here)
        if not birth:
            alive.pop(at - 1)
            continue
        if not 0 <= offsets[i] <= peak - r.size:
            raise ValueError(f"request {i} of {r.size} at {offsets[i]} leaves [0, {peak})")
        alive.insert(at, here)
        for (low, a), (high, b) in itertools.pairwise(alive[max(0, at - 1) : at + 2]):
            if low + requests[a].size > high:
                a, b = sorted((a, b))
                raise ValueError(f"requests {a} and {b} live together and overlap: {requests[a]} "
                                 f"at {offsets[a]}, {requests[b]} at {offsets[b]}")


def live_sets(requests: list[Request]) -> list[list[int]]:
    """The maximal live sets, in the order of time. Each begins with births and ends before a
    death, so there are at most n."""
    moments = sorted([(r.upper, 0, i) for i, r in enumerate(requests)]
                     + [(r.lower, 1, i) for i, r in enumerate(requests)])
    sets, alive, born = [], {}, False
    for _, birth, i in moments:
        if birth:
            alive[i] = born = True
        else:
            if born:
                sets.append(list(alive))
            del alive[i]
            born = False
    return sets


def lower_bound(requests: list[Request]) -> int:
    return max((sum(requests[i].size for i in s) for s in live_sets(requests)), default=0)


def neighbours(requests: list[Request]) -> list[list[int]]:
    """For each request the others that live together with it."""
    near, alive = [[] for _ in requests], set()
    for _, birth, i in sorted([(r.upper, 0, i) for i, r in enumerate(requests)]
                              + [(r.lower, 1, i) for i, r in enumerate(requests)]):
        if birth:
            near[i].extend(alive)
            for j in alive:
                near[j].append(i)
            alive.add(i)
        else:
            alive.remove(i)
    return near


# ---------------------------------------------------------------------------- orders of placing


def place(sizes: list[int], near: list[list[int]], order: list[int], best_fit: bool,
          fixed: list[int] | None = None) -> list[int]:
    """Each request in turn at the lowest gap between those placed that it lives with (or at the
    smallest gap that is large enough). fixed: offsets of those that are not in `order`, else -1."""
    offsets = list(fixed or [-1] * len(sizes))
    for i in order:
        size, at, found, room = sizes[i], 0, -1, math.inf
        placed = [j for j in near[i] if offsets[j] >= 0]
        for a, end in sorted((offsets[j], offsets[j] + sizes[j]) for j in placed):
            if at + size <= a and a - at < room:
                found, room = at, a - at
                if not best_fit:
                    break
            at = max(at, end)
        offsets[i] = at if found < 0 else found
    return offsets


def peak_of(sizes: list[int], offsets: list[int]) -> int:
    return max((a + s for a, s in zip(offsets, sizes)), default=0)


def first_orders(requests: list[Request]) -> list[list[int]]:
    """Orders that are often good: by size, lifetime, their product, birth, and by the fullest
    moment that a request lives through."""
    fullest = [0] * len(requests)
    for s in live_sets(requests):
        total = sum(requests[i].size for i in s)
        for i in s:
            fullest[i] = max(fullest[i], total)
    life = [r.upper - r.lower for r in requests]
    keys = (lambda i: (-requests[i].size, -life[i]), lambda i: (-life[i], -requests[i].size),
            lambda i: -requests[i].size * life[i], lambda i: (requests[i].lower, -life[i]),
            lambda i: (-fullest[i], -requests[i].size), lambda i: (-fullest[i], -life[i]),
            lambda i: (-requests[i].upper, -life[i]))
    return [sorted(range(len(requests)), key=key) for key in keys]


def search_orders(requests: list[Request], near: list[list[int]], bound: int, until: float,
                  seed: int = 0) -> list[int]:
    """The first orders, then better ones near them: what ends at the peak, or just below it, moves
    forward, and equal or (with a falling probability) worse results are taken."""
    sizes, rng, tries = [r.size for r in requests], random.Random(seed), []
    for order in first_orders(requests):
        for best_fit in (False, True):
            offsets = place(sizes, near, order, best_fit)
            tries.append((peak_of(sizes, offsets), order, offsets))
            if tries[-1][0] <= bound or time.monotonic() > until:
                return min(tries, key=lambda t: t[0])[2]
    tries.sort(key=lambda t: t[0])
    best, begin = tries[0], time.monotonic()
    for now in itertools.cycle(tries[:4]):
        heat = 0.02  # of the peak
        for _ in range(200 + 10 * len(sizes)):
            left = (until - time.monotonic()) / max(1e-9, until - begin)
            if best[0] <= bound or left <= 0:
                return best[2]
            order = list(now[1])
            high = now[0] * (1 - rng.random() / 8)
            tops = [i for i, a in enumerate(now[2]) if a + sizes[i] > high]
            i = rng.choice(tops)
            where = order.index(i)
            order.insert(rng.randrange(where + 1), order.pop(where))
            offsets = place(sizes, near, order, False)
            peak = peak_of(sizes, offsets)
            worse = (peak / now[0] - 1) / (heat * left + 1e-9)
            if worse <= 0 or rng.random() < math.exp(-worse) / 4:
                now = peak, order, offsets
                best = min(best, now, key=lambda t: t[0])


def pack(requests: list[Request], ceiling: int, seconds: float,
         seed: int = 0) -> tuple[list[int] | None, bool]:
    """Offsets with a peak of at most `ceiling`, by two searches (memplan_search.cpp), or None; and
    whether it is proved that there are none. Without a C++ compiler: None, unproved."""
    unit = math.gcd(*(r.size for r in requests))
    if not requests or max(ceiling, sum(r.size for r in requests)) // unit >= 2**60:
        return None if requests else [], False
    try:
        search = compiled("memplan_search.cpp").pack
    except RuntimeError as e:
        warnings.warn(f"memplan: no search from the bottom up, plans may be worse: {e}")
        return None, False
    first, last = [-1] * len(requests), [0] * len(requests)
    for k, members in enumerate(live_sets(requests)):  # time, counted in these: the same overlaps
        for i in members:
            first[i] = k if first[i] < 0 else first[i]
            last[i] = k + 1
    offsets = np.zeros(len(requests), np.int64)
    data = [np.array(x, np.int64) for x in (first, last, [r.size // unit for r in requests])]
    answer = search(
        ctypes.c_int64(len(requests)), *(ctypes.c_void_p(x.ctypes.data) for x in data),
        ctypes.c_int64(ceiling // unit), ctypes.c_double(seconds), ctypes.c_int64(seed % 2**60),
        ctypes.c_void_p(offsets.ctypes.data))
    return [a * unit for a in offsets.tolist()] if answer == 1 else None, answer == 0


def pack_core(requests: list[Request], near: list[list[int]], ceiling: int, seconds: float,
              seed: int = 0) -> tuple[list[int] | None, bool]:
    """As `pack`, for thousands of requests: it places those that live at nearly full moments, and
    the others, larger and longer ones first, find room around them."""
    until, sizes = time.monotonic() + seconds, [r.size for r in requests]
    sets = [(sum(sizes[i] for i in s), s) for s in live_sets(requests)]
    for share in (0.98, 0.9, 0.7, 0.0) if len(requests) > 400 else (0.0,):
        core = sorted({i for total, s in sets if total >= share * ceiling for i in s})
        left = until - time.monotonic()
        if len(core) > 6000 or left <= 0:
            break
        offsets, proved = pack([requests[i] for i in core], ceiling,
                               left / 3 if share else left, seed)
        if proved:
            return None, True
        if offsets:
            fixed = [-1] * len(requests)
            for i, a in zip(core, offsets):
                fixed[i] = a
            rest = [i for i, a in enumerate(fixed) if a < 0]
            rest.sort(key=lambda i: sizes[i] * (requests[i].lower - requests[i].upper))
            offsets = place(sizes, near, rest, False, fixed)
            if peak_of(sizes, offsets) <= ceiling:
                return offsets, False
    return None, False


@functools.cache
def compiled(source: str, *options: str) -> ctypes.CDLL:
    """The library of a C++ file beside this one, compiled at first use (some seconds) and kept in
    the user's cache. Raises RuntimeError with the compiler's words."""
    file = Path(__file__).with_name(source)
    command = ["g++", "-std=c++20", "-O2", "-shared", "-fPIC", str(file), *options]
    key = hashlib.sha256(file.read_bytes() + repr((command, platform.machine())).encode())
    key = key.hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "memplan"
    built = folder / f"{key}.so"
    try:
        if not built.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as tmp:
                made = Path(tmp) / "made.so"
                subprocess.run([*command, "-o", str(made)], capture_output=True, text=True,
                               check=True)
                os.replace(made, built)  # whole at any moment, whoever else compiles
        return ctypes.CDLL(str(built))
    except (OSError, subprocess.CalledProcessError) as e:
        words = getattr(e, "stderr", None) or e
        raise RuntimeError(f"{' '.join(command)} failed:\n{str(words)[-2000:]}") from None


# ---------------------------------------------------------------------------- the program


EXACT = 2**17  # units of a peak for which the program's tolerances are far below one


def milp_rows(s: list[int], pairs: dict[tuple[int, int], int], big: int,
              sets: list[list[int]]) -> list[tuple[dict[int, float], int]]:
    """The program's rows, ({column: factor}, least value of their sum): of sizes s, of pairs (with
    the column of z_ij), and the cuts of live sets. Columns: A_i, then M, then z_ij."""
    n, rows = len(s), []

    def above(i: int, j: int) -> tuple[int, int, int]:
        """z for "i lies above j" as column, factor, constant."""
        return (pairs[i, j], 1, 0) if i < j else (pairs[j, i], -1, 1)

    for (i, j), z in pairs.items():
        rows.append(({i: 1, j: -1, z: -big}, s[j] - big))  # A_i >= A_j + S_j if z
        rows.append(({j: 1, i: -1, z: big}, s[i]))  # A_j >= A_i + S_i if not z
    for i in range(n):
        rows.append(({n: 1, i: -1}, s[i]))
    for members in sets:
        for j in members:
            low, high = {j: 1.0}, {n: 1.0, j: -1.0}
            least_low, least_high = 0, s[j]
            for i in members:
                if i != j:
                    z, factor, constant = above(j, i)  # i lies below j
                    low[z], least_low = -s[i] * factor, least_low + s[i] * constant
                    z, factor, constant = above(i, j)
                    high[z], least_high = -s[i] * factor, least_high + s[i] * constant
            rows += [(low, least_low), (high, least_high)]
    return rows


def milp_offsets(requests: list[Request], near: list[list[int]], upper: int, bound: int,
                 until: float, cuts: bool = True, symmetry: bool = True) -> tuple[list[int] | None,
                                                                                  int]:
    """Offsets with a peak of at most `upper`, or None; and a lower bound that was proved.

    Variables: A_i, M, and z_ij = 1 where i lies above j, for pairs that live together. cuts: in a
    live set C everything below j fits below it, and everything above it above:

        sum_{i in C} S_i z_ji <= A_j        A_j + S_j + sum_{i in C} S_i z_ij <= M

    symmetry: equal requests keep one order, and the picture is not turned upside down.

    Floating point decides about integers that are small enough: sizes count in units, rounded down.
    What stands in a plan in its order stands so, too, with smaller sizes, at a peak of at most
    upper / unit, so the bound holds for the sizes as they are.
    """
    n, left = len(requests), until - time.monotonic()
    sizes = [r.size for r in requests]
    exact = math.gcd(*sizes)
    unit = exact * -(-upper // (exact * EXACT))
    pairs = {(i, j): k for k, (i, j) in enumerate(
        ((i, j) for i in range(n) for j in near[i] if i < j), n + 1)}
    if left <= 0 or len(pairs) > 40000:
        return None, bound
    width, big, s = n + 1 + len(pairs), upper // unit, [x // unit for x in sizes]
    least_peak = -(-bound // unit) - n * (unit > exact)  # rounded up, all would take n units more
    rows = milp_rows(s, pairs, big, live_sets(requests) if cuts else [])
    fixed_low, fixed_high = np.zeros(width), np.full(width, np.inf)
    fixed_low[n], fixed_high[n] = max(0, least_peak), big
    fixed_high[:n] = [big - x for x in s]
    fixed_high[n + 1 :] = 1
    if symmetry:
        same = {}
        for i, r in enumerate(requests):
            same.setdefault(r, []).append(i)
        for group in same.values():
            for i, j in zip(group, group[1:]):
                fixed_high[pairs[i, j]] = 0  # i below j
        if all(len(g) == 1 for g in same.values()) and pairs:
            fixed_high[max(pairs.items(), key=lambda p: sizes[p[0][0]] * sizes[p[0][1]])[1]] = 0
    entries = [(k, c, v) for k, (row, _) in enumerate(rows) for c, v in row.items()]
    k, c, v = zip(*entries)
    matrix = coo_array((v, (k, c)), shape=(len(rows), width)).tocsr()
    found = milp(np.eye(1, width, n)[0], integrality=np.r_[np.zeros(n + 1), np.ones(len(pairs))],
                 bounds=Bounds(fixed_low, fixed_high),
                 constraints=LinearConstraint(matrix, [least for _, least in rows], np.inf),
                 options={"time_limit": left, "mip_rel_gap": 0.0})
    proved = bound  # also where it finds the program infeasible: there is a plan of `upper`
    dual = found.fun if found.status == 0 else found.mip_dual_bound  # solved: they are equal
    if found.status != 2 and dual is not None and np.isfinite(dual):
        proved = max(bound, math.ceil(dual - 1e-3) * unit)
    if found.x is None:
        return None, min(proved, upper)
    # from the order alone: what is rounded in x cannot make two requests overlap
    return place(sizes, near, sorted(range(n), key=lambda i: found.x[i]), False), min(proved, upper)


def solve(requests: list[Request], capacity: int = 0, time_limit: float = 60.0, cuts: bool = True,
          symmetry: bool = True) -> Plan:
    """A plan of the lowest peak that is found within time_limit seconds (a first order of placing
    is tried in any case: seconds, of thousands of requests that live together); with a capacity,
    the first that fits is good enough. cuts, symmetry: see milp_offsets; without them plans are as
    valid."""
    start = time.monotonic()
    where = split_in_time(requests)
    parts = [[requests[i] for i in part] for part in where]
    bound = max([capacity, *map(lower_bound, parts)])  # where one part is as high, lower is no use
    near = [neighbours(part) for part in parts]
    plans = [solve_part(*x, bound, start + time_limit / 50, cuts, symmetry)
             for x in zip(parts, near)]
    for seed in itertools.count(1):  # the parts that are still too high, the highest first
        bound = max([bound, *(p.lower_bound for p in plans)])
        high = sorted((k for k, p in enumerate(plans) if p.peak > bound),
                      key=lambda k: -plans[k].peak)
        if not high or time.monotonic() > start + time_limit:
            break
        end = start + (0.3 if seed == 1 else 1.0) * time_limit
        for count, k in enumerate(high):
            now = time.monotonic()
            until = now + (end - now) / (len(high) - count)
            plans[k] = solve_part(parts[k], near[k], bound, until, cuts, symmetry, plans[k], seed)
    offsets = [0] * len(requests)
    for part, p in zip(where, plans):
        for i, a in zip(part, p.offsets):
            offsets[i] = a
    worst = max(plans, key=lambda p: p.peak, default=Plan([], 0, 0, "nothing to place"))
    return Plan(offsets, worst.peak, max([p.lower_bound for p in plans], default=0), worst.method,
                time.monotonic() - start)


def split_in_time(requests: list[Request]) -> list[list[int]]:
    """Indices of requests, cut where nothing is alive."""
    parts, end = [], -math.inf
    for i in sorted(range(len(requests)), key=lambda i: requests[i].lower):
        if requests[i].lower >= end:
            parts.append([])
        parts[-1].append(i)
        end = max(end, requests[i].upper)
    return parts


def solve_part(requests: list[Request], near: list[list[int]], enough: int, until: float,
               cuts: bool, symmetry: bool, plan: Plan | None = None, seed: int = 0) -> Plan:
    """A plan that is better than `plan`, or the same: orders of placing; from the bottom up, with
    ever lower ceilings; and, where there are few requests, the program."""
    sizes = [r.size for r in requests]
    if plan is None:
        offsets = search_orders(requests, near, enough, until)
        plan = Plan(offsets, peak_of(sizes, offsets), lower_bound(requests), "order of placing")

    def take(offsets: list[int] | None, method: str) -> None:
        nonlocal plan
        if offsets and peak_of(sizes, offsets) < plan.peak:
            plan = Plan(offsets, peak_of(sizes, offsets), plan.lower_bound, method)

    def part_of_time(share: float) -> float:
        now = time.monotonic()
        return now + share * (until - now)

    unit, goal = math.gcd(*sizes), max(enough, plan.lower_bound)
    failed, ceiling = goal - 1, goal  # first the best that can be, then between what is known
    while plan.peak > goal and time.monotonic() < until:
        seconds = part_of_time(0.25) - time.monotonic()
        offsets, proved = pack_core(requests, near, ceiling, seconds, seed)
        take(offsets, "from the bottom up")
        if proved:  # peaks are sums of sizes
            plan.lower_bound = max(plan.lower_bound, (ceiling // unit + 1) * unit)
            goal = max(goal, plan.lower_bound)
        failed = failed if offsets else ceiling
        ceiling = (failed + plan.peak) // 2
        if ceiling < failed + max(unit, plan.peak // 2000):
            ceiling = plan.peak - unit  # last, what a proof needs
        if ceiling <= failed:
            break
    if plan.peak > goal and len(requests) <= 150:
        offsets, bound = milp_offsets(requests, near, plan.peak, plan.lower_bound,
                                      part_of_time(0.6), cuts, symmetry)
        plan.lower_bound = max(plan.lower_bound, bound)
        goal = max(goal, plan.lower_bound)
        take(offsets, "integer program")
    if plan.peak > goal and time.monotonic() < until:
        take(search_orders(requests, near, goal, until, seed), "order of placing")
    return plan


def solve_levels(requests: list[Request], passes: list[tuple[int, int]],
                 time_limit: float = 60.0) -> Plan:
    """Memo's two levels. passes: half-open spans of time, one a layer's forward or backward, that
    do not overlap. What lives within one is planned there; the pass is then one block of the step.

    The plan's lower bound is that of all requests, not of the blocks.
    """
    start, inner = time.monotonic(), [[] for _ in passes]
    outer = []
    for i, r in enumerate(requests):
        home = [k for k, (a, b) in enumerate(passes) if a <= r.lower and r.upper <= b]
        (inner[home[0]] if home else outer).append(i)

    @functools.cache
    def level1(mine: tuple[Request, ...]) -> Plan:
        return solve(list(mine), time_limit=time_limit / 4)

    plans = []
    for (a, _), mine in zip(passes, inner):  # equal passes are equal but for when they begin
        plans.append(level1(tuple(Request(requests[i].lower - a, requests[i].upper - a,
                                          requests[i].size) for i in mine)))
    blocks = [Request(a, b, p.peak) for (a, b), p in zip(passes, plans)]
    step = solve(blocks + [requests[i] for i in outer],
                 time_limit=start + time_limit - time.monotonic())
    offsets = [0] * len(requests)
    for base, p, mine in zip(step.offsets, plans, inner):
        for i, a in zip(mine, p.offsets):
            offsets[i] = base + a
    for i, a in zip(outer, step.offsets[len(blocks) :]):
        offsets[i] = a
    different = list({id(p): p for p in plans}.values())
    return Plan(offsets, step.peak, lower_bound(requests), f"two levels, {step.method}",
                time.monotonic() - start, different + [step])


# ---------------------------------------------------------------------------- record and replay

ALIGN = {"cpu": 64, "cuda": 512}  # bytes: where PyTorch's kernels want a tensor to start
LEAST = {"cpu": 2**10, "cuda": 2**20}  # bytes of a request that is planned: cuda, of large blocks


@functools.cache
def library(kind: str) -> ctypes.CDLL:
    """The allocator (memplan_allocator.cpp) for "cpu" or "cuda", installed for good: outside of
    record and replay it only delegates. Raises RuntimeError with the compiler's words."""
    loaded = compiled("memplan_allocator.cpp", *allocator_options(kind))
    loaded.install.argtypes = [ctypes.c_void_p]
    loaded.begin.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    loaded.end.restype = ctypes.c_int64
    loaded.recorded.restype = loaded.counted.restype = ctypes.POINTER(ctypes.c_int64)
    loaded.load.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    loaded.load.restype = ctypes.c_int64
    import torch

    loaded.install(torch.cuda.current_stream().cuda_stream if kind == "cuda" else None)
    return loaded


def allocator_options(kind: str) -> list[str]:
    """Of the compiler, for this PyTorch and its headers."""
    import torch
    from torch.utils.cpp_extension import CUDA_HOME, include_paths

    include, packages = include_paths(), Path(torch.__file__).parents[1]
    if kind == "cuda" and CUDA_HOME:
        include += [str(Path(CUDA_HOME) / "include")]
    elif kind == "cuda":  # pip's packages
        include += map(str, packages.glob("nvidia/cu*/include"))
    return [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
            f'-DMEMPLAN_TORCH="{torch.__version__}"', *(f"-I{path}" for path in include),
            f"-L{packages / 'torch' / 'lib'}", "-lc10",
            *(["-DMEMPLAN_CUDA", "-lc10_cuda"] if kind == "cuda" else [])]


class StepMemory:
    """Planned memory of a step, a callable that requests the same each time.

        memory = StepMemory()
        memory.run(step)        # again and again; counts says how well the plan was met
        memory.give_back()      # until the next run, for whatever else needs memory

    On a CPU, all of the process's tensors; on a GPU those of the current device and stream. What
    other streams use must be in use until this one has waited for them. In train.py, gathered
    weights, whole gradients and rounding buffers lie in memory that outlives steps, and what ranks
    map from each other lies outside the allocator; what all-to-alls and copies to the host read or
    write is held until this stream has waited for their event.
    Requests below `least` bytes, and those that outlive the step, stay with PyTorch's allocator.
    guess: the requests that `simulate` finds, where a step might not fit unplanned; then none runs
    unplanned: the first ones run by a plan of these, as far as it is met, while one is recorded.
    One StepMemory a kind of device at a time: its arena must live as long as any tensor in it, so
    what loads an arena raises RuntimeError while tensors of another's steps are in use.
    """

    COUNTS = ("hits", "passed", "misses", "refused", "hit_bytes", "bytes")

    def __init__(self, device: str = "cpu", least: int = 0, guess: list[Request] = ()):
        self.kind = str(device).partition(":")[0]
        self.device, self.align = device, ALIGN[self.kind]
        self.least, self.requests, self.plan = least or LEAST[self.kind], list(guess), None
        self.arena, self.counts, self.runs, self.plans = None, {}, 0, 0
        if guess:
            self.requests.sort(key=lambda r: r.lower)
            self.sizes, self.inside = [r.size for r in self.requests], range(len(guess))
            self.solve()
            self.plans = 0  # of recorded steps

    def run(self, step):
        """Run the step: the first two as they are (or by the guess), for what lasts; the third is
        recorded; then by plan, and recorded again (three times in all) after one that met less than
        nine tenths of its plan."""
        self.runs += 1
        missed = self.plans and self.counts and self.counts["hits"] < 0.9 * len(self.inside)
        if missed and self.plans < 3 and self.give_back():
            self.counts, self.plan = {}, None
        if self.runs < 3:
            return self.replay(step) if self.plan else step()
        if self.plan is None or not self.plans:
            result = self.record(step)
            if self.give_back():  # else what is in the arena outlives the step: the next one, maybe
                self.solve()
            return result
        return self.replay(step)

    def record(self, step):
        """Run the step, by the guess if there is one, and note its requests: sizes, and lifetimes
        counted in events."""
        lib = library(self.kind)
        if self.plan and self.arena is None:
            self._load()
        if self.kind == "cuda" and not self.plan:  # PyTorch's allocator is to show what it needs
            import torch

            torch.cuda.empty_cache()
        lib.begin(3 if self.plan else 1, self.least, self.align)
        try:
            result = step()
        finally:
            n = lib.end()
        events = np.ctypeslib.as_array(lib.recorded(), (n, 3)).copy() if n else []
        born = [(now, int(size), int(at)) for now, (_, size, at) in enumerate(events) if size >= 0]
        died = {int(request): now for now, (request, size, _) in enumerate(events) if size < 0}
        self.sizes = [size for _, size, _ in born]
        self.inside = [i for i in range(len(born)) if i in died]
        self.addresses = [born[i][2] for i in self.inside]  # that PyTorch's allocator has given
        self.requests = [Request(born[i][0], died[i], self._round(born[i][1]))
                         for i in self.inside]
        self.counts = {}  # of a plan that is not followed any more
        return result

    def _round(self, size: int) -> int:
        return -(-max(1, size) // self.align) * self.align

    def solve(self, time_limit: float = 20.0) -> Plan:
        """Plan the recorded step, and check the plan."""
        self.plan, self.plans = solve(self.requests, time_limit=time_limit), self.plans + 1
        check(self.requests, self.plan.offsets, self.plan.peak)
        entries = np.full((len(self.sizes), 2), -1, np.int64)
        entries[:, 0] = [self._round(size) for size in self.sizes]
        entries[self.inside, 1] = self.plan.offsets
        self.entries = np.ascontiguousarray(entries)
        return self.plan

    def _load(self) -> None:
        """Make the arena, one block of PyTorch's allocator."""
        import torch

        memory = torch.empty(self.plan.peak + self.align, dtype=torch.uint8, device=self.device)
        first = -memory.data_ptr() % self.align
        arena = memory[first : first + self.plan.peak]
        if used := library(self.kind).load(arena.data_ptr(), self.entries.ctypes.data,
                                           len(self.entries)):
            raise RuntimeError(f"{used} tensors of an earlier plan are still in use")
        self.arena = HELD[self.kind] = arena  # for as long as the allocator may point into it

    def give_back(self) -> bool:
        """The arena's memory, to PyTorch's allocator, if no tensor is in it. Returns whether."""
        if self.arena is not None and not library(self.kind).load(None, None, 0):
            self.arena = HELD[self.kind] = None
        return self.arena is None

    def replay(self, step):
        """Run the step on planned addresses; self.counts: how many requests met the plan."""
        if self.arena is None:
            self._load()
        lib = library(self.kind)
        lib.begin(2, self.least, self.align)
        try:
            return step()
        finally:
            lib.end()
            self.counts = dict(zip(self.COUNTS, lib.counted()[:6]))

    def draw(self, path: str) -> None:
        """A PNG file: the planned addresses over time beside those that PyTorch has given, which
        are moved together where no request of the step ever was."""
        theirs, end, shift = [0] * len(self.addresses), 0, 0
        for i in sorted(range(len(self.addresses)), key=lambda i: self.addresses[i]):
            shift += max(0, self.addresses[i] - shift - end)
            theirs[i] = self.addresses[i] - shift
            end = max(end, theirs[i] + self.requests[i].size)
        draw(path, self.requests, self.plan, theirs)


def simulate(make, ranks: int = 1, fused=lambda: None, least: int = 2**20,
             align: int = 512) -> tuple[list[Request], int]:
    """What a step would request, and the bytes of what lasts between steps, on fake tensors: no
    GPU, no memory, any number of ranks, of which this is the first.

    make() builds everything, on the CPU, and returns the step; fused() names the kernel that is
    running, if it is one that will be a single one: what is born and dies in it is left out, and so
    is what kernels request inside. Raises RuntimeError where there is a process group.
    """
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    events, known = [], set()  # (request, size or -1, fused kernel)

    def gone(i: int, storage: int) -> None:
        known.discard(storage)
        events.append((i, -1, fused()))

    class Births(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for t in tree_leaves(out):
                if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in known:
                    storage, i = t.untyped_storage(), len(events)
                    known.add(storage._cdata)
                    events.append((i, storage.nbytes(), fused()))
                    weakref.finalize(storage, gone, i, storage._cdata)
            return out

    if dist.is_initialized():
        raise RuntimeError("simulate: a process group is in the way of the simulated one")
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), Births():
            step = make()
            step()  # what it makes and keeps lasts
            start = len(events)
            step()
            end = len(events)
    finally:
        dist.destroy_process_group()
    lasting = {i: size for i, size, _ in events[:start] if size >= 0}
    for i, size, _ in events[:start]:
        if size < 0:
            del lasting[i]
    born, requests = {}, []
    for now, (i, size, kernel) in enumerate(events[start:end]):
        if size >= 0:
            born[i] = now, size, kernel
        elif i in born:
            lower, size, first = born.pop(i)
            if size >= least and (kernel is None or kernel is not first):
                requests.append(Request(lower, now, -(-size // align) * align))
    return requests, sum(lasting.values())


HELD: dict[str, object] = {}  # a kind of device: the arena that its allocator points into


# ---------------------------------------------------------------------------- the program's files


def read_trace(path: str) -> tuple[list[str], list[Request]]:
    """ids and requests of a CSV file. Raises ValueError naming the line."""
    lines, requests = {}, []  # lines: by id
    with open(path, newline="", encoding="utf-8-sig", errors="replace") as f:
        rows = csv.reader(f)
        columns = [c.strip() for c in next(rows, [])]
        if any(columns.count(c) != 1 for c in ("id", "lower", "upper", "size")):
            raise ValueError(f"{path}, line 1: the columns are id,lower,upper,size, each once; not "
                             f"{','.join(columns)[:99]!r}")
        for row in filter(None, rows):
            where, named = f"{path}, line {rows.line_num}", dict(zip(columns, row))
            cells = [named.get(k, "").strip() for k in ("lower", "upper", "size")]
            if len(row) != len(columns) or not all(re.fullmatch(r"-?[0-9]{1,18}", x)
                                                   for x in cells):
                raise ValueError(f"{where}: {len(columns)} cells, of which lower, upper and size "
                                 f"are whole numbers; not {','.join(row)[:99]!r}")
            r = Request(*map(int, cells))
            if r.lower >= r.upper or r.size <= 0:
                raise ValueError(f"{where}: a request lives from lower to before upper, and has a "
                                 f"size: {r}")
            if (first := lines.setdefault(named["id"], rows.line_num)) != rows.line_num:
                raise ValueError(f"{where}: id {named['id']} is on line {first} already")
            requests.append(r)
    return [*lines], requests


def write_plan(path: str, ids: Iterable, requests: list[Request], offsets: list[int]) -> None:
    with open(path, "w", newline="") as f:
        out = csv.writer(f)
        out.writerow(["id", "lower", "upper", "size", "offset"])
        out.writerows([x, r.lower, r.upper, r.size, a] for x, r, a in zip(ids, requests, offsets))


def draw(path: str, requests: list[Request], plan: Plan, theirs: list[int] | None = None) -> None:
    """Address over time, one rectangle a request; beside it, at the addresses of `theirs`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    pictures = [(plan.offsets, str(plan))]
    if theirs:
        peak = peak_of([r.size for r in requests], theirs)
        pictures.append((theirs, f"PyTorch's allocator, addresses in use: {peak:,}"))
    top = max(peak_of([r.size for r in requests], offsets) for offsets, _ in pictures)
    fig, axes = plt.subplots(1, len(pictures), figsize=(9 * len(pictures), 5), squeeze=False)
    for ax, (offsets, title) in zip(axes[0], pictures):
        boxes = [Rectangle((r.lower, a), r.upper - r.lower, r.size)
                 for r, a in zip(requests, offsets)]
        colours = PatchCollection(boxes, cmap="viridis", edgecolor="white", linewidth=0.2)
        colours.set_array(np.log(np.array([r.size for r in requests], float)))
        ax.add_collection(colours)
        ax.axhline(plan.lower_bound, color="red", linewidth=0.8, label="lower bound")
        ax.set(xlabel="time", ylabel="address", title=title, ylim=(0, top * 1.05),
               xlim=(min(r.lower for r in requests), max(r.upper for r in requests)))
        ax.title.set_fontsize(8)
        ax.legend()
    fig.savefig(path, dpi=150)
    plt.close(fig)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("trace", help="a CSV file with the columns id,lower,upper,size")
    parser.add_argument("--capacity", type=int, default=0, help="a peak that is low enough")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds; default: 60")
    parser.add_argument("--out", help="CSV file for the plan: the trace's columns and offset")
    parser.add_argument("--plot", help="PNG file: address over time")
    args = parser.parse_args(argv)
    if args.capacity < 0 or not 0 < args.time_limit < 1e9:
        parser.error(f"--capacity {args.capacity}: from 0 (none); --time-limit {args.time_limit}: "
                     "above 0")
    try:
        ids, requests = read_trace(args.trace)
        plan = solve(requests, args.capacity, args.time_limit)
        check(requests, plan.offsets, plan.peak)
        print(plan)
        if args.out:
            write_plan(args.out, ids, requests, plan.offsets)
        if args.plot and requests:
            draw(args.plot, requests, plan)
    except (OSError, ValueError, csv.Error) as e:
        print(f"memplan.py: error: {e}", file=sys.stderr)
        return 2
    if args.capacity and plan.peak > args.capacity:
        print(f"memplan.py: the peak is {plan.peak - args.capacity:,} above the capacity; "
              + ("nothing lower exists" if plan.optimal else "more --time-limit may help"),
              file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
