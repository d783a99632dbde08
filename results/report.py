"""Write what is shown of the files in results/: README.md here, the pictures, README.md's numbers.

    python results/report.py            write all of them
    python results/report.py --check    write nothing; exit 1 if a text is not what it would write

A results file is a JSON object of bench.py: command, hardware, versions, commit, and rows, whose
kind of table `bench.layout` tells. A text between the marks `<!-- NAME -->` and `<!-- end -->` of
the project's README.md is of BLOCKS. Everything follows from the files, so that it cannot drift.

Left out: measuring, which is bench.py's; memplan-*.png, which `bench.py memplan` draws, since no
file holds the addresses that PyTorch gave.
"""
import argparse
import gzip
import json
import re
import sys
from pathlib import Path
from textwrap import fill

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle

from bench import cells, layout

# ---------------------------------------------------------------------------- tables

TOPICS = {  # topic -> bench.py's table -> what it shows, and how to read it
    "One machine": {
        "step": "Shows what `python bench.py` finds on a machine: a matrix product and attention as"
        " a share of the data sheet, a few layers alone (the bound: no embedding, head, loss,"
        " optimizer or communication), then steps of the largest model that fits.",
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
        " with everything else allocated as planned. Model states stay on the GPUs. *8 x H200* is a"
        " plan that was not run; there host memory binds, and most layers drop even their attention"
        " output.",
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
INTRO = """# Results

Written by `python results/report.py` from the files beside it; do not edit. MFU counts model FLOPs,
recomputation never: *causal* counts half of the attention matrix, *full* all of it. TGS is tokens
per GPU and second. *of bound* is the ratio to what the kernels reach alone in the same run, a row
above. GiB are the most of a GPU, and of the machine's host memory. What does not fit is a row.
A command is as of the commit that measured it: later ones may name things differently.
"""


def read(name: str) -> dict:
    return json.loads((HERE / f"{name}.json").read_text())


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """Return a table; all but the first two columns are to the right."""
    lines = [head, ["---"] * 2 + ["--:"] * (len(head) - 2), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def section(path: Path) -> str:
    """Return the section of a results file."""
    r = read(path.stem)
    head, write = layout(r["rows"])
    versions = ", ".join(f"{k} {v}" for k, v in r["versions"].items())
    return (f"\n### {path.name}\n\n`{r['command']}` as of commit `{r['commit']}`, "
            f"{r['hardware']}; {versions}.\n\n" + markdown(head, [write(x) for x in r["rows"]]))


def results_readme() -> str:
    files: dict[str, list[Path]] = {}
    for path in sorted(HERE.glob("*.json")):
        table = re.search(r"bench\.py (\w+)", read(path.stem)["command"])[1]
        files.setdefault(table, []).append(path)
    text = INTRO
    for topic, tables in TOPICS.items():
        text += f"\n## {topic}\n"
        for table, says in tables.items():
            text += f"\n**{table}.** {says}\n" + "".join(map(section, files.pop(table, [])))
    assert not files, f"TOPICS has no table {sorted(files)}"
    return text


# ---------------------------------------------------------------------------- README.md's numbers

LONG = ("long-32k-64k-128k-4xh200", "long-256k-4xh200", "long-512k-4xh200")
NINE = (  # file, system, tokens
    ("long-512k-4xh200", "ours", 2**19), ("long-256k-4xh200", "ours", 2**18),
    ("long-256k-4xh200", "fsdp2 ZeRO-3, Ulysses, full", 2**18),
    ("long-256k-80g-4xh200", "ours", 2**18),
    ("long-256k-80g-4xh200", "ours, full recompute", 2**18),
    ("long-32k-64k-128k-4xh200", "ours", 2**15), ("long-176k-h200", "ours", 176 * 2**10),
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
                      str(row["gpus"]), text[5], text[7], text[8]])
    return markdown(["system", "tokens", "GPUs", "causal MFU", "of bound", "GPU GiB"], lines)


BLOCKS = {"claim": claim, "table": nine_rows}


def readme(text: str) -> str:
    """Return README.md with its blocks as the files have them."""
    for name, write in BLOCKS.items():
        start = text.index(mark := f"<!-- {name} -->\n") + len(mark)
        text = text[:start] + write() + text[text.index("<!-- end -->", start):]
    return text


# ---------------------------------------------------------------------------- pictures

BLUE, ORANGE, GREEN, RED, GREY = "#3b6ea8", "#d9822b", "#4f9a62", "#b5485d", "#8a8f98"
PURPLE, TEAL = "#7a5ea8", "#2a8c95"
PALE = {BLUE: "#cfdff0", ORANGE: "#f8dfc4", GREEN: "#d2e8d7", RED: "#efd0d6", GREY: "#e6e8eb",
        PURPLE: "#ded6ee", TEAL: "#cbe7e9"}


def figure(height: float, rows: int = 1, cols: int = 1, **options):
    """Return a figure of 1800 pixels' width, to be read at 900, and its axes."""
    plt.rcParams.update({"font.size": 9, "font.family": "DejaVu Sans", "axes.spines.top": False,
                         "axes.spines.right": False, "legend.frameon": False})
    return plt.subplots(rows, cols, figsize=(9, height), dpi=200, **options)


def save(fig, name: str) -> None:
    fig.savefig(HERE / name, facecolor="white", metadata={"Software": None})
    plt.close(fig)


def box(ax, x: float, y: float, width: float, height: float, color: str, text: str = "",
        **style) -> None:
    """Draw a rectangle with its text in the middle."""
    style = {"facecolor": PALE[color], "edgecolor": color, "linewidth": 1} | style
    ax.add_patch(Rectangle((x, y), width, height, **style))
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center")


def arrow(ax, start: tuple[float, float], end: tuple[float, float], text: str = "") -> None:
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=10, color="#333"))
    ax.text((start[0] + end[0]) / 2, start[1] + 0.12, text, ha="center", va="bottom")


