"""Measure what exists: print ceiling, measurement and ratio; write results/NAME.json.

    python bench.py              every table that this machine can measure
    python bench.py step         one table

Each table prints first what the hardware allows, measured in the same run (a matrix product, the
attention kernel, a few layers alone), then what the project reaches, then the ratio: machines are
noisy, ratios less so. Times are medians after a warm-up; a speed is never taken from zeros. MFU
counts model FLOPs (model.flops_per_token), recomputation never: "causal" counts half of the
attention matrix, "full" all of it. The last line of output is one JSON object with the same rows.

Legend: T tokens a sequence, C width, L layers.
"""
import argparse
import dataclasses
import gc
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from model import (MODELS, LLaMA, ModelConfig, attention, flops_per_token, initial_weight,
                   param_count, peak_flops, pick_kernel, rope_tables)
from shard import States
from train import start_ranks

HERE = Path(__file__).parent
GIB = 2**30


def clock(fn, repeats: int, device: torch.device, warmup: int = 3) -> float:
    """Median seconds of fn() on an otherwise idle device."""
    times = []
    for i in range(warmup + repeats):
        sync(device)
        start = time.perf_counter()
        fn()
        sync(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[warmup:])


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Give back what a finished table held (modules and their states refer to each other)."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else None


def row(system: str, cfg: ModelConfig, name: str, seq: int, tokens: int, seconds: float,
        device: torch.device, **more) -> dict:
    """A line of a table and of the results file. tokens: of one step on one device."""
    hw = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    peak, tgs = peak_flops(hw), tokens / seconds
    causal, full = (f * tgs / peak if peak else None for f in flops_per_token(cfg, seq))
    return {"system": system, "model": name, "seq": seq, "gpus": int(device.type == "cuda"),
            "tgs": tgs, "step_s": seconds, "mfu_causal": causal, "mfu_full": full,
            "bound_ratio": None, "gpu_gib": peak_gib(device), "host_gib": None, "oom": False, **more}


def make(cfg: ModelConfig, kernel: str, device, dtype, group):
    with torch.device("meta"):
        model = LLaMA(cfg, attention(kernel))
    states = States(model, device, dtype, 1, group)
    for name, p in model.named_parameters():
        states.load(name, initial_weight(cfg, name, p.shape, 0, device))
    return model, states


def table_step(device: torch.device, group) -> list[dict]:
    """One training step, one sequence, real optimizer: against six of its layers alone.

    The layers' rate is the ceiling: it has the same products, kernels and element-wise parts, but no
    embedding, head, loss or optimizer, and its FLOPs are counted the same way.
    """
    gpu = device.type == "cuda"
    name, seq, repeats = ("7b", 4096, 10) if gpu else ("tiny", 256, 5)
    dtype = torch.bfloat16 if gpu else torch.float32
    cfg, kernel = MODELS[name], pick_kernel("auto", device, dtype)
    rng = torch.Generator(device).manual_seed(0)
    tokens = torch.randint(cfg.vocab, (1, seq + 1), device=device, generator=rng)
    batch, rows = (tokens[:, :-1], tokens[:, 1:]), []

    def layers_alone() -> dict:
        few = dataclasses.replace(cfg, layers=min(6, cfg.layers))
        model, states = make(few, kernel, device, dtype, group)
        rope = rope_tables(few, torch.arange(seq, device=device), torch.float32)
        x = torch.randn(1, seq, cfg.dim, device=device, generator=rng).to(dtype).requires_grad_()

        def layers():
            states.begin()
            y = x
            for block in model.blocks:
                y = block(y, rope, model.attention)
            y.backward(x.detach())

        blocks_only = dataclasses.replace(few, vocab=0)  # for the count of FLOPs
        return row("bound", blocks_only, f"{name}, {few.layers} layers", seq, seq,
                   clock(layers, repeats, device), device, kernel=kernel)

    rows.append(bound := layers_alone())
    release(device)
    model, states = make(cfg, kernel, device, dtype, group)

    def compute():
        states.begin()
        model(*batch).backward()
        states.reduce()

    without = clock(compute, repeats, device)
    update = clock(lambda: states.update(1e-4, 1.0), repeats, device)

    def step():
        compute()
        states.update(1e-4, 1.0)

    both = clock(step, repeats, device)
    bandwidth = 28 * param_count(cfg) / update / 1e12 if gpu else None
    for label, s in (("ours, without optimizer", without), ("ours", both)):
        r = row(label, cfg, name, seq, seq, s, device, kernel=kernel)
        if bound["mfu_causal"]:
            r["bound_ratio"] = r["mfu_causal"] / bound["mfu_causal"]
        rows.append(r)
    rows[-1] |= {"optimizer_s": update, "optimizer_tb_s": bandwidth}
    return rows


