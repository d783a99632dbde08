"""Fill README.md, results/*.md and docs/*.md with tables, sentences and pictures of results files.

    python results/report.py            fill all pages, and draw the pictures (pictures.py)
    python results/report.py --check    write nothing; exit 1 if a page is not what it would write

A page is Markdown that people write. In it, this file replaces the lines between `<!-- NAME -->`
and `<!-- end -->`. NAME is a row of BLOCKS, and the words after it are its arguments. Example:

    <!-- rows long cudnn -->        the rows of table long that ran cuDNN's attention
    | what ran | hardware | ...
    <!-- end -->

A results file is results/MONTH-MACHINE/TABLE.jsonl, and bench.py adds rows to it. Each line is a
row: a JSON object with its label, its flags, what was measured, hardware, versions, commit and
command.
If a setting was measured again, the pages show the newest row. The others stay in the file.

Rows without flags are *older*: they were measured before rows recorded their flags. Since then the
engine has been rewritten in large parts, so the pages mark them.

Left out: measuring, which is bench.py's task, and predictions for published results (scale.py).
"""

import argparse
import functools
import json
import re
import shlex
import statistics
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

import pictures
import torch

import memplan
from bench import took_text
from costs import OVERLAP_CHOICES, Plan, nearest_kernel, predict
from hardware import Profile, find_profile
from model import MODELS
from offload import ActivationPlan
from planner import resident_states_in_words
from shard import Factors
from streams import GIB

# ---------------------------------------------------------------------------- rows


def read_rows(table: str = "*") -> list[dict]:
    """Return the rows of a table from all results files, or those of all tables.

    Each row gets two more keys: "table", and "file", its file's path below results/. Raises
    ValueError that names the file and the line that is no row.
    """
    rows = []
    for path in sorted(HERE.glob(f"*/{table}.jsonl")):
        name = f"{path.parent.name}/{path.name}"
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                row = json.loads(line)
                missing = {"label", "flags", "hardware", "versions", "commit"} - set(row)
            except (ValueError, TypeError) as e:
                raise ValueError(f"results/{name}, line {number} is no JSON object: {e}") from None
            if missing:
                raise ValueError(
                    f"results/{name}, line {number} lacks {', '.join(sorted(missing))}"
                )
            rows.append(row | {"table": path.stem, "file": name})
    return rows


def flag_values(flags: str) -> dict[str, str]:
    """Return a row's flags by name. Of a flag that is given twice, the last value holds."""
    words = shlex.split(flags)
    return {flag: value for flag, value in zip(words, words[1:]) if flag.startswith("--")}


KERNEL_NAMES = {"fa4": "FlashAttention-4", "cudnn": "cuDNN"}


def kernel_of(row: dict) -> str:
    """Return the attention kernel that a row ran: "fa4" or "cudnn".

    transformers calls PyTorch's attention, so cuDNN's. Older rows do not record their kernel. They
    ran FlashAttention-4 where it was installed.
    """
    if row["label"].startswith("transformers"):
        return "cudnn"
    installed = "fa4" if "flash-attn-4" in row["versions"] else "cudnn"
    return row.get("kernel") or installed


def kernel_name(row: dict) -> str:
    return KERNEL_NAMES.get(kernel_of(row), kernel_of(row))


def is_older(row: dict) -> bool:
    return row["flags"] is None


def has_rough_clock(row: dict) -> bool:
    """Return whether bench.py's earlier clock probably timed fewer than three steps of a row. It
    chose their number by the predicted time, so a slow peer may have had three.

    That clock began before the GPU had finished the step before. So its first time was too long by
    the work that was still queued. Or it was too short, if the host was still launching an update
    with states on the host. A median of three times is right all the same. Rows of the present
    clock say how many steps were timed.
    """
    by_bench = "train.py" not in row["label"] and not is_older(row)
    return by_bench and "timed_steps" not in row and 3 * (row.get("step_s") or 0) > 20


def may_be_too_short(row: dict) -> bool:
    return has_rough_clock(row) and row.get("os_place") == "host"


def newest(rows: list[dict]) -> list[dict]:
    """Return the rows without those whose setting was measured again later.

    A setting is hardware, nodes, kernel, table, label and flags. Older rows have no flags, so they
    stay.
    """
    last = {}
    for i, row in enumerate(rows):
        key = i
        if not is_older(row):
            flags = tuple(sorted(flag_values(row["flags"]).items()))
            machine = row["hardware"], num_nodes(row), kernel_of(row)
            key = (row["table"], *machine, row["label"], flags)
        last.pop(key, None)  # a row that replaces another one stands where it was measured
        last[key] = row
    return list(last.values())


def num_gpus(row: dict) -> int:
    """Return the GPUs of a row's machine. "4 x NVIDIA H200" are 4."""
    count = re.match(r"(\d+) x ", row["hardware"])
    return int(count[1]) if count else 1


def num_nodes(row: dict) -> int:
    """Return into how many nodes a row's command split the machine (--nodes)."""
    # older rows say it in their label, as "nodes=2"
    said = re.search(r"\bnodes[ =](\d+)", f"{row['command']} {row['label']}")
    return int(said[1]) if said else 1


def gpu_of(row: dict) -> str:
    return re.search("H[12]00", row["hardware"])[0]


def hardware_of(row: dict) -> str:
    """Return a row's hardware in words, for example "4 H200"."""
    return f"{num_gpus(row)} {gpu_of(row)}"


