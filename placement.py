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

That is a partition of a graph of N places with parts of given sizes, which is NP-hard. Here whole
blocks are packed into leaves, the largest first, and from such orders, turned, two places are
swapped as long as that saves bytes: never worse than the given order, and the best one for every p,
g, os, sp and all leaves of up to 8 nodes of 2 ranks (a test).

Left out: trees and NVLink SHARP, whose edges lie elsewhere; several levels of spines; vectors, the
norm and the loss, which are small.

Legend: N nodes, M micro-batches, S bytes of the model; a place is a position in the order of nodes,
a comb the ranks of an os group or of all that lie the same number of ranks apart.
"""
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from offload import GIB
from shard import Factors

# ---------------------------------------------------------------------------- placement


@dataclass(frozen=True)
class Ring:
    """A communication of all ranks: in every block of `block` neighbours, each rank sends to the
    one that is `stride` further in the block, the last ones to the first."""

    kind: str  # one of shard.STREAMS, "all_to_all", or "ring" of attention
    block: int  # ranks
    stride: int  # ranks
    sent: float  # bytes a step of each rank


def make_rings(ranks: int, f: Factors, layout: str, micro_batches: int,
               param_bytes: float, grad_bytes: float,
               sp: int = 1, exchanged_bytes: float = 0) -> list[Ring]:
    """Return a step's communication, as shard.py launches it.

    param_bytes, grad_bytes: of the whole model, in the dtypes that travel. exchanged_bytes: of a
    rank's tensors that go through all-to-alls of sp ranks in a step (of attention's ring, of those
    that share heads).
    """
    # how often a subgroup sums gradients, and by which stream; and who sums the rest
    if f.g > f.p:
        subgroup, sums = "grad_scatter", micro_batches
    else:
        subgroup, sums = "grad_reduce", 1
    rest, stride = "grad_reduce", f.os
    if layout == "inter":
        sums = 2 * (sums - 1)
        rest, stride = subgroup, f.p
    rows = (  # kind, block, stride, bytes of all shards together, times that they go round
        ("param_gather", f.p, 1, param_bytes, 2 * micro_batches),  # forward and backward
        ("grad_scatter", f.p, 1, grad_bytes, micro_batches),
        ("param_broadcast", f.os, f.p, param_bytes / f.p, 1),
        (subgroup, f.os, f.p, grad_bytes / f.p, sums),
        (rest, ranks, stride, grad_bytes / stride, 2))
    rings = [
        Ring(kind, block, stride,
             times * size * (1 - stride / block))
        for kind, block, stride, size, times in rows]
    rings += [
        Ring("all_to_all", sp, i, exchanged_bytes / sp)
        for i in range(1, sp)]
    return [ring for ring in rings if ring.sent]


def place_traffic(rings: list[Ring], num_nodes: int, per_node: int) -> np.ndarray:
    """Return the bytes (N, N) that each place sends to each other one in a step."""
    rank = np.arange(num_nodes * per_node)
    traffic = np.zeros((num_nodes, num_nodes))
    for ring in rings:
        first = rank // ring.block * ring.block
        next_rank = first + (rank + ring.stride) % ring.block
        edges = rank // per_node, next_rank // per_node
        np.add.at(traffic, edges, ring.sent)
    return traffic


def pack_blocks(sizes: list[int], given: np.ndarray) -> np.ndarray:
    """Return leaves (N,) of places: of blocks of each size, the largest first, as many under one
    leaf as its nodes are enough for; then what is left."""
    free = Counter(given.tolist())
    places = []
    for size in [*sizes, 1]:
        for leaf, count in free.most_common():
            whole = count // size * size
            places += whole * [leaf]
            free[leaf] -= whole
    return np.array(places)


def swap_places(traffic: np.ndarray, leaves: np.ndarray) -> np.ndarray:
    """Return leaves (N,) after the best swap of two places, again and again until none saves bytes.

    With D[i, b] the bytes between place i and leaf b, a swap of i under a with j under b saves
    D[i, b] - D[i, a] + D[j, a] - D[j, b], less the bytes between i and j, which still cross, twice.
    """
    between = traffic + traffic.T
    np.fill_diagonal(between, 0)
    leaves = leaves.copy()
    one_hot = np.eye(leaves.max() + 1)
    while True:
        to_leaf = (between @ one_hot[leaves])[:, leaves]  # (N, N), of place i to the leaf of j
        own = to_leaf.diagonal()
        saved = to_leaf + to_leaf.T - own[:, None] - own - 2 * between
        i, j = np.unravel_index(saved.argmax(), saved.shape)
        if saved[i, j] <= 1e-9 * between.sum():
            return leaves
        leaves[[i, j]] = leaves[[j, i]]


@dataclass(frozen=True)
class Placement:
    """An order of nodes, and the bytes of a step that cross the spine."""

    order: list[int]  # place k, the ranks from k * per_node on, is node order[k]
    before: float  # in the given order
    after: float  # in this one

    def describe(self, names: list[str]) -> str:
        """Return lines for people. names: of the nodes, in the given order."""
        saved = (self.before - self.after) / max(1.0, self.before)
        return (f"order of nodes: {', '.join(names[node] for node in self.order)}\n"
                f"spine traffic {self.before / GIB:.2f} -> {self.after / GIB:.2f} GiB a step, "
                f"{saved:.0%} saved")


def place_nodes(leaves: list[str], rings: list[Ring], per_node: int) -> Placement:
    """Return the order of nodes that sends the fewest bytes across the spine, the given one if none
    sends fewer. leaves: of each node, in the given order."""
    _, given = np.unique(leaves, return_inverse=True)
    traffic = place_traffic(rings, len(leaves), per_node)

    def spine_bytes(order):
        return traffic[order[:, None] != order].sum()

    blocks = {max(1, ring.block // per_node) for ring in rings}
    sizes = sorted(blocks, reverse=True)
    starts = [given]
    for i in range(len(sizes) + 1):
        packed = pack_blocks(sizes[i:], given)
        starts += [  # turned, since blocks may begin within a leaf
            np.roll(packed, turn)
            for turn in range(8)]
    starts.sort(key=spine_bytes)
    found = [given] + [swap_places(traffic, start) for start in starts[:24]]  # for 512 nodes: 10 s
    whole = traffic.sum() or 1.0
    best = min(  # or the first
        found, key=lambda order: round(spine_bytes(order) / whole, 9))
    order = np.empty_like(given)  # nodes of a leaf take its places in the given order
    order[best.argsort(kind="stable")] = given.argsort(kind="stable")
    return Placement(order.tolist(), spine_bytes(given), spine_bytes(best))


def parse_leaf(text: str, num_nodes: int) -> tuple[list[str], list[str]]:
    """Return names and leaves of the nodes, of --leaf N: so many nodes a leaf, in the given order;
    or --leaf FILE: a node and its leaf a line, nodes in the given order, # begins a comment. Raises
    ValueError."""
    if text.isdecimal() and int(text):
        nodes = range(num_nodes)
        leaves = [str(node // int(text)) for node in nodes]
        return list(map(str, nodes)), leaves
    try:
        lines = Path(text).read_text().splitlines()
        rows = [line.partition("#")[0].split() for line in lines]
        rows = [row for row in rows if row]
        leaf_of = dict(rows)
    except (OSError, ValueError) as e:
        raise ValueError(f"--leaf {text}: neither a number of nodes a leaf, from 1 on, nor a file "
                         f"of a node's name and its leaf's a line: {e}") from e
    if not len(rows) == len(leaf_of) == num_nodes:
        raise ValueError(f"--leaf {text}: {len(rows)} lines of {len(leaf_of)} nodes, instead of "
                         f"one for each of {num_nodes}")
    return list(leaf_of), list(leaf_of.values())
