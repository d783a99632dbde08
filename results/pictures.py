"""Draw the pictures of README.md and results/*.md as SVG files.

    draw_layer          layer.svg           a layer in three parts, and where its chunks are until
                                            backward
    draw_shards         shards.svg          which rank holds which part of the model states
    draw_timeline       timeline.svg        which kernels run on which stream of a GPU
    draw_speed          speed.svg           causal MFU: ours beside the fastest peer
    draw_predictions    predictions.svg     errors of the planner's seconds and GiB, in percent
    draw_memory         memory.svg          addresses of three layers' tensors over time

`python results/report.py` calls these functions. A title says what the picture shows. The same
files give the same pictures, to the byte, with the same Matplotlib. Text stays text, on a white
background, so that a picture can be searched, and read in a dark page.

Left out: numbers. They come from the results files, by report.py.
"""

import gzip
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch, Rectangle

BLUE, ORANGE, GREEN = "#3b6ea8", "#d9822b", "#4f9a62"
RED, VIOLET, TEAL = "#b5485d", "#7a5da8", "#2f8f8f"
GREY, BLACK = "#8a8f98", "#222222"
plt.rcParams.update(
    {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "legend.frameon": False,
        "svg.fonttype": "none",  # text as text
        "svg.hashsalt": "pictures",  # the names inside a file do not change from run to run
    }
)


def save(fig, path: Path) -> None:
    """Write a figure as SVG, without a date and Matplotlib's version, and close it."""
    metadata = {"Date": None, "Creator": None}
    fig.savefig(path, format="svg", facecolor="white", metadata=metadata)
    plt.close(fig)
    # Matplotlib ends some lines with a space
    lines = [line.rstrip() for line in path.read_text().splitlines()]
    path.write_text("\n".join(lines) + "\n")


def canvas(width: float, height: float):
    """Return a figure without axes, and its only plot, whose units are inches from the top left."""
    fig = plt.figure(figsize=(width, height))
    ax = fig.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, width), ylim=(height, 0))
    ax.axis("off")
    return fig, ax


def box(ax, x: float, y: float, width: float, height: float, text: str, color: str) -> None:
    """Draw a rectangle in a light tint of a color, with text in its middle."""
    ax.add_patch(Rectangle((x, y), width, height, facecolor=color, alpha=0.25))
    ax.add_patch(Rectangle((x, y), width, height, fill=False, edgecolor=color, linewidth=1))
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=BLACK)


def heading(ax, x: float, y: float, text: str) -> None:
    ax.text(x, y, text, va="center", weight="bold", color=BLACK)


# ---------------------------------------------------------------------------- ideas


