"""Test the training loop: its log, evaluations, learning rates, and one run under several plans."""

import io
import itertools
import json
import math
import re
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from pytest import approx, raises
from safetensors.torch import load_file

import data
import model as m
import train
from helpers import SMALL_PLAN, planned_run, saved_steps
from test_all import (
    SpoilingStream,
    losses,
    main,
    make_case,
    make_run,
    parametrize,
    read_log,
    relative,
    run,
    seeded_model,
    slow,
    values_to_save,
)


def test_log_checkpoint_and_evaluation(tmp_path, capsys):
    """A run writes its log, checkpoints, evaluations, picture and export.

    It begins with --steps 0, and is resumed. The safetensors library reads its files, as a user
    would. Catches a log, a file or a picture that lacks something.
    """
    out = tmp_path / "o"
    flags = f"--out {out} --save-every 2 --steps 7"
    main(f"{flags} --steps 0")
    main(f"{flags} --eval-every 3 --resume --export {tmp_path}/hf", picture=True)
    text, rows = capsys.readouterr().out, read_log(out)
    keys = "step loss grad_norm lr tgs mfu_causal mfu_full gpu_gib host_gib seconds".split()
    assert [r["step"] for r in rows] == list(range(1, 8)) and all(set(keys) <= set(r) for r in rows)
    assert [r["step"] for r in rows if "val_loss" in r] == [3, 6, 7]
    assert rows[-1]["loss"] < rows[0]["loss"] and rows[0]["mfu_causal"] is None
    assert "1,869,504 parameters" in text and "left 0:00:0" in text
    assert saved_steps(out) == [6, 7]
    assert (out / "loss.png").read_bytes()[1:4] == b"PNG"
    states = load_file(out / "step-00000007" / "rank-00000-0.safetensors")
    theirs = load_file(tmp_path / "hf" / "model-00001-of-00001.safetensors")
    qkv = [theirs[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(states["master.blocks.1.qkv.weight"], torch.cat(qkv).flatten())
    assert states["updates"] == 7 and states["exp_avg.embed.weight"].any()
    main(flags)  # a new run; the old one is kept
    assert losses(out) == losses(out / "earlier-1")
    assert (out / "earlier-1" / "step-00000007" / "meta.json").exists()


def test_last_lines_say_what_to_open_and_try(tmp_path, capsys):
    """The last lines of a run name its picture, and commands that can be copied.

    A line is left out if there is nothing to open, as in a run without a checkpoint or in one that
    only evaluates. Catches a command that does not exist, and a file that was not written.
    """

    def last_lines(flags: str) -> list[str]:
        """Return what a run prints after its last step, or everything if it takes no step."""
        main(f"--steps 2 --out {tmp_path}/o {flags}", picture=True)
        lines = capsys.readouterr().out.splitlines()
        (last_step,) = [i for i, line in enumerate(lines) if line.startswith("step 2/2 ")] or [-1]
        return [line for line in lines[last_step + 1 :] if not line.startswith("saved ")]

    picture, sampling, training = last_lines("")
    assert picture.startswith(f"Open {tmp_path}/o/loss.png") and (tmp_path / "o/loss.png").exists()
    assert sampling.partition(": python sample.py ")[2] == f"{tmp_path}/o"
    flags = training.partition(": python train.py ")[2].split()
    assert train.parse(flags) == {"out": f"{tmp_path}/o", "resume": "latest", "steps": 4}
    train.main(flags)
    assert "step 4/4" in capsys.readouterr().out

    ids = ids_without_spaces(tmp_path / "a.bin")
    assert last_lines(f"--data {ids}")[1].endswith(f"sample.py {tmp_path}/o --tokenizer DIR")
    (picture,) = last_lines("--save-every -1")
    assert "loss.png" in picture
    assert "Open " not in "".join(last_lines("--steps 0 --eval-every 1"))


def test_lines_before_the_first_step(tmp_path, capsys):
    """Before its first step a run says what it reads, how a step is split, and what the words in a
    step's line mean.

    Catches a legend that comes too late.
    """
    main(f"--steps 1 --batch 4 --micro-batch 2 --save-every -1 --out {tmp_path}")
    text = capsys.readouterr().out.partition("step 1/1")[0]
    for line in (
        "flags that differ from their defaults, some of them chosen for auto: model=tiny seq=32",
        "data transformers: 7,979,036 tokens",
        "plan: a step is 1 data-parallel group x 2 micro-batches x 2 sequences; model states are "
        "not sharded; activations: keep all\n",
        "TGS (tokens per rank per second)",
        "The first loss is near ln 256 = 5.5",
    ):
        assert line in text, line


def test_progress_inside_a_step(monkeypatch, capsys):
    """A long step prints its progress again and again.

    Catches a step of minutes that prints nothing.
    """
    said = []
    states = SimpleNamespace(progress=lambda: said.pop() if said else "")
    monkeypatch.setattr(train, "PROGRESS_SECONDS", 0.01)
    progress = train.start_progress_thread(SimpleNamespace(rank=0), states)
    progress.begin(7)
    said.append("backward layer 3/4")  # the states say it once; the thread repeats it
    time.sleep(0.2)
    progress.begin(8)
    time.sleep(0.2)
    progress.end()
    text = capsys.readouterr().out
    assert text.count("step 7: backward layer 3/4, 0 s so far\n") > 1 and "step 8" not in text


def test_loss_that_is_not_finite_changes_nothing(group):
    """If the loss is not finite, no weight changes, even if the gradients are finite.

    Catches an update by a loss of NaN.
    """
    run, model, states = make_run(make_case("1"), {}, SpoilingStream)
    train.load_random_weights(run, states)
    for i, loss in enumerate((torch.ones(()), torch.tensor(math.inf), torch.tensor(math.nan))):
        train.run_step(model, states, train.load_batch(run, 0), 0.0, 0.0)
        before = values_to_save(states)
        _, finite = states.update(1e-2, 0.5, loss)
        updated = not torch.equal(before, values_to_save(states))
        assert (bool(finite), updated) == ((True, True) if i == 0 else (False, False))


@parametrize("when", ["before begin_step", "after begin_step"])
def test_zero_grad_loses_no_gradient(when, group):
    """A step has the same gradients if a training loop also calls model.zero_grad().

    Catches norms and biases that never train, because autograd adds their gradients to tensors that
    the update does not read.
    """
    run, model, states = make_run(make_case("1 micro=2 keep=mixed"), {}, SpoilingStream)
    train.load_random_weights(run, states)
    batch = train.load_batch(run, 0)
    _, expected, _ = train.run_step(model, states, batch, 0.0, 0.0)
    for _ in range(2):
        if when == "before begin_step":
            model.zero_grad()
        states.begin_step()
        if when == "after begin_step":
            model.zero_grad()
        loss = model.forward_backward(batch.micro_batches())
        states.finish_gradients()
        norm, _ = states.update(0.0, 0.0, loss)
        assert norm.item() == expected.item()


def test_diverging_run_skips_stops_and_saves(tmp_path):
    """A run that diverges skips updates, and then it stops and saves. In its log, a number that is
    not finite is null.

    Catches a run that goes on with NaN, and a log that is not JSON.
    """
    with raises(SystemExit, match="not finite"):
        main(f"--steps 20 --lr 1e30 --warmup 0 --clip 0 --out {tmp_path}")
    rows = read_log(tmp_path)
    flags = f"--steps {len(rows)} --lr 1e30 --warmup 0 --clip 0 --out {tmp_path}/exported"
    with raises(SystemExit, match="not finite"):  # now in the last step
        main(f"{flags} --export {tmp_path}/hf")
    assert not [*tmp_path.glob("hf/*.safetensors")]
    assert [r["finite"] for r in rows[-5:]] == [0] * 5 and len(rows) < 20
    assert rows[-1]["grad_norm"] is None and saved_steps(tmp_path)


def test_mfu_counts_the_keys_that_tokens_see(capsys):
    """If documents are short, the causal MFU of a step counts only the keys that its tokens see.

    Catches an MFU that counts attention over whole sequences.
    """
    run = planned_run(SMALL_PLAN)
    run = replace(run, hardware=SimpleNamespace(profile=SimpleNamespace(peak_flops=1e15)))

    def row(keys_seen):
        numbers = dict.fromkeys(("loss", "grad_norm", "lr", "finite", "gpu_gib", "valid_labels"), 1)
        log = io.StringIO()
        train.log_step(run, log, numbers | {"step": 1, "seconds": 2, "keys_seen": keys_seen}, "")
        return json.loads(log.getvalue())

    whole, short = row(SMALL_PLAN.seq), row(SMALL_PLAN.seq / 8)
    assert "2.00 s left 0:06:38" in capsys.readouterr().out  # 199 steps are left
    assert short["mfu_causal"] < 0.9 * whole["mfu_causal"] and short["tgs"] == whole["tgs"]


def test_flags_of_a_step_do_what_they_say(tmp_path):
    """--seed decides the first weights and the order of samples, --clip the norm of the gradient
    that AdamW gets, and --weight-decay how much a step shrinks matrices.

    Catches a flag that is lost on its way to the engine, which then has its default.
    """

    def states_after_a_step(flags: str) -> dict[str, torch.Tensor]:
        flags += " --seed 3 --lr 0.01 --warmup 0 --dtype fp64 --steps 1"
        main(f"{flags} --out {tmp_path}/o")
        (file,) = tmp_path.glob("o/step-*/*.safetensors")
        return load_file(file)

    found = {decay: states_after_a_step(f"--weight-decay {decay}") for decay in (0, 0.5)}
    model = m.LLaMA(m.MODELS["tiny"]).double()
    model.init_weights(3)
    for name, weight in model.named_parameters():
        shrunk = found[0][f"master.{name}"] - found[0.5][f"master.{name}"]
        expected = 0.01 * 0.5 * weight.detach() if weight.dim() > 1 else torch.zeros_like(weight)
        assert torch.allclose(shrunk, expected.flatten(), rtol=1e-9, atol=1e-12), name

    sequences, _ = data.split(data.open_corpus(train.Config.data)[0], None, 32, 3)
    windows = torch.from_numpy(np.stack([sequences.sample(i).tokens for i in range(6)]))
    logits = model(windows[:, :-1]).transpose(1, 2)
    expected_loss = F.cross_entropy(logits, windows[:, 1:]).item()
    (row,) = read_log(tmp_path / "o")
    assert row["loss"] == approx(expected_loss, rel=1e-11)

    moments = states_after_a_step("--clip 0.25").items()  # the first ones are 0.1 * gradient
    squares = [value.square().sum() for name, value in moments if name.startswith("exp_avg.")]
    assert row["grad_norm"] > 0.25 and sum(squares) ** 0.5 == approx(0.1 * 0.25, rel=1e-4)


def test_only_skips_in_a_row_end_a_run():
    """A run goes on if finite steps lie between those that are skipped.

    Catches a long run that a few skipped steps, far from each other, end.
    """
    state = train.LoopState(0, 0, needs_save=False, is_saved=False)
    stop = SimpleNamespace(agree_on=lambda request: "")
    almost = (train.MAX_SKIPS - 1) * [0]
    for finite in [*almost, 1, *almost]:
        train.check_stop(state, stop, {"finite": finite, "read_failed": 0, "stop": 0}, None)
        assert not state.stop_reason
    train.check_stop(state, stop, {"finite": 0, "read_failed": 0, "stop": 0}, None)
    assert "5 steps in a row" in state.stop_reason


def test_schedule_equals_torchs_and_stays_where_it_ended(tmp_path, capsys):
    """Between warm-up and end, learning rates equal those of torch.optim. A run that is extended,
    here twice, stays at its last rate.

    Catches a rate that differs from torch's, or one that rises when a run is extended.
    """
    flags = f"--out {tmp_path} --steps"
    main(f"{flags} 25 --warmup 5 --lr 0.01 --min-lr 0.2")
    main(f"{flags} 27 --resume")
    assert "at step 25; changed: steps 25 -> 27\n" in capsys.readouterr().out
    main(f"{flags} 28 --resume")
    rates = [r["lr"] for r in read_log(tmp_path)]
    opt = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 20, 0.002)
    expected = [0.002, 0.004, 0.006, 0.008, 0.01]
    for _ in range(20):
        expected += schedule.get_last_lr()
        opt.step()
        schedule.step()
    assert rates == approx(expected + 3 * schedule.get_last_lr(), rel=1e-12)


def rates_of(steps: int, **flags) -> list[float]:
    """Return the learning rates that a run with these flags has in steps 0 to steps + 2."""
    cfg = train.Config(steps=steps, lr=1.0, **flags)
    run = SimpleNamespace(cfg=cfg, meta={"config": train.lay_out_schedule(cfg, None)})
    return [train.learning_rate(run, step) for step in range(steps + 3)]


def test_positions_of_a_resumed_run(tmp_path):
    """A resumed run has as many positions as its longest --seq so far.

    Catches an export that names the length of the first run only.
    """
    for seq, steps, positions in ((1024, 1, 1024), (1040, 2, 1040), (16, 3, 1040)):
        main(f"--seq {seq} --batch 1 --steps {steps} --resume auto --out {tmp_path}")
        meta = json.loads((tmp_path / f"step-{steps:08}" / "meta.json").read_text())
        assert meta["model"]["max_positions"] == positions


def resumed_at(step: int, steps: int, more_steps: int, flags: dict, **changes) -> list[float]:
    """Return the learning rates of a run that began with `steps` and `flags`, and that is resumed
    at `step` with more_steps in all and with `changes` of its flags."""
    cfg = train.Config(steps=steps, lr=1.0, **flags)
    old = asdict(cfg) | train.lay_out_schedule(cfg, None)
    resumed = SimpleNamespace(meta={"step": step, "config": old})
    new = train.Config(**(dict(steps=more_steps, lr=1.0) | flags | changes))
    run = SimpleNamespace(cfg=new, meta={"config": train.lay_out_schedule(new, resumed)})
    return [train.learning_rate(run, i) for i in range(more_steps + 1)]


def test_schedules_at_their_edges():
    """Each schedule has its closed form at the edges of its phases.

    The edges are the first step, the last one of the warm-up and the next, the first and the last
    step of the decay, and all steps after it. Catches a phase that is a step too long.
    """
    flags = dict(warmup=4, min_lr=0.2)
    warm = [0.25, 0.5, 0.75, 1.0]
    assert rates_of(10, schedule="constant", **flags) == warm + 9 * [1.0]

    cosine = rates_of(10, schedule="cosine", **flags)
    assert cosine[:5] == [*warm, 1.0]
    assert cosine[9] == approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * 5 / 6)))
    assert cosine[10:] == approx(3 * [0.2])

    wsd = rates_of(10, schedule="wsd", decay_steps=3, **flags)
    assert wsd[:8] == [*warm, 1.0, 1.0, 1.0, 1.0]  # step 7 is the decay's first: 1 - sqrt(0)
    assert wsd[8:10] == approx([1 - 0.8 * math.sqrt(1 / 3), 1 - 0.8 * math.sqrt(2 / 3)])
    assert wsd[10:] == approx(3 * [0.2])
    assert rates_of(10, schedule="wsd", decay_steps=0.3, **flags) == wsd
    assert train.decay_length(0.29, 100) == 29  # although 0.29 * 100 is 28.999999999999996
    assert rates_of(20, schedule="wsd") == rates_of(20, schedule="wsd", decay_steps=4.0)
    assert rates_of(10, schedule="wsd", decay_steps=1e-9)[8:11] == [1.0, 1.0, 0.1]
    assert rates_of(10, schedule="wsd", warmup=9, decay_steps=1.0)[7:11] == [8 / 9, 1.0, 1.0, 0.1]
    assert rates_of(10, warmup=10)[8:12] == [0.9, 1.0, 0.1, 0.1]


