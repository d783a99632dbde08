"""Plan at which address each buffer of a training step lies (Memo, arXiv 2407.12117, section 4.2).

The steps of a run request the same memory again and again, so addresses can be computed once: which
buffer is alive when is known, and each is to get an offset (offline dynamic storage allocation).
Buffer i has a size S_i and is alive from its start to before its end; its offset is A_i:

    min M   s.t.   A_i + S_i <= M   and, for i and j that are alive together, with a binary z_ij:
                   A_i + S_i <= A_j + z_ij*U   and   A_j + S_j <= A_i + (1 - z_ij)*U

No plan is below the largest sum of sizes that are alive at one moment. A plan that meets this bound
is optimal, and most often a first fit does. `solve` makes two plans and takes the lower:

    first fit    all buffers at once, in some orders, each at the lowest address that is free
    two levels   Memo's. A pass is one layer's forward or backward; a buffer that lives and dies in
                 one belongs to it. Level 1 plans each distinct pass once; level 2 plans the step
                 with each pass as one block of its pass's peak. A level is done where a first fit
                 meets its bound; else the integer program above is solved.

`check` trusts neither. `StepMemory` records a step's buffers, plans them, and serves later
steps from one arena at the planned addresses (replay; csrc/allocator.cpp: planned_address), on a
CPU or a GPU. `simulate` finds the buffers of a step that no machine at hand could run.

    python memplan.py TRACE.csv [--time-limit S] [--out PLAN.csv] [--plot PLAN.png]

TRACE.csv has the columns id,lower,upper,size (alive from lower to before upper) and may have one
more, pass; PLAN.csv has offset beside them.

Left out: alignment other than that of the sizes, buffers whose address is given, passes within
passes, and speed for more than some ten thousand buffers, which no training step has.

Legend: n buffers; rows: an n x 3 array of start, end, size; section: a span of time in which the
same buffers are alive, and no more could be; peak: M; deadline: of time.monotonic().
"""
import argparse
import contextlib
import csv
import ctypes
import functools
import hashlib
import itertools
import math
import os
import platform
import re
import subprocess
import sys
import time
import weakref
from bisect import bisect, bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array


class Buffer(NamedTuple):
    start: int  # the first moment at which it is alive
    end: int  # the first moment at which it is not any more
    size: int
    in_pass: str = ""  # the pass that it belongs to, if any


@dataclass
class Plan:
    offsets: np.ndarray  # int64, one a buffer
    peak: int
    lower_bound: int  # the largest sum of sizes alive together, or what was proved beyond it
    method: str  # what found it
    seconds: float = 0.0
    levels: list["Plan"] = field(default_factory=list)  # of two: distinct passes, then the step
    beside: "Plan | None" = None  # the plan that was not taken

    @property
    def optimal(self) -> bool:
        return self.peak == self.lower_bound

    @property
    def gap(self) -> float:
        return self.peak / self.lower_bound - 1 if self.lower_bound else 0.0

    def __str__(self) -> str:
        proof = "proved optimal" if self.optimal else f"gap {self.gap:.2%}"
        other = f" ({self.beside.method}: {self.beside.peak:,})" if self.beside else ""
        return (f"{len(self.offsets)} buffers, peak {self.peak:,}, lower bound "
                f"{self.lower_bound:,}, {proof}, {self.method}{other}, {self.seconds:.2f} s")


def as_rows(buffers: Iterable[Buffer]) -> np.ndarray:
    """Return the buffers as rows. Raise ValueError for a buffer that is never alive or has no
    size, and for sizes that 64 bits cannot add up."""
    rows = np.array([b[:3] for b in buffers], np.int64).reshape(-1, 3)
    start, end, size = rows.T
    for i in np.flatnonzero((start >= end) | (size <= 0)):
        raise ValueError(f"buffer {i}: alive from start to before end, and of a size above 0; not "
                         f"{buffers[i]}")
    total = size.sum(dtype=float)
    if total >= 2**60:
        raise ValueError(f"the sizes add up to {total:.3g}, at most 2^60")
    return rows


def moments_in_order(rows):
    """Return births (i) and deaths (n + i) in the order of time, at one moment deaths first."""
    n = len(rows)
    start, end, _ = rows.T
    is_birth = np.arange(2 * n) < n
    return np.lexsort((is_birth, np.r_[start, end]))