def draw_layer(path: Path) -> None:
    """Draw a layer's three parts, where its tensors are until backward, and how copies overlap."""
    fig, ax = canvas(9, 6.7)

    title = "Only attention mixes tokens, so the rest of a layer runs in chunks of tokens"
    heading(ax, 0.1, 0.2, title)
    for i in range(3):
        y = 0.5 + 0.36 * i
        ax.text(0.1, y + 0.14, f"chunk {i}", va="center")
        box(ax, 1.5, y, 1.7, 0.29, "block.pre", GREY)
        box(ax, 6.0, y, 1.7, 0.29, "block.post", GREY)
        for start, end in ((1.05, 1.45), (3.25, 3.7), (5.5, 5.95), (7.75, 8.15)):
            ax.annotate(
                "",
                (end, y + 0.145),
                (start, y + 0.145),
                arrowprops={"arrowstyle": "-|>", "fc": BLACK},
            )
    box(ax, 3.75, 0.5, 1.7, 1.01, "attention:\nall tokens,\nsome heads", RED)
    for x, text in (
        (1.25, "x"), (3.48, "q, k, v"), (5.72, "o, lse"), (7.95, "y"),
    ):  # fmt: skip
        ax.text(x, 0.42, text, ha="center", style="italic")
    for x, text in ((2.35, "norm, projection, rotary"), (6.85, "projection, norm, SwiGLU")):
        ax.text(x, 1.72, text, ha="center", va="center", fontsize=8)

    heading(
        ax,
        0.1,
        2.1,
        "x and o are kept or swapped, so backward runs attention's forward no second time",
    )
    columns = ("x", "o, lse", "q, k, v", "h, gate|up")
    for j, text in enumerate(columns):
        ax.text(3.75 + 1.3 * j, 2.38, text, ha="center", va="center", style="italic")
    gpu, host, either = ("GPU", GREEN), ("host", BLUE), ("GPU or host", GREY)
    pre, post = ("recompute: pre", ORANGE), ("recompute: post", ORANGE)
    rows = (
        ("kept (last k layers, as far as memory allows)", (gpu, gpu, gpu, gpu)),
        ("swapped (a fraction alpha of the other layers)", (host, host, host, host)),
        ("recomputed (the remaining chunks)", (either, either, pre, post)),
        (
            "if x does not fit: all but every m-th layer",
            (("from layer i - 1", ORANGE), either, pre, post),
        ),
        ("last resort: the first layers drop o", (either, ("run attention", ORANGE), pre, post)),
    )
    for i, (text, cells) in enumerate(rows):
        y = 2.52 + 0.36 * i
        ax.text(0.1, y + 0.14, text, va="center", fontsize=8)
        for j, (cell, color) in enumerate(cells):
            box(ax, 3.13 + 1.3 * j, y, 1.24, 0.29, cell, color)
    ax.text(
        3.13,
        4.48,
        "lse: log-sum-exp of attention. h: residual stream after attention. "
        "gate|up: SwiGLU's inputs",
        va="center",
        fontsize=8,
    )

    heading(
        ax,
        0.1,
        4.9,
        "Copies run beside other layers' computation (here with lag 2). Backward has two rounding "
        "buffers",
    )
    lines = (
        (5.1, "forward", ("layer 4", "layer 5", "layer 6", "layer 7"), (GREY,) * 4),
        (5.46, "copy to host", ("", "4 to host", "5 to host", "6 to host"), ("", *(BLUE,) * 3)),
        (5.9, "backward", ("layer 7", "layer 6", "layer 5", "layer 4"), (GREY,) * 4),
        (6.26, "prefetch", ("6 to buffer 0", "5 to buffer 1", "4 to buffer 0", ""),
         (VIOLET, TEAL, VIOLET, "")),
    )  # fmt: skip
    for y, text, cells, colors in lines:
        ax.text(1.9, y + 0.14, text, ha="right", va="center")
        for j, (cell, color) in enumerate(zip(cells, colors)):
            if cell:
                box(ax, 2.1 + 1.65 * j, y, 1.59, 0.29, cell, color)
    save(fig, path)


SHARD_COLORS = {"a": "#2e7ebc", "b": "#e25508"}  # half of the parameters -> its color
SHARD_SHADES = {  # half of the parameters -> the colors of its quarters
    "a": ("#0b539b", "#3b8bc2", "#7fb5d8", "#c6daee"),
    "b": ("#ad3803", "#ee6511", "#fb9b51", "#fdd0a2"),
}


def draw_shards(path: Path) -> None:
    """Draw which of eight ranks hold which part of the model states, for two choices of factors."""
    fig, ax = canvas(9, 4.9)
    heading(
        ax, 0.1, 0.2, "Each of p, g and os says in how many parts one kind of model states is held"
    )
    for left, factors, os_groups in (
        (1.15, (2, 2, 4), "os groups {0,1,2,3} {4,5,6,7}"),
        (5.2, (2, 8, 8), "os group {0,1,2,3,4,5,6,7}"),
    ):
        heading(ax, left, 0.55, "p = {}, g = {}, os = {}".format(*factors))
        for line, parts in enumerate(factors):
            for rank in range(8):
                draw_part(ax, left + 0.46 * rank, 0.75 + 1.15 * line, rank, parts)
        for rank in range(8):
            ax.text(left + 0.46 * rank + 0.2, 4.2, f"rank {rank}", ha="center", fontsize=7)
        ax.text(left, 4.45, "parameters are gathered in {0,1} {2,3} {4,5} {6,7}", fontsize=8)
        ax.text(left, 4.7, os_groups, fontsize=8)
    for line, text in enumerate(("parameters\n2P/p bytes", "gradients\n2P/g", "optimizer\n12P/os")):
        ax.text(1.05, 1.25 + 1.15 * line, text, ha="right", va="center")
    save(fig, path)