@parametrize("schedule", train.SCHEDULES)
def test_schedules_of_few_steps(schedule):
    """Runs of 0, 1 and 2 steps have rates, and the first step without a warm-up has --lr.

    Catches a division by zero.
    """
    for steps in (0, 1, 2):
        rates = rates_of(steps, schedule=schedule)
        assert all(0 < rate <= 1 for rate in rates)
    assert rates_of(1, schedule=schedule, warmup=0, decay_steps=None)[0] == 1.0
    assert rates_of(2, schedule=schedule, warmup=1)[:2] == [1.0, 1.0]


def test_automatic_warm_up_of_short_runs():
    """The automatic warm-up has at least 20 steps, so a shorter run ends inside it.

    With wsd the warm-up ends before the decay begins. Catches a run of a few steps whose first
    rates are so high that the loss of a large model rises.
    """
    assert rates_of(3)[:3] == approx([1 / 20, 2 / 20, 3 / 20])
    assert rates_of(20, schedule="constant")[:20] == approx([(i + 1) / 20 for i in range(20)])
    for steps, warmup in ((1, 20), (79, 20), (80, 20), (84, 21), (2000, 500), (10**6, 500)):
        assert train.lay_out_schedule(train.Config(steps=steps), None)["warmup_steps"] == warmup

    wsd = dict(schedule="wsd", decay_steps=1.0)
    assert rates_of(3, **wsd)[:3] == [1 / 2, 1.0, 1.0]
    assert rates_of(30, **wsd)[:20] == rates_of(30)[:20]
    assert rates_of(1, **wsd)[0] == 1.0  # the only step belongs to the decay


