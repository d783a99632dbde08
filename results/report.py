"""Write the pages and pictures that show the files of results/.

    python results/report.py            write results/README.md, the pictures (pictures.py), and
                                        the numbers of the project's README.md
    python results/report.py --check    write nothing; exit 1 if a page is not what it would write

A results file is a JSON object that bench.py has written: command, hardware, versions, commit, and
rows. A section of results/README.md shows the rows of one of bench.py's tables from all files. Its
last sections show what the planner predicts: for the measured rows, and for what papers have
published (scale.json, which scale.py writes).

In the project's README.md this file replaces the text between `<!-- NAME -->` and `<!-- end -->`
for each NAME of BLOCKS. So no number on these pages is typed by hand, except in the notes below.

Left out: measuring, which is bench.py's task; layer.png and shards.png, which show ideas.
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
from costs import Plan, nearest_kernel, predict
from hardware import Profile, find_profile
from model import MODELS
from offload import ActivationPlan
from shard import STREAMS, Factors
from streams import GIB

# ---------------------------------------------------------------------------- tables

INTRO = """# Results

`python results/report.py` writes this page from the files beside it; do not edit it. Each row is a
setting that was measured: a label, and flags of train.py. A setting that does not fit is a row,
too. `-` means nothing, or not known.

| column | what it says |
| --- | --- |
| plan | the sharding factors p,g,os; k, the number of resident layers; alpha, the fraction that\
 the remaining layers swap; the token chunk; whether optimizer states (os) lie on the host |
| M | micro-batches per step |
| TGS | tokens per GPU and second |
| MFU causal, MFU full | model FLOPs as a share of the GPU's peak. *causal* counts half of the attention\
 matrix. *full* also counts the half that the mask hides, so it may exceed 100%. Neither counts\
 recomputation |
| bound, of bound | the causal MFU of a step's attention and matrix kernels when only they run; the\
 step's share of it |
| GPU GiB | peak memory of a GPU, including what ranks map from each other, outside PyTorch's\
 allocator |
| reserved GiB | the most that PyTorch's allocator held |
| host GiB | peak memory of the machine's host |
| predicted s | the prediction of the planner at the commit that measured |

Below each table is the command that measured a file, with its commit. Later commits may name flags
differently. A + behind the commit means that other changes were not committed yet. Attention is
FlashAttention-4's or cuDNN's, as the file's line says.

Not measured: bench.py's table parallel (tensor parallelism and pipelines beside data parallelism).
"""
TABLES = {  # table of bench.py -> what it shows, and how to read it
    "step": """`python bench.py` measures steps of the largest model that fits a machine. When these
