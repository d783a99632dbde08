"""What does the planner predict for machines that others have measured?

    python results/scale.py      write scale.json, the tables of report.py's section on scale

Published results (AMSP, Memo, InternEvo) stand beside what the planner predicts for the same
question, on profiles/a800.json, which was put together from papers, data sheets and other people's
measurements: each number has its source there, and what nobody published is marked as assumed. No
number is chosen so that a paper's result comes out.

Left out: DeepSpeed's and Megatron's own costs. A named strategy is its factors in this project's
schedule, without the overlaps that AMSP (section VI-C) says it lacks.
"""

import bisect
import json
import sys
from dataclasses import astuple
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import planner
from hardware import load_profile
from model import MODELS, ModelConfig
from planner import GPU_SHARE, Constraints, Hardware, Plan
from streams import GIB

# ---------------------------------------------------------------------------- what was published

PAPER_MODELS = {  # AMSP's 30B is InternEvo's: 60 x 6144, which its MFU and TGS imply together
    "7b": MODELS["7b"],
    "13b": MODELS["13b"],
    "30b": ModelConfig(32000, 6144, 60, 48, 48, 16384),
}
RECOMPUTE = {"7b": "none", "13b": "none", "30b": "full"}  # AMSP, section VI
CHOICES = {  # table IV
    "7b": {"p": 1, "g": 1, "os": 8},
    "13b": {"p": 4, "g": 4, "os": 8},
    "30b": {"p": 8, "g": 8, "os": 32},
}
OVERLAPS = {  # AMSP, table V
    "all overlaps": "param_gather,grad_scatter,grad_reduce,param_broadcast",
    "without broadcast": "param_gather,grad_scatter,grad_reduce",
    "and without all-reduce": "param_gather,grad_scatter",
    "none": "none",
}
TABLE_5 = {  # TGS on 64 GPUs with 1, 2, 4, 8 micro-batches, in the order of OVERLAPS
    "7b": "3525 4119 4416 4503  3346 3991 4329 4438  2812 3609 4070 4286  2812 3609 4070 4286",
    "13b": "1918 2082 2183 2230  1895 1920 2160 2184  1630 1782 2033 2126  1527 1552 1608 1666",
    "30b": "825 856 872 880  759 814 847 859  651 740 814 842  557 654 678 719",
}
SYSTEMS = {  # of figures 11 and 12: strategy, overlaps (of DeepSpeed's: section VI-C)
    "ours": ("", OVERLAPS["without broadcast"]),
    "ZeRO-1": ("zero1", OVERLAPS["without broadcast"]),
    "ZeRO-3": ("zero3", "param_gather,grad_reduce"),
    "MiCS": ("mics:8", "param_gather,grad_reduce"),
}
FIGURE_11 = {  # MFU in %; at 1024 GPUs section VI-B, at 8 "63 to 64", at 32 "around 40"
    "7b ours 8": 63.5,
    "7b ZeRO-1 8": 63.5,
    "7b ours 1024": 51,
    "7b ZeRO-1 1024": 36,
    "7b MiCS 1024": 35,
    "7b ZeRO-3 1024": 4,
    "13b ours 1024": 52,
    "13b MiCS 1024": 33,
    "30b ours 32": 40,
    "30b MiCS 32": 40,
    "30b ZeRO-3 32": 40,
    "30b ours 1024": 42,
    "30b MiCS 1024": 29,
}
MEMO = {  # causal MFU of 7B in % by GPUs, thousand tokens: table 3; figure 12(b) says "over 50 %"
    "8 64": "52.3",
    "8 128": "51.0",
    "8 256": "53.6",
    "8 384": "53.0",
    "8 512": "51.8",
    "8 640": "52.6",
    "8 768": "51.9",
    "8 896": "52.7",
    "8 1024": "52.3",
    "16 2048": "over 50",
    "32 4096": "over 50",
    "64 8192": "over 50",
}

# ---------------------------------------------------------------------------- predictions