def tokens_text(tokens: int) -> str:
    """Return a length in binary thousands: 65536 is "64K"."""
    return f"{tokens // 1024:,}K" if tokens % 1024 == 0 else f"{tokens:,}"


# ---------------------------------------------------------------------------- labels in words

PEERS = {"fsdp2": "FSDP2", "deepspeed": "DeepSpeed", "transformers": "transformers"}
PEER_WORDS = {  # word of a peer's label -> what it says
    "none": "recomputes nothing",
    "half-selective": "recomputes all but attention in every second layer",
    "three-quarters-selective": "recomputes all but attention in three of four layers",
    "selective": "recomputes all but attention",
    "half": "recomputes every second layer",
    "three-quarters": "recomputes three of four layers",
    "full": "recomputes every layer",
    "host": "model states on the host",
    "fp32": "float32 weights",
    "bf16": "bf16 weights and states",
    "liger": "Liger's kernels",
    "liger-loss": "Liger's loss",
    "fp8": "torchao's float8 products",
    "by-layer": "compiled by layer",
}


OUR_WORDS = (  # what a label of ours says -> in words. What the plan says, too, is left out
    (r"^ours,? ?|,? ?ring \d|,? ?nodes=\d+|,? ?trace$|,? ?M=\d+", ""),
    (r"^as planned$|^(data|mtp|msp|fsp|plain pipeline|pipeline|interleaved)$", ""),
    (r"^(os|g and os|all|by heads|by context)$", ""),
    (r"^states on the (host|GPU)$", r"optimizer states kept on the \1 by hand"),
    (r"^(states on the host|updated) in the open$", "the host's update is exposed"),
    (r"\bspread\b", "param_broadcast"),  # the streams' names in older rows
    (r"\breduce\b", "grad_reduce"),
    (r"^none$", "no overlaps"),
    (r"^plan (\d)$", r"the planner's choice number \1"),
    (r"^--head-groups (\d)$", r"head groups: \1"),
    (r"^[ ,]+|[ ,]+$", ""),
)


def what_ran(row: dict) -> str:
    """Return what a row measured, in words: the system, what its label says, and its plan."""
    system, *words = re.split("[ ,]+", row["label"])
    if system in PEERS:
        name = PEERS[system]
        words = [PEER_WORDS.get(w, w) for w in words if not w.startswith(("M=", "nodes="))]
        return ", ".join([name, *words, *nodes_texts(row)])

    factors = None
    label = row["label"]
    if row.get("p"):
        factors = Factors(row["p"], row["g"], row["os"])
    elif match := re.search(r"(\d+),(\d+),(\d+) ?", label):  # only older labels name the factors
        label = label.replace(match[0], "")
        factors = Factors(*map(int, match.groups()))
    for pattern, words in OUR_WORDS:
        label = re.sub(pattern, words, label)
    texts = [label] if label else []
    texts += nodes_texts(row) + plan_texts(row, factors)
    if row.get("warm_up"):
        texts.append(f"warmed up by {row['warm_up']}")
    return "; ".join(["this project", *texts])


def nodes_texts(row: dict) -> list[str]:
    """Return what a row's command says of nodes, in words; [] if it ran as one node."""
    nodes = num_nodes(row)
    return [f"{nodes} nodes, which sockets connect"] if nodes > 1 else []


def plan_texts(row: dict, factors: Factors | None) -> list[str]:
    """Return what a row's plan says, in words: who shares a sequence, matrices or layers, who holds
    what, and what layers save."""
    texts = []
    sp, ring = row.get("sp", 1), row.get("ring", 1)
    if sp > 1:
        rings = {1: "", sp: " in a ring"}.get(ring, f" in rings of {ring}")
        texts.append(f"{sp} GPUs share the sequence{rings}")
    tp, stages = row.get("tp", 1), row.get("pp", 1)
    if tp > 1:
        texts.append(f"{tp} GPUs share each matrix (mode {row['tp_mode']})")
    if stages > 1:
        virtual = row["pp_chunks"]
        each = f", each of {virtual} virtual stages" if virtual > 1 else ""
        texts.append(f"a pipeline of {stages} stages{each}")
    # GPUs that share matrices or layers do not hold all model states, even if nothing is sharded
    if factors and num_gpus(row) > 1 and (factors != Factors(1, 1, 1) or tp * stages == 1):
        texts.append(factors_text(factors))
    if row.get("recompute") == "full":
        texts.append("every layer is recomputed")
    elif row.get("activations"):
        texts.append(activations_text(ActivationPlan(**row["activations"])))
    elif "activations" in row:
        texts.append("all layers stay on the GPU")
    if row.get("os_place") == "host":
        text = "optimizer states on the host"
        if layers := row.get("resident_states"):
            text += f", {resident_states_in_words(layers, row.get('pp', 1))}"
        texts.append(text)
    return texts


def factors_text(factors: Factors) -> str:
    """Return the sharding factors in words. Example: 1,4,4 is "gradients and optimizer states in 4
    parts"."""
    by_parts = {}
    for name, parts in (
        ("parameters", factors.p),
        ("gradients", factors.g),
        ("optimizer states", factors.os),
    ):
        by_parts.setdefault(parts, []).append(name)
    texts = [
        f"{', '.join(names[:-1])}{' and ' if names[:-1] else ''}{names[-1]} in {parts} parts"
        for parts, names in by_parts.items()
        if parts > 1
    ]
    return ", ".join(texts) or "every GPU holds all model states"


