"""Write what is shown of the files in results/: README.md here, the pictures (pictures.py), and the
numbers of the project's README.md.

    python results/report.py            write all of them
    python results/report.py --check    write nothing; exit 1 if a text is not what it would write

A results file is a JSON object of bench.py: command, hardware, versions, commit, and rows. Each of
its tables is one of bench.as_text, over all files of it; scale.json has tables of scale.py. A text
between the marks `<!-- NAME -->` and `<!-- end -->` of the project's README.md is of BLOCKS.
Everything follows from the files, so that it cannot drift.

Left out: measuring, which is bench.py's; layer.png and shards.png, which show ideas.
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

import pictures
import torch

import memplan
from bench import as_text
from costs import Plan, predict
from hardware import find_profile, nearest_kernel
from model import MODELS
from offload import ActivationPlan
from shard import STREAMS, Factors
from streams import GIB

# ---------------------------------------------------------------------------- tables

INTRO = (
    "# Results\n\n"
    "Written by `python results/report.py` from the files beside it; do not edit. A row is a"
    " label and train.py's flags. MFU counts model FLOPs, recomputation never: *causal* counts"
    " half of the attention matrix, *full* also the half that the mask hides, so it may exceed"
    " 100%. TGS is tokens per GPU and second. *plan* names the shards p,g,os, the resident layers"
    " k, alpha, the chunk, and whether optimizer states (os) lie on the host; M are micro-batches,"
    " and - is nothing, or not known. *bound* is the causal MFU of a step's attention and matrix"
    " kernels alone, *of bound* the step's share of it. GiB are the most of a GPU, and of the"
    " machine's host memory. *GPU GiB* includes what ranks map"
    " from each other, outside PyTorch's allocator, *reserved GiB* is what that held. What does not"
    " fit is a row. *predicted* is by the planner of that commit. A command is as of the commit"
    " that measured it (+: other changes were not committed yet): later ones may name things"
    " differently. Attention is FlashAttention-4's, or"
    " cuDNN's, as the line of a file says. Not measured: bench.py's table parallel (tensor modes"
    " and pipelines beside data parallelism).\n"
)
TABLES = {  # of bench.py -> commands that measured it -> what it shows, and how to read it
    "step": "What `python bench.py` finds on a machine: steps of the largest model that fits. (When"
    " these were measured, it had rows of a matrix product and of attention as a share of the data"
    " sheet, and of a step without its update.)",
    "long": "One sequence over all GPUs (at 4K tokens, on one GPU: four, where the file says"
    " --batch 4). *full recompute* runs all of a layer twice; *full swap* keeps two layers resident"
    " and swaps all of the others; *fsdp2* is the same model code and attention kernel under"
    " PyTorch's fully_shard, with Ulysses over NCCL, and the word behind it says what is recomputed:"
    " nothing (*none*), all but attention (*selective*), that of every second layer"
    " (*half-selective*), every second layer (*half*) or every layer (*full*). The step of a million"
    " tokens is the first and only one of a run of train.py, with the compilers' caches filled: 10 s"
    " of it are first uses of kernels, and 13 s the lower clock at which the attention kernel runs in"
    " a step, at the GPU's power limit (its file says more). On four H200s at 128K tokens our row"
    " runs layers whole, takes 12% longer than predicted, and 9% longer than an older run in chunks:"
    " why is not known yet. *host*: its states lie there, and are updated there. Of two H100s at 64K tokens the"
    " table was cut short. *planned memory*: --memplan on, on one GPU a CUDA graph: where a host"
    " takes longer than its GPU, as at 4K tokens, the step is the GPU's. *transformers* is that"
    " library's model, compiled: float32 weights under autocast, or weights and both moments in"
    " bfloat16, whose update reads and writes half as much; with Liger's kernels (*liger*) it is"
    " not compiled; *full* recomputes every layer. Peers take our micro-batches.",
    "ring": "One sequence by heads alone (*ring 1*, Ulysses) and by context (a ring) over two GPUs,"
    " each as train.py plans it; *nodes=2*: the two reach each other by sockets over loopback"
    " alone. There the keys and values of llama3-8b, a quarter of its queries, go around hidden by"
    " attention, and all-to-alls of everything do not.",
    "offload": "7B with optimizer states on the host (75 GiB), from which they visit the GPU:"
    " updated under the next forward, or in the open, where compute waits; and on the GPU, if they"
    " fit there. Short sequences do not hide 12 bytes a parameter there and 12 back.",
    "plans": "The planner's best plan of each tp, pp and sp: here of both sp, with tp and pp of 1."
    " On two H100s it finds their order, but both take longer than it says: the profile's attention"
    " is FlashAttention-4's, and its network and copies to the host are h200x2's.",
    "shard": "Ours by p,g,os and layout beside four settings of FSDP2, with one and with eight"
    " micro-batches (M); *nodes=2*: GPUs of one machine as nodes that reach each other"
    " by sockets over loopback alone, slow, and of two levels as real networks are. The bound is"
    " six layers alone on one GPU, without embedding, head, loss, optimizer or communication, not"
    " kernels. At M = 8 FSDP2 like ZeRO-2 ties with the best of ours.",
    "overlap": "What each overlap is worth with one micro-batch; M = 2, 4 and 8 are in the file. At"
    " M = 8 p,g,os = 4,4,4 without any takes 12% longer, and all others are within 1%. When it was"
    " measured, param_broadcast was called *spread* and grad_reduce *reduce*.",
    "trace": "How much of a step's communication no computation hides."
    " [trace.json.gz](trace.json.gz), for chrome://tracing, is the profile of the last row, two"
    " steps of one GPU; [timeline.png](timeline.png) is a stretch of it.",
    "memplan": "A step at planned addresses beside PyTorch's allocator. *reserved* is the most that"
    " the allocator held, *planned* the peak of the plan, which is proved optimal where it equals"
    " the lower bound; *hits* is the share of requests that met the plan. 7b/4 is four layers with"
    " everything else held. The requests and their addresses are in memplan-*.csv; below, those of"
    " 64K tokens, a rectangle a buffer, the lighter the larger: forward fills memory, and backward"
    " empties it. ![planned addresses over time](memplan.png)",
}
MOVED = {"place": "offload", "nodes": "shard"}  # former tables, whose rows are another's now
CHECKS = (
    "\n"
    "## Checks\n"
    "Tests show these on any machine; the files are what GPUs gave once, and bench.py has no"
    " such tables now.\n"
    "* [swap-h200](swap-h200.json), [2 GPUs](swap-2xh200.json), [4](swap-4xh200.json): 50 steps"
    " of a small model whose layers keep, swap and recompute. All losses and norms are bit-equal"
    " between alpha 0, 0.25 and 1, also where memory is poisoned after use and copies start late;"
    " without waits, the control, the loss stays at 10.5.\n"
    "* [races-2xh200](races-2xh200.json): pipelines whose layers swap, on two GPUs, with streams that"
    " start late and memory that is poisoned after its last use. All of 80 rounds of four cases are"
    " bit-equal to a round without delays; without one of three waits, 2 to 11 of 11 rounds are"
    " wrong.\n"
    "* [curves-4xh200](curves-4xh200.json): 20 steps under every legal p,g,os, both layouts, M ="
    " 1 and 2. Losses differ by at most 0.0032 from the first setting's, norms by 0.065; by up"
    " to 0.0007 and 0.0125 where the same was run again.\n"
    "* [memory-4xh200](memory-4xh200.json): bytes of states under every legal p,g,os; at most"
    " 0.21 % off the formula.\n"
    "* [million-h200](million-h200.json): attention with more than 2^31 elements (1M tokens, 17"
    " heads). The last head's result is that of the head alone (dq within 2.6e-5), and rows past"
    " the middle are within 0.25 % of the definition.\n"
    "* [first-weights-h200](first-weights-h200.json): what first weights and a warm-up are"
    " worth, over 300 steps of train.py on bytes of Python's standard library. Embeddings 1 and"
    " matrices 1/sqrt(columns), as they are now, reach 1.67 with 160m and 1.64 with 1b in"
    " validation, 0.02 everywhere 1.83 and 1.80; a warm-up of a quarter of the steps brings 1b to"
    " 1.39.\n"
)


def read(name: str) -> dict:
    return json.loads((HERE / f"{name}.json").read_text())


def markdown(rows: list[dict[str, str]], left: int = 2) -> str:
    """Return a table; all but its first columns are to the right."""
    head = list(rows[0])
    lines = [head, ["---"] * left + ["--:"] * (len(head) - left), *(row.values() for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def as_cells(rows: list[dict]) -> list[dict[str, str]]:
    """Return the rows' cells by their titles; what files say differently is said in one way."""
    titles, lines = as_text(
        [
            row
            | {
                "host_gib": row.get("host_gib") or None,
                "micro_batches": row.get("micro_batches", 1),
            }
            for row in rows
        ]
    )
    return [
        dict(zip(titles, line)) | {"file": row.get("file", "")} for row, line in zip(rows, lines)
    ]