def test_run_that_ended_in_its_warm_up_is_resumed():
    """A run that ended inside its warm-up and is resumed with more steps has the rates of a longer
    run.

    Catches a rate that falls to its minimum right after the warm-up.
    """
    for schedule in ("cosine", "constant"):
        flags = {"schedule": schedule}
        for step in (1, 3):
            assert resumed_at(step, 3, 40, flags) == rates_of(40, **flags)[:41]
        assert resumed_at(2, 3, 3, flags)[:3] == rates_of(3, **flags)[:3]  # the same steps
        assert resumed_at(20, 20, 60, flags) == rates_of(60, **flags)[:61]
    assert resumed_at(10, 10, 30, {"warmup": 10}) == rates_of(30, warmup=10)[:31]


def test_resumed_schedules():
    """A resumed run that has more steps goes on as --schedule says, without a jump.

    Catches a decay that begins again, and a warm-up that is longer after a resume.
    """
    wsd = dict(schedule="wsd", decay_steps=4.0, warmup=5)
    whole = rates_of(20, **wsd)
    for step in (0, 1, 8, 16, 17, 19, 20):  # with the same number of steps nothing changes
        assert resumed_at(step, 20, 20, wsd)[step:] == whole[step:21]
    # resumed before the decay, or at its first step: the decay moves, and the warm-up stays
    for step in (5, 16):
        assert resumed_at(step, 20, 40, wsd) == rates_of(40, **wsd)[:41]
        moved = resumed_at(step, 20, 40, wsd, decay_steps=None)
        assert moved[31:34] == approx([1.0, 1.0, 1 - 0.9 / 8**0.5])
    # resumed in the decay, or after it: the decay ends where it would have ended, and the rate
    # stays
    for step in (17, 20):
        assert resumed_at(step, 20, 40, wsd) == approx(whole[:20] + 21 * [0.1])
    # resumed with fewer steps: the decay comes earlier
    assert resumed_at(6, 20, 10, wsd) == rates_of(10, **wsd)[:11]

    assert resumed_at(20, 20, 40, {"schedule": "constant", "warmup": 5})[4:] == 37 * [1.0]
    cosine = rates_of(20, warmup=5)
    for step in (1, 20):
        assert resumed_at(step, 20, 40, {"warmup": 5}) == approx(cosine[:20] + 21 * [0.1])
    # resumed with another schedule: it has its own shape, and ends with the new number of steps
    changed = resumed_at(8, 20, 40, {"warmup": 5}, schedule="wsd", decay_steps=8.0)
    assert [changed[31], changed[33]] == approx([1, 1 - 0.9 / 8**0.5])


