"""Write what is shown of the files in results/: README.md here, the pictures (pictures.py), and the
numbers of the project's README.md.

    python results/report.py            write all of them
    python results/report.py --check    write nothing; exit 1 if a text is not what it would write

A results file is a JSON object of bench.py: command, hardware, versions, commit, and rows, whose
kind of table `bench.layout` tells; scale.json has predictions of scale.py. A text between the marks
`<!-- NAME -->` and `<!-- end -->` of the project's README.md is of BLOCKS. Everything follows from
the files, so that it cannot drift.

Left out: measuring, which is bench.py's; memplan-*.png, which `bench.py memplan` draws, since no
file holds the addresses that PyTorch gave; layer.png and shards.png, which show ideas.
"""
import argparse
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from textwrap import fill

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import torch

import pictures
from bench import FORMS_BY_KEY, cells, layout
from hardware import load_profile
from model import MODELS
from offload import ActivationPlan
from planner import Plan, predict
from shard import Factors

# ---------------------------------------------------------------------------- tables

TOPICS = {  # topic -> bench.py's table -> what it shows, and how to read it
    "One machine": {
        "step": "Shows what `python bench.py` finds on a machine: a matrix product and attention as"
        " a share of the data sheet, a few layers alone (the bound: no embedding, head, loss,"
        " optimizer or communication), then steps of the largest model that fits.",
        "train.py": "Shows what first weights and a warm-up are worth: bytes of Python's standard"
        " library, 4 sequences a step (of 7b one of 32K, whose first 11 or 12 steps of 200 were"
        " run). In all, the two matrices of a layer that write into the residual stream are smaller"
        " by sqrt(2L). The last three ways are less than 0.12 apart, each the best once; at a width"
        " of 192 (tiny) the last wins by far. A warm-up of a quarter of the steps, the default, is"
        " worth more than any of them, and with a twentieth a 7b's loss rises to 18.6 first.",
    },
    "Long sequences": {
        "long": "Shows one sequence over all GPUs. The bound, *kernels alone*, is attention and"
        " matrix kernels at the same shapes, a layer's one after the other for seconds (at 512K,"
        " each kernel by itself). A row of ours names the shards p,g,os, the resident layers k,"
        " alpha and the chunk that train.py chose; *full recompute* runs all of a layer twice;"
        " *full swap* keeps two layers resident and swaps all of the others, which at 256K tokens"
        " does not fit the host; *fsdp2* is the same model code and attention kernel under"
        " PyTorch's fully_shard, with Ulysses over NCCL and recomputed layers.",
        "longest": "Shows the longest sequence by plan, and a step of the first and last two layers"
        " with everything else allocated as planned (on one GPU, with optimizer states on it). *8 x"
        " H200* is a plan that was not run; there host memory binds, and most layers drop even"
        " their attention output. Layers of one H100, and of two H200s, made q, k, v of a group of"
        " heads at a time, which went since: plans of now are shorter.",
        "ring": "Shows one sequence by heads alone (*ring 1*, Ulysses) and by context (a ring) over"
        " two GPUs, each as train.py plans it; *nodes=2*: the two reach each other by sockets over"
        " loopback alone. There the keys and values of llama3-8b, a quarter of its queries, go"
        " around hidden by attention, and all-to-alls of everything do not.",
        "place": "Shows 7B with optimizer states on the host (75 GiB), from which they visit the"
        " GPU: updated under the next forward, or in the open, where compute waits; and on the GPU,"
        " if they fit there. Short sequences do not hide 12 bytes a parameter there and 12 back.",
        "million": "Shows attention where its elements pass 2^31: the last head's result against"
        " the same head computed alone, and rows past the middle against the definition; relative"
        " differences.",
    },
    "What layers keep": {
        "swap": "Shows 50 steps of a small model whose layers keep, swap and recompute: *bit-equal*"
        " rows have every loss and norm of the row that they repeat, with everything poisoned after"
        " use and copies that start late, too. The last row is the control, the same without waits:"
        " there the numbers must break. Differences are to the first row.",
        "alpha": "Shows Memo's rule for alpha, calculated for the paper's machine, beside what the"
        " paper reports. Its two constraints, copies under a layer's forward and 2 TB of host"
        " memory, allow far more than was swapped from 384K tokens on: 0.97 against 0.125 at 512K."
        " GPU memory explains a part. A rounding buffer that holds a whole layer costs as much as"
        " the tokens that are swapped save: two take 24 GiB at 768K, and alpha = 0, where the"
        " others need one buffer only, 13.5. It does not explain 0.5 at 384K, where two take 12"
        " GiB; nor does host memory that something else held: 101 GiB a GPU were swapped there,"
        " and only 56 at 512K.",
    },
    "Sharding": {
        "shard": "Shows ours by p,g,os and layout beside four settings of FSDP2, with one and with"
        " eight micro-batches (M). The bound is a few layers alone on one GPU.",
        "overlap": "Shows what each overlap is worth. When it was measured, param_broadcast was"
        " called *spread* and grad_reduce *reduce*.",
        "nodes": "Shows the GPUs of one machine split into nodes that reach each other by sockets"
        " over loopback alone: slow, and of two levels as real networks are.",
        "trace": "Shows how much of a step's communication no computation hides."
        " [trace.json.gz](trace.json.gz), for chrome://tracing, is the profile of the last row,"
        " two steps of one GPU; [timeline.png](timeline.png) is a stretch of it.",
        "memory": "Shows the bytes of states that a rank holds under every legal p,g,os, and those"
        " of the formula: GiB held / GiB by formula. *deviation* is the largest of the three.",
        "curves": "Shows 20 steps under every legal p,g,os: the largest difference of a loss and of"
        " a gradient norm from the first row. The first three rows are the same, so they show the"
        " noise of runs.",
    },
    "Planned memory": {
        "memplan": "Shows a step at planned addresses beside PyTorch's allocator. *reserved* is the"
        " most that the allocator held, *planned* the peak of the plan, which is proved optimal"
        " where it equals the lower bound; *hits* is the share of requests that met the plan."
        " 7b/4 is four layers with everything else held. The requests and their addresses are in"
        " memplan-*.csv.\n\n![planned addresses over time](memplan-64k-2x.png)",
        "capped": "Shows the longest sequence under a cap of 80 GiB a GPU for each allocator.",
    },
}
SCALE = {  # key of scale.json -> how to read it
    "choices":
        "**The papers' choices** of p,g,os, costed here beside the best under the same"
        " restrictions: for AMSP 4M tokens a step, one sequence of 4,096 tokens a micro-batch,"
        " data parallelism alone, layers whole (30B: full recomputation), optimizer states"
        " *inter*, all overlaps; for InternEvo 256K tokens, 16 sequences a step, and its os"
        " read as a factor beyond p. All of the papers' choices fit. That of 7B is the best,"
        " or ties with it, and that of 30B ties at 64 GPUs. The others are near:\n\n"
        "* *13B*: p = 1 fits here, since a layer keeps 22.7 bytes a token and unit of width;"
        " with the 34 that InternEvo counts, it would need 9 GiB more and not fit.\n"
        "* *30B* at 1024 GPUs: by the profile, weights that are gathered over 8 nodes hide"
        " under computation. Its rates are those of the wires and NCCL's latencies; the"
        " paper's ZeRO-3 falls to 4% of MFU (below), so its gathers across nodes were much"
        " slower than that.\n"
        "* *InternEvo*: fewer ranks a sequence have room for all that layers keep, again with"
        " 22.7 bytes instead of 34; and layers that swap fit 8 ranks of one node, whose"
        " all-to-alls cross no NIC.",
    "table_5":
        "**AMSP's table V**: TGS of its choices on 64 GPUs, by overlap and micro-batches (M),"
        " predicted / published, and the seconds that a further micro-batch takes. Nothing is"
        " fitted to it. Micro-batches are predicted too fast: 245 TFLOP/s of all products is"
        " an assumption, and element-wise kernels count as fused. Of 7B at M = 1 the paper's"
        " MFU and TGS disagree by 9%.",
    "figures":
        "**AMSP's figures 11 and 12**: MFU in % (Megatron's FLOPs with attention in full, of"
        " 312 TFLOP/s) on 8 to 1024 GPUs, predicted / **published**; 4M tokens a step,"
        " micro-batches of one sequence. param_broadcast does not overlap, nor do"
        " reduce-scatters of ZeRO-3 and MiCS, as the paper says of DeepSpeed. *ours*"
        " is the planner's first choice, and AMSP's is published beside it. These are all the"
        " numbers in the paper's text. Levels are predicted too high: by what computation is"
        " too fast (above); of ours on 1024 GPUs by other factors than AMSP's, too; of MiCS by"
        " more, of ZeRO-3 several times. A step of theirs took 15 s for 7B, 17 us"
        " for each hop of a ring of 1024, for which NCCL's own model has 0.5 to 4. With MiCS's"
        " factors AMSP's engine reaches 39, 47 and 37%, DeepSpeed's 35, 33 and 29%: a part is"
        " the engine, and no bandwidth.\n\n"
        "![MFU and TGS on 8 to 1024 GPUs](scale-amsp.png)",
    "memo":
        "**Memo's table 3 and figure 12(b)**: causal MFU of 7B, predicted / published, on the"
        " same profile (Memo's InfiniBand is twice as fast), with LLaMA's gated feed-forward"
        " instead of GPT's. The level at 1M is no prediction: attention rates above 32K tokens"
        " were assumed such that their mean is what the paper's 1M tokens imply. The course is"
        " one. Where layers keep all without swapping, Memo recomputed all but attention"
        " (alpha = 0). 8M tokens on 64 GPUs fit with rings across nodes, as Memo ran them with"
        " context parallelism; by heads alone they do not.\n\n"
        "![causal MFU by length and by GPUs](scale-memo.png)",
}
INTRO = """# Results

Written by `python results/report.py` from the files beside it; do not edit. MFU counts model FLOPs,
recomputation never: *causal* counts half of the attention matrix, *full* all of it. TGS is tokens
per GPU and second. *of bound* is the ratio to what the kernels reach alone in the same run, a row
above. GiB are the most of a GPU, and of the machine's host memory. What does not fit is a row.
A command is as of the commit that measured it: later ones may name things differently.
"""