def section(name: str) -> str:
    """Return what is shown of a table: its rows in all files, and what measured them."""
    text = f"\n## {name}\n{TABLES[name]}\n\n"
    rows = []
    sources = []
    for path in sorted(HERE.glob("*-*.json")):
        file = read(path.stem)
        table = re.search(r"(?<=bench\.py )[\w-]+|$", file["command"])[0]
        if MOVED.get(table, table) == name:
            # bounds that were rows of their own are a column
            rows += [
                row | {"file": path.stem}
                for row in file["rows"]
                if row["system"] not in ("kernels alone", "bound")
                and (name != "overlap" or row["micro_batches"] == 1)
            ]
            kernel = "FlashAttention-4" if "flash-attn-4" in file["versions"] else "cuDNN"
            sources.append(
                f"* [{path.stem}]({path.name}): {file['hardware']}, {kernel}, measured "
                f"by `{file['command']}` as of commit {file['commit']}\n"
            )
    rows.sort(key=lambda r: (r["model"], r.get("gpus", 0), r["seq"]))  # else as measured
    return text + markdown(as_cells(rows)) + "\n" + "".join(sources)


SCALE = {  # key of scale.json -> how to read it
    "choices": "**The papers' choices** of p,g,os, costed here beside the best under the same"
    " restrictions: for AMSP 4M tokens a step, one sequence of 4,096 tokens a micro-batch, data"
    " parallelism alone, layers whole (30B: full recomputation), optimizer states *inter*, all"
    " overlaps; for InternEvo 256K tokens, 16 sequences a step, and its os read as a factor"
    " beyond p. All of the papers' choices fit. That of 7B is the best, or ties with it, and"
    " that of 30B ties at 64 GPUs. The others are near. *13B*: p = 1 fits here, since a layer"
    " keeps 22.8 bytes a token and unit of width; with the 34 that InternEvo counts, it would"
    " need 9 GiB more and not fit. *30B* at 1024 GPUs: by the profile, weights that are"
    " gathered over 8 nodes hide under computation. Its rates are those of the wires and NCCL's"
    " latencies; the paper's ZeRO-3 falls to 4% of MFU (below), so its gathers across nodes"
    " were much slower than that. *InternEvo*: fewer ranks a sequence have room for all that"
    " layers keep, again with 22.8 bytes instead of 34; and layers that swap fit 8 ranks of one"
    " node, whose all-to-alls cross no NIC.",
    "table_5": "**AMSP's table V**: TGS of its choices on 64 GPUs, by overlap and micro-batches (M),"
    " predicted / published, and the seconds that a further micro-batch takes. Nothing is"
    " fitted to it. Micro-batches are predicted too fast: 245 TFLOP/s of all products is an"
    " assumption, and element-wise kernels count as fused. Of 7B at M = 1 the paper's MFU and"
    " TGS disagree by 9%.",
    "figures": "**AMSP's figures 11 and 12**: MFU in % (Megatron's FLOPs with attention in full, of 312"
    " TFLOP/s) on 8 to 1024 GPUs, predicted / **published**; 4M tokens a step, micro-batches of"
    " one sequence. param_broadcast does not overlap, nor do reduce-scatters of ZeRO-3 and"
    " MiCS, as the paper says of DeepSpeed. *ours* is the planner's first choice, and AMSP's is"
    " published beside it. These are all the numbers in the paper's text. Levels are predicted"
    " too high: by what computation is too fast (above); of ours on 1024 GPUs by other factors"
    " than AMSP's, too; of MiCS by more. *ZeRO-3 on 1024 GPUs is predicted at nine times what"
    " was published (37 against 4 %)*: a step of theirs took 15 s for 7B, 17 us for each hop of"
    " a ring of 1024, for which NCCL's own model, by which the profile is made, has 0.5 to 4;"
    " what made it so slow is not in the paper. With MiCS's factors AMSP's engine reaches 39,"
    " 47 and 37%, DeepSpeed's 35, 33 and 29%: a part is the engine, and no bandwidth. So read a"
    " row's course, not its level, and no prediction of a gather across all nodes.",
    "memo": "**Memo's table 3 and figure 12(b)**: causal MFU of 7B, predicted / published, on the same"
    " profile (Memo's InfiniBand is twice as fast), with LLaMA's gated feed-forward instead of"
    " GPT's. The level at 1M is no prediction: attention rates above 32K tokens were assumed"
    " such that their mean is what the paper's 1M tokens imply. The course is one. Where layers"
    " keep all without swapping, Memo recomputed all but attention (alpha = 0). 8M tokens on"
    " 64 GPUs fit by heads alone, over four nodes; Memo ran them with context parallelism.",
}


