"""What does the planner predict for machines that others have measured?

    python results/scale.py profiles      write profiles/a800.json, h200x8.json, h200x8-400g.json
    python results/scale.py predictions   write scale.json, which report.py shows

Profiles of machines that bench.py has not measured are put together here, from papers, data sheets
and other people's measurements; what nobody published is marked as assumed. No number is chosen so
that a paper's result comes out. Published results (AMSP, Memo, InternEvo) stand beside what the
planner predicts for the same question.

Left out: DeepSpeed's and Megatron's own costs. A named strategy is its factors in this project's
schedule, without the overlaps that AMSP (section VI-C) says it lacks.

Legend: mesh (GPUs in a node g, nodes n) of a group, k = g*n ranks.
"""
import argparse
import bisect
import dataclasses
import itertools
import json
import math
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from hardware import (COLLECTIVES, PRODUCTS, PROFILES, Points, Profile, load_profile, mesh_name,
                      profile_text, rounded)
from model import MODELS, ModelConfig
from offload import GIB
from planner import GPU_SHARE, Constraints, Hardware, Plan, Search, figures, plan
from planner import choices as choices_of

# ---------------------------------------------------------------------------- networks

NCCL = {  # its model, src/graph/tuning.cc: seconds at the start, of a hop in a node, between nodes;
    # the share of the bus bandwidth that is left
    ("ring", "LL"): (3.6e-6, 0.47e-6, 2.7e-6, 0.25),
    ("ring", "LL128"): (10e-6, 1.9e-6, 4.0e-6, 0.92),
    ("ring", "Simple"): (8.4e-6, 3.4e-6, 9.6e-6, 1.0),
    ("tree", "LL"): (4.4e-6, 0.52e-6, 5.0e-6, 0.24),
    ("tree", "LL128"): (4.4e-6, 1.2e-6, 8.5e-6, 0.82),
    ("tree", "Simple"): (0.0, 28e-6, 50e-6, 0.9),
}
PAIRS = (40e-6, 1.5e-6)  # an all-to-all's seconds at the start, and of each peer: assumed
SIZES = (1, *(2**n for n in range(16, 31, 2)))  # bytes
MODEL_OF_NCCL = (
    "t = latency + bytes*f/bus, the fastest of NCCL's protocols and algorithms with the latencies"
    " and efficiencies of its src/graph/tuning.cc (a small all_reduce over 32 nodes takes 62 us, 62"
    " to 71 measured: nccl issue 652); f = (k-1)/k of all_gather and reduce_scatter, twice that of"
    " all_reduce, 1 of broadcast; groups that share a node share its NICs; all_to_all: assumed 40"
    " us + 1.5 us a peer, then the slower of a rank's bytes within the node and through its share"
    " of the NICs")


def bus_share(op: str, ranks: int) -> float:
    """Return seconds of a collective, of so many bytes and as many bytes/s of bus bandwidth."""
    return {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}.get(op, (ranks - 1) / ranks)


def seconds(op: str, size: float, mesh: tuple[int, int], per_node: int, inside: float,
            across: float) -> float:
    """Return seconds of a collective by NCCL's own model. inside: bus bytes/s within a node;
    across: of all NICs of a node."""
    g, n = mesh
    k = g * n
    if op == "all_to_all":
        start, peer = PAIRS
        within = size * (g - 1) / k / inside
        between = size * (k - g) / k / (across / per_node)
        return start + peer * k + max(within, between)
    bus = inside if n == 1 else min(inside, across * g / per_node)
    found = []
    for (algorithm, _), (start, hop, hop_between, efficiency) in NCCL.items():
        if algorithm == "ring":
            passes = 2 if op == "all_reduce" else 1
            hops = passes * (k - n), passes * (n - 1)
        elif op == "all_reduce" and n > 1:
            hops = 2 * (g - 1), 2 * math.log2(n)
        else:
            continue
        found.append(start + hops[0] * hop + hops[1] * hop_between
                     + size * bus_share(op, k) / (bus * efficiency))
    return min(found)