def draw_part(ax, x: float, y: float, rank: int, parts: int) -> None:
    """Draw a rank's column of one kind of model states, of which it holds one of `parts` parts.

    The column stands for all states, from a at the top to b at the bottom. Ranks 0, 2, 4, 6 hold
    parts of a and ranks 1, 3, 5, 7 parts of b. With 4 parts, rank 2 holds a1, a's second half.
    """
    ax.add_patch(Rectangle((x, y), 0.4, 1.0, facecolor="#f3f4f6", edgecolor=GREY, linewidth=0.7))
    half = "ab"[rank % 2]
    parts_of_half = parts // 2
    index = rank // 2 % parts_of_half
    height = 1.0 / parts
    top = y + 0.5 * (rank % 2) + index * height
    dark = index < 2
    color = SHARD_COLORS[half] if parts == 2 else SHARD_SHADES[half][index]
    ax.add_patch(Rectangle((x, top), 0.4, height, facecolor=color, edgecolor="none"))
    ax.text(
        x + 0.2,
        top + height / 2,
        half if parts == 2 else f"{half}{index}",
        ha="center",
        va="center",
        fontsize=7,
        color="white" if dark else BLACK,
    )


# ---------------------------------------------------------------------------- measurements


def draw_speed(path: Path, bars: list[tuple[str, dict, dict, str]]) -> None:
    """Draw causal MFU, two bars per row: ours and the fastest peer's. A line marks the bound, the
    MFU of the attention and matrix kernels when only they run.

    bars: (hardware, model and length; our row; the peer's row; what the peer is).
    """
    fig, ax = plt.subplots(figsize=(9, 0.55 * len(bars) + 1.1))
    for i, (_, ours, peer, what) in enumerate(bars):
        bound = 100 * ours["mfu_causal"] / ours["bound_ratio"]
        ax.vlines(bound, i - 0.4, i + 0.4, color=BLACK, linewidth=1.6)
        for y, row, color in ((i - 0.2, ours, BLUE), (i + 0.2, peer, ORANGE)):
            mfu = 100 * row["mfu_causal"]
            text = f"{mfu:.1f}%" if row is ours else f"{mfu:.1f}%  {what}"
            ax.barh(y, mfu, 0.36, color=color)
            ax.text(0.5, y, text, va="center", color="white", fontsize=7.5)
        faster = peer["step_s"] / ours["step_s"]
        ax.text(bound + 0.8, i, f"{faster:.2f}", va="center", weight="bold")
    ax.set_yticks(range(len(bars)), [where for where, *_ in bars])
    ax.set(ylim=(len(bars) - 0.5, -0.5), xlim=(0, 76), xlabel="causal MFU, %")
    ax.set_title(
        "Long sequences run near their kernel bound (bold numbers: peer's time / ours)",
        pad=22,
        weight="bold",
    )
    ax.legend(
        [plt.Line2D([], [], color=BLACK), Patch(color=BLUE), Patch(color=ORANGE)],
        ["kernel bound", "this project", "fastest peer, at its best setting"],
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
    known = [row for row in rows if row["kind"] != ELSEWHERE]
    near = sum(abs(row["now_s"] / row["step_s"] - 1) <= 0.05 for row in known)
    fig, axes = plt.subplots(1, 2, figsize=(9, 3.6))
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
        ax.set(ylim=(-16, 19), xscale=scale, xlabel=f"measured {title}", title=title)
        ax.xaxis.set_major_formatter("{x:g}")
    axes[0].set_ylabel("predicted - measured, % of measured")
    axes[1].legend(loc="upper right", fontsize=8)
    fig.suptitle(
        f"Where GPU, network and kernel were measured, {near} of {len(known)} step times are "
        "predicted within 5%",
        x=0.01,
        ha="left",
        fontsize=10,
        weight="bold",
    )
    fig.tight_layout()
    save(fig, path)


# part of a kernel's name, its text in the legend, its color. The first part that fits counts
KERNELS = (
    ("flash", "attention", RED),
    ("nvjet", "matrix product", BLUE),
    ("AllGather", "all-gather of parameters", GREEN),
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


def draw_timeline(path: Path, trace: Path, what: str, hidden: float) -> None:
    """Draw two layers' worth of a step, a line per stream: forward above, backward below.

    The trace has two steps of a model of 32 layers, and the second step is drawn. Each half begins
    at one layer's attention and ends at the attention of the second layer after it.

    what: what was profiled. hidden: the fraction of the communication that computation hides.
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
        ax.set(xlim=(0, right - left), xlabel="ms")
        ax.set_title(name, fontsize=9)
        ax.tick_params(axis="y", length=0)
    fig.suptitle(
        f"Computation hides {hidden:.0%} of the communication", x=0.01, ha="left", weight="bold"
    )
    fig.text(0.01, 0.928, what, fontsize=8)
    fig.legend(
        [Patch(color=color) for *_, color in KERNELS],
        [text for _, text, _ in KERNELS],
        loc="upper center",
        bbox_to_anchor=(0.5, 0.925),
        ncol=5,
        columnspacing=1.2,
        fontsize=8,
    )
    fig.tight_layout(rect=(0, 0, 1, 0.9))
    save(fig, path)


MEMORY_KINDS = {  # kind of a tensor -> its color
    "transient: freed within its layer": GREY,
    "swapped: freed when the host has it": ORANGE,
    "kept until backward": BLUE,
}


def draw_memory(path: Path, buffers: list, plan, caching_gib: float, layers: range) -> None:
    """Draw the planned addresses while some layers run forward, and the peak of the whole step
    beside that of PyTorch's caching allocator.

    buffers, plan: the requests of a step (memplan.Lifetime), and their addresses. caching_gib: what
    the caching allocator reserves for the same requests. layers: the numbers of the drawn layers.
    """
    starts = {b.in_pass: b.start for b in reversed(buffers)}  # of a pass, its first request
    lines = [starts[f"forward, layer {i}/32"] for i in (*layers, layers.stop)]
    first, last = lines[0], lines[-1]
    end_of_forward = max(b.end for b in buffers if b.in_pass.startswith("forward"))
    fig, (ax, bars) = plt.subplots(1, 2, figsize=(9, 4), width_ratios=(4, 1))
    for b, offset in zip(buffers, plan.offsets):
        if b.end < first or b.start > last:
            continue
        if b.in_pass:
            kind = 0
        else:
            kind = 2 if b.end > end_of_forward else 1
        left, right = max(b.start, first), min(b.end, last)
        ax.add_patch(
            Rectangle(
                (left - first, offset / 2**30),
                right - left,
                b.size / 2**30,
                facecolor=list(MEMORY_KINDS.values())[kind],
                edgecolor="white",
                linewidth=0.3,
            )
        )
    highest = max(o + b.size for b, o in zip(buffers, plan.offsets) if first <= b.start < last)
    for i, x in zip(layers, lines):
        ax.axvline(x - first, color=BLACK, linewidth=0.6, linestyle=":")
        ax.text(x - first + 1, 1.04 * highest / 2**30, f"layer {i}", fontsize=8)
    ax.set(
        xlim=(0, last - first),
        ylim=(0, 1.12 * highest / 2**30),
        xlabel="requests and releases, in order",
        ylabel="address, GiB",
    )
    ax.legend(
        [Patch(color=color) for color in MEMORY_KINDS.values()],
        list(MEMORY_KINDS),
        loc="lower left",
        bbox_to_anchor=(-0.01, 1),
        ncol=3,
        borderaxespad=0.1,
        columnspacing=1.0,
        fontsize=7.5,
    )

    peak = plan.peak / 2**30
    for x, gib, color in ((0, peak, BLUE), (1, caching_gib, RED)):
        bars.bar(x, gib, 0.7, color=color)
        bars.text(x, gib + 0.8, f"{gib:.1f}", ha="center", fontsize=8)
    bars.axhline(plan.lower_bound / 2**30, color=BLACK, linewidth=1, linestyle="--")
    bars.set_xlabel("dashed: lower bound", fontsize=8)
    bars.set_xticks((0, 1), ("planned", "PyTorch's\ncaching\nallocator"))
    bars.set_ylabel("peak of the step, GiB")
    fig.suptitle(
        "Swapped layers use the same addresses again; the peak of the step is its lower bound",
        x=0.01,
        ha="left",
        fontsize=10,
        weight="bold",
    )
    fig.tight_layout()
    save(fig, path)