def results_readme() -> str:
    scale = read("scale")
    text = INTRO + "".join(map(section, TABLES)) + CHECKS + predictions()
    text += (
        "\n## Scale, by prediction\nNothing here was run: `python results/scale.py` asks the"
        " planner what others have measured on up to 1024 A800s (profiles/a800.json, whose"
        " numbers have their sources beside them).\n"
    )
    return text + "".join(f"\n{says}\n\n{markdown(scale[name])}" for name, says in SCALE.items())


# ---------------------------------------------------------------------------- predictions

PREDICTIONS = (
    "\n"
    "## Predictions\n"
    "The planner's predictions now, by profiles h100x1 and h200x2, beside what was measured"
    " (predict-*.json, by former tables of bench.py, each file's command and commit in it): all"
    " rows that record their whole plan, which older ones do not: all of four GPUs, some of one"
    " and two. Settings of one question (GPU, model, tokens, ranks) differ in what was set by"
    " hand. Those *held out* were chosen before, and measured once, when the model of seconds was"
    " done. (Mended since, before anything was measured on an H100: seconds, by a cast of whole"
    " gradients; bytes, of layers that run whole, and of q, k, v, o, a chunk's products and a"
    " kernel's sums, which were counted twice: two of the held-out settings were predicted 7.6 and"
    " 3.3 % too large, and now no row is 1 %.) The planner's own pick is"
    " *as planned*, or where nothing open was set by hand. Questions K are of the tables offload,"
    " long, plans and ring. What was *seen before* the model of seconds was done, or ran where"
    " the network or the kernel was not measured, is in the picture alone.\n\n"
)
ERRORS = (
    " *Network or kernel not measured*: there, long steps are predicted too fast."
    " Two H100s are predicted by profile h100x1 and, by data sheets, h200x2's network; two H200s"
    " that reach each other by sockets (*nodes=2*) by an assumed network of 400 Gb/s a GPU, with"
    " which ring 1, the slower one, would be the faster. What ran cuDNN's attention is predicted"
    " by cuDNN's rates. Most of these follow from the seconds that the kernels of the same rows"
    " take alone (each profile says which), so these rows count as seen before. Where one"
    " sequence of 4,096 tokens of 1b is a micro-batch (A), the host has more to do than its GPU"
    " (on an H100 a layer computes for 2.5 ms; profile h100x1's host launches it in 4.4), and a"
    " step takes what the host of the day takes: 0.69 to 0.87 s on four of them. So h100x1 was"
    " measured on the host of that row, right"
    " before it; on a faster one K's 1b of 4K tokens takes 0.105 s, not the 0.123 predicted."
    " ![errors of predictions](predict.png)\n\n"
)


