"""Plan at which address each buffer of a training step lies (Memo, arXiv 2407.12117, section 4.2).

The steps of a run request the same memory again and again, so addresses can be computed once: which
buffer is alive when is known, and each is to get an offset (offline dynamic storage allocation).
Buffer i has a size S_i and is alive from its start to before its end; its offset is A_i:

    min M   s.t.   A_i + S_i <= M   and, for i and j that are alive together, with binaries z:
                   A_i + S_i <= A_j + (1 - z_ij)*U   and   z_ij + z_ji = 1   (z_ij: i lies below j)

No plan is below the largest sum of sizes that are alive at one moment. A plan that meets this bound
is optimal, and most often a first fit does. `solve` makes two plans and takes the lower:

    first fit    all buffers at once, in four orders, each at the lowest address that is free
    two levels   Memo's. A pass is one layer's forward or backward; a buffer that lives and dies in
                 one belongs to it. Level 1 plans each distinct pass once; level 2 plans the step
                 with each pass as one block of its pass's peak. A level is done where a first fit
                 meets its bound; else the integer program above is solved, within a hard limit.

`check` trusts neither. replay.py records a step's buffers, and serves later steps from one arena at
the addresses that are planned here.

    python memplan.py TRACE.csv [--time-limit S] [--out PLAN.csv] [--plot PLAN.png]

TRACE.csv has the columns id,lower,upper,size (alive from lower to before upper) and may have one
more, pass; PLAN.csv has offset beside them.

Left out: alignment other than that of the sizes, buffers whose address is given, passes within
passes, and speed for more than some ten thousand buffers, which no training step has: after the
time limit, what is left lies above all else.

Legend: n buffers; rows: an n x 3 array of start, end, size; section: a span of time in which the
same buffers are alive, and no more could be; peak: M; deadline: of time.monotonic().
"""

import argparse
import csv
import itertools
import math
import operator
import subprocess
import sys
import tempfile
import time
from bisect import insort
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np


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
    beside: "Plan | None" = None  # the plan that was not taken

    @property
    def optimal(self) -> bool:
        return self.peak == self.lower_bound

    def __str__(self) -> str:
        proof = f"gap {self.peak / max(1, self.lower_bound) - 1:.2%}"
        if self.optimal:
            proof = "proved optimal"
        other = f" ({self.beside.method}: {self.beside.peak:,})" if self.beside else ""
        return (
            f"{len(self.offsets)} buffers, peak {self.peak:,}, lower bound "
            f"{self.lower_bound:,}, {proof}, {self.method}{other}, {self.seconds:.2f} s"
        )


peak_of = operator.attrgetter("peak")


def as_rows(buffers: Iterable[Buffer]) -> np.ndarray:
    """Return the buffers as rows. Raise ValueError for a buffer that is never alive or has no
    size, and for sizes that 64 bits cannot add up."""
    numbers = [b[:3] for b in buffers]
    rows = np.array(numbers, np.int64).reshape(-1, 3)
    start, end, size = rows.T
    for i in np.flatnonzero((start >= end) | (size <= 0)):
        raise ValueError(
            f"a buffer is alive from start to before end, and of a size above 0; not {buffers[i]}"
        )
    total = size.sum(dtype=float)
    if total >= 2**60:
        raise ValueError(f"the sizes add up to {total:.3g}, at most 2^60")
    return rows


def check(buffers: Iterable[Buffer], offsets: Iterable[int], peak: int) -> None:
    """Raise ValueError if two buffers that are alive together overlap, or one leaves [0, peak).

    Simple enough to be believed: in the order of births, each is compared with all that are born
    while it is alive.
    """
    rows = as_rows(buffers)
    by_birth = np.argsort(rows[:, 0], kind="stable")
    start, end, size = rows[by_birth].T
    low = np.asarray(offsets, np.int64)[by_birth]
    high = low + size
    last = np.searchsorted(start, end)  # what is born while i is alive is before last[i]
    for i, number in enumerate(by_birth):
        if low[i] < 0 or high[i] > peak:
            raise ValueError(f"buffer {number} of {size[i]} at {low[i]} leaves [0, {peak})")
        others = slice(i + 1, last[i])
        below = low[others] < high[i]
        above = low[i] < high[others]
        for other in by_birth[others][below & above]:
            raise ValueError(
                f"buffers {number} and {other} are alive together and overlap: "
                f"{buffers[number]} at {low[i]}, {buffers[other]} at {offsets[other]}"
            )