def draw_mfu() -> None:
    """Draw causal MFU by sequence length: bars, and the bound over them."""
    rows, (fig, ax) = long_rows(), figure(3.6)
    seqs = sorted(rows["ours"])
    for k, (system, color) in enumerate((("ours", BLUE), ("fsdp2", ORANGE))):
        for i, r in ((seqs.index(s), r) for s, r in rows[system].items()):
            ax.bar(i + 0.36 * k - 0.18, 100 * r["mfu_causal"], 0.34, color=color)
            ax.text(i + 0.36 * k - 0.18, 100 * r["mfu_causal"] - 1, f"{r['mfu_causal']:.1%}",
                    ha="center", va="top", color="white", fontweight="bold")
    for i, r in ((seqs.index(s), r) for s, r in rows["kernels"].items()):
        ax.hlines(100 * r["mfu_causal"], i - 0.38, i + 0.38, color="#222", linewidth=1.6)
        ax.text(i, 100 * r["mfu_causal"] + 0.8, f"{r['mfu_causal']:.1%}", ha="center", va="bottom")
    for s in set(seqs) - set(rows["fsdp2"]):
        ax.text(seqs.index(s) + 0.22, 1, "not\nmeasured", ha="center", va="bottom", color=GREY,
                fontsize=8)
    ax.set(xticks=range(len(seqs)), xticklabels=[f"{s // 1024}K" for s in seqs], ylim=(0, 70),
           xlabel="tokens of the sequence", ylabel="causal MFU, %")
    ax.set_title("LLaMA-7B, one sequence over 4 H200s, bf16", fontsize=10, loc="left", pad=26)
    ax.legend([plt.Line2D([], [], color="#222"), Patch(color=BLUE), Patch(color=ORANGE)],
              ["kernels alone (bound)", "this project", "FSDP2, Ulysses, full recomputation"],
              loc="lower left", bbox_to_anchor=(-0.01, 1), ncol=3, borderaxespad=0.2)
    fig.tight_layout()
    save(fig, "mfu.png")


KEPT = (("kept", "last k layers", GREEN, "GPU", "GPU", "GPU"),
        ("swapped", "the other layers", BLUE, "host", "host", "host"),
        ("recomputed", "any layer", ORANGE, "GPU or host", "again: pre", "again: post"))


