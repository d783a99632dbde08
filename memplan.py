"""Plan the address of each buffer of a training step (Memo, arXiv 2407.12117, section 4.2).

A buffer is the memory of one tensor. All steps of a run request the same buffers in the same order.
So after one step it is known when each buffer is alive, and the addresses of all later steps can be
computed at once. All buffers lie in one block of memory, the *arena*, and a buffer's address is an
offset in it. The *peak* is the size of the arena. (The literature calls this problem offline
dynamic storage allocation.)

An example with three buffers. A (10 bytes) is alive at times 0 and 1, B (2 bytes) at times 1 to 3,
and C (10 bytes) at times 2 to 5. C can take A's address, because A is dead when C is born:

    offsets 2 to 11     A  A  C  C  C  C      peak 12, which no plan can beat,
    offsets 0 and 1     .  B  B  B  .  .      because A and B are alive together
    time                0  1  2  3  4  5

The paper states the problem as an integer program. Buffer i has the size S_i and gets the offset
A_i, M is the peak, U is a large number, and the binary z_ij is 1 if buffer i lies below buffer j.

    minimise M   subject to   A_i + S_i <= M                         for each i
                              A_i + S_i <= A_j + (1 - z_ij) * U      for i and j alive together
                              z_ij + z_ji = 1                        for i and j alive together

A lower bound of M is the largest number of bytes that are alive at one moment. A plan that meets
this bound is optimal. `solve` makes two plans and takes the one with the lower peak:

    first fit     Buffers are placed one after the other, each at the lowest free address. Up to
                  four orders are tried.
    two levels    Memo's bi-level plan. A pass is one layer's forward or backward. A buffer that is
                  born and dies within one pass belongs to it. Level 1 plans each distinct pass
                  once. In level 2 each pass is one block, as large as the peak of its plan. Level 2
                  plans these blocks and the buffers that belong to no pass.

In each level a first fit is tried first. The integer program takes seconds. So it runs only if the
first fit misses the lower bound, and if the level is small (MAX_PAIRS). If buffers belong to
passes, two levels must also still be able to win (`solve`). The program is stopped at a deadline.
`check` tells whether a plan is right, whatever made it. replay.py records the buffers of a step,
and serves the later steps from one arena.

    python memplan.py TRACE.csv [--time-limit S] [--out PLAN.csv] [--plot PLAN.png]

TRACE.csv has the columns id,lower,upper,size and maybe pass. A buffer is alive from time `lower`
until before time `upper`. PLAN.csv has the columns id,lower,upper,size,pass,offset.

Left out: alignment (offsets are sums of sizes, so round the sizes up), buffers with a prescribed
address, passes within passes, and speed for more than about ten thousand buffers, which no training
step has. (After the time limit, the buffers that are not placed yet are stacked on top.)

Legend: n buffers; rows: an array (n, 3) of start, end and size; peak: M; deadline: the value of
time.monotonic() at which to stop; section: a span of time that `to_sections` explains.
"""

import argparse
import csv
import itertools
import math
import operator
import os
import subprocess
import sys
import tempfile
import time
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

# ---------------------------------------------------------------------------- lifetimes and plans


class Lifetime(NamedTuple):
    """When a buffer is alive, and how large it is. Times are any integers, for example counts of
    events."""

    start: int  # the first moment at which the buffer is alive
    end: int  # the first moment at which it is not alive any more
    size: int  # bytes
    in_pass: str = ""  # the pass that the buffer belongs to, or ""


@dataclass
class AddressPlan:
    """An offset for each buffer."""

    offsets: np.ndarray  # (n,), int64
    peak: int  # bytes of the arena
    lower_bound: int  # no plan has a lower peak
    method: str  # how the plan was found, for the log
    seconds: float = 0.0  # how long `solve` took
    rejected: "AddressPlan | None" = None  # the plan that `solve` compared with this one, if any

    @property
    def optimal(self) -> bool:
        return self.peak == self.lower_bound

    def __str__(self) -> str:
        proof = f"gap {self.peak / max(1, self.lower_bound) - 1:.2%}"
        if self.optimal:
            proof = "proved optimal"
        other = f" ({self.rejected.method}: {self.rejected.peak:,})" if self.rejected else ""
        return (
            f"{len(self.offsets)} buffers, peak {self.peak:,}, lower bound "
            f"{self.lower_bound:,}, {proof}, {self.method}{other}, {self.seconds:.2f} s"
        )