@parametrize(
    "make, sentence",
    [
        (
            lambda: rates_of(4, warmup=5),
            "--warmup 5 is longer than the 4 steps .* --warmup 4, or more --steps$",
        ),
        (lambda: rates_of(4, schedule="wsd", warmup=5), "--warmup 5 is longer"),
        (
            lambda: rates_of(10, schedule="wsd", warmup=6, decay_steps=5.0),
            "a decay of 5 steps .* step 5, which is before step 6, .* at most --decay-steps 4, at "
            "most --warmup 5, or more --steps",
        ),
        (  # the automatic warm-up of the first command stays, and leaves no room
            lambda: resumed_at(3, 3, 10, {}, schedule="wsd"),
            "before step 20, .* Choose at most --warmup 8, or more --steps",
        ),
        (
            lambda: resumed_at(8, 20, 10, dict(schedule="wsd", decay_steps=4.0, warmup=5)),
            "would begin at step 6, which is before step 8, .* --decay-steps 2, or more --steps",
        ),
        (
            lambda: resumed_at(18, 20, 40, {"schedule": "wsd"}, decay_steps=5.0),
            "resumes at step 18, and its decay of 4 steps began at step 16. Drop --decay-steps",
        ),
        (lambda: resumed_at(9, 80, 99, {}, warmup=81), "--warmup 81 is longer than the 80 steps"),
        (
            lambda: train.Config(decay_steps=5.0),
            "--decay-steps 5 belongs to --schedule wsd.*, and the schedule is cosine",
        ),
        (
            lambda: train.Config(schedule="wsd", decay_steps=2.5),
            "--decay-steps 2.5: choose a whole number of steps, such as 2, or a fraction",
        ),
        (lambda: train.Config(schedule="wsd", decay_steps=-0.1), "--decay-steps -0.1: choose a"),
        (
            lambda: train.Config(schedule="wsd", decay_steps=0.0),
            "such as 1, or a fraction .* const",
        ),
        (lambda: train.Config(schedule="exp"), "exp: choose one of cosine, constant, wsd"),
    ],
)
def test_schedules_that_are_refused(make, sentence):
    """A schedule whose phases do not fit into the steps is refused with the nearest legal choice.

    Catches a phase that is cut off silently, and advice that is illegal, too.
    """
    with raises(ValueError, match=sentence):
        make()


