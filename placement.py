"""On which node does each block of ranks run? Under leaf and spine switches: where few bytes cross
the spine (AMSP, section V-D).

    place_nodes(leaves, rings, per_node) -> Placement(order, before, after)

A scheduler gives N nodes under some leaf switches, in any order. Ranks stand node by node, so the
order of the nodes decides which groups cross the spine. Bytes are counted as rings send them: the
k ranks of a group, in order, send to the next one, the last to the first,

    spine bytes = sum over groups, over r in the group:  sent * (leaf(r) != leaf(next(r)))
    sent        = S * (k - 1)/k   all-gather, reduce-scatter, broadcasts of S bytes; all-reduce: 2x

and an all-to-all is a ring to each rank but the own: next(r) is 1, 2, .. k - 1 further. The nodes
of a group, in order under n > 1 leaves, so have n edges that cross. With 2 ranks a node:

    place                 0    1    2    3
    ranks                 0 1  2 3  4 5  6 7      edges that cross the spine, bytes sent on each:
    p = g = 4             p------   p------       param_gather, grad_scatter: 9/4 MS
    os = 8                os----------------      grad_reduce, param_broadcast: S/4, by {r, r + 4}
    given leaves          a    b    a    b        4 of p, 0 of os
    order [0, 2, 1, 3]    a    a    b    b        0 of p, 8 of os

That is a partition of a graph of N places with parts of given sizes, which is NP-hard. Here nested
blocks are packed into leaves, best fit, and places are swapped while that saves bytes: never worse
than the given order, and the best one for every p, g, os, sp and all leaves of up to 8 nodes of 2
ranks (a test).

Left out: trees and NVLink SHARP, whose edges lie elsewhere; several levels of spines; vectors, the
norm and the loss, which are small.

Legend: N nodes, M micro-batches, S bytes of the model; a place is a position in the order of nodes,
a comb the ranks of an os group or of all that lie the same number of ranks apart.
"""
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from offload import GIB
from shard import Factors

# ---------------------------------------------------------------------------- placement

TURNS = 8  # of each packed order, as starts of a search: with 1 some of 7 nodes are not the best
STARTS = 16  # the best of them, from which places are swapped: seconds for 512 nodes


@dataclass(frozen=True)
class Ring:
    """A communication of all ranks: in every block of `block` neighbours, each rank sends to the
    one that is `stride` further in the block, the last ones to the first."""

    kind: str  # one of shard.STREAMS, "all_to_all", or "ring" of attention
    block: int  # ranks
    stride: int  # ranks
    sent: float  # bytes a step of each rank


def make_rings(ranks: int, f: Factors, layout: str, micro_batches: int, param_bytes: float,
               grad_bytes: float, sp: int = 1, exchanged_bytes: float = 0) -> list[Ring]:
    """Return a step's communication, as shard.py launches it.

    param_bytes, grad_bytes: of the whole model, in the dtypes that travel. exchanged_bytes: of a
    rank's tensors that go through all-to-alls of sp ranks in a step (of attention's ring, of those
    that share heads).
    """
    gathers = "grad_scatter" if f.g > f.p else "grad_reduce"  # where the subgroup's sum runs
    rows = [  # kind, block, stride, bytes of all shards together, times that they go round
        ("param_gather", f.p, 1, param_bytes, 2 * micro_batches),  # forward and backward
        ("grad_scatter", f.p, 1, grad_bytes, micro_batches),
        ("param_broadcast", f.os, f.p, param_bytes / f.p, 1)]
    if layout == "intra":
        times = micro_batches if f.g > f.p else 1
        rows += [(gathers, f.os, f.p, grad_bytes / f.p, times),
                 ("grad_reduce", ranks, f.os, grad_bytes / f.os, 2)]
    else:
        times = 2 * (micro_batches - 1) if f.g > f.p else 0
        rows += [(gathers, f.os, f.p, grad_bytes / f.p, times),
                 (gathers, ranks, f.p, grad_bytes / f.p, 2)]
    rings = [Ring(kind, block, stride, times * size * (1 - stride / block))
             for kind, block, stride, size, times in rows]
    rings += [Ring("all_to_all", sp, i, exchanged_bytes / sp) for i in range(1, sp)]
    return [ring for ring in rings if ring.sent]


