"""Draw the pictures of README.md and results/README.md from results files.

    draw_mfu            mfu.png         causal MFU and memory by length: ours beside FSDP2
    draw_predictions    predict.png     errors of the planner's seconds and GiB, in percent
    draw_timeline       timeline.png    which kernels run on which stream of a GPU, by
                                        torch.profiler

`python results/report.py` calls these functions. The same files give the same pictures, to the
byte. A picture is 1800 pixels wide and is shown at 900.
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
    """Write a figure as PNG, without Matplotlib's version in it, and close it."""
    fig.savefig(path, facecolor="white", metadata={"Software": None})
    plt.close(fig)


def draw_mfu(path: Path, ours: dict[int, dict], peers: dict[int, dict]) -> None:
    """Draw causal MFU by length, two bars per length: ours and the peer's.

    ours, peers: tokens -> row of a results file (report.long_rows). A bar has the GPU's memory in
    it, and a peer's also the last word of its label. A black line above two bars is our row's
    bound, where it was measured.
    """
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


# what was known of a row when it was predicted -> marker, color, addition to the legend
ELSEWHERE = "network or kernel not measured"
MARKERS = {
    "seen before": ("o", BLUE, ""),
    "held out": ("D", ORANGE, " (chosen before measuring)"),
    ELSEWHERE: ("s", GREY, ""),
}


def draw_predictions(path: Path, rows: list[dict]) -> None:
    """Draw the errors of predictions in percent, over what was measured: seconds of a step on the
    left, GiB of a GPU on the right. rows: report.predicted_rows."""
    fig, axes = plt.subplots(1, 2, figsize=(9, 3.2))
    for ax, measured, predicted, title, scale in (
        (axes[0], "step_s", "now_s", "seconds of a step", "log"),
        (axes[1], "gpu_gib", "now_gib", "GiB of a GPU", "linear"),
    ):
        for kind, (marker, color, addition) in MARKERS.items():
            rows_of_kind = [row for row in rows if row["kind"] == kind]
            errors = [100 * (row[predicted] / row[measured] - 1) for row in rows_of_kind]
            ax.plot(
                [row[measured] for row in rows_of_kind],
                errors,
                marker,
                color=color,
                markersize=4,
                label=kind + addition,
            )
        ax.axhspan(-5, 5, color="0.92", zorder=0, label="within 5%")
        ax.axhline(0, color=GREY, linewidth=1, zorder=0)
        ax.set(ylim=(-16, 10), xscale=scale, xlabel=f"measured {title}", title=title)
        ax.xaxis.set_major_formatter("{x:g}")
    axes[0].set_ylabel("predicted - measured, % of measured")
    axes[1].legend(loc="lower left")
    fig.tight_layout()
    save(fig, path)


# part of a kernel's name, its text in the legend, its color. The first part that fits counts
KERNELS = (
    ("flash", "attention", RED),
    ("nvjet", "matrix product", BLUE),
    ("AllGather", "all-gather of weights", GREEN),
    ("ReduceScatter", "reduce-scatter of gradients", ORANGE),
    ("", "norm, rotary, SwiGLU, copies", GREY),
)
# part of a kernel's name -> the stream that it runs on, by which a stream is recognised. The order
# is that of the lines, from bottom to top
STREAMS = (("ReduceScatter", "grad_scatter"), ("AllGather", "param_gather"), ("flash", "compute"))


def read_trace(path: Path) -> list[tuple[str, str, float, float]]:
    """Return (stream, kernel, start in ms, duration in ms) of all that ran on a GPU's STREAMS.

    They are ordered by stream, and by time within a stream. A trace has only numbers for streams:
    the first kernel that fits one of STREAMS names the stream on which it ran.
    """
    with gzip.open(path) as f:
        events = json.load(f)["traceEvents"]
    events = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    events.sort(key=lambda e: e["ts"])

    names = {}  # the trace's number of a stream -> its name
    for e in events:
        for part, name in STREAMS:
            if part in e["name"]:
                names.setdefault(e["tid"], name)

    return [
        (stream, e["name"], e["ts"] / 1e3, e["dur"] / 1e3)  # from us
        for _, stream in STREAMS
        for e in events
        if names.get(e["tid"]) == stream
    ]


def draw_timeline(path: Path, trace: Path, title: str) -> None:
    """Draw two layers' worth of a step, a line per stream: forward above, backward below.

    The trace has two steps of a model of 32 layers, and the second step is drawn. Each half begins
    at one layer's attention and ends at the attention of the second layer after it.
    """
    events = read_trace(trace)
    # when attention starts: 32 times forward and 32 times backward per step
    attention = [start for _, name, start, ms in events if "flash" in name and ms > 0.2]
    fig, axes = plt.subplots(2, 1, figsize=(9, 5))
    for ax, name, first in (  # first: the index in `attention` where the half begins
        (axes[0], "forward, from layer 10's attention to layer 12's", 64 + 10),
        (axes[1], "backward, from layer 12's attention to layer 10's", 96 + 32 - 13),
    ):
        left, _, right = attention[first : first + 3]
        for stream, kernel, start, ms in events:
            if start + ms < left or start > right:
                continue
            color = next(color for part, _, color in KERNELS if part in kernel)
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
        [Patch(color=color) for *_, color in KERNELS],
        [text for _, text, _ in KERNELS],
        loc="upper center",
        bbox_to_anchor=(0.5, 0.955),
        ncol=5,
        columnspacing=1.2,
    )
    fig.tight_layout(rect=(0, 0, 1, 0.93))
    save(fig, path)