def plan_of(r: dict) -> Plan:
    """Return the plan that a row has run."""
    names = (
        "seq",
        "sp",
        "ring",
        "batch",
        "micro_batch",
        "head_groups",
        "chunk",
        "os_layout",
        "os_place",
    )  # older rows lack some: as Plan has them
    model = MODELS[r["model"]]
    nodes = int(re.search(r"(?<=nodes=)\d|$", r["system"])[0] or 1)
    plan = Plan(
        model,
        torch.bfloat16,
        r["gpus"],
        r["gpus"] // nodes,
        overlap=tuple(x for x in STREAMS if x != "host_update" or "open" not in r["system"]),
        recompute="none" if r["recompute"] == "none" else "auto",
        factors=Factors(r["p"], r["g"], r["os"]),
        activations=r["activations"] and ActivationPlan(**r["activations"]),
        **{name: r[name] for name in names if name in r},
    )
    if r["recompute"] == "full":  # layers that keep their input alone, whole or in chunks
        n = model.layers
        all_again = ActivationPlan(n, plan.chunks, n, layers_recomputing_attention=n)
        plan = replace(plan, activations=all_again)
    return plan


def predicted_rows() -> list[dict]:
    """Return the measured rows whose plan is known, with what is predicted for it now."""
    rows = []
    for path in sorted(HERE.glob("*-*.json")):
        found = read(path.stem)
        gpu = re.search("H[12]00", found["hardware"])[0]
        for r in found["rows"]:
            graph = "planned memory" in r["system"]  # of which predictions count the launches
            if graph or not (r.get("predicted_s") and r["step_s"]):
                continue
            plan = plan_of(r)
            profile = find_profile(found["hardware"], plan.per_node)
            kernel = r.get("kernel") or "auto"  # older rows lack it: they ran the best one
            kind = "held out" if r.get("held_out") else "seen before"
            if (
                plan.ranks > plan.per_node
                or plan.ranks > 1
                and "collectives" in profile.sources
                or kernel not in ("auto", nearest_kernel(profile, kernel))
            ):
                kind = pictures.ELSEWHERE
            plan = predict(plan, profile, kernel)
            rows.append(
                {
                    "question": f"K, {r['model']} {r['seq'] // 1024}K",
                    **r,
                    "gpu": gpu,
                    "kind": kind,
                    "now_s": plan.step_s,
                    "now_gib": plan.gpu_bytes / GIB,
                }
            )
    return sorted(rows, key=lambda r: (r["question"], r["gpu"], r["gpus"], r["step_s"]))


