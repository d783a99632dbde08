"""Compare the planner's predictions with results that papers have published.

    python results/scale.py      write scale.json: the tables of results/papers.md, and that of
                                 docs/planning.md on the longest sequences

For each published result of AMSP, Memo and InternEvo, the planner answers the same question on
profiles/a800.json. That profile was put together from papers, data sheets and other people's
measurements. Each of its numbers has a source there, and a number that nobody has published is
marked as assumed. No number is chosen so that a paper's result comes out.

    choices     papers' sharding factors beside the planner's best, in seconds and GiB
    table_5     AMSP's table V: tokens per GPU and second, by overlap and micro-batches
    figures     AMSP's figures 11 and 12: MFU of four systems on 8 to 1024 GPUs
    memo        Memo's table 3 and figure 12(b): causal MFU by length and GPUs
    fits        no paper: the longest sequences that fit GPUs of 24, 80 and 141 GB

Example, of table_5: 7B with all overlaps and one micro-batch on 64 GPUs. The row says "predicted /
published" TGS, and 3,525 was published.

Left out: costs that only DeepSpeed or Megatron has. A named strategy, such as ZeRO-3, is its
sharding factors in this project's schedule, without the overlaps that AMSP (section VI-C) says it
lacks.
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

PAPER_MODELS = {
    "7b": MODELS["7b"],
    "13b": MODELS["13b"],
    # AMSP's 30B is InternEvo's, 60 x 6144: its MFU and TGS together imply this size
    "30b": ModelConfig(32000, 6144, 60, 48, 48, 16384),
}
RECOMPUTE = {"7b": "none", "13b": "none", "30b": "full"}  # AMSP, section VI
CHOICES = {  # AMSP, table IV
    "7b": {"p": 1, "g": 1, "os": 8},
    "13b": {"p": 4, "g": 4, "os": 8},
    "30b": {"p": 8, "g": 8, "os": 32},
}
OVERLAPS = {  # AMSP, table V: name of the row -> --overlap
    "all overlaps": "param_gather,grad_scatter,grad_reduce,param_broadcast",
    "without broadcast": "param_gather,grad_scatter,grad_reduce",
    "and without all-reduce": "param_gather,grad_scatter",
    "none": "none",
}
MICRO_BATCHES = (1, 2, 4, 8)
TABLE_5 = {  # TGS on 64 GPUs: a row for each of OVERLAPS, a column for each of MICRO_BATCHES
    "7b": [
        [3525, 4119, 4416, 4503],
        [3346, 3991, 4329, 4438],
        [2812, 3609, 4070, 4286],
        [2812, 3609, 4070, 4286],
    ],
    "13b": [
        [1918, 2082, 2183, 2230],
        [1895, 1920, 2160, 2184],
        [1630, 1782, 2033, 2126],
        [1527, 1552, 1608, 1666],
    ],
    "30b": [
        [825, 856, 872, 880],
        [759, 814, 847, 859],
        [651, 740, 814, 842],
        [557, 654, 678, 719],
    ],
}
SYSTEMS = {  # of figures 11 and 12: --strategy, --overlap. DeepSpeed's overlaps: section VI-C
    "ours": ("", OVERLAPS["without broadcast"]),
    "ZeRO-1": ("zero1", OVERLAPS["without broadcast"]),
    "ZeRO-3": ("zero3", "param_gather,grad_reduce"),
    "MiCS": ("mics:8", "param_gather,grad_reduce"),
}
# "model system GPUs" -> MFU in %. The numbers for 1024 GPUs are from section VI-B. For 8 GPUs the
# paper says "63 to 64", for 32 GPUs "around 40"
FIGURE_11 = {
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
# "GPUs thousands-of-tokens" -> causal MFU of 7B in %, from Memo's table 3. Of more than 8 GPUs
# figure 12(b) says only "over 50 %"
MEMO = {
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
    """Return A800s of 80 GB with their hosts, as a cluster to plan for. As in planner.py, a plan
    may use GPU_SHARE of a GPU's memory and 7/8 of a host's."""
    profile = load_profile("a800")
    return Hardware(
        gpus,
        profile.per_node,
        profile,
        GPU_SHARE * min(profile.gpu_bytes, 80e9),
        profile.host_bytes * 7 / 8 / profile.per_node,
    )


def best_plan(model: ModelConfig, gpus: int, **flags) -> Plan | None:
    """Return the planner's first choice on A800s, or None if nothing fits or flags are illegal."""
    try:
        return planner.plan(Constraints(**flags), model, a800s(gpus))[0]
    except ValueError:
        return None


