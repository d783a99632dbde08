"""Draw the pictures of both README.md, as PNG files of 1800 pixels' width, read at 900.

    mfu          causal MFU and memory by length, from rows of results files
    predict      errors of predictions, from the same
    timeline     what runs on the streams of a GPU, from a trace of torch.profiler

`python results/report.py` calls these; the same files give the same pictures, to the byte.
"""

import gzip
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

BLUE, ORANGE, GREEN = "#3b6ea8", "#d9822b", "#4f9a62"
RED, GREY, BLACK = "#b5485d", "#8a8f98", "#222222"
plt.rcParams.update(
    {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "legend.frameon": False,
        "figure.dpi": 200,
    }
)


def save(fig, path: Path) -> None:
    fig.savefig(path, facecolor="white", metadata={"Software": None})
    plt.close(fig)


def draw_mfu(path: Path, ours: dict[int, dict], peers: dict[int, dict]) -> None:
    """Draw causal MFU by tokens of a sequence: one bar per row of a results file, with the GPU's
    memory in it, and the bound of our rows, where it was measured, above them."""
    fig, ax = plt.subplots(figsize=(9, 3.6))
    for i, (seq, row) in enumerate(ours.items()):
        if row["bound_ratio"]:
            bound = 100 * row["mfu_causal"] / row["bound_ratio"]
            ax.hlines(bound, i - 0.38, i + 0.38, color=BLACK, linewidth=1.6)
            ax.text(i, bound + 0.8, f"{bound:.1f}%", ha="center")
        for x, rows, color in ((i - 0.18, ours, BLUE), (i + 0.18, peers, ORANGE)):
            if seq not in rows:
                ax.text(x + 0.04, 1, "not\nmeasured", ha="center", color=GREY)
                continue
            mfu = 100 * rows[seq]["mfu_causal"]
            text = f"{mfu:.1f}%\n{rows[seq]['gpu_gib']:.0f} GiB"
            if rows is peers:
                text += f"\n{rows[seq]['system'].split()[-1]}"
            ax.bar(x, mfu, 0.34, color=color)
            ax.text(x, mfu - 1, text, ha="center", va="top", color="white", fontsize=8)
    ax.set_xticks(range(len(ours)), [f"{seq // 1024}K" for seq in ours])
    ax.set(ylim=(0, 78), xlabel="tokens of the sequence", ylabel="causal MFU, %")
    ax.set_title(
        "LLaMA-7B, one sequence over 4 H200s of 141 GB, bf16; in the bars: MFU, and GiB "
        "of a GPU's memory",
        pad=26,
    )
    ax.legend(
        [plt.Line2D([], [], color=BLACK), Patch(color=BLUE), Patch(color=ORANGE)],
        ["kernels by themselves (bound)", "this project", "FSDP2, and what it recomputes"],
        loc="lower left",
        bbox_to_anchor=(-0.01, 1),
        ncol=3,
        borderaxespad=0.2,
    )
    fig.tight_layout()
    save(fig, path)


ELSEWHERE = "network or kernel not measured"
MARKERS = {
    "seen before": ("o", BLUE, ""),
    "held out": ("D", ORANGE, " (chosen before measuring)"),
    ELSEWHERE: ("s", GREY, ""),
}


def draw_predictions(path: Path, rows: list[dict]) -> None:
    """Draw the errors of predicted seconds and GiB of a step, in percent, by what was measured."""
    fig, axes = plt.subplots(1, 2, figsize=(9, 3.2))
    for ax, measured, predicted, title, scale in (
        (axes[0], "step_s", "now_s", "seconds of a step", "log"),
        (axes[1], "gpu_gib", "now_gib", "GiB of a GPU", "linear"),
    ):
        for kind, (marker, color, how) in MARKERS.items():
            points = [r for r in rows if r["kind"] == kind]
            errors = [100 * (r[predicted] / r[measured] - 1) for r in points]
            ax.plot(
                [r[measured] for r in points],
                errors,
                marker,
                color=color,
                markersize=4,
                label=kind + how,
            )
        ax.axhspan(-5, 5, color="0.92", zorder=0, label="within 5%")
        ax.axhline(0, color=GREY, linewidth=1, zorder=0)
        ax.set(ylim=(-16, 10), xscale=scale, xlabel=f"measured {title}", title=title)
        ax.xaxis.set_major_formatter("{x:g}")
    axes[0].set_ylabel("predicted - measured, % of measured")
    axes[1].legend(loc="lower left")
    fig.tight_layout()
    save(fig, path)


KINDS = (
    ("flash", "attention", RED),
    ("nvjet", "matrix product", BLUE),
    ("AllGather", "all-gather of weights", GREEN),
    ("ReduceScatter", "reduce-scatter of gradients", ORANGE),
    ("", "norm, rotary, SwiGLU, copies", GREY),
)
STREAMS = (("ReduceScatter", "grad_scatter"), ("AllGather", "param_gather"), ("flash", "compute"))


def read_trace(path: Path) -> list[tuple[str, str, float, float]]:
    """Return what ran on the GPU's streams of STREAMS, in their order, of each in order: the
    stream, the kernel, start and duration in ms. A stream is named by the first of STREAMS that
    runs on it."""
    with gzip.open(path) as f:
        events = json.load(f)["traceEvents"]
    events = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    events.sort(key=lambda e: e["ts"])
    names = {}
    for e in events:
        for part, name in STREAMS:
            if part in e["name"]:
                names.setdefault(e["tid"], name)
    return [
        (stream, e["name"], e["ts"] / 1e3, e["dur"] / 1e3)
        for _, stream in STREAMS
        for e in events
        if names.get(e["tid"]) == stream
    ]


def draw_timeline(path: Path, trace: Path, title: str) -> None:
    """Draw what runs between the attention of two layers of 32, forward and backward, in the
    trace's second step: a line for each stream."""
    events = read_trace(trace)
    attention = [start for _, name, start, ms in events if "flash" in name and ms > 0.2]
    fig, axes = plt.subplots(2, 1, figsize=(9, 5))
    for ax, name, first in (  # attentions before it, 32 a pass: two passes a step
        (axes[0], "forward, from layer 10's attention to layer 12's", 64 + 10),
        (axes[1], "backward, from layer 12's attention to layer 10's", 96 + 32 - 13),
    ):
        left, _, right = attention[first : first + 3]
        for stream, kernel, start, ms in events:
            if start + ms < left or start > right:
                continue
            color = next(color for part, _, color in KINDS if part in kernel)
            ax.barh(
                stream,
                width=ms,
                height=0.72,
                left=start - left,
                color=color,
                edgecolor="white",
                linewidth=0.25,
            )
        ax.set(xlim=(0, right - left), xlabel="ms", title=name)
        ax.tick_params(axis="y", length=0)
    fig.suptitle(title, x=0.01, ha="left", fontsize=10)
    fig.legend(
        [Patch(color=color) for *_, color in KINDS],
        [text for _, text, _ in KINDS],
        loc="upper center",
        bbox_to_anchor=(0.5, 0.955),
        ncol=5,
        columnspacing=1.2,
    )
    fig.tight_layout(rect=(0, 0, 1, 0.93))
    save(fig, path)