EARLIER_FORMS = {  # as FORMS_BY_KEY, of tables that bench.py measured once, and tests show now
    "largest_loss_difference": {
        "system": "{system}", "first loss": "{loss_first:.4f}", "last loss": "{loss_last:.4f}",
        "difference": "{largest_loss_difference:.4f}",
        "of the norm": "{largest_norm_difference:.4f}"},
    "rule_alpha": {
        "system": "{system}", "alpha by bandwidth": "{by_bandwidth:.2f}",
        "by host memory": "{by_host:.2f}", "rule": "{rule_alpha:.2f}",
        "published": "{published_alpha:.3f}", "host GiB": "{host_gib:.1f}",
        "buffers GiB": "{buffers_gib:.1f}", "at alpha 0": "{buffers_alpha0_gib:.1f}"},
    "distinct_passes": {
        "step": "{system}", "method": "{method}", "requests": "{requests:,}",
        "peak GiB": "{peak_gib:.3f}", "bound GiB": "{bound_gib:.3f}", "gap": "{gap:.2%}",
        "seconds": "{seconds:.3f}", "distinct passes": "{passes:d}"},
    "imbalance": {
        "system": "{system}", "parameters": "{parameters}", "gradients": "{gradients}",
        "optimizer": "{optimizer}", "deviation": "{deviation:.2%}"},
    "first_norm": {
        "first weights": "{system}", "model": "{model}", "tokens": "{seq:,}", "steps": "{steps}",
        "lr": "{lr:.0e}", "warm-up": "{warmup}", "first norm": "{first_norm:.0f}",
        "first loss": "{first_loss:.2f}", "largest": "{worst_loss:.2f}",
        "validation": "{val_loss:.3f}"},
    "dq": {"system": "{system}", "tokens": "{seq:,}", "heads": "{heads}", "o": "{o:.1e}",
           "dq": "{dq:.1e}", "dk": "{dk:.1e}", "dv": "{dv:.1e}"},
}