def activations_text(plan: ActivationPlan) -> str:
    """Return what layers save, in words. Example: "20 layers stay on the GPU (74% of their chunks);
    the other 12 swap x, o and 23% of their chunks"."""
    kept = plan.kept_chunks / max(1, plan.resident * plan.chunks)
    text = f"{plan.resident} layers stay on the GPU"
    if plan.resident == plan.layers:
        text = "all layers stay on the GPU"
    if kept == 0:
        recomputes_o = plan.layers_recomputing_attention == plan.layers
        text += " with x only" if recomputes_o else " with x and o only"
    elif kept < 1:
        text += f" with {kept:.0%} of their chunks"
    if plan.stride > 1:
        text += f", one in {plan.stride} with x"
    if plan.swapped_layers:
        share = f", o and {plan.alpha:.0%} of their chunks" if plan.alpha else " and o"
        text += f"; the other {plan.swapped_layers} swap x{share}"
        if plan.lag > 2:
            text += f", lag {plan.lag}"
    if plan.layers_recomputing_attention:
        text += f"; {plan.layers_recomputing_attention} layers run attention twice"
    return text


# ---------------------------------------------------------------------------- tables of rows


def number(name: str, form: str) -> Callable[[dict], str]:
    """Return a function that formats a row's value, "-" if there is none."""

    def text(row: dict) -> str:
        value = row.get(name)
        return "-" if value is None else format(value, form)

    return text


def commit_text(row: dict) -> str:
    marks = {", older": is_older(row), ", rough clock": has_rough_clock(row)}
    return row["commit"] + "".join(mark for mark, holds in marks.items() if holds)


def flags_text(row: dict) -> str:
    if is_older(row):
        return "-"
    return " ".join(f"`{name} {value}`" for name, value in flag_values(row["flags"]).items())


COLUMNS = {  # title -> what it says of a row
    "what ran": what_ran,
    "hardware": hardware_of,
    "model": lambda row: row["model"],
    "tokens": lambda row: tokens_text(row["seq"]),
    "sequences": number("batch", ""),
    "micro-batches": lambda row: str(row.get("micro_batches") or 1),
    "step, s": took_text,
    "predicted, s": number("predicted_s", ".4g"),
    "tokens/s per GPU": number("tgs", ",.0f"),
    "MFU, causal": number("mfu_causal", ".1%"),
    "of kernel bound": number("bound_ratio", ".1%"),
    "GPU GiB": number("gpu_gib", ".1f"),
    # some older rows say 0 where others say nothing
    "host GiB": lambda row: f"{row['host_gib']:.1f}" if row.get("host_gib") else "-",
    "communication, ms": number("communication_ms", ".1f"),
    "exposed, ms": number("exposed_ms", ".1f"),
    "idle, ms": number("idle_ms", ",.0f"),
    "to the host, ms": number("to_host_ms", ",.0f"),
    "from the host, ms": number("from_host_ms", ",.0f"),
    "requests": number("requests", ","),
    "reserved GiB": number("reserved_gib", ".2f"),
    "cache flushes": number("cache_flushes", ","),
    "planned GiB": number("planned_peak_gib", ".2f"),
    "lower bound": number("lower_bound_gib", ".2f"),
    "solved in, s": number("solve_s", ".2f"),
    "hits": number("hit_requests", ".2%"),
    "commit": commit_text,
    "flags": flags_text,
}
LEFT = ("what ran", "hardware", "model", "flags")  # columns that are aligned left
SPEED = ["step, s", "tokens/s per GPU", "MFU, causal", "of kernel bound", "GPU GiB"]
TABLE_COLUMNS = {  # table of bench.py -> its columns between "tokens" and "commit"
    "step": SPEED,
    "machine": [*SPEED, "host GiB"],
    "parallel": ["micro-batches", *SPEED],
    "long": ["sequences", *SPEED, "host GiB"],
    "ring": SPEED,
    "offload": [*SPEED, "host GiB"],
    "plans": ["micro-batches", "step, s", "predicted, s", *SPEED[2:]],
    "shard": ["micro-batches", *SPEED],
    "overlap": ["micro-batches", "step, s", "tokens/s per GPU", "MFU, causal", "GPU GiB"],
    "trace": ["step, s", "communication, ms", "exposed, ms", "GPU GiB"],
    "idle": ["sequences", "step, s", "idle, ms", "to the host, ms", "from the host, ms"],
    "memo": [*SPEED, "reserved GiB", "cache flushes", "planned GiB", "lower bound", "host GiB"],
    "memplan": [
        *["step, s", "requests", "reserved GiB", "cache flushes", "planned GiB", "lower bound"],
        *["solved in, s", "hits"],
    ],
}  # fmt: skip