def draw_layer() -> None:
    """Draw a layer cut in three, where its tensors lie until backward, and the rounding buffers."""
    fig, ax = figure(5.9)
    ax.set(xlim=(-0.1, 18), ylim=(0.6, 12.6))
    ax.axis("off")
    fig.subplots_adjust(0.01, 0.01, 0.99, 0.99)
    ax.text(0, 12.2, "A layer, cut in three; its tokens in chunks", fontweight="bold")
    for j in range(3):
        y = 11.1 - 0.75 * j
        ax.text(0, y + 0.3, f"chunk {j}", va="center")
        box(ax, 2.9, y, 3.4, 0.6, GREY, "block.pre")
        box(ax, 12.1, y, 3.4, 0.6, GREY, "block.post")
        for a, b in ((1.9, 2.8), (6.4, 7.4), (11.0, 12.0), (15.6, 16.5)):
            arrow(ax, (a, y + 0.3), (b, y + 0.3))
    box(ax, 7.5, 9.6, 3.4, 2.1, RED, "attention\n(all tokens,\nsome heads)")
    for x, text in ((2.35, "x"), (6.9, "q, k, v"), (11.5, "o, lse"), (16.05, "y")):
        ax.text(x, 11.8, text, ha="center", va="bottom", style="italic")
    for x, text in ((4.6, "norm, projection, rotary"), (9.2, "the only part that mixes tokens"),
                    (13.8, "projection, norm, SwiGLU")):
        ax.text(x, 9.3, text, ha="center", va="top", color="#444", fontsize=8)
    ax.text(0, 8.1, "Where a chunk's tensors lie until backward", fontweight="bold")
    for x, text in ((6.3, "x, o, lse"), (10.5, "q, k, v"), (14.9, "h, gate|up")):
        ax.text(x, 7.55, text, ha="center", style="italic")
    for j, (name, where, color, *places) in enumerate(KEPT):
        y = 6.7 - 0.75 * j
        ax.text(0, y + 0.3, f"{name} ({where})", va="center")
        for x, width, place in zip((4.6, 8.4, 12.7), (3.4, 4.2, 4.4), places):
            same = GREY if place == "GPU or host" else color
            box(ax, x, y, width, 0.6, same, place)
    ax.text(0, 4.2, "Two rounding buffers: layer i uses buffer i mod 2", fontweight="bold")
    lanes = {"forward  compute": [(n, f"layer {n}", GREY) for n in (4, 5, 6, 7)],
             "offload": [(n + 1, f"{n} to host", BLUE) for n in (4, 5, 6)],
             "backward  compute": [(11 - n, f"layer {n}", GREY) for n in (7, 6, 5, 4)],
             "prefetch": [(11 - n - 1, f"{n} to buffer {n % 2}", (PURPLE, TEAL)[n % 2])
                          for n in (6, 5, 4)]}
    for k, (name, blocks) in enumerate(lanes.items()):
        y = 3.3 - 0.75 * k - 0.25 * (k > 1)
        ax.text(3.9, y + 0.3, name, va="center", ha="right")
        for place, text, color in blocks:
            box(ax, 4.6 + 3.3 * (place - 4), y, 3.2, 0.6, color, text)
    save(fig, "layer.png")


def draw_shards() -> None:
    """Draw which part of each kind of states the ranks of one node hold, under two p, g, os."""
    fig, axes = figure(4.4, 1, 2)
    fig.subplots_adjust(0.105, 0.01, 0.995, 0.94, wspace=0.08)
    maps = {"a": plt.get_cmap("Blues"), "b": plt.get_cmap("Oranges")}
    for ax, (p, g, os) in zip(axes, ((2, 2, 4), (2, 8, 8))):
        ax.set(xlim=(-0.1, 8.1), ylim=(-2.1, 10.6))
        ax.axis("off")
        ax.set_title(f"p = {p}, g = {g}, os = {os}", fontweight="bold", fontsize=10)
        for k, (kind, count) in enumerate((("parameters\n2P/p bytes", p), ("gradients\n2P/g", g),
                                           ("optimizer\n12P/os", os))):
            low = 7.2 - 3.6 * k
            if ax is axes[0]:
                ax.text(-0.3, low + 1.4, kind, ha="right", va="center")
            for rank in range(8):
                shard, part, parts = "ab"[rank % p], rank % count // p, count // p
                height = 2.8 / count
                y = low + 2.8 - height * (parts * (rank % p) + part + 1)
                box(ax, rank + 0.05, low, 0.9, 2.8, GREY, facecolor="#f4f5f6", linewidth=0.6)
                shade = 0.7 if parts == 1 else 0.85 - 0.2 * part
                box(ax, rank + 0.05, y, 0.9, height, GREY, facecolor=maps[shard](shade),
                    linewidth=0)
                ax.text(rank + 0.5, y + height / 2, shard + str(part) * (parts > 1), ha="center",
                        va="center_baseline", fontsize=7.5, color=("white", "#222")[shade < 0.5])
        for rank in range(8):
            ax.text(rank + 0.5, -0.35, f"rank {rank}", ha="center", va="top", fontsize=7.5)
        gathers = " ".join(f"{{{r},{r + 1}}}" for r in range(0, 8, 2))
        groups = " ".join("{" + ",".join(map(str, range(r, r + os))) + "}" for r in range(0, 8, os))
        ax.text(0, -1.05, f"gather parameters in {gathers}\nos group {groups}", va="top",
                fontsize=8)
    save(fig, "shards.png")