@slow
def test_wsd_is_extended_from_before_its_decay(tmp_path, capsys):
    """A run with wsd goes on from its stable phase with more steps, bit for bit as a longer run.

    Catches a schedule that a checkpoint does not hold.
    """
    flags = "--schedule wsd --decay-steps 0.5 --warmup 1 --save-every 1 --keep 9"
    main(f"{flags} --steps 4 --out {tmp_path}/a")
    main(f"--resume {tmp_path}/a/step-00000002 --steps 8 --out {tmp_path}/b")
    assert "changed: steps 4 -> 8, schedule_steps 4 -> 8\n" in capsys.readouterr().out
    main(f"{flags} --steps 8 --out {tmp_path}/c")
    assert losses(tmp_path / "b") == losses(tmp_path / "c")[2:]
    assert [r["lr"] for r in read_log(tmp_path / "b")] == [
        r["lr"] for r in read_log(tmp_path / "c")[2:]
    ]


def ids_without_spaces(path: Path) -> Path:
    """Write the default data's bytes as ids. Spaces (32) are ignored as labels."""
    corpus, _ = data.open_corpus(train.Config.data)
    corpus.read(0, 10**6).tokens.astype("<u2").tofile(path)
    Path(f"{path}.json").write_text('{"token_bytes": 2, "ignore": 32}')
    return path