peak_of = operator.attrgetter("peak")


def as_rows(buffers: Sequence[Lifetime]) -> np.ndarray:
    """Return the buffers as an array (n, 3) of start, end and size.

    Raises ValueError for a buffer that is never alive or has no size, and for sizes whose sum is
    2^60 or more, because sums of them must fit 64 bits."""
    numbers = [b[:3] for b in buffers]
    rows = np.array(numbers, np.int64).reshape(-1, 3)
    start, end, size = rows.T
    wrong = np.flatnonzero((start >= end) | (size <= 0))
    if len(wrong):
        raise ValueError(
            f"a buffer's start must be before its end, and its size above 0: {buffers[wrong[0]]}"
        )
    total = size.sum(dtype=float)
    if total >= 2**60:
        raise ValueError(f"the sizes of all buffers add up to {total:.3g}; it must be below 2^60")
    return rows


def check(buffers: Sequence[Lifetime], offsets: Sequence[int], peak: int) -> None:
    """Raise ValueError if two buffers that are alive together overlap, or if a buffer leaves
    [0, peak).

    Each buffer is compared with all buffers that are born while it is alive. This is simple, so it
    is easy to see that the check itself is right."""
    rows = as_rows(buffers)
    by_birth = np.argsort(rows[:, 0], kind="stable")
    start, end, size = rows[by_birth].T
    low = np.asarray(offsets, np.int64)[by_birth]
    high = low + size
    # for each buffer, the first one that is born when it is dead
    first_after_death = np.searchsorted(start, end)

    for i, number in enumerate(by_birth):
        if low[i] < 0 or high[i] > peak:
            raise ValueError(f"buffer {number} of {size[i]} at {low[i]} leaves [0, {peak})")

        others = slice(i + 1, first_after_death[i])
        begins_below = low[others] < high[i]
        ends_above = low[i] < high[others]
        for other in by_birth[others][begins_below & ends_above]:
            raise ValueError(
                f"buffers {number} and {other} are alive together and overlap: "
                f"{buffers[number]} at {low[i]}, {buffers[other]} at {offsets[other]}"
            )


def to_sections(rows: np.ndarray) -> np.ndarray:
    """Return the rows with start and end counted in sections instead of moments.

    A step is a series of births and deaths of buffers. Cut this series wherever a birth is followed
    by a death. A piece with a birth is a section. (The last piece may consist of deaths only.) In a
    section all deaths come first. So after its last birth all of its buffers are alive at the same
    time, and two buffers are alive together if and only if they share a section. The plan needs to
    know nothing else about time, and there are at most n sections. The example at the top has two.
    A and B are born in section 0. Then A dies, and C is born in section 1, so B and C share section
    1:

        A (0, 2), B (1, 4), C (2, 6)  ->  A (0, 1), B (0, 2), C (1, 2)"""
    start, end, size = rows.T
    births = np.unique(start)
    section_ends = np.unique(births[np.searchsorted(births, end) - 1])
    first_section = np.searchsorted(section_ends, start)
    end_section = np.searchsorted(section_ends, end)
    return np.stack([first_section, end_section, size], axis=1)


def live_bytes(rows: np.ndarray) -> np.ndarray:
    """Return the bytes that are alive in each section (or at each moment)."""
    start, end, size = rows.T
    change = np.zeros(end.max(initial=0) + 1, np.int64)
    np.add.at(change, start, size)
    np.subtract.at(change, end, size)
    return np.cumsum(change)[:-1]


# ---------------------------------------------------------------------------- first fits


def first_fit(
    rows: np.ndarray, order: Iterable[int], deadline: float = math.inf
) -> tuple[np.ndarray, int]:
    """Return the offsets (n,) and the peak of a first fit.

    Each buffer goes to the lowest gap that is large enough, between the buffers that are placed
    already and alive together with it. After the deadline it goes above all placed buffers. order:
    a permutation of the buffers."""
    offsets = np.zeros(len(rows), np.int64)
    peak = 0
    placed = []  # (offset, end of the buffer's addresses, start, end), sorted by offset
    for i in order:
        start, end, size = rows[i].tolist()
        offset = 0
        if time.monotonic() > deadline:
            offset = peak
            placed.clear()  # nothing below the peak is searched again
        for low, high, other_start, other_end in placed:
            alive_together = other_start < end and start < other_end
            if not alive_together:
                continue
            if low - offset >= size:
                break  # the gap below this buffer is large enough
            offset = max(offset, high)
        offsets[i] = offset
        peak = max(peak, offset + size)
        insort(placed, (offset, offset + size, start, end))
    return offsets, peak