def layers_keep(plan: Plan) -> str:
    """Return what layers keep, in as few words as a table's column has room for."""
    kept = plan.activations
    text = "all"
    if kept and kept.kept_chunks < kept.layers * kept.chunks:
        text = f"{kept.resident} of {kept.layers} layers stay, alpha {kept.alpha:.2f}"
    if kept and kept.chunks > 1:
        text += f", chunks of {plan.chunk:,}"
    if kept and kept.stride > 1:
        text += f", x in one of {kept.stride} layers"
    if kept and kept.layers_recomputing_attention:
        text += f", attention twice in {kept.layers_recomputing_attention}"
    return text


def amsp_flags(name: str, sequences: int) -> dict:
    """Return the flags of AMSP's experiments: data parallelism only, with micro-batches of one
    sequence of 4,096 tokens, and `sequences` of them per step."""
    return {
        "seq": 4096,
        "batch": sequences,
        "micro_batch": 1,
        "sp": 1,
        "os_place": "gpu",
        "recompute": RECOMPUTE[name],
    }


def choices() -> list[dict]:
    """Return the papers' choices beside the planner's best under the same restrictions."""
    questions = []  # text, model, GPUs, flags, the paper's choice
    for gpus in (1024, 64):
        for name, choice in CHOICES.items():
            questions.append(
                (f"AMSP {name}", PAPER_MODELS[name], gpus, amsp_flags(name, 1024), choice)
            )
    flags = {"seq": 2**18, "batch": 16, "os_place": "gpu"}
    interns_choice = {"p": 4, "g": 4, "os": 8, "sp": 32, "ring": 1, "recompute": "none"}
    for text, recompute in (("layers whole", "none"), ("layers may swap", "auto")):
        flags_here = flags | {"recompute": recompute}
        questions.append((f"InternEvo 7b, {text}", MODELS["7b"], 128, flags_here, interns_choice))

    rows = []
    for text, model, gpus, flags, choice in questions:
        paper = best_plan(model, gpus, os_layout="inter", **flags | choice)
        best = best_plan(model, gpus, os_layout="inter", **flags)
        row = {"setting": text, "GPUs": f"{gpus}"}
        for whose, plan in (("the paper's", paper), ("the model's best", best)):
            keeps, *_ = layers_keep(plan).split(",")
            row |= {
                f"{whose} p,g,os": "{},{},{}".format(*astuple(plan.factors)),
                f"sp, layers of {whose}": f"{plan.sp}, {keeps}",
                f"seconds of {whose}": f"{plan.step_s:.4g}",
                f"GiB of {whose}": f"{plan.gpu_bytes / GIB:.1f}",
            }
        row["the paper's takes longer by"] = f"{paper.step_s / best.step_s - 1:+.1%}"
        rows.append(row)
    return rows


def micro_batch_seconds(tgs: list[float]) -> float:
    """Return the seconds of one more micro-batch of 4,096 tokens. tgs: a value for each of
    MICRO_BATCHES, of which the first and the last are compared."""
    first_s = 4096 * MICRO_BATCHES[0] / tgs[0]
    last_s = 4096 * MICRO_BATCHES[-1] / tgs[-1]
    return (last_s - first_s) / (MICRO_BATCHES[-1] - MICRO_BATCHES[0])


def table_5() -> list[dict]:
    """Return TGS of AMSP's choices on 64 GPUs, predicted / published, by overlap and micro-batches,
    and the seconds of one more micro-batch."""
    rows = []
    for name, choice in CHOICES.items():
        for (overlaps, flag), published in zip(OVERLAPS.items(), TABLE_5[name]):
            predicted = []
            for micro_batches in MICRO_BATCHES:
                plan = best_plan(
                    PAPER_MODELS[name],
                    64,
                    overlap=flag,
                    os_layout="inter",
                    **choice,
                    **amsp_flags(name, 64 * micro_batches),
                )
                predicted.append(1 / plan.token_s)

            row = {"model": name, "overlaps": overlaps}
            for micro_batches, ours, theirs in zip(MICRO_BATCHES, predicted, published):
                row[f"M = {micro_batches}"] = f"{ours:,.0f} / {theirs:,}"
            ours_s, theirs_s = micro_batch_seconds(predicted), micro_batch_seconds(published)
            row["micro-batch s"] = f"{ours_s:.2f} / {theirs_s:.2f}"
            rows.append(row)
    return rows