def markdown(rows: list[dict[str, str]], left: tuple[str, ...] = LEFT) -> str:
    """Return a Markdown table of cells. The columns `left` are aligned left, the others right."""
    titles = list(rows[0])
    lines = [titles, ["---" if title in left else "--:" for title in titles]]
    lines += [row.values() for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def shown(table: str, kernel: str = "") -> list[dict]:
    """Return the rows of a table that the pages show, in order: the newest of each setting."""
    rows = []
    for row in newest(read_rows(table)):
        # older files have the bound as rows of its own; here it is a column
        is_bound = row["label"] in ("kernels alone", "bound")
        other_kernel = kernel and kernel_of(row) != kernel
        # with more micro-batches the overlaps of this table make no difference
        left_out = table == "overlap" and row["micro_batches"] != 1
        if not (is_bound or other_kernel or left_out):
            rows.append(row)
    # rows that are equal in these keep the order in which they were measured
    rows.sort(key=lambda row: (num_gpus(row), gpu_of(row), row["model"], row["seq"]))
    return rows


def rows_table(table: str, kernel: str = "") -> str:
    """Return a table of rows, and the commands that measured them.

    Raises ValueError if there are no such rows, or if they ran several attention kernels: rows of
    one table should differ in one thing.
    """
    if table not in TABLE_COLUMNS:
        raise ValueError(
            f"rows {table}: TABLE_COLUMNS names no columns for it, only for those of "
            f"{', '.join(TABLE_COLUMNS)}"
        )
    rows = shown(table, kernel)
    if not rows:
        raise ValueError(f"rows {table} {kernel}: no results file has such a row")
    kernels = sorted({kernel_of(row) for row in rows})
    if len(kernels) > 1:
        raise ValueError(
            f"rows {table}: these rows ran the attention kernels {', '.join(kernels)}. Write a "
            f"table for each, for example rows {table} {kernels[0]}"
        )
    titles = ["what ran", "hardware", "model", "tokens", *TABLE_COLUMNS[table], "commit", "flags"]
    cells = [{title: COLUMNS[title](row) for title in titles} for row in rows]
    # a column in which no row has a value says nothing
    titles = [title for title in titles if any(line[title] != "-" for line in cells)]
    commands = {}
    for row in rows:
        commands[f"* {hardware_of(row)}, {row['commit']}: `{row['command']}`\n"] = None
    return (
        markdown([{title: line[title] for title in titles} for line in cells])
        + "\n<details><summary>The commands that measured these rows, with the attention of "
        + f"{kernel_name(rows[0])}</summary>\n\n"
        + "".join(commands)
        + "\n</details>\n"
    )


def versions() -> str:
    """Return a list: which versions of packages have measured, in how many rows."""
    counts = {}
    for row in read_rows():
        names = (
            "torch",
            "flash-attn-4",
            "transformers",
            "torchao",
            "deepspeed",
            "nvidia-nccl-cu13",
        )
        texts = [f"{name} {row['versions'][name]}" for name in names if name in row["versions"]]
        text = f"Python {row['versions']['python']}, {', '.join(texts)}"
        counts[text] = counts.get(text, 0) + 1
    return "".join(f"* {text}: {count} rows\n" for text, count in sorted(counts.items()))


# ---------------------------------------------------------------------------- ours and peers

SHOWN = (  # the rows of README.md's table: hardware, model, tokens
    ("1 H100", "1b", "16K"),
    ("1 H100", "1b", "64K"),
    ("1 H100", "llama3-8b", "68 x 8K"),
    ("1 H100", "llama3-8b", "30 x 16K"),
    ("4 H100", "7b", "32K"),
    ("4 H100", "7b", "128K"),
    ("4 H200", "7b", "128K"),
    ("4 H200", "7b", "512K"),
)


def step_text(row: dict) -> str:
    """Return the tokens of a row's step: "64K", or "4 x 4K" for several sequences."""
    sequences = f"{row['batch']} x " if row["batch"] > 1 else ""
    return sequences + tokens_text(row["seq"])


def comparisons() -> dict[tuple[str, str, str], tuple[dict, dict]]:
    """Return {(hardware, model, tokens of a step): (our row, the fastest peer's row)}.

    Both are the newest rows of their settings. Ours is as planned, maybe with planned memory, and
    never a setting that a person chose. So of rows that differ in --host-memory, only those with
    the most count. The peer is the fastest of all that were tried. Both compute products in bf16,
    because a step whose products are in float8 is another one. A peer that calls our attention
    kernels must have run the one that we ran; transformers calls PyTorch's. If a peer came nearer
    to its kernel bound with settings that ran only with another kernel, our next fastest row is
    compared, which ran another kernel. If there is none, the setting is left out.
    """
    rows_of = {}
    for row in newest(read_rows("long")):
        if is_older(row) or not row.get("step_s") or may_be_too_short(row):
            continue
        if "fp8" in row["label"].split():
            continue
        peer = row["label"].startswith(tuple(PEERS))
        if not peer and row["label"] not in ("ours", "ours planned memory"):
            continue
        where = hardware_of(row), row["model"], step_text(row)
        ours, peers = rows_of.setdefault(where, ([], []))
        (peers if peer else ours).append(row)
    found = {}
    for where, (ours, peers) in rows_of.items():
        most = max(map(host_memory, ours), default=0)
        for row in sorted((row for row in ours if host_memory(row) == most), key=step_seconds):
            fair = [
                peer
                for peer in peers
                if peer["label"].startswith("transformers") or kernel_of(peer) == kernel_of(row)
            ]
            if fair:
                best = min(fair, key=step_seconds)
                if not any(is_better_elsewhere(peer, best, fair) for peer in peers):
                    found[where] = row, best
                    break
    return found


def is_better_elsewhere(peer: dict, best: dict, fair: list[dict]) -> bool:
    """Return whether a peer's row suggests that its settings are better than those of the row
    `best`: they did not run with our attention kernel, as the rows `fair` did, and they came nearer
    to their kernel bound."""
    tried = {row["label"] for row in fair}
    return peer["label"] not in tried and peer["bound_ratio"] > best["bound_ratio"]


def step_seconds(row: dict) -> float:
    return row["step_s"]


def host_memory(row: dict) -> int:
    """Return a row's --host-memory in GiB, 0 if it has none."""
    return int(flag_values(row["flags"] or "").get("--host-memory", "0G").removesuffix("G"))


def ratio(ours: dict, peer: dict) -> float:
    """Return a peer's step time over ours: above 1, ours is faster."""
    return peer["step_s"] / ours["step_s"]


def shown_comparisons() -> list[tuple[str, str, str, dict, dict]]:
    """Return SHOWN with our row and the fastest peer's. Raises ValueError for one not measured."""
    found = comparisons()
    for where in SHOWN:
        if where not in found:
            raise ValueError(f"SHOWN: {where} was not measured; these were: {list(found)}")
    return [(*where, *found[where]) for where in SHOWN]


def speed() -> str:
    """Return README.md's table: ours beside the fastest peer."""
    return markdown(
        [
            {
                "hardware": hardware,
                "model": model,
                "tokens": tokens,
                "attention": kernel_name(ours),
                "this project": f"{ours['step_s']:.4g} s, MFU {ours['mfu_causal']:.1%}",
                "fastest peer": f"{peer['step_s']:.4g} s, MFU {peer['mfu_causal']:.1%}",
                "which peer": what_ran(peer),
                "ratio": f"{ratio(ours, peer):.2f}",
            }
            for hardware, model, tokens, ours, peer in shown_comparisons()
        ],
        left=("hardware", "model", "attention", "which peer"),
    )


def longest_row() -> dict:
    """Return the fastest of our rows of the longest sequence that was measured."""
    rows = [
        row
        for row in newest(read_rows("long"))
        if row.get("step_s") and row["label"].startswith("ours")
    ]
    return min(rows, key=lambda row: (-row["seq"], row["step_s"]))


def paragraph(text: str) -> str:
    """Return text in lines of 100 columns."""
    return textwrap.fill(text, 100, break_on_hyphens=False) + "\n"


def claim() -> str:
    """Return sentences: the longest step, and the range of ratios to the fastest peers."""

    def in_words(where: tuple[str, str, str]) -> str:
        gpus, model, tokens = where
        return f"{model} with {tokens} tokens on {gpus}"

    longest = longest_row()
    found = comparisons()
    ratios = {where: ratio(*pair) for where, pair in found.items()}
    least, most = min(ratios, key=ratios.get), max(ratios, key=ratios.get)
    which = "the first step of a run" if "first step" in longest["label"] else "a step"
    return paragraph(
        f"{num_gpus(longest)} {gpu_of(longest)}s train LLaMA-7B on one sequence of "
        f"{longest['seq']:,} tokens: {which} took {longest['step_s']:.0f} s, at "
        f"{longest['mfu_causal']:.1%} causal MFU. In {len(ratios)} settings we compared this "
        "project with the fastest setting of its peers that we measured. The peer took "
        f"{ratios[least]:.2f} to {ratios[most]:.2f} times as long: {ratios[least]:.2f} for "
        f"{in_words(least)}, and {ratios[most]:.2f} for {in_words(most)}."
    )


def normal() -> str:
    """Return a sentence: between which values our MFU and our percent of kernel bound lie."""
    rows = [ours for ours, _ in comparisons().values() if ours["batch"] == 1]
    texts = []
    for name in ("mfu_causal", "bound_ratio"):
        values = [row[name] for row in rows]
        texts.append(f"between {min(values):.0%} and {max(values):.0%}")
    lengths = sorted(row["seq"] for row in rows)
    return paragraph(
        f"{len(rows)} of the settings that we compared with peers have one sequence per step, of "
        f"{tokens_text(lengths[0])} to {tokens_text(lengths[-1])} tokens. There our MFU is "
        f"{texts[0]}, and our percent of kernel bound {texts[1]}. Some steps "
        "with few tokens per GPU are less efficient, above all if optimizer states lie on the host."
    )


def all_comparisons() -> str:
    """Return a table of every comparison with the fastest peer, from few GPUs to many."""

    def size(where: tuple[str, str, str]) -> tuple:
        ours, _ = found[where]
        return *where[:2], ours["seq"], ours["batch"]

    found = comparisons()
    return markdown(
        [
            {
                "hardware": where[0],
                "model": where[1],
                "tokens": where[2],
                "attention": kernel_name(found[where][0]),
                "ours, s": f"{found[where][0]['step_s']:.4g}",
                "fastest peer, s": f"{found[where][1]['step_s']:.4g}",
                "which peer": what_ran(found[where][1]),
                "ratio": f"{ratio(*found[where]):.2f}",
            }
            for where in sorted(found, key=size)
        ],
        left=("hardware", "model", "attention", "which peer"),
    )


PRECISIONS = {  # column -> the labels of our rows that it shows
    "bf16": ("ours",),
    "bf16 states": ("ours bf16 states", "ours bf16 moments"),
    "fp8": ("ours fp8",),
    "fp8, bf16 states": ("ours fp8 and bf16 states", "ours fp8 and bf16 moments"),
}
# TGS of https://github.com/als244/ml_dataflow at d6f941d, in its bench/reproduce_results/
# recorded_data/h100_8b_*.csv, on one H100, of llama3-8b, with at most 112 GiB of host memory (64K:
# 144, 128K: 128). (sequences of our step, tokens of each) -> TGS. It had as many sequences, but 144
# of 4K tokens
ML_DATAFLOW = {
    (136, 4096): 12255,
    (68, 8192): 11406,
    (30, 16384): 10023,
    (12, 32768): 7908,
    (5, 65536): 5487,
    (1, 131072): 3385,
}


def rate_text(row: dict) -> str:
    """Return a row's tokens per second and GPU, with a * if its clock was rough."""
    return f"{row['tgs']:,.0f}" + "*" * has_rough_clock(row)


def precisions(model: str = "") -> str:
    """Return a table of our tokens per second and GPU: products in bf16 or in float8, states in
    float32 or in bf16. All rows ran FlashAttention-4. A setting of one model, or of all, is listed
    if it ran with float8, or if another project has published it. Raises ValueError if there are
    none.

    Rows that may be too short are left out. A * marks the others of the rough clock. The gain of
    float8 is that of two rows of one commit."""
    settings = {}
    for row in newest(read_rows("long")):
        if is_older(row) or not row.get("step_s") or (model and row["model"] != model):
            continue
        if may_be_too_short(row) or kernel_of(row) != "fa4":
            continue
        for column, labels in PRECISIONS.items():
            if row["label"] in labels:
                where = (num_gpus(row), gpu_of(row), row["model"], row["seq"], row["batch"])
                settings.setdefault(where, {})[column] = row
    lines = []
    for _, found in sorted(settings.items()):
        row, *_ = found.values()
        step = row["batch"], row["seq"]
        published = ML_DATAFLOW.get(step) if row["model"] == "llama3-8b" else None
        if not (published or any("fp8" in column for column in found)):
            continue
        gains = [
            found[fp8]["tgs"] / found[bf16]["tgs"]
            for bf16, fp8 in (("bf16", "fp8"), ("bf16 states", "fp8, bf16 states"))
            if bf16 in found and fp8 in found and found[bf16]["commit"] == found[fp8]["commit"]
        ]
        lines.append(
            {"hardware": hardware_of(row), "model": row["model"], "tokens": step_text(row)}
            | {name: rate_text(found[name]) if name in found else "-" for name in PRECISIONS}
            | {"fp8 / bf16": ", ".join(f"{gain:.2f}" for gain in gains) or "-"}
            | {"ml_dataflow, 1 H100": f"{published:,}" if published else "-"}
        )
    if not lines:
        raise ValueError(f"precisions {model}: there are no such rows")
    empty = [title for title in lines[0] if all(line[title] == "-" for line in lines)]
    return markdown([{t: cell for t, cell in line.items() if t not in empty} for line in lines])


CURVES = {  # column -> first part of a row's label
    "bf16": "bf16",
    "`--products fp8`": "fp8",
    "`--moments bf16`": "bf16 moments",
}


def curves() -> str:
    """Return a table of the losses with which training ended: the mean loss of the last 50 steps
    that all runs of a model have, and the validation loss at the end in brackets."""
    runs, shortest = {}, {}
    for row in read_rows("precision"):
        precision, model, seed, *repetition = row["label"].split(", ")
        if repetition:  # of a run that the table has
            continue
        flags = flag_values(row["flags"])
        tens = len(row["mean_losses_of_10_steps"])
        shortest[model] = min(tens, shortest.get(model, tens))
        tokens_per_step = tokens_text(row["seq"] * int(flags["--batch"]))
        run = (f"{model}, {tokens_per_step}", f"{int(flags['--steps']):,}", seed.split()[-1])
        runs.setdefault(run, {})[precision] = row

    def losses(row: dict) -> str:
        last = row["mean_losses_of_10_steps"][: shortest[row["model"]]][-5:]
        validation = f" ({row['val_loss']:.4f})" if row["val_loss"] else ""
        return f"{sum(last) / len(last):.4f}{validation}"

    return markdown(
        [
            dict(zip(("model, tokens per step", "steps", "seed"), run))
            | {column: losses(found[label]) for column, label in CURVES.items()}
            for run, found in runs.items()
        ]
    )


# ---------------------------------------------------------------------------- predictions


def plan_of(row: dict) -> Plan:
    """Return the plan that a row of a results file has run."""
    # older rows lack some of these fields; then Plan's defaults hold
    names = (
        "seq",
        "sp",
        "ring",
        "tp",
        "tp_mode",
        "pp",
        "pp_chunks",
        "batch",
        "micro_batch",
        "head_groups",
        "chunk",
        "os_layout",
        "os_place",
        "resident_states",
        "optimizer",
        "grad_sums",
        "products",
        "keeps_casts",
    )
    model = MODELS[row["model"]]
    update_overlaps = "open" not in row["label"]  # the label says if the host's update does not
    activations = row["activations"]
    plan = Plan(
        model,
        torch.bfloat16,
        row["gpus"],
        row["gpus"] // num_nodes(row),
        overlap=tuple(x for x in OVERLAP_CHOICES if x != "host_update" or update_overlaps),
        recompute="none" if row["recompute"] == "none" else "auto",
        factors=Factors(row["p"], row["g"], row["os"]),
        activations=ActivationPlan(**activations) if activations else activations,
        **{name: row[name] for name in names if name in row},
    )
    if row["recompute"] == "full":  # layers keep only their input, whole or in chunks
        n = plan.reached_layers
        recompute_all = ActivationPlan(n, plan.chunks, n, layers_recomputing_attention=n)
        plan = replace(plan, activations=recompute_all)
    return plan


def kind_of(row: dict, plan: Plan, profile: Profile, kernel: str) -> str:
    """Return which of pictures.MARKERS a row is: what was known when it was predicted."""
    assumed_network = plan.ranks > 1 and "collectives" in profile.sources
    other_kernel = kernel not in ("auto", nearest_kernel(profile, kernel))
    if assumed_network or other_kernel:
        return pictures.ELSEWHERE
    return "held out" if row.get("held_out") else "seen before"


@functools.cache  # several blocks need the predictions, and they take seconds
def predicted_rows() -> tuple[dict, ...]:
    """Return the measured rows whose plan is known, and what the planner predicts for them now.

    Rows with states on the host are left out if the host then kept more bytes than it does now:
    they copied more, and ran another program than the one that is predicted. Rows whose GPUs act as
    several nodes are left out, too: no profile has the rate of sockets inside a machine.
    """
    rows = []
    for row in read_rows():
        plan_is_known = row.get("predicted_s") and row.get("step_s")
        if not plan_is_known or may_be_too_short(row) or num_nodes(row) > 1:
            continue
        plan = plan_of(row)
        # a CUDA graph needs no launches of kernels, which predictions count
        if "planned memory" in row["label"] and plan.on_one_stream:
            continue

        profile = find_profile(row["hardware"], plan.per_node)
        kernel = row.get("kernel") or "auto"  # older rows lack it: they ran the best one
        # older rows do not say their host's processor: the profile's first one counts
        predicted = predict(plan, profile, kernel, row.get("processor", ""))
        if plan.os_place == "host":
            host_gib = plan.per_node * predicted.host_bytes / GIB
            if abs(row["host_gib"] / host_gib - 1) > 0.01:
                continue
        rows.append(
            {
                "question": f"K, {row['model']} {row['seq'] // 1024}K",
                **row,
                "gpu": gpu_of(row),
                "kind": kind_of(row, plan, profile, kernel),
                "now_s": predicted.step_s,
                "now_gib": predicted.gpu_bytes / GIB,
            }
        )
    return tuple(sorted(rows, key=lambda r: (r["question"], r["gpu"], r["gpus"], r["step_s"])))


def errors_of(kind: str) -> list[float]:
    """Return the errors of the predicted seconds of rows of this kind, from small to large."""
    return sorted(abs(r["now_s"] / r["step_s"] - 1) for r in predicted_rows() if r["kind"] == kind)


def errors() -> str:
    """Return a table: how far predictions of step times are off, by what was known before."""
    lines = []
    for kind in pictures.MARKERS:
        found = errors_of(kind)
        lines.append(
            {
                "rows": kind,
                "how many": str(len(found)),
                "error of the step time, median": f"{statistics.median(found):.1%}",
                "worst": f"{found[-1]:.1%}",
            }
        )
    return markdown(lines, left=("rows",))


def held_out() -> str:
    """Return a table of the rows whose settings were chosen before they were measured."""
    return markdown(
        [
            {
                "question": r["question"],
                "set by hand": r["label"],
                "model": r["model"],
                "tokens": tokens_text(r["seq"]),
                "hardware": hardware_of(r),
                "measured s": f"{r['step_s']:.4g}",
                "predicted s": f"{r['now_s']:.4g}",
                "error of s": f"{r['now_s'] / r['step_s'] - 1:+.1%}",
                "measured GiB": f"{r['gpu_gib']:.2f}",
                "predicted GiB": f"{r['now_gib']:.2f}",
                "error of GiB": f"{r['now_gib'] / r['gpu_gib'] - 1:+.1%}",
            }
            for r in predicted_rows()
            if r["kind"] == "held out"
        ],
        left=("question", "set by hand", "model", "hardware"),
    )


def scale_table(name: str) -> str:
    """Return a table of scale.json, which scale.py writes. Raises ValueError for an unknown one."""
    tables = json.loads((HERE / "scale.json").read_text())
    if name not in tables:
        raise ValueError(f"scale {name}: scale.json has only {', '.join(tables)}")
    rows = tables[name]
    return markdown(rows, left=(*LEFT, *list(rows[0])[:1], "system", "overlaps", "layers"))


# ---------------------------------------------------------------------------- the index's answers


def planned_and_caching() -> tuple[dict, float]:
    """Return the row of a step at planned addresses, and the GiB that PyTorch's caching allocator
    reserved for the same requests. The step is 7B's with 64K tokens."""
    rows = [row for row in read_rows("memplan") if row["model"] == "7b" and row["seq"] == 2**16]
    by_label = {row["label"]: row for row in rows}
    planned = by_label["planned"]
    # both rows hold the same model states, which are no part of the plan
    outside_plan = planned["reserved_gib"] - planned["planned_peak_gib"]
    return planned, by_label["caching allocator"]["reserved_gib"] - outside_plan


def answer(topic: str) -> str:
    """Return the sentence with which results/README.md answers a question."""
    found = comparisons()
    ratios = sorted(ratio(*pair) for pair in found.values())
    held = errors_of("held out")
    exposed = max(row["exposed_ms"] / row["communication_ms"] for row in shown("trace"))
    planned, caching_gib = planned_and_caching()
    longest = longest_row()
    sentences = {
        "speed": f"In {len(ratios)} comparisons, the fastest peer takes {ratios[0]:.2f} to "
        f"{ratios[-1]:.2f} times as long as this project, {statistics.median(ratios):.2f} times in "
        "the median.",
        "length": f"{num_gpus(longest)} {gpu_of(longest)}s have run a step of LLaMA-7B on "
        f"{longest['seq']:,} tokens, in {longest['step_s']:.0f} s.",
        "communication": f"In a profiled step of four GPUs, at most {exposed:.0%} of it is "
        "exposed.",
        "predictions": f"For {len(held)} settings that were chosen before they were measured, the "
        f"planner's seconds are {statistics.median(held):.1%} off in the median, and "
        f"{held[-1]:.1%} at worst.",
        "memory": f"The tensors of a step of 7B with {tokens_text(planned['seq'])} tokens take "
        f"{planned['planned_peak_gib']:.1f} GiB at planned addresses, where the lower bound is "
        f"{planned['lower_bound_gib']:.1f}. PyTorch's caching allocator reserves {caching_gib:.1f} "
        "GiB for them.",
    }
    if topic not in sentences:
        raise ValueError(f"answer {topic}: there are only {', '.join(sentences)}")
    return paragraph(sentences[topic])


# ---------------------------------------------------------------------------- pages

BLOCKS = {  # first word between <!-- and --> -> what writes the lines behind it, from other words
    "claim": claim,
    "normal": normal,
    "speed": speed,
    "comparisons": all_comparisons,
    "precisions": precisions,
    "curves": curves,
    "rows": rows_table,
    "versions": versions,
    "errors": errors,
    "held_out": held_out,
    "scale": scale_table,
    "answer": answer,
}
MARK = re.compile(r"^<!-- (?!end)([^>\n]*) -->\n", re.M)
END = "<!-- end -->\n"


def pages() -> list[Path]:
    """Return all pages that may have blocks."""
    return [ROOT / "README.md", *sorted(HERE.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]


def filled(text: str) -> str:
    """Return a page's text with the blocks that the results files give now.

    Raises ValueError for an unknown block, and for one that has no end.
    """
    done = ""
    while mark := MARK.search(text):
        name, *arguments = mark[1].split()
        if name not in BLOCKS:
            raise ValueError(
                f"<!-- {mark[1]} -->: there is no such block, only {', '.join(BLOCKS)}"
            )
        behind = text[mark.end() :]
        old, end, rest = behind.partition(END)
        if not end or MARK.search(old):
            raise ValueError(f"<!-- {mark[1]} --> has no line {END.strip()} before the next block")
        done += text[: mark.end()] + BLOCKS[name](*arguments) + END
        text = rest
    return done + text


def fill(page: Path) -> str:
    """Return a page's text as `filled` gives it. Raises ValueError that names the page."""
    try:
        return filled(page.read_text())
    except ValueError as e:
        raise ValueError(f"{page.relative_to(ROOT)}: {e}") from None


def draw_pictures() -> None:
    """Draw all pictures of the pages."""
    bars = [
        (f"{hardware}, {model}, {tokens}", ours, peer, what_ran(peer))
        for hardware, model, tokens, ours, peer in shown_comparisons()
    ]
    pictures.draw_speed(HERE / "speed.svg", bars)
    pictures.draw_layer(HERE / "layer.svg")
    pictures.draw_shards(HERE / "shards.svg")
    profiled = read_rows("trace")[-1]  # bench.py writes the profile of its last row
    pictures.draw_timeline(
        HERE / "timeline.svg",
        (HERE / profiled["file"]).with_name("trace.json.gz"),
        f"LLaMA-{profiled['model'].upper()}, {tokens_text(profiled['seq'])} tokens on each of "
        f"{hardware_of(profiled)}; {what_ran(profiled).removeprefix('this project; ')}",
        1 - profiled["exposed_ms"] / profiled["communication_ms"],
    )
    pictures.draw_predictions(HERE / "predictions.svg", predicted_rows())

    planned, caching_gib = planned_and_caching()
    trace = (HERE / planned["file"]).with_name("memplan-64k.csv")
    _, buffers = memplan.read_trace(str(trace))
    pictures.draw_memory(
        HERE / "memory.svg",
        buffers,
        memplan.solve(buffers),
        caching_gib,
        layers=range(8, 11),  # layers 8 and 9 swap, layer 10 is kept
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit 1 if a page is not what the results files give",
    )
    check = parser.parse_args().check
    try:
        texts = {page: fill(page) for page in pages()}
    except ValueError as e:
        print(f"report.py: error: {e}", file=sys.stderr)
        return 2

    if check:
        stale = [page for page, text in texts.items() if page.read_text() != text]
        for page in stale:
            print(f"{page} is not what the results files give. Run python results/report.py")
        if not stale:
            print("All pages are what the results files give")
        return 1 if stale else 0

    for page, text in texts.items():
        page.write_text(text)
    draw_pictures()
    return 0


if __name__ == "__main__":
    sys.exit(main())