def best_first_fit(rows: np.ndarray, deadline: float) -> AddressPlan:
    """Try a first fit in up to four orders, and return the plan with the lowest peak.

    The buffers that come first are, in the four orders:

        1. those that are alive when most bytes are alive (the order of MiniMalloc)
        2. those with the longest lives
        3. those with the largest areas, which are life times size
        4. the largest ones

    If a plan meets the lower bound, the remaining orders are not tried."""
    start, end, size = rows.T
    live = live_bytes(rows)
    lower_bound = int(live.max(initial=0))
    # the most bytes that are alive at any moment of a buffer's life
    most_live = np.array([live[first:last].max() for first, last in zip(start, end)])
    life = end - start
    area = life * size.astype(float)
    orders = [
        np.lexsort((-area, -life, -most_live)),  # by most_live; ties by life, then by area
        np.argsort(-life, kind="stable"),
        np.argsort(-area, kind="stable"),
        np.argsort(-size, kind="stable"),
    ]
    plans = []
    for order in orders:
        offsets, peak = first_fit(rows, order, deadline)
        plans.append(AddressPlan(offsets, peak, lower_bound, "first fit"))
        if plans[-1].optimal:
            break
    return min(plans, key=peak_of)


# ---------------------------------------------------------------------------- the integer program

# The solver is HiGHS, which SciPy calls. It computes in floating point: a z_ij may be off by about
# 1e-6, and so an address by 1e-6 * U. Sizes are counted in units so large that the peak, and so U,
# is at most EXACT_UNITS units. Then this error is less than one unit
EXACT_UNITS = 2**17
# pairs of buffers that are alive together: with more than MAX_PAIRS, HiGHS finds nothing in 20 s.
# With at most FEW_PAIRS, it takes less time than it takes to start a process
MAX_PAIRS = 3000
FEW_PAIRS = 200

Coefficients = dict[int, float]  # index of a variable -> its coefficient in a constraint


def constraints(
    sizes: list[int], below: dict[tuple[int, int], int], cliques: list[list[int]], big: int
) -> Iterator[tuple[Coefficients, float, float]]:
    """Yield each constraint of the program as (coefficients, lower limit, upper limit).

    The variables, by index: A_0 ... A_{n-1}, then M, then one z_ij per pair. below[i, j]: the index
    of z_ij. cliques: for each section, its buffers, which are all alive together. big: U.

    Two kinds of constraints are added, which help the solver. In a clique C, the buffers below j
    fit below it, and the buffers above j fit above it:

        sum_{i in C} S_i z_ij <= A_j        A_j + S_j + sum_{i in C} S_i z_ji <= M

    The second kind is a stronger form of A_j + S_j <= M, and replaces it.
    """
    peak = len(sizes)  # the index of M
    for (i, j), z_ij in below.items():
        z_ji = below[j, i]
        yield {j: 1, i: -1, z_ij: -big}, sizes[i] - big, np.inf  # A_i + S_i <= A_j if z_ij
        yield {z_ij: 1, z_ji: 1}, 1, 1
    for members in cliques:
        for j in members:
            others = [i for i in members if i != j]
            sizes_below = {below[i, j]: -sizes[i] for i in others}
            sizes_above = {below[j, i]: -sizes[i] for i in others}
            yield {j: 1} | sizes_below, 0, np.inf
            yield {peak: 1, j: -1} | sizes_above, sizes[j], np.inf