def a800s(gpus: int) -> Hardware:
    """Return that many A800s, 80 GB each, and their hosts, to plan with as planner.py does."""
    profile = load_profile("a800")
    return Hardware(
        gpus,
        profile.per_node,
        profile,
        GPU_SHARE * min(profile.gpu_bytes, 80e9),
        profile.host_bytes * 7 / 8 / profile.per_node,
    )


def best_plan(model: ModelConfig, gpus: int, **flags) -> Plan | None:
    """Return the planner's first choice on A800s, None if nothing fits or flags are illegal."""
    try:
        return planner.plan(Constraints(**flags), model, a800s(gpus))[0]
    except ValueError:
        return None


def layers_keep(plan: Plan) -> str:
    """Return what layers keep, in as few words as a table's column has room for."""
    kept = plan.activations
    text = "all"
    if kept and kept.kept_chunks < kept.layers * kept.chunks:
        text = f"k={kept.resident} alpha={kept.alpha:.2f}"
    if kept and kept.chunks > 1:
        text += f", chunks of {plan.chunk:,}"
    if kept and kept.stride > 1:
        text += f", inputs of one in {kept.stride}"
    if kept and kept.layers_recomputing_attention:
        text += f", attention twice in {kept.layers_recomputing_attention}"
    return text


def amsp_flags(name: str, sequences: int) -> dict:
    return {
        "seq": 4096,
        "batch": sequences,
        "micro_batch": 1,
        "sp": 1,
        "os_place": "gpu",
        "recompute": RECOMPUTE[name],
    }


def choices() -> list[dict]:
    """Return the papers' choices beside the model's best under the same restrictions."""
    asked = []
    for gpus in (1024, 64):
        for name, choice in CHOICES.items():
            asked.append((f"AMSP {name}", PAPER_MODELS[name], gpus, amsp_flags(name, 1024), choice))
    flags = {"seq": 2**18, "batch": 16, "os_place": "gpu"}
    theirs = {"p": 4, "g": 4, "os": 8, "sp": 32, "ring": 1, "recompute": "none"}
    for text, recompute in (("layers whole", "none"), ("layers may swap", "auto")):
        asked.append(
            (f"InternEvo 7b, {text}", MODELS["7b"], 128, flags | {"recompute": recompute}, theirs)
        )
    rows = []
    for text, model, gpus, flags, choice in asked:
        paper, best = (
            best_plan(model, gpus, os_layout="inter", **flags | more) for more in (choice, {})
        )
        row = {"setting": text, "GPUs": f"{gpus}"}
        for whose, plan in (("the paper's", paper), ("the model's best", best)):
            keeps, *_ = layers_keep(plan).split(",")
            row |= {
                f"{whose} p,g,os": "{},{},{}".format(*astuple(plan.factors)),
                f"sp, layers of {whose}": f"{plan.sp}, {keeps}",
                f"seconds of {whose}": f"{plan.step_s:.4g}",
                f"GiB of {whose}": f"{plan.gpu_bytes / GIB:.1f}",
            }
        rows.append(row | {"the paper's takes": f"{paper.step_s / best.step_s - 1:+.1%}"})
    return rows


def table_5() -> list[dict]:
    """Return TGS of AMSP's choices on 64 GPUs, by overlap and micro-batches, predicted / published,
    and the seconds of a further micro-batch."""
    rows = []
    for name, choice in CHOICES.items():
        published = map(int, TABLE_5[name].split())
        for overlaps, flag in OVERLAPS.items():
            row = {"model": name, "overlaps": overlaps}
            pairs = []
            for micro_batches in (1, 2, 4, 8):
                plan = best_plan(
                    PAPER_MODELS[name],
                    64,
                    overlap=flag,
                    os_layout="inter",
                    **choice,
                    **amsp_flags(name, 64 * micro_batches),
                )
                pairs.append((1 / plan.token_s, next(published)))
                row[f"M = {micro_batches}"] = " / ".join(f"{each:,.0f}" for each in pairs[-1])
            row["micro-batch s"] = " / ".join(
                f"{4096 * (8 / last - 1 / first) / 7:.2f}" for first, *_, last in zip(*pairs)
            )
            rows.append(row)
    return rows