def megatron_flops(model: ModelConfig) -> float:
    """Return the FLOPs per token by Megatron's formula, by which AMSP counts MFU. It does not halve
    attention: 72 L C^2 (1 + T / 6C + V / 12LC), with T = 4,096 tokens."""
    width, layers = model.dim, model.layers
    factor = 1 + 4096 / (6 * width) + model.vocab / (12 * layers * width)
    return 72 * layers * width**2 * factor


def figures() -> list[dict]:
    """Return MFU of systems on 8 to 1024 GPUs, predicted / published, with 4M tokens per step."""
    peak_flops = 312e12  # of an A800, per second
    rows = []
    for name, model in PAPER_MODELS.items():
        flops = megatron_flops(model)
        for system, (strategy, overlap) in SYSTEMS.items():
            if (name, system) == ("30b", "MiCS"):
                strategy = "mics:16"  # AMSP, table IV
            row = {"model": name, "system": system}
            for gpus in (8, 16, 32, 64, 128, 256, 512, 1024):
                plan = best_plan(
                    model, gpus, strategy=strategy, overlap=overlap, **amsp_flags(name, 1024)
                )
                text = "does not fit"
                if plan:
                    text = f"{100 * flops / plan.token_s / peak_flops:.1f}"
                published = FIGURE_11.get(f"{name} {system} {gpus}")
                if published:
                    text += f" / **{published}**"
                row[f"{gpus}"] = text
            rows.append(row)
    return rows


def memo() -> list[dict]:
    """Return the causal MFU of 7B, predicted / published: on 8 GPUs by length, and on more GPUs
    with 128K tokens per GPU."""
    rows = []
    for question, published in MEMO.items():
        gpus, kilo_tokens = map(int, question.split())
        plan = best_plan(MODELS["7b"], gpus, seq=kilo_tokens * 1024, os_place="gpu")
        predicted = planner.figures(plan, a800s(gpus))
        rows.append(
            {
                "GPUs": f"{gpus}",
                "tokens": f"{kilo_tokens:,}K",
                "sp": f"{plan.sp}, rings of {plan.ring}",
                "layers keep": layers_keep(plan),
                "host GiB per node": f"{predicted['host_gib']:.0f}",
                "causal MFU": f"{100 * predicted['mfu_causal']:.1f} / **{published}**",
            }
        )
    return rows


GPU_GIB = {"24 GB": 24.0, "80 GB": 79.2, "141 GB": 139.8}  # GPU -> its GiB, as CUDA reports them
HOST_GIB = {1: 112, 2: 224, 8: 490}  # GPUs -> GiB of host memory that they may use together


def longest(model: ModelConfig, hardware: Hardware) -> int:
    """Return the length of the longest sequence over all ranks that fits, in steps of 16K tokens
    per rank. Return 0 if not even one step fits."""
    step = hardware.ranks * 2**14

    def too_long(steps: int) -> bool:
        question = Constraints(steps * step, batch=1, sp=hardware.ranks)
        return not planner.any_plan_fits(question, model, hardware)

    # bisect_left finds the first number of steps that is too long
    first_too_long = bisect.bisect_left(range(2**14), True, lo=1, key=too_long)
    return step * (first_too_long - 1)


def fits() -> list[dict]:
    """Return the longest sequences that fit GPUs of 24, 80 and 141 GB. All of them are planned as
    GPUs of profile h200x8 with another memory."""
    rows = []
    for ranks, host_gib in HOST_GIB.items():
        row = {"GPUs, host memory": f"{ranks}, {host_gib} GiB"}
        for gpu, gpu_gib in GPU_GIB.items():
            hardware = Hardware(
                ranks,
                ranks,
                load_profile("h200x8"),
                GPU_SHARE * gpu_gib * GIB,
                host_gib * GIB / ranks,
            )
            lengths = []
            for name in ("1b", "7b", "llama3-8b"):
                tokens = longest(MODELS[name], hardware)
                if tokens:
                    lengths.append(f"{name} {tokens // 1024:,}K")
            row[gpu] = ", ".join(lengths) or "-"
        rows.append(row)
    return rows


if __name__ == "__main__":
    tables = {make.__name__: make() for make in (choices, table_5, figures, memo, fits)}
    (HERE / "scale.json").write_text(json.dumps(tables, indent=1) + "\n")