rows were measured, the table had three more kinds of rows: a matrix product and attention, as a
share of the data sheet's rate, and a step without its update.""",
    "long": """One sequence runs over all GPUs. One exception: at 4K tokens on one GPU there are
four sequences where the file says --batch 4. The labels say:

* *ours*: as train.py plans it. *full recompute* runs all of a layer twice. *full swap* keeps two
  layers resident and swaps all of the others. *host*: optimizer states lie on the host, and are
  updated there. *planned memory*: --memplan on, which on one GPU is a CUDA graph. If a host takes
  longer than its GPU, as at 4K tokens, a step with the graph takes only the GPU's time.
* *fsdp2*: the same model code and attention kernel under PyTorch's fully_shard, with Ulysses over
  NCCL. The next word says what is recomputed: nothing (*none*), all but attention (*selective*),
  all but attention in every second layer (*half-selective*), every second layer (*half*), or every
  layer (*full*).
* *transformers*: that library's model, compiled. *fp32* has float32 weights under autocast. *bf16*
  has weights and both moments in bfloat16, so its update reads and writes half as much. With
  Liger's kernels (*liger*) the model is not compiled. *full* recomputes every layer.

All peers take our number of micro-batches. Notes:

* The step of a million tokens is the first and only one of a run of train.py. The compilers' caches
  were filled before. The first uses of kernels take 10 s of the step. Another 13 s are lost because
  the GPU reaches its power limit and lowers its clock while attention runs. The file says more.
* On four H200s at 32K tokens, 8 head groups per layer make the host slower than its GPU
  ([long-groups](long-groups-32k-4xh200.json)): a step takes 1.13 s, and 1.04 s with 1, 2 or 4
  groups. The planner of commit 2c332ea took 8, because it did not count the host's seconds.
* On four H200s at 128K tokens our row runs layers whole. It takes 6% longer than predicted (an
  older commit, with 4 head groups and whole weights, took 12% longer). We do not know why yet.
* At 512K tokens, FSDP2 with selective recomputation ties with our step: both run at 95% of what
  the kernels reach by themselves.
* The measurement of two H100s at 64K tokens was stopped before all of its rows were done.""",
    "ring": """One sequence runs over two GPUs, as train.py plans it: by heads only (*ring 1*,
Ulysses), or by context (a ring). With *nodes=2* the two GPUs reach each other only by sockets over
loopback. There, a ring sends the keys and values of llama3-8b, each a quarter as large as its
queries, and attention hides this. Ulysses' all-to-alls send everything, and nothing hides them.""",
    "offload": """7B with optimizer states on the host (75 GiB). They stream through the GPU for
the update, either during the next forward, or exposed, which means that computation waits. Where
they fit, a row with the states on the GPU stands beside them. Short sequences cannot hide 12 bytes per parameter
to the GPU and 12 back.""",
    "plans": """The planner's best plan for each tp, pp and sp. Here tp and pp are 1, so there is
one row per sp. On two H100s the planner predicts the order of the two, but both take longer than it
says. The profile's attention is FlashAttention-4's, and its network and its copies to the host are
those of h200x2.""",
    "shard": """Ours, by sharding factors p,g,os and by layout, beside four settings of FSDP2, with
one and with eight micro-batches (M). With *nodes=2* GPUs of one machine act as two nodes, which
reach each other only by sockets over loopback. That is slow, but it has two levels, as real
networks have. The bound here is not of kernels: it is six layers on one GPU, without embedding,
head, loss, optimizer or communication. At M = 8, FSDP2 like ZeRO-2 ties with the best of ours.""",
    "overlap": """What each overlap saves with one micro-batch. The file also has M = 2, 4 and 8: at
M = 8, p,g,os = 4,4,4 takes 12% longer without any overlap, and all other rows are within 1%. When
this was measured, param_broadcast was called *spread*, and grad_reduce was called *reduce*.""",
    "trace": """How much of a step's communication is exposed, which means that no computation hides
it. [trace.json.gz](trace.json.gz), for chrome://tracing, is the profile of the last row: two steps
of one GPU. [timeline.png](timeline.png) shows a part of it.""",
    "memplan": """A step at planned addresses beside a step with PyTorch's allocator. *reserved* is
the most that the allocator held. *planned* is the peak of the plan, which is proved optimal where
it equals the lower bound. *hits* is the share of requests that met the plan. 7b/4 is four layers
with everything else held. The requests and their addresses are in memplan-*.csv. The picture shows
those of 64K tokens: each rectangle is a buffer, and lighter ones are larger. Forward fills the
memory, and backward empties it.

![planned addresses over time](memplan.png)""",
}
FORMER_TABLES = {"place": "offload", "nodes": "shard"}  # former name -> the table's name now
CHECKS = """
## Checks
Each file is the result of one check on GPUs. bench.py no longer has these tables, because tests
check the same on any machine.

* [swap-h200](swap-h200.json), [2 GPUs](swap-2xh200.json), [4](swap-4xh200.json): 50 steps of a
  small model whose layers keep, swap and recompute. All losses and norms are bit-equal between
  alpha 0, 0.25 and 1, also if memory is poisoned after its use and copies start late. As a control
  the waits were removed: then the loss stays at 10.5.
* [races-2xh200](races-2xh200.json): pipelines whose layers swap, on two GPUs. Streams start late,
  and memory is poisoned after its last use. In four cases, all of 80 rounds are bit-equal to a
  round without delays. If one of three waits is removed, 2 to 11 of 11 rounds are wrong.
* [curves-4xh200](curves-4xh200.json): 20 steps with every legal p,g,os, with both layouts, with M =
  1 and 2. Losses differ by at most 0.0032 from those of the first setting, and norms by 0.065. If
  the same setting runs again, they differ by up to 0.0007 and 0.0125.
* [memory-4xh200](memory-4xh200.json): bytes of model states with every legal p,g,os. They are at
  most 0.21 % off the formula.
* [million-h200](million-h200.json): attention with more than 2^31 elements (1M tokens, 17 heads).
  The last head's result is the same as if only that head is computed (dq within 2.6e-5). Rows past
  the middle are within 0.25 % of the definition.
* [first-weights-h200](first-weights-h200.json): what initial weights and a warm-up are worth, over
  300 steps of train.py on bytes of Python's standard library. With embeddings of 1 and matrices of
  1/sqrt(columns), as they are now, validation reaches 1.67 with 160m and 1.64 with 1b. With 0.02
  everywhere it reaches 1.83 and 1.80. A warm-up of a quarter of the steps brings 1b to 1.39.
"""