def place_traffic(rings: list[Ring], num_nodes: int, per_node: int) -> dict[str, np.ndarray]:
    """Return the bytes (N, N) that each place sends to each other one in a step, by kind."""
    rank = np.arange(num_nodes * per_node)
    traffic = {ring.kind: np.zeros((num_nodes, num_nodes)) for ring in rings}
    for ring in rings:
        next_rank = rank // ring.block * ring.block + (rank + ring.stride) % ring.block
        np.add.at(traffic[ring.kind], (rank // per_node, next_rank // per_node), ring.sent)
    return traffic


def spine_bytes(traffic: np.ndarray, leaves: np.ndarray) -> float:
    """Return the bytes of traffic (N, N) between places that lie under different leaves (N,)."""
    return float(traffic[leaves[:, None] != leaves].sum())


def pack_blocks(sizes: list[int], free: dict[int, int]) -> list[int]:
    """Return a leaf for each place: of blocks of sizes[0] places as many under one leaf as can be,
    the others of what is left; inside these the same with the smaller sizes.

    free: nodes of each leaf, all of which are taken.
    """
    if not sizes:
        return list(Counter(dict(sorted(free.items(), key=lambda item: -item[1]))).elements())
    size, *smaller = sizes
    if sum(free.values()) % size:  # these blocks lie across the larger ones
        return pack_blocks(smaller, free)
    whole = {leaf: count // size * size for leaf, count in free.items()}
    left = {leaf: count % size for leaf, count in free.items() if count % size}
    places = pack_blocks([], whole)
    while left:
        places += pack_blocks(smaller, take_block(size, left))
    return places


def take_block(size: int, left: dict[int, int]) -> dict[int, int]:
    """Take a block of `size` nodes out of `left`, best fit; return how many of each leaf."""
    taken = {}
    while size:
        fitting = [leaf for leaf in left if left[leaf] <= size]
        leaf = max(fitting, key=left.get) if fitting else min(left, key=left.get)
        taken[leaf] = min(size, left[leaf])
        size -= taken[leaf]
        left[leaf] -= taken[leaf]
        if not left[leaf]:
            del left[leaf]
    return taken


def swap_places(traffic: np.ndarray, leaves: np.ndarray) -> np.ndarray:
    """Return leaves (N,) after the best swap of two places, again and again until none saves bytes.

    With D[i, b] the bytes between place i and leaf b, a swap of i under a with j under b saves
    D[i, b] - D[i, a] + D[j, a] - D[j, b], less the bytes between i and j, which still cross, twice.
    """
    between = traffic + traffic.T
    np.fill_diagonal(between, 0)
    one_hot = np.eye(leaves.max() + 1)
    while True:
        to_leaf = (between @ one_hot[leaves])[:, leaves]  # (N, N), of place i to the leaf of j
        own = to_leaf.diagonal()
        saved = to_leaf + to_leaf.T - own[:, None] - own - 2 * between
        i, j = np.unravel_index(saved.argmax(), saved.shape)
        if saved[i, j] <= 1e-9 * between.sum():
            return leaves
        leaves = leaves.copy()
        leaves[[i, j]] = leaves[[j, i]]


@dataclass(frozen=True)
class Placement:
    """An order of nodes, and the bytes of a step that cross the spine, by kind."""

    order: list[int]  # place k, the ranks from k * per_node on, is node order[k]
    before: dict[str, float]  # in the given order
    after: dict[str, float]  # in this one

    def describe(self, names: list[str]) -> str:
        """Return lines for people. names: of the nodes, in the given order."""
        old, new = sum(self.before.values()), sum(self.after.values())
        saved = f", {100 * (1 - new / old):.0f} % saved" if old else ""
        kinds = [f"{kind} {self.before[kind] / GIB:.2f} -> {self.after[kind] / GIB:.2f}"
                 for kind in self.before if self.before[kind] or self.after[kind]]
        lines = [f"order of nodes: {in_ranges([names[node] for node in self.order])}",
                 f"spine traffic {old / GIB:.2f} -> {new / GIB:.2f} GiB a step{saved}"]
        return "\n".join(lines + [f"  {', '.join(kinds)}"] * bool(kinds))


def place_nodes(leaves: list[str], rings: list[Ring], per_node: int) -> Placement:
    """Return the order of nodes that sends the fewest bytes across the spine, the given one if none
    sends fewer. leaves: of each node, in the given order."""
    index = {leaf: i for i, leaf in enumerate(dict.fromkeys(leaves))}
    given = np.array([index[leaf] for leaf in leaves])
    traffic = place_traffic(rings, len(leaves), per_node)
    total = sum(traffic.values(), np.zeros((len(leaves), len(leaves))))
    sizes = sorted({ring.block // per_node for ring in rings
                    if ring.block % per_node == 0 and per_node < ring.block}, reverse=True)
    packed = [np.sort(given)] + [np.array(pack_blocks(sizes[i:], Counter(given.tolist())))
                                 for i in range(len(sizes) + 1)]
    # turned, since blocks may begin within a leaf; the given order may be nearly right
    starts = [np.roll(leaves, turn) for leaves in packed for turn in range(TURNS)] + [given]
    starts.sort(key=lambda leaves: spine_bytes(total, leaves))
    found = [given] + [swap_places(total, start) for start in starts[:STARTS]]
    whole = total.sum() or 1.0
    best = min(found, key=lambda leaves: round(spine_bytes(total, leaves) / whole, 9))  # or first
    order = np.empty_like(given)  # nodes of a leaf take its places in the given order
    order[best.argsort(kind="stable")] = given.argsort(kind="stable")
    return Placement(order.tolist(),
                     {kind: spine_bytes(sent, given) for kind, sent in traffic.items()},
                     {kind: spine_bytes(sent, best) for kind, sent in traffic.items()})


def in_ranges(names: list[str]) -> str:
    """Return names in order, neighbours that count up as one: 'a08..a11, a00, 4..7'."""
    runs = []  # (first name, last name)
    for name in names:
        if runs and next_name(runs[-1][1]) == name:
            runs[-1] = runs[-1][0], name
        else:
            runs.append((name, name))
    return ", ".join(first if first == last else f"{first}..{last}" for first, last in runs)


def next_name(name: str) -> str | None:
    """Return the name that follows: of 'node09' 'node10'; None if it ends without a number."""
    digits = re.search("[0-9]*$", name).group()
    return name[: -len(digits)] + f"{int(digits) + 1:0{len(digits)}}" if digits else None


def parse_leaf(text: str, num_nodes: int) -> tuple[list[str], list[str]]:
    """Return names and leaves of the nodes, of --leaf N: so many nodes a leaf, in the given order;
    or --leaf FILE: a node and its leaf a line, nodes in the given order, # begins a comment.

    Raises ValueError with the line.
    """
    if text.isdecimal() and int(text):
        return ([str(node) for node in range(num_nodes)],
                [str(node // int(text)) for node in range(num_nodes)])
    if not Path(text).is_file():
        raise ValueError(f"--leaf {text}: neither a number of nodes a leaf, from 1 on, nor a file")
    leaf_of = {}
    for number, line in enumerate(Path(text).read_text().splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"--leaf {text}, line {number}"
        if len(words) != 2:
            raise ValueError(f"{where}: {line.strip()!r}: a node's name and its leaf's are 2 words")
        if words[0] in leaf_of:
            raise ValueError(f"{where}: node {words[0]} is under leaf {leaf_of[words[0]]} already")
        if len(leaf_of) == num_nodes:
            raise ValueError(f"{where}: node {words[0]} is one more than {num_nodes}")
        leaf_of[words[0]] = words[1]
    if len(leaf_of) < num_nodes:
        raise ValueError(f"--leaf {text}: {len(leaf_of)} nodes of {num_nodes}; one a line")
    return list(leaf_of), list(leaf_of.values())