def with_states(r: dict) -> dict:
    """Return a row of a table of states with GiB held / GiB by formula, for each kind of them."""
    pairs = {kind: (r["state_bytes"][kind] / 2**30, r["state_bytes_formula"][kind] / 2**30)
             for kind in ("parameters", "gradients", "optimizer")}
    worst = max(abs(have / want - 1) for have, want in pairs.values())
    texts = {kind: f"{have:.2f} / {want:.2f}" for kind, (have, want) in pairs.items()}
    return r | texts | {"deviation": worst}


def with_gib(r: dict) -> dict:
    """Return a row of a table of methods with its bytes in GiB; without passes it has none."""
    return r | {"peak_gib": r["peak"] / 2**30, "bound_gib": r["bound"] / 2**30,
                "passes": r["distinct_passes"] or None}


def read(name: str) -> dict:
    return json.loads((HERE / f"{name}.json").read_text())


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """Return a table; all but the first two columns are to the right."""
    lines = [head, ["---"] * 2 + ["--:"] * (len(head) - 2), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def section(path: Path) -> str:
    """Return the section of a results file."""
    r = read(path.stem)
    rows = [with_states(x) if "imbalance" in x else x for x in r["rows"]]
    rows = [with_gib(x) if "distinct_passes" in x else x for x in rows]
    head, write = layout(rows, EARLIER_FORMS | FORMS_BY_KEY)
    versions = ", ".join(f"{k} {v}" for k, v in r["versions"].items())
    return (f"\n### {path.name}\n\n`{r['command']}` as of commit `{r['commit']}`, "
            f"{r['hardware']}; {versions}.\n\n" + markdown(head, [write(x) for x in rows]))


def scale_tables() -> str:
    """Return the section of predictions."""
    found = read("scale")
    tables = {
        "choices": markdown(
            ["setting", "GPUs", "the paper's p,g,os", "step s", "GPU GiB", "the model's best",
             "step s", "GPU GiB", "the paper's takes"],
            [[r["setting"], f"{r['gpus']}", *choice_cells(r["theirs"]), *choice_cells(r["best"]),
              f"{r['theirs']['step_s'] / r['best']['step_s'] - 1:+.1%}"]
             for r in found["choices"]]),
        "table_5": markdown(
            ["model", "overlaps", *(f"M = {m}" for m in (1, 2, 4, 8)), "micro-batch s"],
            [[r["model"], r["overlap"], *(f"{mine:,.0f} / {theirs:,}" for mine, theirs in
                                          zip(r["tgs"], r["published"])),
              " / ".join(f"{4096 * (8 / tgs[3] - 1 / tgs[0]) / 7:.2f}"
                         for tgs in (r["tgs"], r["published"]))] for r in found["table_5"]]),
        "figures": figure_table(found["figures"]),
        "memo": markdown(
            ["GPUs", "tokens", "sp", "layers keep", "host GiB a node", "causal MFU"],
            [[f"{r['gpus']}", f"{r['seq'] // 1024:,}K", f"{r.get('sp', '-')}",
              r.get("layers", "nothing fits"), f"{r['host_gib']:.0f}" if "sp" in r else "-",
              " / ".join([f"{r['mfu_causal']:.1%}" if "sp" in r else "-",
                          f"{r['published_mfu']:.1%}" if r["published_mfu"] else "over 50%"])]
             for r in found["memo"]]),
    }
    text = ("\n## Scale, by simulation\n\nNothing here was run: `python results/scale.py"
            " predictions` asks the planner what others have measured on up to 1024 A800s"
            " (profiles/a800.json, whose numbers have their sources beside them).\n")
    return text + "".join(f"\n{SCALE[name]}\n\n{table}" for name, table in tables.items())


def choice_cells(plan: dict) -> list[str]:
    shards = plan["shards"].removesuffix(" inter")
    if plan["sp"] != "1":
        shards += f", sp={plan['sp']}, {plan['layers'].split(',')[0]}"
    return [shards, f"{plan['step_s']:.4g}", f"{plan['gpu_gib']:.1f}"]


def figure_table(rows: list[dict]) -> str:
    """Return MFU by system and GPUs, the published one beside it."""
    gpus = sorted({r["gpus"] for r in rows})
    lines: dict[tuple, list[str]] = {}
    for r in rows:
        cell = f"{100 * r['mfu']:.1f}" if "mfu" in r else "does not fit"
        if r["published_mfu"]:
            cell += f" / **{100 * r['published_mfu']:.3g}**"
        lines.setdefault((r["model"], r["system"]), []).append(cell)
    return markdown(["model", "system", *map(str, gpus)],
                    [[*names, *cells] for names, cells in lines.items()])


def results_readme() -> str:
    files: dict[str, list[Path]] = {}
    for path in sorted(HERE.glob("*.json")):
        if path.stem.startswith("predict-") or path.stem == "scale":
            continue
        table = re.search(r"(bench\.py \w+|train\.py)", read(path.stem)["command"])[0]
        table = table.removeprefix("bench.py ")
        files.setdefault(table, []).append(path)
    text = INTRO
    for topic, tables in TOPICS.items():
        text += f"\n## {topic}\n"
        for table, says in tables.items():
            if table in files:
                text += f"\n**{table}.** {says}\n" + "".join(map(section, files.pop(table)))
    assert not files, f"TOPICS has no table {sorted(files)}"
    return text + predictions() + scale_tables()


# ---------------------------------------------------------------------------- predictions

PREDICTED = (  # files of rows whose time and memory the planner predicts
    "predict-*", "place-h100", "long-256k-h100", "long-1b-256k-h100", "long-176k-h200",
    "long-400k-h200", "long-1b-128k-24g-h200", "long-*-8xh200", "ring-32k-64k-128k-2xh200")
PROFILE_OF = {"H100": "h100", "H200": "h200x2"}  # but of eight H200s
PREDICTIONS = """
## Predictions

planner.py's prediction, by profiles h100 and h200x2, beside what was measured, of `bench.py
predict-seen` and `bench.py predict-held` on one H100 and on one and two H200s. Settings of one
question (GPU, model, tokens, ranks) differ in what was set by hand. Those *held out* were chosen
before, and measured once, when the model of seconds was done; *then* is the error of the prediction
that run made. (Mended since, before anything was measured on an H100: seconds, by a cast of whole
gradients; bytes, of layers that run whole and of q, k, v, o, which were counted twice: two of the
held-out settings were predicted 7.6 and 3.3 % too large.) *rank* is that of the setting among the
measured ones of its question, by measured time, and what it loses to the best of them; the
planner's own pick is *as planned*, or where nothing open was set by hand. Questions K are of the
tables place, long and ring: optimizer states on the host, layers that drop o, rings.

Where one sequence of 4,096 tokens of 1b is a micro-batch, the host has more to do than its GPU (a
layer computes for 2.5 ms; the profile's host launches it in 4.4), and a step takes what the host of
the day takes: 0.69 to 0.87 s on four of them. So this profile was measured on the host of the row,
right before it.

![predicted and measured](predict.png)
"""


def plan_of(r: dict) -> Plan:
    """Return the plan that a row has run."""
    plan = Plan(MODELS[r["model"]], torch.bfloat16, r["gpus"], r["gpus"], r["seq"], r["sp"],
                r.get("ring", 1), r["batch"], r["micro_batch"], r["head_groups"], r["recompute"],
                r["chunk"], Factors(r["p"], r["g"], r["os"]), r["os_layout"],
                r.get("os_place", "gpu"))
    kept = r["activations"] and ActivationPlan(**r["activations"])
    if r["recompute"] == "full":  # layers that keep their input alone, whole or in chunks
        n = plan.model.layers
        chunks = -(-plan.tokens // plan.chunk)
        kept = ActivationPlan(n, chunks, n, layers_recomputing_attention=n)
        plan = replace(plan, recompute="auto")
    plan = replace(plan, activations=kept)
    return replace(plan, accumulates=plan.micro_batches > 1)


def predicted_rows() -> list[dict]:
    """Return the measured rows with what is predicted for their plans now."""
    rows = []
    paths = [path for name in PREDICTED for path in sorted(HERE.glob(f"{name}.json"))]
    for path in paths:
        found = read(path.stem)
        gpu = re.search("H[12]00", found["hardware"])[0]
        profile_name = "h200x8" if found["hardware"].startswith("8 x") else PROFILE_OF[gpu]
        for r in found["rows"]:
            if r["oom"] or "predicted_s" not in r or "in the open" in r["system"]:
                continue
            plan = predict(plan_of(r), load_profile(profile_name))
            now = {"now_s": plan.step_s, "now_gib": plan.gpu_bytes / 2**30}
            asked = {"question": f"K, {r['model']} {r['seq'] // 1024}K", "held_out": False}
            rows.append(asked | r | now | {"gpu": gpu})
    return sorted(rows, key=lambda r: (r["question"], r["gpu"], r["gpus"], r["step_s"]))


def predictions() -> str:
    head = ["question", "set by hand", "model", "tokens", "GPUs", "held out", "measured s",
            "predicted s", "error", "then", "measured GiB", "predicted GiB", "error", "rank"]
    rows = predicted_rows()
    lines = []
    for r in rows:
        alike = [x["step_s"] for x in rows if all(
            x[key] == r[key] for key in ("question", "gpu", "gpus"))]
        rank = alike.index(r["step_s"])
        behind = f", {r['step_s'] / alike[0] - 1:+.1%}" if rank else ""
        then = f"{r['predicted_s'] / r['step_s'] - 1:+.1%}" if r["held_out"] else "-"
        lines.append([r["question"], r["system"], r["model"], f"{r['seq']:,}",
                      f"{r['gpus']} {r['gpu']}", "held out" if r["held_out"] else "-",
                      f"{r['step_s']:.4g}",
                      f"{r['now_s']:.4g}", f"{r['now_s'] / r['step_s'] - 1:+.1%}", then,
                      f"{r['gpu_gib']:.2f}", f"{r['now_gib']:.2f}",
                      f"{r['now_gib'] / r['gpu_gib'] - 1:+.1%}",
                      f"{rank + 1} of {len(alike)}{behind}" if len(alike) > 1 else "-"])
    said = []
    for held, name in ((False, "seen before"), (True, "held out")):
        errors = sorted(abs(r["now_s"] / r["step_s"] - 1) for r in rows if r["held_out"] == held)
        said.append(f"{name}: {errors[len(errors) // 2]:.1%} in the median, {errors[-1]:.1%} at "
                    f"worst of {len(errors)}")
    errors = f"\nErrors of the step time, {'; '.join(said)}.\n\n"
    return PREDICTIONS + errors + markdown(head, lines)


# ---------------------------------------------------------------------------- README.md's numbers

LONG = ("long-32k-64k-128k-4xh200", "long-256k-4xh200", "long-512k-4xh200")
NINE = (  # file, system, tokens
    ("long-512k-4xh200", "ours", 2**19), ("long-256k-4xh200", "ours", 2**18),
    ("long-256k-4xh200", "fsdp2 ZeRO-3, Ulysses, full", 2**18),
    ("long-32k-64k-128k-4xh200", "ours", 2**15), ("long-400k-h200", "ours", 400 * 2**10),
    ("long-176k-h200", "ours", 176 * 2**10),
    ("shard-4xh200", "ours 1,4,4 intra M=1", 2**12),
    ("shard-4xh200", "fsdp2 ZeRO-2-like M=1", 2**12))


def long_rows() -> dict[str, dict[int, dict]]:
    """Return the rows of 7B on 4 GPUs with all of their memory: system -> tokens -> row."""
    found: dict[str, dict[int, dict]] = {}
    for row in (row for name in LONG for row in read(name)["rows"]):
        found.setdefault(row["system"].split()[0], {})[row["seq"]] = row
    return found


def claim() -> str:
    rows = long_rows()
    seq, best = max(rows["ours"].items())
    ratios = [r["step_s"] / rows["ours"][s]["step_s"] for s, r in rows["fsdp2"].items()]
    shortest, longest = (f"{f(rows['fsdp2']) // 1024}K" for f in (min, max))
    return fill(
        f"4 H200s train LLaMA-7B on sequences of {seq // 1024}K tokens at "
        f"**{best['mfu_causal']:.1%} causal MFU**, {best['bound_ratio']:.0%} of what its attention "
        f"and matrix kernels reach alone. At {shortest} to {longest} tokens that is "
        f"**{min(ratios):.2f} to {max(ratios):.2f} times as fast** as the same model code and "
        "attention kernel under FSDP2 with Ulysses and recomputed layers, whose all-to-alls are "
        "NCCL's.", 100) + "\n"


def nine_rows() -> str:
    lines = []
    for name, system, seq in NINE:
        r = read(name)
        row, = (x for x in r["rows"] if (x["system"], x["seq"]) == (system, seq))
        cap = re.search(r"--gpu-memory (\d+)G", r["command"])
        text = cells(row)
        lines.append([text[0] + (f", of {cap[1]} GiB a GPU" if cap else ""), f"{seq // 1024}K",
                      f"{row['gpus']}", text[5], text[7], text[8]])
    return markdown(["system", "tokens", "GPUs", "causal MFU", "of bound", "GPU GiB"], lines)


def fits_table() -> str:
    """Return the longest sequences by plan: GPUs, then a column a memory."""
    rows = read("scale")["fits"]
    sizes = list(dict.fromkeys(r["memory"] for r in rows))
    lines = []
    for gpus, host in dict.fromkeys((r["gpus"], r["host_gib"]) for r in rows):
        lines.append([f"{gpus}, {host} GiB of the host", *(
            ", ".join(f"{r['model']} {r['seq'] // 1024:,}K" for r in rows
                      if (r["gpus"], r["memory"]) == (gpus, memory) and r["seq"]) or "-"
            for memory in sizes)])
    return markdown(["GPUs", *sizes], lines)


BLOCKS = {"claim": claim, "table": nine_rows, "fits": fits_table}


def readme(text: str) -> str:
    """Return README.md with its blocks as the files have them."""
    for name, write in BLOCKS.items():
        start = text.index(mark := f"<!-- {name} -->\n") + len(mark)
        text = text[:start] + write() + text[text.index("<!-- end -->", start):]
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--check", action="store_true",
                        help="write nothing; exit 1 if a text is not what the files say")
    check = parser.parse_args().check
    page = HERE.parent / "README.md"
    texts = {HERE / "README.md": results_readme(), page: readme(page.read_text())}
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    if check:
        print("\n".join(f"{path} is not what results/ says: python results/report.py"
                        for path in stale) or "as the files say")
        return int(bool(stale))
    for path, text in texts.items():
        path.write_text(text)
    pictures.draw_mfu(HERE / "mfu.png", long_rows())
    pictures.draw_predictions(HERE / "predict.png", predicted_rows())
    pictures.draw_timeline(HERE / "timeline.png", HERE / "trace.json.gz")
    pictures.draw_systems(HERE / "scale-amsp.png", read("scale")["figures"])
    pictures.draw_lengths(HERE / "scale-memo.png", read("scale")["memo"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