def network(per_node: int, inside: float,
            across: dict[int, float]) -> dict[str, dict[str, Points]]:
    """Return a profile's collectives. across: number of nodes -> bus bytes/s of all NICs of a
    node."""
    powers = [2**i for i in range(per_node.bit_length())]
    meshes = [(g, 1) for g in powers if g > 1] + [(g, n) for n in across for g in powers]

    def points(op: str, mesh: tuple[int, int]) -> Points:
        nics = across.get(mesh[1], inside)
        return [[size, size / seconds(op, size, mesh, per_node, inside, nics)] for size in SIZES]

    return {op: {mesh_name(mesh): points(op, mesh) for mesh in meshes} for op in COLLECTIVES}


# ---------------------------------------------------------------------------- profiles


def a800() -> Profile:
    """Return the papers' cluster: 8 A800-80GB a node, AMSP's network of 4 HDR InfiniBand a node."""
    attention = {  # causal, head dim 128
        "forward": [[2048, 165e12], [4096, 180e12], [8192, 190e12], [16384, 195e12],
                    [32768, 205e12]],
        "backward": [[2048, 135e12], [4096, 155e12], [8192, 170e12], [16384, 180e12],
                     [32768, 185e12]]}
    across = {2: 93e9, 4: 93e9, 8: 89e9, 32: 83e9, 128: 72e9}
    sources = {
        "all": "put together from papers, data sheets and others' measurements; not measured",
        "gpu_bytes": "79.15 GiB, which PyTorch reports of an A100-80GB",
        "host_bytes": "Memo, section 5.1: 2 TB a node",
        "peak_flops": "A100 data sheet (an A800 has its compute); Memo, section 5.1",
        "products": "assumed: 245 TFLOP/s at all shapes, between 81 % of the peak at 4096^3"
                    " (Triton's regression test) and 271, the best of any shape"
                    " (stas00/ml-engineering)",
        "attention": "assumed: FlashAttention-2's paper has 230 TFLOP/s as the best forward, and"
                     " charts without numbers; from 32K on 205 and 185, whose mean is the least"
                     " that Memo's 1M tokens on 8 GPUs imply",
        "memory": "85 % of the data sheet's 2039 GB/s (element-wise kernels in Triton's regression"
                  " test)",
        "optimizer": "as memory",
        "to_host": "derived from Memo's table 4: full swapping takes 10 GB/s a GPU at 64K and 128K"
                   " tokens, its crossing at 192K 13; the 32 GB/s of its section 5.1 are PCIe 4.0"
                   " x16 of one GPU, and nothing there comes near it",
        "launch": "assumed: about what h200x2's host takes",
        "collectives": "in a node 158 GB/s of bus bandwidth: between 161 (InternEvo's simulator,"
                       " A800_NVL) and 155 (232.5 of 8 A100s, nccl issue 1048, times 200/300 of"
                       " NVLink); across nodes 4 NICs of 25 GB/s: InternEvo's 107 GB/s divided by"
                       " its 1.2 to 1.5 for more nodes, at most 93 (86 to 96 measured: nccl issue"
                       " 1048, nccl-tests issue 119); " + MODEL_OF_NCCL,
        "visits": "assumed: both ways together as fast as one",
        "overlap": "Galvatron's coefficient, measured on other machines"}
    return Profile(
        "a800", "NVIDIA A800-SXM4-80GB", 8, 79.15 * 2**30, 2e12, 312e12,
        {kind: [[4096, 4096, 245e12]] for kind in PRODUCTS}, attention, 0.85 * 2039e9,
        0.85 * 2039e9, 12e9, 6e9, {"forward": 0.001, "backward": 0.002},
        network(8, 158e9, across),
        {"collectives": [1.126, 1.126], "all_to_all": [1.126, 1.126]}, sources,
        {"hardware": "8 x A800-80GB a node", "command": "python results/scale.py profiles"})