def read(name: str) -> dict:
    """Return the contents of a results file, by its name without .json."""
    return json.loads((HERE / f"{name}.json").read_text())


def markdown(rows: list[dict[str, str]], left: int = 2) -> str:
    """Return a Markdown table. Its first `left` columns are aligned left, the others right."""
    titles = list(rows[0])
    aligned = ["---"] * left + ["--:"] * (len(titles) - left)
    lines = [titles, aligned]
    lines += [row.values() for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def as_cells(rows: list[dict]) -> list[dict[str, str]]:
    """Return each row as {title: cell}, as bench.py prints it.

    Files of different ages say the same in different ways. Here no host memory is None, never 0,
    and a row without micro_batches has one.
    """
    same_form = [
        row
        | {
            "host_gib": row.get("host_gib") or None,
            "micro_batches": row.get("micro_batches", 1),
        }
        for row in rows
    ]
    titles, lines = as_text(same_form)
    return [
        dict(zip(titles, line)) | {"file": row.get("file", "")} for row, line in zip(rows, lines)
    ]


def section(name: str) -> str:
    """Return the section of one of TABLES: its note, its rows in all files, and their commands."""
    rows = []
    sources = []
    for path in sorted(HERE.glob("*-*.json")):
        file = read(path.stem)
        table = re.search(r"(?<=bench\.py )[\w-]+|$", file["command"])[0]
        if FORMER_TABLES.get(table, table) != name:
            continue
        for row in file["rows"]:
            # older files have the bound as rows of its own; it is a column here
            is_bound = row["system"] in ("kernels alone", "bound")
            left_out = name == "overlap" and row["micro_batches"] != 1
            if not is_bound and not left_out:
                rows.append(row | {"file": path.stem})
        kernel = "FlashAttention-4" if "flash-attn-4" in file["versions"] else "cuDNN"
        sources.append(
            f"* [{path.stem}]({path.name}): {file['hardware']}, {kernel}, measured "
            f"by `{file['command']}` as of commit {file['commit']}\n"
        )

    # rows that are equal in these keep the order in which they were measured
    rows.sort(key=lambda row: (row["model"], row.get("gpus", 0), row["seq"]))
    return f"\n## {name}\n{TABLES[name]}\n\n" + markdown(as_cells(rows)) + "\n" + "".join(sources)


SCALE = {  # key of scale.json -> how to read its table
    "choices": """### Choices of sharding factors
The papers' choices of p,g,os, costed here beside the best plan under the same restrictions. For
AMSP these are 4M tokens per step, micro-batches of one sequence of 4,096 tokens, only data
parallelism, layers whole (30B: full recomputation), layout *inter*, and all overlaps. For InternEvo
they are 256K tokens and 16 sequences per step, and its os is read as a factor beyond p.

All of the papers' choices fit. The choice for 7B is the best or ties with it, and the choice for
30B ties at 64 GPUs. The others are near:

* *13B*: p = 1 fits here, because a layer keeps 22.8 bytes per token and unit of width. With the 34
  bytes that InternEvo counts, it would need 9 GiB more and would not fit.
* *30B* on 1024 GPUs: by the profile, all-gathers of weights over 8 nodes hide under computation.
  The profile has the bandwidth of the wires and the latencies of NCCL. The paper's ZeRO-3 falls to
  an MFU of 4 % (below), so its gathers across nodes were much slower than the profile says.
* *InternEvo*: fewer ranks per sequence have room for all skeletal activations, again with 22.8
  bytes instead of 34. If layers swap, a sequence fits 8 ranks of one node, whose all-to-alls cross
  no NIC.""",
    "table_5": """### AMSP's table V
TGS of AMSP's choices on 64 GPUs, by overlap and micro-batches (M), predicted / published, and the
seconds that one more micro-batch takes. Nothing is fitted to this table.

Micro-batches are predicted too fast. One reason is that 245 TFLOP/s of all products is an
assumption, another that element-wise kernels count as fused. For 7B at M = 1, the paper's MFU and
TGS disagree by 9%.""",
    "figures": """### AMSP's figures 11 and 12
MFU in % (Megatron's FLOPs with attention in full, of 312 TFLOP/s) on 8 to 1024 GPUs, predicted /
**published**, with 4M tokens per step and micro-batches of one sequence. As the paper says of
DeepSpeed, param_broadcast is not overlapped, nor are reduce-scatters of ZeRO-3 and MiCS. *ours* is
the planner's first choice, with AMSP's published number beside it. The published numbers are all
that the paper's text has.

Read the course of a row, not its level, and trust no prediction of an all-gather across all nodes:

* All levels are predicted too high, because computation is predicted too fast (above). Ours on 1024
  GPUs is also too high because it has other factors than AMSP's. MiCS is too high by more.
* *ZeRO-3 on 1024 GPUs is predicted at nine times what was published (37 against 4 %).* Their step
  took 15 s for 7B, which is 17 us for each hop of a ring of 1024. By NCCL's own model, from which
  the profile is made, a hop takes 0.5 to 4 us. The paper does not say what made it so slow.
* With MiCS's factors AMSP's engine reaches 39, 47 and 37%, and DeepSpeed's 35, 33 and 29%. So a
  part of the difference is due to the engine, not to a bandwidth.""",
    "memo": """### Memo's table 3 and figure 12(b)
Causal MFU of 7B, predicted / **published**, on the same profile, although Memo's InfiniBand is
twice as fast. The model here is LLaMA with its gated feed-forward, Memo's is GPT.

The level at 1M tokens is no prediction: attention's rates above 32K tokens were assumed such that
their mean is what the paper's 1M tokens imply. The course over the lengths is a prediction. Where
layers keep all without swapping, Memo recomputed all but attention (alpha = 0). 8M tokens on 64
GPUs fit with Ulysses only, over four nodes. Memo ran them with context parallelism.""",
}


def results_readme() -> str:
    """Return results/README.md."""
    scale = read("scale")
    text = INTRO + "".join(map(section, TABLES)) + CHECKS + predictions()
    text += (
        "\n## Scale, by prediction\nNothing in this section was run. `python results/scale.py` asks"
        " the planner the questions that others have measured on up to 1024 A800s. All numbers of"
        " profiles/a800.json have their sources beside them.\n"
    )
    return text + "".join(f"\n{note}\n\n{markdown(scale[name])}" for name, note in SCALE.items())


# ---------------------------------------------------------------------------- predictions

PREDICTIONS = """
## Predictions
What the planner predicts now, by profiles h100x1 and h200x2, beside what was measured. Included are
all rows that record their whole plan: all of four GPUs, and some of one and two. Older rows do not
record it. The files predict-*.json are from former tables of bench.py, and each has its command and
its commit.

A *question* is a GPU, a model, a number of tokens and a number of ranks. Its rows differ in what
was set by hand. The planner's own pick is *as planned*, or the row where nothing open was set by
hand. Questions K are of the tables offload, long, plans and ring.

* *Held out*: settings that were chosen before measuring, and measured once, when the model of
  seconds was done. The table below shows them. Two corrections came later, before anything was
  measured on an H100. The first is a cast of whole gradients, in the seconds. The second concerns
  the bytes of layers that run whole, and of q, k, v, o, a chunk's products and a kernel's sums. They
  were counted twice. Before, the predicted bytes of two held-out settings were 7.6 % and 3.3 % too
  large. Now no row is off by 1 %.
* *Seen before*: settings that were measured before the model of seconds was done. Only the picture
  shows them.
* *Network or kernel not measured*: settings that ran where the profile has an assumed network, or
  another attention kernel. Only the picture shows them.

"""
ERRORS = """

Notes on *network or kernel not measured*, where long steps are predicted too fast:

* Two H100s are predicted by profile h100x1 and, by data sheets, the network of h200x2.
* Two H200s that reach each other by sockets (*nodes=2*) are predicted by an assumed network of 400
  Gb/s per GPU. By that network ring 1 would be the faster choice, but it is the slower one.
* Rows that ran cuDNN's attention are predicted by cuDNN's rates. Most of these rates follow from
  the seconds that the kernels of the same rows take when only they run (each profile says which),
  so these rows count as seen before.

A note on the host. If one sequence of 4,096 tokens of 1b is a micro-batch (question A), the host
has more to do than its GPU. On an H100 a layer computes for 2.5 ms, and profile h100x1's host
launches it in 4.4 ms. So a step takes what the host of the day takes: 0.69 to 0.87 s on four hosts.
h100x1 was measured on the host of that row, right before it. On a faster host, question K's 1b with
4K tokens takes 0.105 s, not the 0.123 s that are predicted.

![errors of predictions](predict.png)

"""


def plan_of(row: dict) -> Plan:
    """Return the plan that a row of a results file has run."""
    # older rows lack some of these fields; then Plan's defaults hold
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
    )
    model = MODELS[row["model"]]
    nodes = int(re.search(r"(?<=nodes=)\d|$", row["system"])[0] or 1)
    update_overlaps = "open" not in row["system"]  # the label says if the host's update does not
    activations = row["activations"]
    plan = Plan(
        model,
        torch.bfloat16,
        row["gpus"],
        row["gpus"] // nodes,
        overlap=tuple(x for x in STREAMS if x != "host_update" or update_overlaps),
        recompute="none" if row["recompute"] == "none" else "auto",
        factors=Factors(row["p"], row["g"], row["os"]),
        activations=ActivationPlan(**activations) if activations else activations,
        **{name: row[name] for name in names if name in row},
    )
    if row["recompute"] == "full":  # layers keep only their input, whole or in chunks
        n = model.layers
        recompute_all = ActivationPlan(n, plan.chunks, n, layers_recomputing_attention=n)
        plan = replace(plan, activations=recompute_all)
    return plan


