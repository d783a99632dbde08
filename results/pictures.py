"""Draw the pictures of both README.md, as PNG files of 1800 pixels' width (one 1080), read at 900.

    causal MFU by length    from rows of results files
    a layer, who holds what from what offload.py and shard.py say
    streams                 from a trace of torch.profiler
    scale                   from predictions in scale.json, published points beside them

`python results/report.py` calls these; the same files give the same pictures, to the byte.
"""
import gzip
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle

BLUE, ORANGE, GREEN, RED, GREY = "#3b6ea8", "#d9822b", "#4f9a62", "#b5485d", "#8a8f98"
PURPLE, TEAL = "#7a5ea8", "#2a8c95"
PALE = {BLUE: "#cfdff0", ORANGE: "#f8dfc4", GREEN: "#d2e8d7", RED: "#efd0d6", GREY: "#e6e8eb",
        PURPLE: "#ded6ee", TEAL: "#cbe7e9"}


def figure(height: float, rows: int = 1, cols: int = 1, dpi: int = 200):
    """Return a figure and its axes."""
    plt.rcParams.update({"font.size": 9, "font.family": "DejaVu Sans", "axes.spines.top": False,
                         "axes.spines.right": False, "legend.frameon": False})
    return plt.subplots(rows, cols, figsize=(9, height), dpi=dpi)


def save(fig, path: Path) -> None:
    fig.savefig(path, facecolor="white", metadata={"Software": None})
    plt.close(fig)


def box(ax, x: float, y: float, width: float, height: float, color: str, text: str = "",
        **style) -> None:
    """Draw a rectangle with its text in the middle."""
    style = {"facecolor": PALE[color], "edgecolor": color, "linewidth": 1} | style
    ax.add_patch(Rectangle((x, y), width, height, **style))
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center")


def arrow(ax, start: tuple[float, float], end: tuple[float, float]) -> None:
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=10, color="#333"))


def draw_mfu(path: Path, rows: dict[str, dict[int, dict]]) -> None:
    """Draw causal MFU by sequence length: bars, and the bound over them. rows: system (ours, fsdp2,
    kernels) -> tokens -> row of a results file."""
    fig, ax = figure(3.6)
    seqs = sorted(rows["ours"])
    for i, seq in enumerate(seqs):
        bound = 100 * rows["kernels"][seq]["mfu_causal"]
        ax.hlines(bound, i - 0.38, i + 0.38, color="#222", linewidth=1.6)
        ax.text(i, bound + 0.8, f"{bound:.1f}%", ha="center", va="bottom")
        for x, system, color in ((i - 0.18, "ours", BLUE), (i + 0.18, "fsdp2", ORANGE)):
            if seq not in rows[system]:
                ax.text(x + 0.04, 1, "not\nmeasured", ha="center", color=GREY, fontsize=8)
                continue
            mfu = 100 * rows[system][seq]["mfu_causal"]
            ax.bar(x, mfu, 0.34, color=color)
            ax.text(x, mfu - 1, f"{mfu:.1f}%", ha="center", va="top", color="white",
                    fontweight="bold")
    ax.set(xticks=range(len(seqs)), xticklabels=[f"{s // 1024}K" for s in seqs], ylim=(0, 70),
           xlabel="tokens of the sequence", ylabel="causal MFU, %")
    ax.set_title("LLaMA-7B, one sequence over 4 H200s, bf16", fontsize=10, loc="left", pad=26)
    ax.legend([plt.Line2D([], [], color="#222"), Patch(color=BLUE), Patch(color=ORANGE)],
              ["kernels alone (bound)", "this project", "FSDP2, Ulysses, full recomputation"],
              loc="lower left", bbox_to_anchor=(-0.01, 1), ncol=3, borderaxespad=0.2)
    fig.tight_layout()
    save(fig, path)