def h200x8() -> Profile:
    """Return one machine of 8 H200s from measurements that were made before bench.py --profile."""
    two = load_profile("h200x2")
    million = {"forward": 643e12, "backward": 618e12}
    attention = {kind: points + [[2**20, million[kind]]] for kind, points in two.attention.items()}
    sizes = (2**22, 2**26, 2**30)
    measured = {  # bus bytes/s at these sizes
        "all_gather": (100e9, 286e9, 344e9), "reduce_scatter": (65e9, 292e9, 345e9),
        "all_reduce": (135e9, 319e9, 360e9), "all_to_all": (82e9, 273e9, 331e9),
        "broadcast": (100e9, 286e9, 344e9)}

    def points(op: str, ranks: int) -> Points:
        return [[size, bus / bus_share(op, ranks)] for size, bus in zip(sizes, measured[op])]

    collectives = {op: two.collectives[op] | {f"{g}x1": points(op, g) for g in (4, 8)}
                   for op in COLLECTIVES}
    sources = {
        "all": "measured piece by piece, not by bench.py --profile: see each",
        "host_bytes": "measured: 560 GiB",
        "products": "h200x2's, measured under load for seconds (a single product of 8192 x 4096 x"
                    " 11008 reaches 792 TFLOP/s, 690 at 131072 rows)",
        "attention": "h200x2's; at 1M tokens measured here",
        "to_host": "measured, all 8 GPUs at once (one alone: 55 GB/s)",
        "collectives": "8x1: bus bandwidths measured at 4, 64 and 1024 MiB; 4x1: assumed the same"
                       " bus bandwidths; 2x1: h200x2's; broadcast: assumed all_gather's",
        "visits": "measured, all 8 GPUs at once, of copies both ways without an update",
        "memory": "h200x2's", "optimizer": "h200x2's", "launch": "h200x2's", "overlap": "h200x2's"}
    return dataclasses.replace(
        two, name="h200x8", per_node=8, host_bytes=560 * GIB, attention=attention, to_host=22e9,
        visits=13e9, collectives=collectives, sources=sources,
        about={"hardware": "8 x NVIDIA H200", "command": "python results/scale.py profiles",
               "note": "not measured by bench.py --profile"})


def h200x8_400g() -> Profile:
    """Return a cluster of h200x8, each GPU with a NIC of 400 Gb/s: assumed."""
    one = load_profile("h200x8")
    nics = {2: 372e9, 4: 372e9, 8: 356e9, 32: 332e9, 128: 288e9, 1250: 288e9}
    sources = one.sources | {
        "all": "h200x8's, and an assumed network between nodes",
        "collectives": one.sources["collectives"] + "; across nodes assumed: 400 Gb/s a GPU, four"
                       " times the bus bandwidths of profile a800 (4 x 200 Gb/s a node), beyond 128"
                       " nodes those of 128; " + MODEL_OF_NCCL}
    between = network(8, 345e9, nics)
    collectives = {op: between[op] | one.collectives[op] for op in COLLECTIVES}
    return dataclasses.replace(one, name="h200x8-400g", collectives=collectives, sources=sources)


def write_profiles() -> None:
    for make in (a800, h200x8, h200x8_400g):
        profile = make()
        (PROFILES / f"{profile.name}.json").write_text(profile_text(profile))


# ---------------------------------------------------------------------------- what was published

PAPER_MODELS = {  # AMSP's 30B is InternEvo's: 60 x 6144, which its MFU and TGS imply together
    "7b": MODELS["7b"], "13b": MODELS["13b"],
    "30b": ModelConfig(32000, 6144, 60, 48, 48, 16384)}
RECOMPUTE = {"7b": "none", "13b": "none", "30b": "full"}  # AMSP, section VI
CHOICES = {"7b": (1, 1, 8), "13b": (4, 4, 8), "30b": (8, 8, 32)}  # table IV
OVERLAPS = {  # AMSP, table V
    "all overlaps": "param_gather,grad_scatter,grad_reduce,param_broadcast",
    "without broadcast": "param_gather,grad_scatter,grad_reduce",
    "and without all-reduce": "param_gather,grad_scatter",
    "none": "none"}
TABLE_5 = {  # TGS on 64 GPUs with 1, 2, 4, 8 micro-batches, in the order of OVERLAPS
    "7b": ((3525, 4119, 4416, 4503), (3346, 3991, 4329, 4438), (2812, 3609, 4070, 4286),
           (2812, 3609, 4070, 4286)),
    "13b": ((1918, 2082, 2183, 2230), (1895, 1920, 2160, 2184), (1630, 1782, 2033, 2126),
            (1527, 1552, 1608, 1666)),
    "30b": ((825, 856, 872, 880), (759, 814, 847, 859), (651, 740, 814, 842),
            (557, 654, 678, 719))}