def kind_of(row: dict, plan: Plan, profile: Profile, kernel: str) -> str:
    """Return which of pictures.MARKERS a row is: what was known when it was predicted."""
    across_nodes = plan.ranks > plan.per_node
    assumed_network = plan.ranks > 1 and "collectives" in profile.sources
    other_kernel = kernel not in ("auto", nearest_kernel(profile, kernel))
    if across_nodes or assumed_network or other_kernel:
        return pictures.ELSEWHERE
    return "held out" if row.get("held_out") else "seen before"


def predicted_rows() -> list[dict]:
    """Return the measured rows whose plan is known, and what the planner predicts for them now."""
    rows = []
    for path in sorted(HERE.glob("*-*.json")):
        file = read(path.stem)
        gpu = re.search("H[12]00", file["hardware"])[0]
        for row in file["rows"]:
            plan_is_known = row.get("predicted_s") and row["step_s"]
            # a CUDA graph needs no launches of kernels, which predictions count
            is_graph = "planned memory" in row["system"]
            if is_graph or not plan_is_known:
                continue

            plan = plan_of(row)
            profile = find_profile(file["hardware"], plan.per_node)
            kernel = row.get("kernel") or "auto"  # older rows lack it: they ran the best one
            # older files do not say their host's processor: the profile's first one counts
            predicted = predict(plan, profile, kernel, file.get("processor", ""))
            rows.append(
                {
                    "question": f"K, {row['model']} {row['seq'] // 1024}K",
                    **row,
                    "gpu": gpu,
                    "kind": kind_of(row, plan, profile, kernel),
                    "now_s": predicted.step_s,
                    "now_gib": predicted.gpu_bytes / GIB,
                }
            )
    return sorted(rows, key=lambda r: (r["question"], r["gpu"], r["gpus"], r["step_s"]))