def figures() -> list[dict]:
    """Return MFU of systems on 8 to 1024 GPUs, 4M tokens a step, predicted / published. AMSP counts
    FLOPs by Megatron's formula, attention not halved."""
    rows = []
    for name, model in PAPER_MODELS.items():
        width, layers = model.dim, model.layers
        share = 1 + 4096 / (6 * width) + model.vocab / (12 * layers * width)
        flops = 72 * layers * width**2 * share
        for system, (strategy, overlap) in SYSTEMS.items():
            row = {"model": name, "system": system}
            if (name, system) == ("30b", "MiCS"):
                strategy = "mics:16"  # table IV
            for gpus in (8, 16, 32, 64, 128, 256, 512, 1024):
                plan = best_plan(
                    model, gpus, strategy=strategy, overlap=overlap, **amsp_flags(name, 1024)
                )
                mfu = f"{100 * flops / plan.token_s / 312e12:.1f}" if plan else "does not fit"
                published = FIGURE_11.get(f"{name} {system} {gpus}")
                row[f"{gpus}"] = mfu + (f" / **{published}**" if published else "")
            rows.append(row)
    return rows


def memo() -> list[dict]:
    """Return the causal MFU of 7B by length on 8 GPUs, and at 128K tokens a GPU on more, predicted
    / published."""
    rows = []
    for question, published in MEMO.items():
        gpus, kilo = map(int, question.split())
        plan = best_plan(MODELS["7b"], gpus, seq=kilo * 1024, os_place="gpu")
        found = planner.figures(plan, a800s(gpus))
        rows.append(
            {
                "GPUs": f"{gpus}",
                "tokens": f"{kilo:,}K",
                "sp": f"{plan.sp}, rings of {plan.ring}",
                "layers keep": layers_keep(plan),
                "host GiB a node": f"{found['host_gib']:.0f}",
                "causal MFU": f"{100 * found['mfu_causal']:.1f} / **{published}**",
            }
        )
    return rows


MEMORY = {"24 GB": 24.0, "80 GB": 79.2, "141 GB": 139.8}  # GiB of a GPU, as CUDA says it
HOST = {1: 112, 2: 224, 8: 490}  # GPUs: GiB of host memory that they may use


def longest(model: ModelConfig, hardware: Hardware) -> int:
    """Return the most tokens of one sequence over all ranks that fit, in steps of 16K a rank; 0 if
    not even one step does."""
    step = hardware.ranks * 2**14

    def too_long(count: int) -> bool:
        asked = Constraints(count * step, batch=1, sp=hardware.ranks)
        return not planner.fits(asked, model, hardware)

    return step * (bisect.bisect_left(range(2**14), True, lo=1, key=too_long) - 1)


def fits() -> list[dict]:
    """Return the longest sequences that fit GPUs of 24, 80 and 141 GB, in those of h200x8's
    place."""
    rows = []
    for ranks, host in HOST.items():
        row = {"GPUs": f"{ranks}, {host} GiB of the host"}
        for memory, gib in MEMORY.items():
            here = Hardware(
                ranks, ranks, load_profile("h200x8"), GPU_SHARE * gib * GIB, host * GIB / ranks
            )
            found = {name: longest(MODELS[name], here) for name in ("1b", "7b", "llama3-8b")}
            row[memory] = (
                ", ".join(f"{name} {seq // 1024:,}K" for name, seq in found.items() if seq) or "-"
            )
        rows.append(row)
    return rows


if __name__ == "__main__":
    tables = {make.__name__: make() for make in (choices, table_5, figures, memo, fits)}
    (HERE / "scale.json").write_text(json.dumps(tables, indent=1) + "\n")