SYSTEMS = {  # of figures 11 and 12: strategy, overlaps (of DeepSpeed's: section VI-C)
    "ours": ("", OVERLAPS["without broadcast"]),
    "ZeRO-1": ("zero1", OVERLAPS["without broadcast"]),
    "ZeRO-3": ("zero3", "param_gather,grad_reduce"),
    "MiCS": ("mics:8", "param_gather,grad_reduce")}
FIGURE_11 = {  # MFU; at 1024 GPUs section VI-B, at 8 "63 to 64", at 32 "around 40"
    ("7b", "ours", 8): 0.635, ("7b", "ZeRO-1", 8): 0.635, ("7b", "ours", 1024): 0.51,
    ("7b", "ZeRO-1", 1024): 0.36, ("7b", "MiCS", 1024): 0.35, ("7b", "ZeRO-3", 1024): 0.04,
    ("13b", "ours", 1024): 0.52, ("13b", "MiCS", 1024): 0.33, ("30b", "ours", 32): 0.40,
    ("30b", "MiCS", 32): 0.40, ("30b", "ZeRO-3", 32): 0.40, ("30b", "ours", 1024): 0.42,
    ("30b", "MiCS", 1024): 0.29}
MEMO = {  # causal MFU of 7B by (GPUs, tokens of a sequence), table 3; figure 12(b): "over 50 %"
    (8, 64): 0.5234, (8, 128): 0.5096, (8, 256): 0.5362, (8, 384): 0.5304, (8, 512): 0.5184,
    (8, 640): 0.5259, (8, 768): 0.5189, (8, 896): 0.5271, (8, 1024): 0.5230, (16, 2048): None,
    (32, 4096): None, (64, 8192): None}


def paper_flops(model: ModelConfig, seq: int) -> float:
    """Return FLOPs a token as AMSP counts them: Megatron's formula, attention not halved."""
    width = model.dim
    share = 1 + seq / (6 * width) + model.vocab / (12 * model.layers * width)
    return 72 * model.layers * width**2 * share


# ---------------------------------------------------------------------------- predictions


def a800s(gpus: int) -> Hardware:
    """Return that many A800s, 80 GB each, and their hosts, to plan with as planner.py does."""
    profile = load_profile("a800")
    return Hardware(gpus, profile.per_node, profile, GPU_SHARE * min(profile.gpu_bytes, 80e9),
                    profile.host_bytes * 7 / 8 / profile.per_node)


def best_plan(model: ModelConfig, hardware: Hardware, **flags) -> Plan | None:
    """Return the planner's first choice for flags, None if nothing fits or they are illegal."""
    try:
        return plan(Constraints(**flags), model, hardware, top=1)[0]
    except ValueError:
        return None


def shown(found: Plan, hardware: Hardware, *names: str) -> dict:
    """Return some of a plan's figures, with its choices in words."""
    words = choices_of(found)
    every = figures(found, hardware) | {"shards": words["p,g,os"], "layers": words["layers keep"]}
    every["sp"] = words["sp"] + (f" ring={found.ring}" if found.ring > 1 else "")
    return {name: every[name] for name in names}


def amsp_flags(name: str, sequences: int) -> dict:
    return {"seq": 4096, "batch": sequences, "micro_batch": 1, "sp": 1, "os_place": "gpu",
            "recompute": RECOMPUTE[name]}


def choices() -> list[dict]:
    """Return the papers' choices beside the model's best under the same restrictions."""
    asked = []
    for gpus in (1024, 64):
        for name, (p, g, os) in CHOICES.items():
            asked.append((f"AMSP {name}", PAPER_MODELS[name], gpus, amsp_flags(name, 1024),
                          {"p": p, "g": g, "os": os}))
    flags = {"seq": 2**18, "batch": 16, "os_place": "gpu"}
    theirs = {"p": 4, "g": 4, "os": 8, "sp": 32, "ring": 1, "recompute": "none"}
    for text, recompute in (("InternEvo 7b, layers whole", "none"),
                            ("InternEvo 7b, layers may swap", "auto")):
        asked.append((text, MODELS["7b"], 128, flags | {"recompute": recompute}, theirs))
    rows = []
    for text, model, gpus, flags, choice in asked:
        row = {"setting": text, "gpus": gpus}
        for whose, more in (("theirs", choice), ("best", {})):
            found = best_plan(model, a800s(gpus), os_layout="inter", **flags | more)
            row[whose] = shown(found, a800s(gpus), "shards", "sp", "layers", "step_s",
                               "gpu_gib")
        rows.append(row)
    return rows