@slow
def test_eval_of_ranks_equals_one_model(tmp_path):
    """An evaluation on two pairs of ranks has the bare model's loss, also at each position.

    The ranks of a pair share sequences: one has the first and the last quarter, the other one has
    the rest. In the last batch, one pair has no sequence. Catches a loss that counts at another
    position, and a rank whose losses are lost.
    """
    sequences = 14  # a batch has ten, five per pair, so the second batch has four for one pair
    run(
        "--seq 96 --micro-batch 5 --batch 10 --dtype fp64 --steps 0 --eval-every 1 --sp 2 --ring 2 "
        f"--p 2 --g 2 --os 2 --data {ids_without_spaces(tmp_path / 'ids.bin')} --out {tmp_path}",
        4,
        # several pieces per loss, two batches, and a picture
        f"ops.LOSS_ELEMENTS = 2**14; ops.LOSS_GRAD_TOKENS = 1; train.EVAL_SEQUENCES = {sequences}\n"
        "main = functools.partial(main, picture=True)",
    )
    (row,) = read_log(tmp_path)
    assert not list(tmp_path.glob("step-*")) and (tmp_path / "loss.png").exists()
    model = seeded_model(m.MODELS["tiny"])
    _, val = data.split(data.open_corpus(str(tmp_path / "ids.bin"))[0], None, 96, 0)
    windows = torch.from_numpy(np.stack([val.window(i).tokens for i in range(sequences)]))
    labels = windows[:, 1:]
    each = F.cross_entropy(model(windows[:, :-1]).transpose(1, 2), labels, reduction="none")
    each = each.detach().masked_fill(labels == 32, torch.nan)  # 32 is ignored
    assert row["val_loss"] == approx(each.nanmean().item(), rel=1e-12)
    bounds = [0, 1, 2, 4, 8, 16, 32, 64, 96]
    assert row["val_loss_by_position"] == [
        [first, approx(each[:, first:end].nanmean().item(), rel=1e-12)]
        for first, end in zip(bounds, bounds[1:])
    ]