def draw_predictions(path: Path, rows: list[dict]) -> None:
    """Predicted over measured seconds and GiB of a step, on the line where they are equal."""
    fig, axes = plt.subplots(1, 2, figsize=(9, 4.2))
    for ax, measured, predicted, title in ((axes[0], "step_s", "now_s", "seconds of a step"),
                                           (axes[1], "gpu_gib", "now_gib", "GiB of a GPU")):
        for held, marker in ((False, "o"), (True, "s")):
            points = [(r[measured], r[predicted]) for r in rows if r["held_out"] == held]
            name = "held out" if held else "seen before"
            ax.plot(*zip(*points), marker, markersize=5, label=name)
        found = [r[measured] for r in rows]
        ends = np.array([0.8 * min(found), 1.25 * max(found)])
        ax.plot(ends, ends, color="0.6", linewidth=1, zorder=0)
        ax.fill_between(ends, 0.95 * ends, 1.05 * ends, color="0.9", zorder=0, label="5 %")
        scale = "log" if measured == "step_s" else "linear"
        ax.set(xscale=scale, yscale=scale, xlabel=f"measured {title}",
               ylabel=f"predicted {title}")
        ax.legend(frameon=False)
    save(fig, path)


def draw_layer(path: Path) -> None:
    """Draw a layer cut in three, where its tensors lie until backward, and the rounding buffers."""
    fig, ax = figure(5.9)
    ax.set(xlim=(-0.1, 18), ylim=(0.6, 12.6))
    ax.axis("off")
    fig.subplots_adjust(0.01, 0.01, 0.99, 0.99)
    draw_cut(ax)
    draw_places(ax)
    draw_rounding_buffers(ax)
    save(fig, path)


def draw_cut(ax) -> None:
    """Draw the three parts of a layer, two of them chunk by chunk."""
    ax.text(0, 12.2, "A layer, cut in three; its tokens in chunks", fontweight="bold")
    for j in range(3):
        y = 11.1 - 0.75 * j
        ax.text(0, y + 0.3, f"chunk {j}", va="center")
        box(ax, 2.9, y, 3.4, 0.6, GREY, "block.pre")
        box(ax, 12.1, y, 3.4, 0.6, GREY, "block.post")
        for start, end in ((1.9, 2.8), (6.4, 7.4), (11.0, 12.0), (15.6, 16.5)):
            arrow(ax, (start, y + 0.3), (end, y + 0.3))
    box(ax, 7.5, 9.6, 3.4, 2.1, RED, "attention\n(all tokens,\nsome heads)")
    for x, text in ((2.35, "x"), (6.9, "q, k, v"), (11.5, "o, lse"), (16.05, "y")):
        ax.text(x, 11.8, text, ha="center", va="bottom", style="italic")
    for x, text in ((4.6, "norm, projection, rotary"), (9.2, "the only part that mixes tokens"),
                    (13.8, "projection, norm, SwiGLU")):
        ax.text(x, 9.3, text, ha="center", va="top", color="#444", fontsize=8)


def draw_places(ax) -> None:
    """Draw a line for each treatment of a chunk, a box for each place."""
    ax.text(0, 8.1, "Where a chunk's tensors lie until backward", fontweight="bold")
    for x, text in ((6.3, "x, o, lse"), (10.5, "q, k, v"), (14.9, "h, gate|up")):
        ax.text(x, 7.55, text, ha="center", style="italic")
    lines = [
        ("kept (last k layers)", GREEN, ("GPU", "GPU", "GPU")),
        ("swapped (the other layers)", BLUE, ("host", "host", "host")),
        ("recomputed (any layer)", ORANGE, ("GPU or host", "again: pre", "again: post")),
    ]
    columns = [(4.6, 3.4), (8.4, 4.2), (12.7, 4.4)]  # x, width
    for j, (name, color, places) in enumerate(lines):
        y = 6.7 - 0.75 * j
        ax.text(0, y + 0.3, name, va="center")
        for (x, width), place in zip(columns, places):
            shade = GREY if place == "GPU or host" else color
            box(ax, x, y, width, 0.6, shade, place)