def solve_program(rows: np.ndarray, peak: int, deadline: float) -> tuple[np.ndarray, int]:
    """Solve the integer program. Return the buffers' order by address, and the lower bound of the
    peak that the solver proved (0 if it proved none).

    peak: the peak of the best plan so far, which serves as U. If the solver finds no solution in
    time, the order is an arbitrary one.

    Sizes are first divided by a unit and rounded down to small integers (EXACT_UNITS). The lower
    bound stays valid, because a plan for the true sizes is also a plan for the smaller ones. The
    order is then used for a first fit of the true sizes (`plan_exactly`)."""
    from scipy.optimize import Bounds, LinearConstraint, milp  # the import takes half a second
    from scipy.sparse import csr_array

    start, end, size = rows.T
    n = len(rows)
    unit = int(np.gcd.reduce(size))
    unit *= -(-peak // (unit * EXACT_UNITS))  # rounded up, so the peak is at most EXACT_UNITS units
    big = peak // unit

    cliques = []
    below = {}
    for section in range(end.max()):
        members = np.flatnonzero((start <= section) & (section < end)).tolist()
        cliques.append(members)
        for pair in itertools.permutations(members, 2):
            below.setdefault(pair, n + 1 + len(below))

    sizes = (size // unit).tolist()
    coefficients, lower, upper = zip(*constraints(sizes, below, cliques, big))
    indices = [index for line in coefficients for index in line]
    values = [value for line in coefficients for value in line.values()]
    line_ends = np.cumsum([0, *map(len, coefficients)])
    matrix = csr_array((values, indices, line_ends))

    variable = np.arange(n + 1 + len(below))
    is_peak = variable == n
    is_binary = variable > n
    seconds = max(0.0, deadline - time.monotonic())
    solution = milp(
        is_peak,  # the objective: minimise M
        integrality=is_binary,
        bounds=Bounds(0, np.where(is_binary, 1, big)),
        constraints=LinearConstraint(matrix, lower, upper),
        options={"time_limit": 0.9 * seconds, "mip_rel_gap": 0.0},
    )

    # only the order is used, so a rounding error in an offset cannot make two buffers overlap
    order = np.arange(n)
    if solution.x is not None:
        order = np.argsort(solution.x[:n], kind="stable")
    bound = solution.mip_dual_bound or 0
    if solution.status == 0:  # solved to the end, so the bound is M itself
        bound = solution.fun
    # the peak is a whole number of units, so the bound is rounded up. But if it is above a whole
    # number by less than 1e-3, this is a rounding error
    proved = math.ceil(bound - 1e-3) * unit if np.isfinite(bound) else 0
    return order, proved


def solve_in_process(rows: np.ndarray, peak: int, deadline: float) -> tuple[np.ndarray, int]:
    """Run solve_program in a process of its own, and return what it returns.

    The process is ended at the deadline, because HiGHS overruns its own time limit. Then the order
    is an arbitrary one, and the bound 0. The problem and its solution are passed in files of plain
    arrays, which cannot run code when they are read."""
    with tempfile.TemporaryDirectory() as folder:
        problem = Path(folder, "problem.npz")
        np.savez(problem, rows=rows, peak=peak, deadline=deadline)
        try:
            subprocess.run(
                [sys.executable, __file__, problem],
                check=True,
                timeout=deadline - time.monotonic(),
            )
        except (subprocess.SubprocessError, OSError):  # it took too long, failed, or did not start
            return np.arange(len(rows)), 0
        with np.load(problem.with_name("solution.npz"), allow_pickle=False) as solution:
            return solution["order"], int(solution["bound"])


def solve_file(problem: Path) -> None:
    """Solve the problem that solve_in_process wrote, and write solution.npz beside it."""
    with np.load(problem, allow_pickle=False) as file:
        rows, peak, deadline = file["rows"], int(file["peak"]), float(file["deadline"])
    order, bound = solve_program(rows, peak, deadline)
    np.savez(problem.with_name("solution.npz"), order=order, bound=bound)


# ---------------------------------------------------------------------------- one level

PlanLevel = Callable[[np.ndarray, float], AddressPlan]  # of rows and a deadline


def plan_exactly(rows: np.ndarray, deadline: float) -> AddressPlan:
    """Return the better plan of a first fit and of the integer program."""
    return improve(best_first_fit(rows, deadline), rows, deadline)


def improve(plan: AddressPlan, rows: np.ndarray, deadline: float) -> AddressPlan:
    """Return the better one of a plan and of the integer program's plan. If the program proves a
    higher lower bound, it is written into `plan`.

    The program does not run if the plan meets the lower bound, or if there are more than MAX_PAIRS
    pairs. It runs until the deadline at most."""
    # the number of pairs of buffers that are alive together: all pairs, less those in which one
    # buffer is already dead when the other one is born
    start, end, _ = rows.T
    n = len(rows)
    dead_at_birth = np.searchsorted(np.sort(end), start, side="right")
    pairs = n * (n - 1) // 2 - dead_at_birth.sum()
    if plan.optimal or pairs > MAX_PAIRS or time.monotonic() > deadline:
        return plan

    solve_it = solve_program if pairs <= FEW_PAIRS else solve_in_process
    order, proved = solve_it(rows, plan.peak, deadline)
    plan.lower_bound = max(plan.lower_bound, proved)
    offsets, peak = first_fit(rows, order)
    other = AddressPlan(offsets, peak, plan.lower_bound, "integer program")
    return min(plan, other, key=peak_of)


def assume_bound_is_met(rows: np.ndarray, deadline: float) -> AddressPlan:
    """Return an optimistic stand-in for a level's plan: its peak is the lower bound, and its
    offsets mean nothing."""
    bound = int(live_bytes(rows).max(initial=0))
    return AddressPlan(np.zeros(len(rows), np.int64), bound, bound, "")


# ---------------------------------------------------------------------------- the plan of a step


def solve(buffers: list[Lifetime], time_limit: float = 60.0) -> AddressPlan:
    """Make two plans, a first fit of all buffers and two levels, and return the one with the lower
    peak.

    If no buffer belongs to a pass, there is only one level. Its plan is the first fit, or the
    integer program's if that is better.

    Can the integer program help two levels to win? To find out, two levels are first planned as if
    each level met its lower bound. If even this peak is not below the peak of the first fit, the
    program does not run. time_limit: seconds."""
    begin = time.monotonic()
    deadline = begin + time_limit
    rows = to_sections(as_rows(buffers))
    passes = [b.in_pass for b in buffers]

    fitted = best_first_fit(rows, deadline)
    if not any(passes):
        plan = improve(fitted, rows, deadline)
        rejected = fitted if plan is not fitted else None
        return replace(plan, seconds=time.monotonic() - begin, rejected=rejected)

    at_best = two_levels(rows, passes, deadline, assume_bound_is_met)
    plan_level = plan_exactly if at_best.peak < fitted.peak else best_first_fit
    by_levels = two_levels(rows, passes, deadline, plan_level)

    plan, rejected = sorted([by_levels, fitted], key=peak_of)
    return replace(
        plan,
        lower_bound=max(plan.lower_bound, rejected.lower_bound),
        seconds=time.monotonic() - begin,
        rejected=rejected,
    )


def two_levels(
    rows: np.ndarray, passes: list[str], deadline: float, plan_level: PlanLevel
) -> AddressPlan:
    """Return a plan by Memo's two levels (section 4.2), each of which plan_level plans.

        level 1    the buffers of one pass, at offsets inside the pass's block
        level 2    blocks and the remaining buffers, at offsets in the arena

    passes: for each buffer the name of its pass, or "" if it belongs to none. At least one buffer
    belongs to a pass. If the buffers of several passes have the same sizes and are alive together
    in the same way, as in equal layers, these passes are planned only once.

    The plan's lower bound is 0 (unknown). The lower bound of level 2 does not hold for the step,
    because it counts whole blocks. `solve` gets the step's bound from the first fit."""
    start, end, _ = rows.T
    members = defaultdict(list)  # the buffers of each pass
    for i, name in enumerate(passes):
        members[name].append(i)
    without_pass = members.pop("", [])  # the buffers that belong to no pass

    plans = {}  # the rows of a pass, in sections -> their plan
    pass_plans = []  # the plan of each pass
    for buffers_of_pass in members.values():
        pass_rows = to_sections(rows[buffers_of_pass])
        key = pass_rows.tobytes()
        if key not in plans:
            now = time.monotonic()
            half_the_time = now + (deadline - now) / 2  # leaves time for the other passes
            plans[key] = plan_level(pass_rows, half_the_time)
        pass_plans.append(plans[key])

    blocks = [
        (start[buffers_of_pass].min(), end[buffers_of_pass].max(), plan.peak)
        for buffers_of_pass, plan in zip(members.values(), pass_plans)
    ]
    level_2 = plan_level(to_sections(np.concatenate([blocks, rows[without_pass]])), deadline)

    offsets = np.empty(len(rows), np.int64)
    offsets[without_pass] = level_2.offsets[len(blocks) :]
    for base, buffers_of_pass, plan in zip(level_2.offsets, members.values(), pass_plans):
        offsets[buffers_of_pass] = base + plan.offsets
    return AddressPlan(offsets, level_2.peak, 0, f"two levels, {level_2.method}")


# ---------------------------------------------------------------------------- files, command line

TRACE_COLUMNS = ("id", "lower", "upper", "size")


def read_trace(path: str) -> tuple[list[str], list[Lifetime]]:
    """Return the ids and the buffers of a CSV file. Raises ValueError that names a wrong line."""
    ids, buffers = [], []
    with open(path, newline="", encoding="utf-8-sig") as f:  # -sig: skip the mark that Excel writes
        rows = csv.DictReader(f)
        if missing := set(TRACE_COLUMNS).difference(rows.fieldnames or ()):
            raise ValueError(
                f"{path}, line 1: there is no {', '.join(sorted(missing))} among the columns "
                f"{rows.fieldnames}"
            )
        for row in rows:
            try:
                numbers = [int(row[column]) for column in TRACE_COLUMNS[1:]]
                buffer = Lifetime(*numbers, row.get("pass") or "")
                as_rows([buffer])
            except (TypeError, ValueError, OverflowError) as e:
                raise ValueError(f"{path}, line {rows.line_num}: {e}") from None
            ids.append(row["id"])
            buffers.append(buffer)
    return ids, buffers


def write_plan(path: str, ids: Iterable, buffers: list[Lifetime], offsets: Iterable[int]) -> None:
    """Write a CSV file of the buffers, their passes and their offsets."""
    with open(path, "w", newline="") as f:
        out = csv.writer(f)
        out.writerow([*TRACE_COLUMNS, "pass", "offset"])
        for number, buffer, offset in zip(ids, buffers, offsets):
            out.writerow([number, *buffer, offset])


def draw(path: str, buffers: list[Lifetime], plan: AddressPlan) -> None:
    """Write a PNG file of addresses over time: one rectangle per buffer, lighter if larger."""
    from matplotlib import colormaps
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    start, end, size = as_rows(buffers).T
    shade = Normalize()(np.log(size))
    figure = Figure(figsize=(9, 4.5), layout="tight")
    ax = figure.subplots()
    ax.barh(
        plan.offsets / 2**30,
        width=end - start,
        height=size / 2**30,
        left=start,
        align="edge",
        color=colormaps["viridis"](shade),
        edgecolor="white",
        linewidth=0.2,
    )
    ax.axhline(plan.lower_bound / 2**30, color="red", linewidth=0.8, label="lower bound")
    ax.set(xlabel="requests and releases, in order", ylabel="address, GiB")
    title = f"{len(buffers):,} buffers, peak {plan.peak / 2**30:.2f} GiB; lighter: larger"
    ax.set_title(title, fontsize=10)
    ax.legend()
    figure.savefig(path, dpi=150, format="png", metadata={"Software": None})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    path = os.path.expanduser  # a shell does not expand the ~ of --out=~/plan.csv
    parser.add_argument(
        "trace", type=path, help="CSV file with the columns id,lower,upper,size, and maybe pass"
    )
    parser.add_argument(
        "--time-limit", type=float, default=60.0, help="seconds until planning stops (default: 60)"
    )
    parser.add_argument(
        "--out", type=path, help="CSV file to write: id,lower,upper,size,pass,offset"
    )
    parser.add_argument("--plot", type=path, help="PNG file to write: addresses over time")
    args = parser.parse_args(argv)
    if not args.time_limit > 0:
        parser.error(f"--time-limit {args.time_limit}: it must be above 0 seconds")
    try:
        if args.trace.endswith(".npz"):  # this process was started by solve_in_process
            try:
                solve_file(Path(args.trace))
            except Exception as e:  # whatever such a file may hold
                raise ValueError(f"{args.trace} is no problem of solve_in_process: {e!r}") from e
            return 0
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