def predictions() -> str:
    rows = predicted_rows()
    said = []
    for kind in pictures.MARKERS:
        errors = sorted(abs(r["now_s"] / r["step_s"] - 1) for r in rows if r["kind"] == kind)
        said.append(
            f"{kind}: {errors[len(errors) // 2]:.1%} in the median, {errors[-1]:.1%} at "
            f"worst of {len(errors)}"
        )
    text = f"{PREDICTIONS}Errors of the step time, {'; '.join(said)}.{ERRORS}"
    return text + markdown(
        [
            {
                "question": r["question"],
                "set by hand": r["system"],
                "model": r["model"],
                "tokens": f"{r['seq']:,}",
                "GPUs": f"{r['gpus']} {r['gpu']}",
                "kind": r["kind"],
                "measured s": f"{r['step_s']:.4g}",
                "predicted s": f"{r['now_s']:.4g}",
                "error": f"{r['now_s'] / r['step_s'] - 1:+.1%}",
                "measured GiB": f"{r['gpu_gib']:.2f}",
                "predicted GiB": f"{r['now_gib']:.2f}",
                "of GiB": f"{r['now_gib'] / r['gpu_gib'] - 1:+.1%}",
            }
            for r in rows
            if r["kind"] == "held out"
        ]
    )


# ---------------------------------------------------------------------------- README.md's numbers

SHOWN = (  # file, system, tokens
    ("long-512k-4xh200", "ours", 2**19),
    ("long-256k-4xh200", "ours", 2**18),
    ("long-32k-64k-128k-4xh200", "ours", 2**15),
    ("long-400k-h200", "ours", 400 * 2**10),
    ("shard-4xh200", "ours 1,4,4 intra M=1", 2**12),
    ("shard-4xh200", "fsdp2 ZeRO-2-like M=1", 2**12),
)


def long_rows(system: str) -> dict[int, dict]:
    """Return by tokens the fastest rows of a system with 7B on 4 H200s with all of their memory."""
    found = []
    for path in HERE.glob("long-*.json"):
        file = read(path.stem)
        if file["hardware"] != "4 x NVIDIA H200" or "--gpu-memory" in file["command"]:
            continue
        for row in file["rows"]:
            if row["system"].split()[0] == system and row["model"] == "7b" and row["step_s"]:
                found.append(row)
    found.sort(key=lambda row: (row["seq"], -row["step_s"]))
    return {row["seq"]: row for row in found}  # the last of a length, the fastest, stays