def test_a_run_that_only_evaluates(tmp_path, capsys):
    """A second evaluation of a finished run gives the same numbers and writes no checkpoint.

    If all labels are ignored, there are no numbers. Catches an evaluation that changes what it
    evaluates.
    """
    flags = f"--out {tmp_path}/a --steps 4 --eval-every 2"
    main(flags)
    last = read_log(tmp_path / "a")[-1]
    saved = sorted(tmp_path.glob("a/step-*/*"))
    main(f"{flags} --steps 0 --eval-every 1 --resume")
    again = read_log(tmp_path / "a")[-1]
    assert f"step 4 val_loss {last['val_loss']:.4f}\n" in capsys.readouterr().out
    assert set(again) == {"step", "val_loss", "val_loss_by_position"} and again["step"] == 4
    assert again["val_loss"] == approx(last["val_loss"], rel=1e-9)
    assert len(read_log(tmp_path / "a")) == 5 and sorted(tmp_path.glob("a/step-*/*")) == saved
    np.full(999, 7, "<u2").tofile(tmp_path / "same.bin")
    (tmp_path / "same.bin.json").write_text('{"token_bytes": 2, "ignore": 7}')
    main(f"--steps 0 --eval-every 1 --out {tmp_path}/b --data {tmp_path}/same.bin")
    assert "step 0 val_loss none (all labels are ignored)\n" in capsys.readouterr().out
    assert read_log(tmp_path / "b") == [{"step": 0, "val_loss": None, "val_loss_by_position": []}]