def draw_rounding_buffers(ax) -> None:
    """Draw four swapped layers on the streams, in forward and in backward."""
    ax.text(0, 4.2, "Two rounding buffers: layer i uses buffer i mod 2", fontweight="bold")
    forward = ("layer 4", "layer 5", "layer 6", "layer 7")
    offload = ("", "4 to host", "5 to host", "6 to host")
    prefetch = ("6 to buffer 0", "5 to buffer 1", "4 to buffer 0", "")
    lines = [  # y, name, what runs one after the other, colours
        (3.3, "forward  compute", forward, [GREY] * 4),
        (2.55, "offload", offload, [BLUE] * 4),
        (1.55, "backward  compute", forward[::-1], [GREY] * 4),
        (0.8, "prefetch", prefetch, [PURPLE, TEAL, PURPLE, GREY]),
    ]
    for y, name, texts, colors in lines:
        ax.text(3.9, y + 0.3, name, va="center", ha="right")
        for k, (text, color) in enumerate(zip(texts, colors)):
            if text:
                box(ax, 4.6 + 3.3 * k, y, 3.2, 0.6, color, text)


def blocks(size: int) -> str:
    """Return the groups of neighbours among 8 ranks."""
    return " ".join(f"{{{','.join(map(str, range(first, first + size)))}}}"
                    for first in range(0, 8, size))


def draw_held(ax, rank: int, low: float, p: int, count: int, maps: dict) -> None:
    """Draw what a rank holds of one kind of states, in `count` shards: a part of its p-shard, a or
    b, in a box from y = low on. maps: the colours of a and b."""
    shard = "ab"[rank % p]
    parts = count // p  # of a p-shard
    part = rank % count // p
    height = 2.8 / count
    y = low + 2.8 - height * (parts * (rank % p) + part + 1)
    shade = 0.7
    name = shard
    if parts > 1:
        shade = 0.85 - 0.2 * part
        name = f"{shard}{part}"
    box(ax, rank + 0.05, low, 0.9, 2.8, GREY, facecolor="#f4f5f6", linewidth=0.6)
    box(ax, rank + 0.05, y, 0.9, height, GREY, facecolor=maps[shard](shade), linewidth=0)
    color = "#222" if shade < 0.5 else "white"  # readable on it
    ax.text(rank + 0.5, y + height / 2, name, ha="center", va="center_baseline", fontsize=7.5,
            color=color)


def draw_shards(path: Path) -> None:
    """Draw which part of each kind of states the ranks of one node hold, under two p, g, os."""
    fig, axes = figure(4.4, 1, 2)
    fig.subplots_adjust(0.105, 0.01, 0.995, 0.94, wspace=0.08)
    maps = {"a": plt.get_cmap("Blues"), "b": plt.get_cmap("Oranges")}
    for ax, (p, g, os) in zip(axes, ((2, 2, 4), (2, 8, 8))):
        ax.set(xlim=(-0.1, 8.1), ylim=(-2.1, 10.6))
        ax.axis("off")
        ax.set_title(f"p = {p}, g = {g}, os = {os}", fontweight="bold", fontsize=10)
        kinds = {"parameters\n2P/p bytes": p, "gradients\n2P/g": g, "optimizer\n12P/os": os}
        for k, (kind, count) in enumerate(kinds.items()):
            low = 7.2 - 3.6 * k
            if ax is axes[0]:
                ax.text(-0.3, low + 1.4, kind, ha="right", va="center")
            for rank in range(8):
                draw_held(ax, rank, low, p, count, maps)
        for rank in range(8):
            ax.text(rank + 0.5, -0.35, f"rank {rank}", ha="center", va="top", fontsize=7.5)
        ax.text(0, -1.05, f"gather parameters in {blocks(p)}\nos group {blocks(os)}", va="top",
                fontsize=8)
    save(fig, path)


KINDS = (("flash", "attention", RED), ("nvjet", "matrix product", BLUE),
         ("AllGather", "all-gather of weights", GREEN),
         ("ReduceScatter", "reduce-scatter of gradients", ORANGE),
         ("", "norm, rotary, SwiGLU, copies", GREY))
STREAMS = (("flash", "compute"), ("AllGather", "param_gather"), ("ReduceScatter", "grad_scatter"),
           ("AllReduce", "grad_reduce"), ("Broadcast", "param_broadcast"))