def in_sections(rows):
    """Return the rows with time counted in sections, whose last moments are births that a death
    follows: then no more could be alive. Of n buffers there are at most n."""
    start, end, size = rows.T
    births = np.unique(start)
    last = np.unique(births[np.searchsorted(births, end) - 1])
    first_section = np.searchsorted(last, start)
    end_section = np.searchsorted(last, end)
    return np.stack([first_section, end_section, size], axis=1)


def live_bytes(rows):
    """Return the sum of the sizes that are alive, of each section."""
    start, end, size = rows.T
    change = np.zeros(end.max(initial=0) + 1, np.int64)
    np.add.at(change, start, size)
    np.subtract.at(change, end, size)
    return np.cumsum(change)[:-1]


# ---------------------------------------------------------------------------- first fits


def first_fit(rows, order, deadline=math.inf):
    """Return offsets and their peak: each buffer of the order, which has all, in the lowest gap
    between those placed that it overlaps; after the deadline, above all of them."""
    offsets = np.zeros(len(rows), np.int64)
    peak = 0
    placed = []  # (offset, end of it, start, end)
    for i in order:
        start, end, size = rows[i].tolist()
        at = 0
        if time.monotonic() > deadline:
            at = peak
            placed.clear()
        for low, high, born, died in placed:
            if born < end and start < died:
                if low - at >= size:
                    break
                at = max(at, high)
        offsets[i] = at
        peak = max(peak, at + size)
        insort(placed, (at, at + size, start, end))
    return offsets, peak


def first_plan(rows, deadline):
    """Return the plan of the lowest first fit, until one meets the lower bound: what is alive at
    the fullest moments first (MiniMalloc's order), the longest life, the largest area, size."""
    start, end, size = rows.T
    live = live_bytes(rows)
    bound = int(live.max(initial=0))
    fullest = np.array([live[a:b].max() for a, b in zip(start, end)])
    life = end - start
    area = life * size.astype(float)
    orders = [
        np.lexsort((-area, -life, -fullest)),
        np.argsort(-life, kind="stable"),
        np.argsort(-area, kind="stable"),
        np.argsort(-size, kind="stable"),
    ]
    plans = []
    for order in orders:
        plan = Plan(*first_fit(rows, order, deadline), bound, "first fit")
        plans.append(plan)
        if plan.optimal:
            break
    return min(plans, key=peak_of)


# ---------------------------------------------------------------------------- the integer program

EXACT_UNITS = 2**17  # of a peak: for so many, the program's tolerances are far below one
MAX_PAIRS = 3000  # of overlapping buffers; of more, HiGHS finds nothing in 20 s
FEW_PAIRS = 200  # that take less time than the start of a process


def program_rows(s, below, cliques, big):
    """Yield the program's rows for sizes s, each a sum of coefficients times columns, the least
    that it is and the most. Columns: A_i, then M, then z_ij: below[i, j].

    Cuts: in a clique C, of which all are alive together, all that lies below j fits below it, and
    all above it above:

        sum_{i in C} S_i z_ij <= A_j        A_j + S_j + sum_{i in C} S_i z_ji <= M
    """
    top = len(s)
    for (i, j), column in below.items():
        yield {j: 1, i: -1, column: -big}, s[i] - big, np.inf  # A_i + S_i <= A_j if z_ij
        yield {column: 1, below[j, i]: 1}, 1, 1
    for members in cliques:
        for j in members:
            others = [i for i in members if i != j]
            beneath = {below[i, j]: -s[i] for i in others}
            above = {below[j, i]: -s[i] for i in others}
            yield {j: 1} | beneath, 0, np.inf
            yield {top: 1, j: -1} | above, s[j], np.inf