KINDS = (("flash", "attention", RED), ("nvjet", "matrix product", BLUE),
         ("AllGather", "all-gather of weights", GREEN),
         ("ReduceScatter", "reduce-scatter of gradients", ORANGE),
         ("", "norm, rotary, SwiGLU, copies", GREY))
STREAMS = (("flash", "compute"), ("AllGather", "param_gather"), ("ReduceScatter", "grad_scatter"),
           ("AllReduce", "grad_reduce"), ("Broadcast", "param_broadcast"))


def read_trace() -> list[tuple[str, int, float, float]]:
    """Return what ran on the GPU in order: the stream's name, the kind, start and duration in ms.
    A stream is named by the first of STREAMS that runs on it."""
    with gzip.open(HERE / "trace.json.gz") as f:
        events = [e for e in json.load(f)["traceEvents"]
                  if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    events.sort(key=lambda e: e["ts"])
    names: dict[int, str] = {}
    for part, name in STREAMS:
        for tid in {e["tid"] for e in events if part in e["name"]}:
            names.setdefault(tid, name)
    kind = {e["name"]: next(k for k, row in enumerate(KINDS) if row[0] in e["name"])
            for e in events}
    first = events[0]["ts"]
    return [(names[e["tid"]], kind[e["name"]], (e["ts"] - first) / 1e3, e["dur"] / 1e3)
            for e in events]


def layer_starts(events: list, layers: int = 32) -> tuple[dict[int, float], dict[int, float]]:
    """Return when each layer's forward and backward start in the trace's second step. In forward
    the product before attention is a layer's first; in backward the third after the attention of
    the layer that follows it, whose own projection takes two."""
    compute = [(kind, start, ms) for stream, kind, start, ms in events if stream == "compute"]
    products = [start for kind, start, _ in compute if kind == 1]
    attention = [start for kind, start, ms in compute if kind == 0 and ms > 0.2]
    forward, backward = attention[2 * layers : 3 * layers], attention[3 * layers :]
    return ({i: max(x for x in products if x < start) for i, start in enumerate(forward)},
            {layers - 2 - i: [x for x in products if x > start][2]
             for i, start in enumerate(backward[:-1])})


def draw_timeline() -> None:
    """Draw two layers' forward and backward of trace.json.gz, a line for each stream."""
    events = read_trace()
    fig, axes = figure(4.7, 2, 1)
    for ax, starts, name, order in zip(axes, layer_starts(events), ("forward", "backward"),
                                       ((10, 11, 12), (12, 11, 10))):
        left, right = starts[order[0]], starts[order[2]]
        streams = [s for s in ("compute", "param_gather", "grad_scatter")
                   if s != "grad_scatter" or name == "backward"]
        for stream, kind, start, ms in events:
            if left - ms < start < right and stream in streams:
                y = len(streams) - 1 - streams.index(stream)
                ax.broken_barh([(start - left, ms)], (y - 0.36, 0.72), facecolor=KINDS[kind][2],
                               edgecolor="white", linewidth=0.25)
        for i in order[:2]:
            ax.axvline(starts[i] - left, color="#222", linewidth=1)
            ax.text(starts[i] - left, len(streams) - 0.45, f" layer {i}'s {name}", va="bottom")
        ax.set(yticks=range(len(streams)), yticklabels=streams[::-1], xlim=(0, right - left),
               ylim=(-0.6, len(streams) - 0.5), xlabel="ms")
        ax.tick_params(axis="y", length=0)
    fig.legend([Patch(color=color) for *_, color in KINDS], [text for _, text, _ in KINDS],
               loc="upper center", ncol=5, columnspacing=1.2, handlelength=1.2, fontsize=8.5)
    fig.tight_layout(rect=(0, 0, 1, 0.94))
    save(fig, "timeline.png")


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
    for draw in (draw_mfu, draw_layer, draw_shards, draw_timeline):
        draw()
    return 0


if __name__ == "__main__":
    sys.exit(main())
