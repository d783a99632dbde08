"""Draw the pictures of both README.md, as PNG files of 1800 pixels' width (one 1080), read at 900.

    causal MFU by length    from rows of results files
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
from matplotlib.patches import Patch

BLUE, ORANGE, GREEN, RED, GREY = "#3b6ea8", "#d9822b", "#4f9a62", "#b5485d", "#8a8f98"


def figure(height: float, rows: int = 1, cols: int = 1, dpi: int = 200):
    """Return a figure and its axes."""
    plt.rcParams.update({"font.size": 9, "font.family": "DejaVu Sans", "axes.spines.top": False,
                         "axes.spines.right": False, "legend.frameon": False})
    return plt.subplots(rows, cols, figsize=(9, height), dpi=dpi)


def save(fig, path: Path) -> None:
    fig.savefig(path, facecolor="white", metadata={"Software": None})
    plt.close(fig)


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