TABLES = {"step": table_step}


def percent(x: float | None) -> str:
    return f"{x:8.1%}" if x is not None else f"{'-':>8}"


def show(rows: list[dict]) -> None:
    print(f"{'system':<26}{'model':<15}{'seq':>9}{'ms':>10}{'TGS':>9}{'causal':>8}{'full':>8}"
          f"{'/bound':>8}{'GPU GiB':>9}")
    for r in rows:
        gib = f"{r['gpu_gib']:9.1f}" if r["gpu_gib"] else f"{'-':>9}"
        print(f"{r['system']:<26}{r['model']:<15}{r['seq']:>9,}{r['step_s'] * 1e3:>10.1f}"
              f"{r['tgs']:>9,.0f}{percent(r['mfu_causal'])}{percent(r['mfu_full'])}"
              f"{percent(r['bound_ratio'])}{gib}")


def versions() -> dict:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.cuda.is_available():
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
                  "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return found


def commit() -> str:
    """The commit that is measured, with a + if files differ from it; BENCH_COMMIT where git is not."""
    git = ["git", "-C", str(HERE)]
    try:
        head = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True,
                                       stderr=subprocess.DEVNULL)
        dirty = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "*.py"]).returncode
        return head.strip() + ("+" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("BENCH_COMMIT", "unknown")


README_MARKS = "<!-- results -->\n", "<!-- end of results -->\n"


def readme_tables(folder: Path) -> str:
    """Markdown tables of all results files, for README.md."""
    text = ""
    for file in sorted(folder.glob("*.json")):
        r = json.loads(file.read_text())
        text += (f"`{r['command']}` on {r['hardware']}, torch {r['versions']['torch']}, commit "
                 f"{r['commit']} ([file](results/{file.name})):\n\n"
                 "| system | model | tokens | step ms | TGS | MFU causal | MFU full | of bound | "
                 "GPU GiB |\n|---|---|--:|--:|--:|--:|--:|--:|--:|\n")
        for x in r["rows"]:
            cells = [x["system"], x["model"], f"{x['seq']:,}", f"{x['step_s'] * 1e3:.1f}",
                     f"{x['tgs']:,.0f}", *(percent(x[k]).strip() for k in (
                         "mfu_causal", "mfu_full", "bound_ratio")),
                     f"{x['gpu_gib']:.1f}" if x["gpu_gib"] else "-"]
            text += "| " + " | ".join(cells) + " |\n"
        text += "\n"
    return text


def write_readme() -> None:
    path = HERE / "README.md"
    start, end = (path.read_text().index(mark) for mark in README_MARKS)
    text = path.read_text()
    path.write_text(text[: start + len(README_MARKS[0])] + readme_tables(HERE / "results")
                    + text[end:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("tables", nargs="*", help=f"of {', '.join(TABLES)}; none: all")
    parser.add_argument("--out", default=str(HERE / "results"), help="folder of the results files")
    parser.add_argument("--readme", action="store_true",
                        help="measure nothing, write README.md's tables from results/")
    args = parser.parse_args()
    if args.readme:
        return write_readme()
    if unknown := set(args.tables) - set(TABLES):
        parser.error(f"no table {', '.join(unknown)}; there are: {', '.join(TABLES)}")
    rank, _, local_rank = start_ranks(600)
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    torch.compiler.set_stance("default" if gpu else "force_eager")
    hardware = torch.cuda.get_device_name(device) if gpu else f"CPU, {os.cpu_count()} cores"
    last = []
    for name in args.tables or TABLES:
        release(device)
        rows = TABLES[name](device, torch.distributed.group.WORLD)
        results = {"hardware": hardware, "versions": versions(), "commit": commit(),
                   "command": shlex.join(["python", "bench.py", name]), "rows": rows}
        print(f"\n{name}: {hardware}, {results['versions']}, commit {results['commit']}")
        show(rows)
        if rank == 0:
            out = Path(args.out)
            out.mkdir(parents=True, exist_ok=True)
            kind = hardware.replace("NVIDIA ", "").split(",")[0].replace(" ", "-").lower()
            (out / f"{name}-{kind}.json").write_text(json.dumps(results, indent=1) + "\n")
        last.append({"table": name, **results})
    print(json.dumps(last[0] if len(last) == 1 else {"tables": last}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