def claim() -> str:
    ours = long_rows("ours")
    million = ours[2**20]
    seq, best = max((seq, row) for seq, row in ours.items() if row["bound_ratio"])
    return (
        fill(
            f"4 H200s train LLaMA-7B on one sequence of a million tokens: a step of 1,048,576 tokens "
            f"takes **{million['step_s']:.0f} s, {million['mfu_causal']:.1%} causal MFU**. At "
            f"{seq // 1024}K tokens they reach **{best['mfu_causal']:.1%} causal MFU**, "
            f"{best['bound_ratio']:.0%} of what the attention and matrix kernels reach by themselves. "
            f"{peer_times()}",
            100,
            break_on_hyphens=False,
        )
        + "\n"
    )


def peer_times() -> str:
    """Return how much longer peers take than the fastest of ours in the same file for one sequence,
    each in its fastest setting; what transformers' weights and states are counts as a peer of its
    own."""
    rows = []
    for path in HERE.glob("long-rows-*.json"):  # each measures lengths of its own
        file = read(path.stem)
        gpu = re.search("H[12]00", file["hardware"])[0]
        rows += [
            row | {"gpu": gpu} for row in file["rows"] if row.get("step_s") and row["batch"] == 1
        ]
    rows.sort(key=lambda r: (r["gpus"], r["gpu"], r["seq"], r["step_s"]))
    fastest = {}  # by place, peer and tokens
    for r in rows:
        words = r["system"].split()
        n = 2 if words[0] == "transformers" else 1
        where = f"{r['gpus']} {r['gpu']}{'s' * (r['gpus'] > 1)}, {r['model']}"
        by_length = fastest.setdefault(where, {}).setdefault(" ".join(words[:n]), {})
        by_length.setdefault(r["seq"], (r["step_s"], words[n:]))
    texts = []
    for where, peers in fastest.items():
        ours = peers.pop("ours")
        by_peer = []
        for peer, by_length in peers.items():
            ratios = []
            for seq, (seconds, setting) in by_length.items():
                our_seconds, our_setting = ours[seq]
                said = setting + ["ours:", *our_setting] * bool(our_setting)
                ratios.append(
                    f"{seq // 1024}K **{seconds / our_seconds:.2f}**"
                    + f" ({' '.join(said)})" * bool(said)
                )
            by_peer.append(f"{peer} {', '.join(ratios)}")
        texts.append(f"{where}: {'; '.join(by_peer)}")
    return (
        "Step time of the fastest [peer](results/README.md#long) tried, over ours: "
        f"{'; '.join(texts)}."
    )


def shown_rows() -> str:
    rows = []
    for name, system, seq in SHOWN:
        found = [x for x in read(name)["rows"] if (x["system"], x["seq"]) == (system, seq)]
        (cells,) = as_cells(found)
        rows.append(
            {
                "system": f"{cells['system']} {cells.get('plan', '')}".strip(),
                "tokens": f"{seq // 1024}K",
            }
            | {title: cells[title] for title in ("GPUs", "MFU causal", "of bound", "GPU GiB")}
        )
    return markdown(rows)


BLOCKS = {
    "claim": claim,
    "table": shown_rows,
    "fits": lambda: markdown(read("scale")["fits"], left=1),
}


def readme(text: str) -> str:
    """Return README.md with its blocks as the files have them."""
    for name, write in BLOCKS.items():
        start = text.index(mark := f"<!-- {name} -->\n") + len(mark)
        text = text[:start] + write() + text[text.index("<!-- end -->", start) :]
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit 1 if a text is not what the files say",
    )
    check = parser.parse_args().check
    page = HERE.parent / "README.md"
    texts = {HERE / "README.md": results_readme(), page: readme(page.read_text())}
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    if check:
        print(
            "\n".join(
                f"{path} is not what results/ says: python results/report.py" for path in stale
            )
            or "as the files say"
        )
        return int(bool(stale))
    for path, text in texts.items():
        path.write_text(text)
    pictures.draw_mfu(HERE / "mfu.png", long_rows("ours"), long_rows("fsdp2"))
    pictures.draw_predictions(HERE / "predict.png", predicted_rows())
    pictures.draw_timeline(
        HERE / "timeline.png",
        HERE / "trace.json.gz",
        "LLaMA-7B, 4K tokens, p = g = os = 4 on 4 H200s: one of them",
    )
    _, buffers = memplan.read_trace(str(HERE / "memplan-64k-2x.csv"))
    memplan.draw(
        str(HERE / "memplan.png"), buffers, memplan.solve(buffers), "7B, 64K tokens, 2 H200s: "
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