def solve_program(rows, peak, deadline):
    """Return the order of addresses that the program found, or any; and a lower bound that it
    proved, or 0. peak: of a plan that there is, for U.

    Floating point decides about integers that are small enough: sizes count in units, rounded down.
    A plan's order of addresses is also one for smaller sizes, at a peak of at most peak / unit, so
    the bound holds for the sizes as they are.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # half a second
    from scipy.sparse import csr_array

    start, end, size = rows.T
    n = len(rows)
    unit = int(np.gcd.reduce(size))
    unit *= -(-peak // (unit * EXACT_UNITS))
    big = peak // unit
    cliques = []
    below = {}
    for section in range(end.max()):
        members = np.flatnonzero((start <= section) & (section < end)).tolist()
        cliques.append(members)
        for pair in itertools.permutations(members, 2):
            below.setdefault(pair, n + 1 + len(below))
    lines, least, most = zip(*program_rows((size // unit).tolist(), below, cliques, big))
    columns = [column for line in lines for column in line]
    values = [value for line in lines for value in line.values()]
    matrix = csr_array((values, columns, np.cumsum([0, *map(len, lines)])))
    column = np.arange(n + 1 + len(below))
    seconds = max(0.0, deadline - time.monotonic())
    found = milp(
        column == n,  # M is minimised
        integrality=column > n,  # z is binary
        bounds=Bounds(0, np.where(column > n, 1, big)),
        constraints=LinearConstraint(matrix, least, most),
        options={"time_limit": 0.9 * seconds, "mip_rel_gap": 0.0},
    )
    order = np.arange(n)
    if found.x is not None:  # the order alone: rounding in x cannot make two buffers overlap
        order = np.argsort(found.x[:n], kind="stable")
    dual = found.mip_dual_bound or 0
    if found.status == 0:  # solved: they are equal
        dual = found.fun
    bound = math.ceil(dual - 1e-3) * unit if np.isfinite(dual) else 0
    return order, bound


def solve_apart(rows, peak, deadline):
    """Return what solve_program returns, computed by this file in a process of its own, which is
    ended at the deadline: HiGHS overruns its own time limit. The problem and its solution travel as
    plain arrays, so that nothing that is read can run code."""
    with tempfile.TemporaryDirectory() as folder:
        problem = Path(folder, "problem.npz")
        np.savez(problem, rows=rows, peak=peak, deadline=deadline)
        try:
            subprocess.run(
                [sys.executable, __file__, problem],
                check=True,
                timeout=deadline - time.monotonic(),
            )
        except subprocess.SubprocessError:
            return np.arange(len(rows)), 0
        with np.load(problem.with_name("solution.npz"), allow_pickle=False) as solution:
            return solution["order"], int(solution["bound"])


def solve_file(problem: Path) -> None:
    """Solve the problem of solve_apart, and write solution.npz beside it."""
    with np.load(problem, allow_pickle=False) as file:
        rows, peak, deadline = file["rows"], int(file["peak"]), float(file["deadline"])
    order, bound = solve_program(rows, peak, deadline)
    np.savez(problem.with_name("solution.npz"), order=order, bound=bound)


def one_level(rows, deadline):
    """Return the plan of a first fit where it meets the bound, else of the integer program where
    that finds a lower one in time."""
    plan = first_plan(rows, deadline)
    start, end, _ = rows.T
    n = len(rows)
    dead = np.searchsorted(np.sort(end), start, side="right")  # at each birth
    pairs = n * (n - 1) // 2 - dead.sum()
    if plan.optimal or pairs > MAX_PAIRS or time.monotonic() > deadline:
        return plan
    solve_it = solve_program if pairs <= FEW_PAIRS else solve_apart
    order, bound = solve_it(rows, plan.peak, deadline)
    plan.lower_bound = max(plan.lower_bound, bound)
    other = Plan(*first_fit(rows, order), plan.lower_bound, "integer program")
    return min(plan, other, key=peak_of)


# ---------------------------------------------------------------------------- the plan of a step


def solve(buffers: list[Buffer], time_limit: float = 60.0) -> Plan:
    """Return the lower of two plans, of a first fit and by two levels, within time_limit seconds.
    No integer program is solved where two levels, each at its lower bound, would not be lower."""
    begin = time.monotonic()
    deadline = begin + time_limit
    rows = in_sections(as_rows(buffers))
    passes = [b.in_pass for b in buffers]
    fitted = first_plan(rows, deadline)
    least = two_levels(rows, passes, deadline, bound_alone)
    plan_level = one_level if least.peak < fitted.peak else first_plan
    by_levels = two_levels(rows, passes, deadline, plan_level)
    plan, other = sorted([by_levels, fitted], key=peak_of)
    bound = max(plan.lower_bound, other.lower_bound)
    seconds = time.monotonic() - begin
    return replace(plan, lower_bound=bound, seconds=seconds, beside=other)


def bound_alone(rows, deadline):
    """Return a plan of a level that is only a peak: the lower bound."""
    bound = int(live_bytes(rows).max(initial=0))
    return Plan(np.zeros(len(rows), np.int64), bound, bound, "")


def two_levels(rows, passes, deadline, plan_level):
    """Return a plan by Memo's two levels, of plan_level(rows, deadline) each. passes: the name of
    each buffer's pass, or "".

    The blocks' lower bound is none of the step's, which `solve` knows: what the levels cost is a
    gap.
    """
    start, end, _ = rows.T
    members = defaultdict(list)
    for i, name in enumerate(passes):
        members[name].append(i)
    outer = members.pop("", [])
    if not members:
        return plan_level(rows, deadline)
    # passes are equal if their buffers overlap alike: when they begin, and what else is alive, does
    # not matter
    plans = {}
    inner = []  # the plan of each pass
    for mine in members.values():
        part = in_sections(rows[mine])
        key = part.tobytes()
        if key not in plans:
            now = time.monotonic()
            plans[key] = plan_level(part, now + (deadline - now) / 2)
        inner.append(plans[key])
    blocks = [
        (start[mine].min(), end[mine].max(), plan.peak)
        for mine, plan in zip(members.values(), inner)
    ]
    top = in_sections(np.concatenate([blocks, rows[outer]]))
    step = plan_level(top, deadline)
    offsets = np.empty(len(rows), np.int64)
    offsets[outer] = step.offsets[len(blocks) :]
    for base, mine, plan in zip(step.offsets, members.values(), inner):
        offsets[mine] = base + plan.offsets
    return Plan(offsets, step.peak, 0, f"two levels, {step.method}")


# ---------------------------------------------------------------------------- files, command line

COLUMNS = ("id", "lower", "upper", "size")


def read_trace(path: str) -> tuple[list[str], list[Buffer]]:
    """Return ids and buffers of a CSV file. Raise ValueError naming the line."""
    ids, buffers = [], []
    with open(path, newline="", encoding="utf-8-sig") as f:  # -sig: Excel's mark at the beginning
        rows = csv.DictReader(f)
        if missing := set(COLUMNS).difference(rows.fieldnames or ()):
            raise ValueError(
                f"{path}, line 1: no {', '.join(sorted(missing))} among the columns "
                f"{rows.fieldnames}"
            )
        for row in rows:
            try:
                numbers = [int(row[column]) for column in COLUMNS[1:]]
                as_rows([buffer := Buffer(*numbers, row.get("pass") or "")])
            except (TypeError, ValueError, OverflowError) as e:
                raise ValueError(f"{path}, line {rows.line_num}: {e}") from None
            ids.append(row["id"])
            buffers.append(buffer)
    return ids, buffers


def write_plan(path: str, ids: Iterable, buffers: list[Buffer], offsets: Iterable[int]) -> None:
    """Write a CSV file of the buffers, their passes and offsets."""
    with open(path, "w", newline="") as f:
        out = csv.writer(f)
        out.writerow([*COLUMNS, "pass", "offset"])
        for number, buffer, offset in zip(ids, buffers, offsets):
            out.writerow([number, *buffer, offset])


def draw(path: str, buffers: list[Buffer], plan: Plan, title: str = "") -> None:
    """Write a PNG file: address over time, one rectangle a buffer, the lighter the larger."""
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
    title += f"{len(buffers):,} buffers, peak {plan.peak / 2**30:.2f} GiB; lighter: larger"
    ax.set_title(title, fontsize=10)
    ax.legend()
    figure.savefig(path, dpi=150, format="png", metadata={"Software": None})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("trace", help="a CSV file with the columns id,lower,upper,size, maybe pass")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds; default: 60")
    parser.add_argument("--out", help="CSV file for the plan: the trace's columns and offset")
    parser.add_argument("--plot", help="PNG file: address over time")
    args = parser.parse_args(argv)
    if not args.time_limit > 0:
        parser.error(f"--time-limit {args.time_limit}: above 0")
    try:
        if args.trace.endswith(".npz"):  # from solve_apart
            try:
                solve_file(Path(args.trace))
            except Exception as e:  # whatever such a file may hold
                raise ValueError(f"{args.trace} is no problem of solve_apart: {e!r}") from e
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