def check(buffers: Iterable[Buffer], offsets: Iterable[int], peak: int) -> None:
    """Raise ValueError if two buffers that are alive together overlap, or one leaves [0, peak).

    Simple enough to be believed: over time, the buffers that are alive are kept in the order of
    offsets, and one that is born must fit between its neighbours. A buffer is known by its place in
    the order of all offsets. Shelf k holds the places from 8192 k on that are alive, sorted, and
    `filled` the shelves that are not empty, so that no list is long.
    """
    rows = as_rows(buffers)
    n, size = len(rows), rows[:, 2]
    offsets = np.asarray(offsets, np.int64)
    for i in np.flatnonzero((offsets < 0) | (offsets > peak - size)):
        raise ValueError(f"buffer {i} of {size[i]} at {offsets[i]} leaves [0, {peak})")
    by_offset = np.argsort(offsets, kind="stable")
    place_of = np.empty(n, np.int64)
    place_of[by_offset] = np.arange(n)
    low = [*offsets[by_offset].tolist(), peak]  # low[n]: above all
    top = [*(offsets + size)[by_offset].tolist(), 0]  # top[-1]: below all
    shelves = [[] for _ in range(n // 8192 + 1)]
    filled = []
    moments = moments_in_order(rows)
    deaths = (moments >= n).tolist()
    places = place_of[moments % max(1, n)].tolist()
    for place, dies in zip(places, deaths):
        k = place // 8192
        shelf = shelves[k]
        at = bisect_left(shelf, place)
        if dies:
            del shelf[at]
            if not shelf:
                filled.remove(k)
            continue
        if not shelf:
            insort(filled, k)
        below, above = -1, n
        if at > 0:
            below = shelf[at - 1]
        elif k > filled[0]:
            below = shelves[filled[bisect_left(filled, k) - 1]][-1]
        if at < len(shelf):
            above = shelf[at]
        elif k < filled[-1]:
            above = shelves[filled[bisect(filled, k)]][0]
        shelf.insert(at, place)
        if top[below] > low[place] or top[place] > low[above]:
            other = below if top[below] > low[place] else above
            i, j = sorted((int(by_offset[other]), int(by_offset[place])))
            raise ValueError(f"buffers {i} and {j} are alive together and overlap: {buffers[i]} at "
                             f"{offsets[i]}, {buffers[j]} at {offsets[j]}")


def in_sections(rows):
    """Return the rows with time counted in sections: the same buffers are alive together. A section
    ends with a death that follows a birth, so there are at most n."""
    n = len(rows)
    moments = moments_in_order(rows)
    is_death = moments >= n
    ends_section = is_death.copy()
    ends_section[1:] &= ~is_death[:-1]
    ended = np.empty(2 * n, np.int64)  # sections that end before a birth, or with a death
    ended[moments] = np.cumsum(ends_section)
    return np.stack([ended[:n], ended[n:], rows[:, 2]], axis=1)


def live_bytes(rows):
    """Return the sum of the sizes that are alive, of each section."""
    start, end, size = rows.T
    change = np.zeros(end.max(initial=0) + 1, np.int64)
    np.add.at(change, start, size)
    np.subtract.at(change, end, size)
    return np.cumsum(change)[:-1]


def lower_bound(buffers: Iterable[Buffer]) -> int:
    """Return the largest sum of sizes that are alive together."""
    rows = in_sections(as_rows(buffers))
    return int(live_bytes(rows).max(initial=0))


def cliques(rows):
    """Return the buffers that are alive in each section: the maximal sets of which all overlap."""
    members = [[] for _ in range(rows[:, 1].max(initial=0))]
    for i, (start, end, _) in enumerate(rows.tolist()):
        for section in range(start, end):
            members[section].append(i)
    return members


def peak_of(rows, offsets):
    return int((offsets + rows[:, 2]).max(initial=0))


def time_left(deadline):
    return max(0.0, deadline - time.monotonic())


# ---------------------------------------------------------------------------- first fits


def first_fit(rows, order):
    """Return offsets: each buffer of the order, which has all, in the lowest gap between those
    placed that it overlaps."""
    offsets = np.zeros(len(rows), np.int64)
    placed: list[tuple[int, int, int, int]] = []  # (offset, end of it, start, end)
    for i in order:
        start, end, size = rows[i].tolist()
        at = 0
        for low, top, born, died in placed:
            if born < end and start < died:
                if low - at >= size:
                    break
                at = max(at, top)
        offsets[i] = at
        insort(placed, (at, at + size, start, end))
    return offsets


def first_plan(rows):
    """Return the plan of the lowest first fit: the longest life first, the largest area, the
    largest size, by birth, until one meets the lower bound."""
    start, end, size = rows.T
    bound = int(live_bytes(rows).max())
    best = None
    for key in (start - end, (start - end) * size.astype(float), -size, start):
        offsets = first_fit(rows, np.argsort(key, kind="stable"))
        plan = Plan(offsets, peak_of(rows, offsets), bound, "first fit")
        if best is None or plan.peak < best.peak:
            best = plan
        if best.optimal:
            break
    return best


# ---------------------------------------------------------------------------- the integer program

EXACT_UNITS = 2**17  # of a peak: for so many, the program's tolerances are far below one
MAX_PAIRS = 40_000  # of overlapping buffers; HiGHS takes minutes of more
MAX_ENTRIES = 2_000_000  # of the cuts' matrix


def overlaps(rows):
    """Return the pairs i < j of buffers that are alive together."""
    start, end, _ = rows.T
    i, j = np.triu_indices(len(rows), 1)
    together = (start[i] < end[j]) & (start[j] < end[i])
    return list(zip(i[together].tolist(), j[together].tolist()))


def milp_rows(s, z, big, sets):
    """Yield the program's rows for sizes s and the cuts of the sets, each a sum of coefficients
    times columns that is at least a constant. z: the column of z_ij, which is 1 where i lies above
    j. Columns: A_i, then M, then z_ij."""
    n = len(s)
    for (i, j), column in z.items():
        yield {i: 1, j: -1, column: -big}, s[j] - big  # A_i >= A_j + S_j if z_ij
        yield {j: 1, i: -1, column: big}, s[i]  # A_j >= A_i + S_i if not z_ij
    for i in range(n):
        yield {n: 1, i: -1}, s[i]  # M >= A_i + S_i
    for members in sets:
        for j in members:
            below, above = {j: 1}, {n: 1, j: -1}  # columns of what fits below j and above it
            least_below, least_above = 0, s[j]
            for i in members:
                if i < j:  # z_ij = 1: i lies above j
                    below[z[i, j]] = s[i]
                    least_below += s[i]
                    above[z[i, j]] = -s[i]
                elif j < i:  # z_ji = 1: i lies below j
                    below[z[j, i]] = -s[i]
                    above[z[j, i]] = s[i]
                    least_above += s[i]
            yield below, least_below
            yield above, least_above


def milp_constraint(rows, width):
    """Return the rows as one sparse matrix."""
    values, numbers, columns, least = [], [], [], []
    for number, (coefficients, constant) in enumerate(rows):
        values += coefficients.values()
        numbers += [number] * len(coefficients)
        columns += coefficients.keys()
        least.append(constant)
    matrix = coo_array((values, (numbers, columns)), shape=(len(least), width))
    return LinearConstraint(matrix.tocsr(), least, np.inf)


def milp_bounds(rows, s, z, least_peak, big):
    """Return the bounds of the program's columns."""
    n = len(s)
    low = np.zeros(n + 1 + len(z))
    high = np.ones(n + 1 + len(z))
    high[:n] = big - np.array(s)
    low[n] = max(0, least_peak)
    high[n] = big
    equal = defaultdict(list)  # of plans that are as good, one is enough
    for i, row in enumerate(rows.tolist()):
        equal[tuple(row)].append(i)
    for group in equal.values():
        for i, j in itertools.pairwise(group):
            high[z[i, j]] = 0  # i below j
    if len(equal) == n and z:
        largest = max(z, key=lambda pair: s[pair[0]] * s[pair[1]])
        high[z[largest]] = 0
    return Bounds(low, high)


def milp_offsets(rows, upper, bound, deadline):
    """Return offsets with a peak of at most `upper`, or None; and a lower bound that was proved, at
    least `bound`. upper: the peak of a plan that there is, for U.

    Cuts: in a clique C all that lies below j fits below it, and all above it above:

        sum_{i in C} S_i z_ji <= A_j        A_j + S_j + sum_{i in C} S_i z_ij <= M

    Equal buffers keep one order, and the picture is not turned upside down.

    Floating point decides about integers that are small enough: sizes count in units, rounded down.
    A plan's order of addresses is also one for smaller sizes, at a peak of at most upper / unit, so
    the bound holds for the sizes as they are.
    """
    n, left = len(rows), time_left(deadline)
    exact = int(np.gcd.reduce(rows[:, 2]))
    unit = exact * -(-upper // (exact * EXACT_UNITS))
    if left == 0 or n > MAX_PAIRS // 20:
        return None, bound
    pairs = overlaps(rows)
    if len(pairs) > MAX_PAIRS:
        return None, bound
    sets = cliques(rows)
    if sum(2 * len(members) ** 2 for members in sets) > MAX_ENTRIES:
        return None, bound
    z = {pair: column for column, pair in enumerate(pairs, n + 1)}
    width = n + 1 + len(z)
    s = (rows[:, 2] // unit).tolist()
    big = upper // unit
    least_peak = -(-bound // unit)
    if unit > exact:
        least_peak -= n  # rounded up, all would take n units more
    columns = np.arange(width)
    found = milp(
        columns == n,  # M is minimised ...
        integrality=columns > n,  # ... and z_ij are binary
        bounds=milp_bounds(rows, s, z, least_peak, big),
        constraints=milp_constraint(milp_rows(s, z, big, sets), width),
        options={"time_limit": time_left(deadline), "mip_rel_gap": 0.0})
    proved = bound  # also where it finds the program infeasible: there is a plan of `upper`
    dual = found.fun if found.status == 0 else found.mip_dual_bound  # solved: they are equal
    if found.status != 2 and dual is not None and np.isfinite(dual):
        dual = math.ceil(dual - 1e-3)
        if dual > least_peak:  # else it is what the program was given
            proved = min(upper, max(bound, dual * unit))
    if found.x is None:
        return None, proved
    # from the order alone: what is rounded in x cannot make two buffers overlap
    order = np.argsort(found.x[:n], kind="stable")
    return first_fit(rows, order), proved


def improve_by_milp(rows, plan, deadline):
    """Return a better plan, or the same with a better bound, by the integer program; or the same,
    of buffers that are too many for it."""
    offsets, bound = milp_offsets(rows, plan.peak, plan.lower_bound, deadline)
    plan = replace(plan, lower_bound=bound)
    if offsets is None or peak_of(rows, offsets) >= plan.peak:
        return plan
    return replace(plan, offsets=offsets, peak=peak_of(rows, offsets), method="integer program")


# ---------------------------------------------------------------------------- the plan of a step


def solve(buffers: list[Buffer], time_limit: float = 60.0) -> Plan:
    """Return the lower of two plans, by two levels and of a first fit. Integer programs end after
    time_limit seconds, and none is solved where a first fit meets the lower bound."""
    begin = time.monotonic()
    if not buffers:
        return Plan(np.zeros(0, np.int64), 0, 0, "nothing to plan")
    rows = in_sections(as_rows(buffers))
    fitted = first_plan(rows)
    deadline = begin if fitted.optimal else begin + time_limit
    by_levels = two_levels(rows, [b.in_pass for b in buffers], deadline)
    plan, other = sorted([by_levels, fitted], key=lambda p: p.peak)
    bound = max(plan.lower_bound, other.lower_bound)
    seconds = time.monotonic() - begin
    return replace(plan, lower_bound=bound, seconds=seconds, beside=other)


def one_level(rows, deadline):
    """Return the plan of a first fit where it meets the bound, else of the integer program."""
    plan = first_plan(rows)
    return plan if plan.optimal else improve_by_milp(rows, plan, deadline)


def two_levels(rows, passes, deadline):
    """Return a plan by Memo's two levels. passes: the name of each buffer's pass, or "".

    The lower bound is that of all buffers, not of the blocks: what the levels cost is a gap.
    """
    names, numbers = np.unique(passes, return_inverse=True)
    start, end, size = rows.T
    by_pass = np.lexsort((size, end, start, numbers))
    groups = np.split(by_pass, np.cumsum(np.bincount(numbers))[:-1])
    members = dict(zip(names.tolist(), groups))
    outer = members.pop("", np.zeros(0, np.int64))
    if not members:
        return one_level(rows, deadline)
    # passes are equal if their buffers overlap alike: when they begin, and what else is alive, does
    # not matter
    inner = {name: in_sections(rows[mine]) for name, mine in members.items()}
    kinds = {name: part.tobytes() for name, part in inner.items()}
    distinct = {kinds[name]: inner[name] for name in inner}
    plans = {}
    for count, (kind, part) in enumerate(distinct.items()):
        share = time_left(deadline) / (len(distinct) - count + 1)  # the last is level 2's
        plans[kind] = one_level(part, time.monotonic() + share)
    blocks = [(start[mine].min(), end[mine].max(), plans[kinds[name]].peak)
              for name, mine in members.items()]
    step = in_sections(np.concatenate([blocks, rows[outer]]))
    top = one_level(step, deadline)
    offsets = np.empty(len(rows), np.int64)
    offsets[outer] = top.offsets[len(blocks) :]
    for base, (name, mine) in zip(top.offsets, members.items()):
        offsets[mine] = base + plans[kinds[name]].offsets
    bound = int(live_bytes(rows).max())
    levels = [*plans.values(), top]
    return Plan(offsets, top.peak, bound, f"two levels, {top.method}", levels=levels)


# ---------------------------------------------------------------------------- record and replay

ALLOCATOR_ALIGN_BYTES = {"cpu": 64, "cuda": 512}  # where PyTorch's kernels want a tensor to start
MIN_PLANNED_BYTES = {"cpu": 2**10, "cuda": 2**20}  # of a request; cuda: those of large blocks

live_arena: dict[str, object] = {}  # of a kind of device: what its allocator points into
note_mark: Callable[[str], None] | None = None  # set while a step is recorded or simulated


def mark(name: str) -> None:
    """Begin a pass, such as "forward, layer 3/32", which ends at the next mark; an empty name
    begins none. Does nothing where no step is recorded or simulated."""
    if note_mark is not None:
        note_mark(name)


@contextlib.contextmanager
def noting_marks(count_events):
    """Yield a list that gets (events so far, name) of each mark."""
    global note_mark
    marks: list[tuple[int, str]] = []

    def note(name: str) -> None:
        marks.append((count_events(), name))

    note_mark = note
    try:
        yield marks
    finally:
        note_mark = None


def with_passes(buffers, marks):
    """Return the buffers, whose times count events, with their passes: of one that lives and dies
    between two marks, the name of the first. A name that comes again gets a number."""
    times = [at for at, _ in marks]
    names, seen = [""], defaultdict(int)
    for _, name in marks:
        seen[name] += 1
        names.append(f"{name} #{seen[name]}" if name and seen[name] > 1 else name)
    marked = []
    for b in buffers:
        first, last = bisect(times, b.start), bisect(times, b.end)  # marks before birth and death
        marked.append(b._replace(in_pass=names[first] if first == last else ""))
    return marked


def compiled(options: list[str]) -> ctypes.CDLL:
    """Return the library of csrc/allocator.cpp, compiled at first use (some seconds) and kept in
    the user's cache. Raise RuntimeError with the compiler's words."""
    file = Path(__file__).parent / "csrc" / "allocator.cpp"
    command = ["g++", "-std=c++20", "-O2", "-shared", "-fPIC", str(file), *options]
    made_by = repr((command, platform.machine()))
    key = hashlib.sha256(file.read_bytes() + made_by.encode())
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "memplan"
    built = folder / f"{key.hexdigest()[:16]}.so"
    try:
        if not built.exists():
            folder.mkdir(parents=True, exist_ok=True)
            made = built.with_suffix(f".{os.getpid()}")
            done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
            made.rename(built)  # whole at any moment, whoever compiles
        return ctypes.CDLL(str(built))
    except OSError as e:
        raise RuntimeError(f"{' '.join(command)}: {e}") from None


@functools.cache
def library(kind: str) -> ctypes.CDLL:
    """Return the allocator (csrc/allocator.cpp) for "cpu" or "cuda", installed for good: outside of
    record and replay it only delegates. Raise RuntimeError with the compiler's words."""
    loaded = compiled(allocator_options(kind))
    loaded.install.argtypes = [ctypes.c_void_p]
    loaded.begin.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    loaded.end.restype = loaded.num_events.restype = ctypes.c_int64
    loaded.recorded.restype = loaded.counted.restype = ctypes.POINTER(ctypes.c_int64)
    loaded.load.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    loaded.load.restype = ctypes.c_int64
    import torch

    # a stream's memory may be given out again at once: only requests on this one are planned
    loaded.install(torch.cuda.current_stream().cuda_stream if kind == "cuda" else None)
    return loaded


def allocator_options(kind):
    """Return the compiler's options for this PyTorch and its headers."""
    import torch
    from torch.utils.cpp_extension import CUDA_HOME, include_paths

    include = include_paths()
    packages = Path(torch.__file__).parents[1]
    if kind == "cuda" and CUDA_HOME:
        include += [str(Path(CUDA_HOME) / "include")]
    elif kind == "cuda":  # pip's packages
        include += map(str, packages.glob("nvidia/cu*/include"))
    options = [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
               f'-DMEMPLAN_TORCH="{torch.__version__}"']
    options += [f"-I{path}" for path in include]
    options += [f"-L{packages / 'torch' / 'lib'}", "-lc10"]
    return options + (["-DMEMPLAN_CUDA", "-lc10_cuda"] if kind == "cuda" else [])


class StepMemory:
    """Planned memory of a step, a callable that requests the same each time.

        memory = StepMemory()
        memory.run(step)        # again and again; counts says how well the plan was met
        memory.give_back()      # until the next run, for whatever else needs memory

    On a CPU, all of the process's tensors; on a GPU those of the current device and stream. A
    tensor that other streams use must be in use until this stream has waited for them. In train.py,
    gathered weights, whole gradients and rounding buffers lie in memory that outlives steps, and
    what ranks map from each other lies outside the allocator; what all-to-alls and copies to the
    host read or write is held until this stream has waited for their event.
    Requests below min_bytes, and those that outlive the step, stay with PyTorch's allocator.
    Marks (`mark`, from within the step) name the passes of a plan's two levels.
    One StepMemory a kind of device at a time: its arena must live as long as any tensor in it, so
    an arena is not loaded (RuntimeError) while tensors of another's steps are in use.
    """

    RECORD, REPLAY = 1, 2  # what the allocator does
    COUNTS = ("hits", "unplanned", "unmatched", "occupied", "hit_bytes", "bytes")

    def __init__(self, device: str = "cpu", min_bytes: int = 0):
        self.kind = str(device).partition(":")[0]
        self.device = device
        self.align = ALLOCATOR_ALIGN_BYTES[self.kind]
        self.min_bytes = min_bytes or MIN_PLANNED_BYTES[self.kind]
        self.buffers: list[Buffer] = []  # of the recorded step
        self.plan: Plan | None = None
        self.arena = None  # memory, while the allocator points into it
        self.counts: dict[str, int] = {}  # of the last replay
        self.runs = 0
        self.plans = 0  # made of recorded steps

    def run(self, step):
        """Run the step: the first two as they are, for what lasts; the third is recorded; then by
        plan, and recorded again (three times in all) after one that met less than nine tenths of
        its plan."""
        self.runs += 1
        missed = self.plans and self.counts and self.counts["hits"] < 0.9 * len(self.planned)
        if missed and self.plans < 3 and self.give_back():
            self.counts = {}
            self.plan = None
        if self.runs < 3:
            return step()
        if self.plan is None:
            result = self.record(step)
            if self.give_back():  # else what is in the arena outlives the step: the next one, maybe
                self.solve()
            return result
        return self.replay(step)

    def record(self, step):
        """Run the step, and note its requests: sizes, lifetimes counted in events, and passes."""
        lib = library(self.kind)
        if self.kind == "cuda":  # what it reserves is to be what the step needs
            import torch

            torch.cuda.empty_cache()
        lib.begin(self.RECORD, self.min_bytes, self.align)
        with noting_marks(lib.num_events) as marks:
            try:
                result = step()
            finally:
                n = lib.end()
        events = np.reshape(lib.recorded()[: 3 * n], (n, 3)).tolist()
        born = []  # (moment, size, address) of each request
        died = {}
        for now, (request, size, address) in enumerate(events):  # size -1: it dies
            if size >= 0:
                born.append((now, size, address))
            else:
                died[request] = now
        self.sizes = [size for _, size, _ in born]  # of all requests
        self.planned = sorted(died)  # the requests that buffers are of; others outlive the step
        self.addresses = [born[i][2] for i in self.planned]  # that PyTorch's allocator gave
        buffers = []
        for i in self.planned:
            moment, size, _ = born[i]
            buffers.append(Buffer(moment, died[i], self._round(size)))
        self.buffers = with_passes(buffers, marks)
        self.counts = {}  # of a plan that is not followed any more
        return result

    def _round(self, size: int) -> int:
        return -(-max(1, size) // self.align) * self.align

    def solve(self, time_limit: float = 20.0) -> Plan:
        """Plan the recorded step, and check the plan."""
        self.plan = solve(self.buffers, time_limit)
        self.plans += 1
        check(self.buffers, self.plan.offsets, self.plan.peak)
        # of all requests, in order, for the allocator; offset -1: not planned
        self.entries = np.full((len(self.sizes), 2), -1, np.int64)  # (size, offset)
        self.entries[:, 0] = [self._round(size) for size in self.sizes]
        self.entries[self.planned, 1] = self.plan.offsets
        return self.plan

    def _load(self) -> None:
        """Make the arena, one block of PyTorch's allocator."""
        import torch

        peak, entries = self.plan.peak, self.entries
        memory = torch.empty(peak + self.align, dtype=torch.uint8, device=self.device)
        first = -memory.data_ptr() % self.align
        arena = memory[first : first + peak]  # keeps the block in use
        load = library(self.kind).load
        # refused while tensors lie in the last arena: its memory would go to others under them
        if used := load(arena.data_ptr(), entries.ctypes.data, len(entries)):
            raise RuntimeError(f"{used} tensors of an earlier plan are still in use")
        self.arena = live_arena[self.kind] = arena  # as long as the allocator may point into it

    def give_back(self) -> bool:
        """Give the arena's memory to PyTorch's allocator if no tensor is in it, and return
        whether it was."""
        if self.arena is not None and not library(self.kind).load(None, None, 0):
            self.arena = live_arena[self.kind] = None
        return self.arena is None

    def replay(self, step):
        """Run the step on planned addresses; self.counts: how many requests met the plan."""
        if self.arena is None:
            self._load()
        lib = library(self.kind)
        lib.begin(self.REPLAY, self.min_bytes, self.align)
        try:
            return step()
        finally:
            lib.end()
            self.counts = dict(zip(self.COUNTS, lib.counted()[:6]))

    def draw(self, path: str) -> None:
        """Write a PNG file: the planned addresses over time beside those that PyTorch gave, moved
        together where no buffer of the step ever was."""
        theirs = np.zeros(len(self.addresses), np.int64)
        end = shift = 0
        for i in np.argsort(self.addresses).tolist():
            address, size = self.addresses[i], self.buffers[i].size
            shift += max(0, address - shift - end)
            theirs[i] = address - shift
            end = max(end, address - shift + size)
        draw(path, self.buffers, self.plan, theirs)


def simulate(make, ranks: int = 1, fused=lambda: None, min_bytes: int = 2**20,
             align: int = 512) -> tuple[list[Buffer], int]:
    """Return the buffers of a step, with their passes, and the bytes that last between steps, on
    fake tensors: no GPU, no memory, any number of ranks, of which this is the first.

    make() builds everything, on the CPU, and returns the step; fused() names the kernel that is
    running, if it is one that will be a single one: what is born and dies in it is left out, and so
    is what kernels request inside. Raise RuntimeError where there is a process group.
    """
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    events = []  # (event at which it was born, size or -1: it dies, fused kernel)
    known = set()  # storages

    def note_death(born: int, storage: int) -> None:
        known.discard(storage)
        events.append((born, -1, fused()))

    class NoteBirths(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for t in tree_leaves(out):
                if not isinstance(t, torch.Tensor):
                    continue
                storage, now = t.untyped_storage(), len(events)
                if storage._cdata not in known:
                    known.add(storage._cdata)
                    events.append((now, storage.nbytes(), fused()))
                    weakref.finalize(storage, note_death, now, storage._cdata)
            return out

    if dist.is_initialized():
        raise RuntimeError("simulate: a process group is in the way of the simulated one")
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), NoteBirths():
            step = make()
            step()  # what it makes and keeps lasts
            first = len(events)
            with noting_marks(lambda: len(events)) as marks:
                step()
            last = len(events)
    finally:
        dist.destroy_process_group()
    buffers, lasting = lifetimes(events[:last], first, min_bytes, align)
    return with_passes(buffers, marks), lasting


def lifetimes(events, first, min_bytes, align):
    """Return the buffers of a simulated step, whose events begin at `first`, and the bytes of what
    was made before and lasts. events: see `simulate`."""
    lasting = {}  # by birth: size
    alive = {}  # by birth: size, fused kernel
    buffers = []
    for now, (born, size, kernel) in enumerate(events):
        if size >= 0 and now < first:
            lasting[born] = size
        elif size >= 0:
            alive[born] = size, kernel
        elif now < first:
            del lasting[born]
        elif born in alive:
            size, begun_in = alive.pop(born)
            # born and dead in one fused kernel: never in memory
            if size >= min_bytes and (kernel is None or kernel is not begun_in):
                rounded = -(-size // align) * align
                buffers.append(Buffer(born, now, rounded))
    return buffers, sum(lasting.values())


# ---------------------------------------------------------------------------- files, command line

COLUMNS = ("id", "lower", "upper", "size")


def read_trace(path: str) -> tuple[list[str], list[Buffer]]:
    """Return ids and buffers of a CSV file. Raise ValueError naming the line."""
    lines, buffers = {}, []  # lines: by id
    whole = re.compile(r"-?[0-9]{1,18}").fullmatch
    # utf-8-sig: Excel writes a mark at the beginning
    with open(path, newline="", encoding="utf-8-sig", errors="replace") as f:
        rows = csv.reader(f)
        columns = [c.strip() for c in next(rows, [])]
        if any(columns.count(c) != 1 for c in COLUMNS) or columns.count("pass") > 1:
            raise ValueError(f"{path}, line 1: the columns are id,lower,upper,size, each once, and "
                             f"maybe pass; not {','.join(columns)[:99]!r}")
        at_id, *at_numbers = (columns.index(c) for c in COLUMNS)
        at_pass = columns.index("pass") if "pass" in columns else None
        for row in filter(None, rows):
            line = rows.line_num
            where = f"{path}, line {line}"
            if len(row) != len(columns) or not all(whole(row[k].strip()) for k in at_numbers):
                raise ValueError(f"{where}: {len(columns)} cells, of which lower, upper and size "
                                 f"are whole numbers; not {','.join(row)[:99]!r}")
            in_pass = row[at_pass].strip() if at_pass is not None else ""
            b = Buffer(*(int(row[k]) for k in at_numbers), in_pass)
            if b.start >= b.end or b.size <= 0:
                raise ValueError(f"{where}: a buffer is alive from lower to before upper, and has "
                                 f"a size: {','.join(row)[:99]!r}")
            first = lines.setdefault(row[at_id], line)
            if first != line:
                raise ValueError(f"{where}: id {row[at_id]} is on line {first} already")
            buffers.append(b)
    return [*lines], buffers


def write_plan(path: str, ids: Iterable, buffers: list[Buffer], offsets: Iterable[int]) -> None:
    """Write a CSV file of the buffers and their offsets, and of their passes if any is known."""
    named = any(b.in_pass for b in buffers)
    columns = [*COLUMNS, "pass"][: len(COLUMNS) + named]
    rows = zip(ids, buffers, np.asarray(offsets).tolist())
    with open(path, "w", newline="") as f:
        out = csv.writer(f)
        out.writerow([*columns, "offset"])
        out.writerows([x, *b[: len(columns) - 1], offset] for x, b, offset in rows)


MAX_DRAWN = 20_000  # the largest rectangles, of more one would see no more


def draw(path: str, buffers: list[Buffer], plan: Plan, theirs: np.ndarray | None = None) -> None:
    """Write a PNG file: address over time, one rectangle a buffer; beside it, at the addresses of
    `theirs`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.collections import PolyCollection

    rows = as_rows(buffers)
    start, end, size = rows.T
    area = size.astype(float) * (end - start)
    shown = np.argsort(-area)[:MAX_DRAWN]
    pictures = [(plan.offsets, str(plan))]
    if theirs is not None and len(theirs):
        title = f"PyTorch's allocator, addresses in use: {peak_of(rows, theirs):,}"
        pictures.append((theirs, title))
    highest = max(peak_of(rows, offsets) for offsets, _ in pictures)
    count = len(pictures)
    fig, axes = plt.subplots(1, count, figsize=(9 * count, 5), squeeze=False)
    for ax, (offsets, title) in zip(axes[0], pictures):
        low, high = offsets, offsets + size  # corners: four (x, y) a buffer
        corners = np.stack([start, low, end, low, end, high, start, high], axis=1)
        boxes = PolyCollection(corners[shown].reshape(-1, 4, 2), cmap="viridis")
        boxes.set(edgecolor="white", linewidth=0.2)
        boxes.set_array(np.log(size[shown].astype(float)))
        ax.add_collection(boxes)
        ax.axhline(plan.lower_bound, color="red", linewidth=0.8, label="lower bound")
        ax.set(xlabel="time", ylabel="address", title=title)
        ax.set(xlim=(start.min(), end.max()), ylim=(0, highest * 1.05))
        ax.title.set_fontsize(8)
        ax.legend()
    fig.savefig(path, dpi=150, format="png")
    plt.close(fig)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("trace", help="a CSV file with the columns id,lower,upper,size, maybe pass")
    parser.add_argument("--time-limit", type=float, default=60.0,
                        help="seconds, of the integer programs; default: 60")
    parser.add_argument("--out", help="CSV file for the plan: the trace's columns and offset")
    parser.add_argument("--plot", help="PNG file: address over time")
    args = parser.parse_args(argv)
    if not 0 < args.time_limit < 1e9:
        parser.error(f"--time-limit {args.time_limit}: above 0")
    try:
        ids, buffers = read_trace(args.trace)
        plan = solve(buffers, args.time_limit)
        check(buffers, plan.offsets, plan.peak)
        print(plan, flush=True)
        if args.out:
            write_plan(args.out, ids, buffers, plan.offsets)
        if args.plot and buffers:
            draw(args.plot, buffers, plan)
    except (OSError, ValueError, csv.Error) as e:
        print(f"memplan.py: error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