def table_5() -> list[dict]:
    """Return TGS of AMSP's choices on 64 GPUs, by overlap and micro-batches."""
    rows = []
    for name, (p, g, os) in CHOICES.items():
        model = PAPER_MODELS[name]
        for (overlaps, flag), published in zip(OVERLAPS.items(), TABLE_5[name]):
            tgs = []
            for micro_batches in (1, 2, 4, 8):
                found = best_plan(model, a800s(64), p=p, g=g, os=os, overlap=flag,
                                  os_layout="inter", **amsp_flags(name, 64 * micro_batches))
                tgs.append(figures(found, a800s(64))["tgs"])
            rows.append({"model": name, "overlap": overlaps, "tgs": tgs, "published": published})
    return rows


def figures_11_and_12() -> list[dict]:
    """Return MFU and TGS of systems from 8 to 1024 GPUs, 4M tokens a step."""
    rows = []
    for name, model in PAPER_MODELS.items():
        for system, (strategy, overlap) in SYSTEMS.items():
            if (name, system) == ("30b", "MiCS"):
                strategy = "mics:16"  # table IV
            for gpus in (8, 16, 32, 64, 128, 256, 512, 1024):
                found = best_plan(model, a800s(gpus), strategy=strategy, overlap=overlap,
                                  **amsp_flags(name, 1024))
                row = {"model": name, "system": system, "gpus": gpus,
                       "published_mfu": FIGURE_11.get((name, system, gpus))}
                if found:
                    row |= shown(found, a800s(gpus), "tgs")
                    row |= {"mfu": row["tgs"] * paper_flops(model, 4096) / 312e12,
                            "shards": choices_of(found)["p,g,os"]}
                rows.append(row)
    return rows


def memo() -> list[dict]:
    """Return the causal MFU of 7B by length on 8 GPUs, and at 128K tokens a GPU on more."""
    rows = []
    for (gpus, kilo), published in MEMO.items():
        found = best_plan(MODELS["7b"], a800s(gpus), seq=kilo * 1024, os_place="gpu")
        row = {"gpus": gpus, "seq": kilo * 1024, "published_mfu": published}
        if found:
            row |= shown(found, a800s(gpus), "mfu_causal", "tgs", "gpu_gib",
                         "host_gib", "sp", "layers")
        rows.append(row)
    return rows


MEMORY = {"24 GB": 24.0, "80 GB": 79.2, "141 GB": 139.8}  # GiB of a GPU, as CUDA says it
HOST = {1: 112, 2: 224, 8: 560}  # GPUs: GiB of host memory that they may use


def longest(model: ModelConfig, hardware: Hardware) -> int:
    """Return the most tokens of one sequence over all ranks that fit, in steps of 16K a rank; 0 if
    not even one step does."""
    step = hardware.ranks * 2**14

    def too_long(count: int) -> bool:
        asked = Constraints(count * step, batch=1, sp=hardware.ranks)
        return not Search(asked, model, hardware).fits()

    bad = 1
    while not too_long(bad):
        bad *= 2
    return step * (bisect.bisect_left(range(bad), True, lo=1, key=too_long) - 1)


def fits() -> list[dict]:
    """Return the longest sequences that fit GPUs of 24, 80 and 141 GB, in those of h200x8's
    place."""
    rows = []
    for (memory, gib), (ranks, host), name in itertools.product(
            MEMORY.items(), HOST.items(), ("1b", "7b", "llama3-8b")):
        here = Hardware(ranks, ranks, load_profile("h200x8"), GPU_SHARE * gib * GIB,
                        host * GIB / ranks)
        rows.append({"memory": memory, "gpus": ranks, "host_gib": host, "model": name,
                     "seq": longest(MODELS[name], here)})
    return rows


def predictions() -> dict:
    return rounded({"choices": choices(), "table_5": table_5(), "figures": figures_11_and_12(),
                    "memo": memo(), "fits": fits()}, 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("what", choices=("profiles", "predictions"))
    if parser.parse_args().what == "profiles":
        write_profiles()
        return
    found = {"command": "python results/scale.py predictions"} | predictions()
    (HERE / "scale.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