def read_trace(path: Path) -> list[tuple[str, int, float, float]]:
    """Return what ran on the GPU in order: the stream's name, the kind, start and duration in ms.
    A stream is named by the first of STREAMS that runs on it."""
    with gzip.open(path) as f:
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
    # of two steps: forward and backward of the first, then of the second
    in_forward = attention[2 * layers : 3 * layers]
    in_backward = attention[3 * layers :]
    forward = {i: max(x for x in products if x < start) for i, start in enumerate(in_forward)}
    backward = {layers - 2 - i: [x for x in products if x > start][2]
                for i, start in enumerate(in_backward[:-1])}
    return forward, backward


def draw_timeline(path: Path, trace: Path) -> None:
    """Draw two layers' forward and backward, a line for each stream."""
    events = read_trace(trace)
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
    save(fig, path)


def draw_systems(path: Path, rows: list[dict]) -> None:
    """Draw MFU and TGS by number of GPUs: a line for what is predicted of a system, a mark for what
    was published of it."""
    fig, axes = figure(4.8, 2, 3, dpi=120)  # a smaller file
    colors = {"ours": BLUE, "ZeRO-1": GREEN, "ZeRO-3": RED, "MiCS": ORANGE}
    for (top, bottom), model in zip(axes.T, ("7b", "13b", "30b")):
        for system, color in colors.items():
            line = [r for r in rows if (r["model"], r["system"]) == (model, system)]
            there = [r for r in line if "mfu" in r]
            gpus = [r["gpus"] for r in there]
            for ax, values in ((top, [100 * r["mfu"] for r in there]),
                               (bottom, [r["tgs"] for r in there])):
                ax.plot(gpus, values, color=color, linewidth=1.4, marker=".", markersize=4)
            published = [(r["gpus"], 100 * r["published_mfu"]) for r in line if r["published_mfu"]]
            if published:
                top.plot(*zip(*published), "D", color=color, markersize=5, markeredgecolor="#222")
        top.set(title=model.upper(), ylim=(0, 85))
        bottom.set(xlabel="GPUs")
        for ax in (top, bottom):
            ax.set_xscale("log", base=2)
            ax.set(xticks=(8, 32, 128, 512), xticklabels=("8", "32", "128", "512"))
        bottom.set_ylim(bottom=0)
    axes[0][0].set_ylabel("MFU, %, attention in full")
    axes[1][0].set_ylabel("tokens a GPU and second")
    marks = [plt.Line2D([], [], color=color) for color in colors.values()]
    marks.append(plt.Line2D([], [], marker="D", linestyle="", color="white",
                            markeredgecolor="#222"))
    fig.legend(marks, [*colors, "published (AMSP; others predicted)"], loc="upper center", ncol=6)
    fig.tight_layout(rect=(0, 0, 1, 0.94))
    save(fig, path)


def draw_lengths(path: Path, rows: list[dict]) -> None:
    """Draw causal MFU by length on 8 GPUs, and by GPUs with 128K tokens each."""
    fig, axes = figure(2.9, 1, 2)
    kinds = (("tokens of the sequence, 8 GPUs", [r for r in rows if r["gpus"] == 8]),
             ("GPUs, 128K tokens each", [r for r in rows if r["seq"] == r["gpus"] * 2**17]))
    for ax, (label, line) in zip(axes, kinds):
        names = [f"{r['seq'] // 1024}K" if label[0] == "t" else f"{r['gpus']}" for r in line]
        there = [i for i, r in enumerate(line) if "sp" in r]
        marks = [i for i, r in enumerate(line) if r["published_mfu"]]
        ax.plot(there, [100 * line[i]["mfu_causal"] for i in there], color=BLUE, marker=".",
                label="predicted")
        ax.plot(marks, [100 * line[i]["published_mfu"] for i in marks], "D", color=ORANGE,
                label="Memo, published")
        ax.set(xticks=range(len(line)), xticklabels=names, ylim=(0, 70), xlabel=label)
    axes[1].axhline(50, color=ORANGE, linewidth=1, linestyle=":", label='published: "over 50 %"')
    axes[1].text(3, 3, "64: does\nnot fit", ha="center", color=GREY, fontsize=8)
    axes[0].set_ylabel("causal MFU, %")
    for ax in axes:
        ax.legend(loc="lower left")
    fig.tight_layout()
    save(fig, path)