def predictions() -> str:
    """Return the section on predictions: errors of each kind, and a table of the held-out rows."""
    rows = predicted_rows()
    error_texts = []
    for kind in pictures.MARKERS:
        errors = sorted(abs(r["now_s"] / r["step_s"] - 1) for r in rows if r["kind"] == kind)
        median, worst = errors[len(errors) // 2], errors[-1]
        error_texts.append(
            f"{kind}: {median:.1%} in the median, {worst:.1%} at worst of {len(errors)}"
        )

    text = f"{PREDICTIONS}Errors of the step time, {'; '.join(error_texts)}.{ERRORS}"
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

SHOWN = (  # the rows of README.md's table: file, label, tokens
    ("long-512k-4xh200", "ours", 2**19),
    ("long-256k-4xh200", "ours", 2**18),
    ("long-32k-64k-128k-4xh200", "ours", 2**15),
    ("long-400k-h200", "ours", 400 * 2**10),
    ("shard-4xh200", "ours 1,4,4 intra M=1", 2**12),
    ("shard-4xh200", "fsdp2 ZeRO-2-like M=1", 2**12),
)


def long_rows(system: str) -> dict[int, dict]:
    """Return {tokens: a system's fastest row}, of 7B on 4 H200s with all of their memory."""
    found = []
    for path in HERE.glob("long-*.json"):
        file = read(path.stem)
        if file["hardware"] != "4 x NVIDIA H200" or "--gpu-memory" in file["command"]:
            continue
        for row in file["rows"]:
            if row["system"].split()[0] == system and row["model"] == "7b" and row["step_s"]:
                found.append(row)

    # the slowest first: of rows with the same length, a dict keeps the last one
    found.sort(key=lambda row: (row["seq"], -row["step_s"]))
    return {row["seq"]: row for row in found}


def claim() -> str:
    """Return the paragraph of README.md with the step of a million tokens and the highest MFU."""
    ours = long_rows("ours")
    million = ours[2**20]
    longest = max(seq for seq, row in ours.items() if row["bound_ratio"])
    best = ours[longest]
    return (
        fill(
            f"4 H200s train LLaMA-7B on one sequence of a million tokens: a step of 1,048,576 tokens "
            f"takes **{million['step_s']:.0f} s, {million['mfu_causal']:.1%} causal MFU**. At "
            f"{longest // 1024}K tokens they reach **{best['mfu_causal']:.1%} causal MFU**, "
            f"{best['bound_ratio']:.0%} of what the attention and matrix kernels reach by themselves. "
            f"{peer_times()}",
            100,
            break_on_hyphens=False,
        )
        + "\n"
    )


def peer_times() -> str:
    """Return a sentence: how much longer peers take than ours, for one sequence.

    Each peer has its fastest setting, and ours is the fastest of the same hardware, model and
    length. Example of an entry: fsdp2 64K **1.12** (selective). transformers is several peers, by
    what its weights and states are: the second word of its label.
    """
    rows = []
    for path in HERE.glob("long-rows-*.json"):
        file = read(path.stem)
        gpu = re.search("H[12]00", file["hardware"])[0]
        rows += [
            row | {"gpu": gpu} for row in file["rows"] if row.get("step_s") and row["batch"] == 1
        ]
    rows.sort(key=lambda row: (row["gpus"], row["gpu"], row["seq"], row["step_s"]))

    # "4 H200s, 7b" -> peer -> tokens -> seconds and setting of the first row, the fastest
    fastest = {}
    for row in rows:
        words = row["system"].split()
        name_words = 2 if words[0] == "transformers" else 1
        peer, setting = " ".join(words[:name_words]), words[name_words:]
        plural = "s" if row["gpus"] > 1 else ""
        where = f"{row['gpus']} {row['gpu']}{plural}, {row['model']}"
        by_length = fastest.setdefault(where, {}).setdefault(peer, {})
        by_length.setdefault(row["seq"], (row["step_s"], setting))

    texts = []
    for where, peers in fastest.items():
        ours = peers.pop("ours")
        by_peer = []
        for peer, by_length in peers.items():
            ratios = []
            for seq, (seconds, setting) in by_length.items():
                our_seconds, our_setting = ours[seq]
                ratio = f"{seq // 1024}K **{seconds / our_seconds:.2f}**"
                settings = list(setting)
                if our_setting:
                    settings += ["ours:", *our_setting]
                if settings:
                    ratio += f" ({' '.join(settings)})"
                ratios.append(ratio)
            by_peer.append(f"{peer} {', '.join(ratios)}")
        texts.append(f"{where}: {'; '.join(by_peer)}")
    return (
        "Step time of the fastest [peer](results/README.md#long) tried, over ours: "
        f"{'; '.join(texts)}."
    )


def shown_rows() -> str:
    """Return README.md's table: the rows of SHOWN."""
    rows = []
    for name, system, seq in SHOWN:
        found = [row for row in read(name)["rows"] if row["system"] == system and row["seq"] == seq]
        (cells,) = as_cells(found)  # exactly one
        rows.append(
            {
                "system": f"{cells['system']} {cells.get('plan', '')}".strip(),
                "tokens": f"{seq // 1024}K",
            }
            | {title: cells[title] for title in ("GPUs", "MFU causal", "of bound", "GPU GiB")}
        )
    return markdown(rows)


BLOCKS = {  # name between <!-- and --> in README.md -> what writes the text behind it
    "claim": claim,
    "table": shown_rows,
    "fits": lambda: markdown(read("scale")["fits"], left=1),
}


def readme(text: str) -> str:
    """Return README.md's text with the blocks that the results files give now."""
    for name, write in BLOCKS.items():
        mark = f"<!-- {name} -->\n"
        start = text.index(mark) + len(mark)
        end = text.index("<!-- end -->", start)
        text = text[:start] + write() + text[end:]
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit 1 if a page is not what the results files give",
    )
    check = parser.parse_args().check

    page = HERE.parent / "README.md"
    texts = {HERE / "README.md": results_readme(), page: readme(page.read_text())}
    if check:
        stale = [
            path for path, text in texts.items() if not path.exists() or path.read_text() != text
        ]
        for path in stale:
            print(f"{path} is not what the results files give. Run python results/report.py")
        if not stale:
            print("Both pages are what the results files give")
        return 1 if stale else 0

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