@slow
def test_one_run_under_four_plans(tmp_path):
    """A run that is resumed under three other plans has the losses of a run under one plan.

    train.py's flags choose the plans: one process; two ranks that share sequences and swap; four
    ranks with tensor parallelism and stages; and one process with recomputation. There are
    documents, ignored labels, and several files per rank. Catches a flag of train.py that has no
    effect, and flags that change a loss.
    """
    flags = "--dtype fp64 --micro-batch 1 --eval-every 6 --save-every 1 --keep 9 "
    flags += f"--document-token 10 --data {ids_without_spaces(tmp_path / 'ids.bin')} "
    swapping = "--sp 2 --chunk 10 --alpha 0.5 --resident-layers 2 --head-groups 3 --g 2 --os 2"
    plans = [
        (0, "", "documents end with token 10"),
        (2, swapping, "2 of 4 layers resident, alpha=0.50"),
        (
            4,
            re.sub(r"\d\S*", "auto", swapping) + " --tp 2 --pp 2 --os-place host --save-async",
            "pipeline stages (pp): 2",
        ),
        (
            0,
            "--tp 1 --pp 1 --recompute full --os-place auto --no-save-async",
            "4 layers run attention twice",
        ),
    ]
    for i, (ranks, more, says) in enumerate(plans):
        exported = tmp_path / f"hf{i}"
        flags += f"--resume {tmp_path}/o{i - 1}/step-0000000{i + 1} " if i else ""
        assert says in run(
            f"{flags} {more} --out {tmp_path}/o{i} --export {exported}",
            ranks,
            "checkpoint.FILE_BYTES = 900_000",
        )
        found = [
            [
                r["loss"],
                r["grad_norm"],
                r.get("val_loss", 0),
                *np.ravel(r.get("val_loss_by_position", 0)),
            ]
            for r in read_log(tmp_path / f"o{i}")
        ]
        weights = {}
        for file in exported.glob("*.safetensors"):
            weights |= load_file(file)
        if i == 0:
            expected, expected_weights = found, weights
            assert expected_weights
            continue
        # plan i begins after step i + 1
        for numbers, same in zip(found, expected[i + 1 :], strict=True):
            assert numbers == approx(same, rel=1e-11), more
        for name, weight in expected_weights.items():
            assert relative(weights[name], weight) < 1e-11, (more, name)


@parametrize("keep", ["all", "mixed", "no-x"])
@parametrize("calls", [1, 5, 12])
def test_a_step_after_one_that_failed_is_right(group, monkeypatch, keep, calls):
    """After a backward that an exception has ended, a fork may run the step again, and gets the
    numbers of an undisturbed step.

    The exception comes after a number of calls of add_grad, as when memory runs out. Catches a
    count of micro-batches, chunks or reductions that goes on from the failed step.
    """

    def step(fails: bool) -> tuple:
        run, model, states = make_run(make_case(f"1 micro=2 keep={keep}"), {}, SpoilingStream)
        train.load_random_weights(run, states)
        batch = train.load_batch(run, 0)
        if fails:
            num_calls = itertools.count()
            add_grad = type(states).add_grad

            def fail_later(*args):
                if next(num_calls) == calls:
                    raise MemoryError("no memory is left")
                add_grad(*args)

            with monkeypatch.context() as patch:
                patch.setattr(type(states), "add_grad", fail_later)
                with raises(MemoryError):
                    train.run_step(model, states, batch, 0.1, 1.0)
        loss, norm, _ = train.run_step(model, states, batch, 0.1, 1.0)
        return loss, norm, [states.full_param(name) for name in states.shapes]

    failed, undisturbed = step(True), step(False)
    assert failed[:2] == undisturbed[:2]
    for weight, expected in zip(failed[2], undisturbed[2], strict=True):
        assert torch.equal(weight, expected)
