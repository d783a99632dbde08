"""Show that one import switches an example on, and that averages and schedules are right.

test_all.py compares the examples' layers, kernels and updates with a plain model.
"""

import copy
import math
import re
import subprocess
import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from pytest import approx, raises
from safetensors import safe_open

import checkpoint
import costs
import examples
import model
import optim
import planner
import train
from examples import ema
from helpers import hf_model
from ranks import ConfigError
from test_all import (
    QUICK_FLAGS,
    ROOT,
    SpoilingStream,
    main,
    make_case,
    make_run,
    on_ranks,
    parametrize,
    read_log,
    relative,
    run,
    slow,
)
from test_train import rates_of, resumed_at

# a name in examples/, and flags that choose its rows
EXAMPLES = {
    "alibi": "--attention alibi",
    "block": "--architecture fork",
    "ema": "--optimizer ema",
    "gelu": "--architecture gelu",
    "gemma": "--architecture gemma",
    "local": "--attention local",
    "lora": "--architecture lora",
    "muon": "--optimizer muon",
    "schedule": "--schedule wsd-linear",
}


# ---------------------------------------------------------------------------- switched on


def test_the_index_lists_every_example():
    """The table in examples/__init__.py has the number of lines and the flags of each example, and
    the docstring of each example has the same flags. An example has 20 to 60 lines.

    Catches an example that no reader finds, and a docstring that switches an example on in another
    way.
    """
    files = {file.stem: file.read_text() for file in (ROOT / "examples").glob("[!_]*.py")}
    assert files.keys() == EXAMPLES.keys()
    rows = re.findall(r"(?m)^    (\w+) +\S.*?  +(--.*?)  +(\d+)$", examples.__doc__)
    assert [name for name, *_ in rows] == sorted(files)
    for name, flags, lines in rows:
        text = files[name]
        assert len(text.splitlines()) == int(lines) and 20 <= int(lines) <= 60, name
        flag, *values = EXAMPLES[name].split()
        assert flag in flags and values[0] in flags
        header = " ".join(text.split('"""')[1].split())
        assert f"write `import examples.{name}` in train.py, below its other imports" in header
        assert f"`{EXAMPLES[name]}`" in header


FORK = """
import os, runpy, sys
folder, *commands = sys.argv[1:]
os.chdir(folder)
sys.path.insert(0, folder)
import torch
import checkpoint, hf, pipeline, planner, prepare, replay, tensor  # what train.py imports
assert not {"examples", "torch._dynamo"} & sys.modules.keys()
import matplotlib.pyplot, torch._dynamo  # only to save time below
for command in commands:  # each in a process of its own
    program, *flags = command.split()
    print("#", flush=True)
    pid = os.fork()
    if pid == 0:
        sys.argv = [program, *flags]
        sys.stderr = sys.stdout
        runpy.run_path(program, run_name="__main__")
        sys.stdout.flush()
        os._exit(0)
    print("status", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@slow
def test_one_import_in_train_switches_an_example_on(tmp_path):
    """In a copy of the project, one line in train.py switches on each example.

    Without this line, resuming a run that has the example is refused, and the error names the flag.
    Catches an example that needs more edits than its docstring says. Catches also a start that
    imports PyTorch's compiler, which takes two seconds.
    """
    for file in ROOT.iterdir():
        is_module = file.suffix == ".py" and file.name != "train.py"
        if is_module or file.name in ("examples", "results"):
            (tmp_path / file.name).symlink_to(file)
    source = (ROOT / "train.py").read_text()
    last_import = "from tensor import TensorParallel, check_tensor_parallel, split_model\n"
    for name in EXAMPLES:
        edited = source.replace(last_import, f"{last_import}import examples.{name}\n")
        assert edited != source
        (tmp_path / f"train_{name}.py").write_text(edited)
    (tmp_path / "train.py").write_text(source)

    (tmp_path / "words.txt").write_text("one two three four\n" * 99)
    quick = QUICK_FLAGS.replace("--steps 6", "--steps 1") + " --data words.txt"
    commands = [f"train_{name}.py {quick} --out {name} {flags}" for name, flags in EXAMPLES.items()]
    commands.append("train_gemma.py --out gemma --resume --steps 2")
    one_per_flag = ["gemma", "local", "ema", "schedule"]
    commands += [f"train.py --out {name} --resume --steps 3" for name in one_per_flag]
    done = subprocess.run(
        [sys.executable, "-c", FORK, str(tmp_path), *commands], text=True, capture_output=True
    )
    _, *texts = done.stdout.split("#\n")
    assert len(texts) == len(commands), done.stdout + done.stderr

    for name in EXAMPLES:
        text = texts.pop(0)
        assert f"saved {name}/step-00000001" in text and "status 0" in text, text
    resumed = texts.pop(0)
    assert "saved gemma/step-00000002" in resumed and "status 0" in resumed, resumed
    for name, text in zip(one_per_flag, texts):
        flag, value = EXAMPLES[name].split()
        unknown = f"error: .*{flag} {value}: (choose one of|there is no such)"
        assert re.search(unknown, text) and "status 2" in text, text


# ---------------------------------------------------------------------------- an average


def check_averages(lines: list[str]) -> None:
    """Compare the averages after each step with averages of the weights. Runs on each rank."""
    torch.compiler.set_stance("force_eager")
    optim.PIECE_ELEMENTS = 300  # tiny matrices have several pieces, too
    groups = {}
    for line in lines:
        run, llama, states = make_run(make_case(f"{line} optimizer=ema"), groups, SpoilingStream)
        train.load_random_weights(run, states)
        expected = {name: states.full_param(name) for name in states.shapes}
        updates = 0
        for step in range(3):
            batch = train.load_batch(run, step)
            if step == 1:
                batch = replace(batch, scale=batch.scale * math.nan)  # this step is skipped
            if step == 0 and run.plan.pp > 1:
                llama.warm_up(next(batch.micro_batches()))
            if step == 1:
                before = {name: states.full_param(name, "ema") for name in states.shapes}
            train.run_step(llama, states, batch, 1e-2, 0.3)
            updates += step != 1
            keep = min(ema.DECAY, (1 + updates) / (10 + updates))
            for name in states.shapes:
                average = states.full_param(name, "ema")
                if step == 1:
                    assert torch.equal(average, before[name]), (line, name)
                    continue
                weight = states.full_param(name)
                expected[name] = keep * expected[name] + (1 - keep) * weight
                assert relative(average, expected[name]) < 1e-12, (line, step, name)
                assert relative(average, weight) > 1e-6, (line, step, name)


def test_averages_follow_the_weights_under_any_sharding():
    """Under any sharding, each weight has its average, and a step that is skipped changes neither.

    The weights are matrices, norms and biases. Catches an average that lacks a part of a matrix,
    that leaves out norms, or that a step with a gradient of NaN changes.
    """
    lines = ["2 p=2 g=2 os=2 sp=2 block=norms", "2 os=2 layout=inter place=host keep=swapped"]
    lines += ["2 tp=2 mode=mtp place=host", "2 pp=2 micro=2 block=gemma tied=1"]
    on_ranks(2, check_averages, lines)


def saved_states(out, step: int) -> dict[str, torch.Tensor]:
    """Return all states of a checkpoint that tensor-parallel ranks did not slice, as flat rows."""
    saved = checkpoint.open_checkpoint(out / f"step-{step:08}")
    states = {}
    for name, state in checkpoint.open_parts(saved).items():
        states[name] = torch.empty(math.prod(state.shape), dtype=torch.float64)
        checkpoint.fill(states[name], state.parts[None], 0)
    return states


@slow
def test_averages_and_schedules_resume_on_other_ranks(tmp_path):
    """A run with an average and a linear schedule continues bit for bit on other ranks.

    It begins on two ranks, each with all states. It goes on with four ranks: two stages, in each of
    which two ranks shard the states. The two ranks of a stage add the same two gradients as before,
    so all bits are equal without clipping. Catches an average or a decay that begins again on
    resume.
    """
    flags = "--optimizer ema --schedule linear --min-lr 0 --warmup 1 --clip 0 --dtype fp64"
    flags += f" --steps 4 --save-every 2 --keep 9 --out {tmp_path}"
    run(f"{flags}/whole --p 1 --g 1 --os 1 --sp 1", 2)
    (tmp_path / "other").mkdir()
    (tmp_path / "whole" / "step-00000002").rename(tmp_path / "other" / "step-00000002")
    resume = f"--resume --steps 4 --out {tmp_path}/other --keep 9 --save-every 1"
    run(f"{resume} --p 2 --g 2 --os 2 --pp 2 --micro-batch 3", 4)

    rates = [row["lr"] for row in read_log(tmp_path / "whole")]
    assert rates == approx([3e-3 * left / 3 for left in (3, 3, 2, 1)])
    assert rates[2:] == [row["lr"] for row in read_log(tmp_path / "other")]
    expected, other = (saved_states(tmp_path / out, 4) for out in ("whole", "other"))
    assert expected.keys() == other.keys()
    assert {"ema.embed.weight", "ema.norm.weight", "ema.blocks.3.down.weight"} <= other.keys()
    for name, values in expected.items():
        assert torch.equal(values, other[name]), name
    for name, values in saved_states(tmp_path / "other", 3).items():
        assert name == "updates" or not torch.equal(values, other[name]), name


@slow
def test_an_export_writes_the_average(tmp_path):
    """An export writes the state that the optimizer names in `exported`, even if the run takes no
    step.

    Catches an export of the weights themselves, or of an average that is still 0.
    """
    for steps in (0, 2):
        out, folder = tmp_path / f"o{steps}", tmp_path / f"e{steps}"
        main(f"--optimizer ema --steps {steps} --out {out} --export {folder}")
        states = saved_states(out, steps)
        (file,) = folder.glob("*.safetensors")
        with safe_open(file, "pt") as file:
            for ours, theirs in (("embed", "model.embed_tokens"), ("norm", "model.norm")):
                exported = file.get_tensor(f"{theirs}.weight").double()
                exported = exported.flatten()
                assert torch.equal(exported, states[f"ema.{ours}.weight"])
                is_master = torch.equal(exported, states[f"master.{ours}.weight"])
                assert is_master == (steps == 0)


ADAMW_STATES = optim.ADAMW.states


@parametrize(
    "changes, says",
    [
        ({"exported": "ema"}, "--export would write the state 'ema', which matrices do not have"),
        (
            {"exported": "ema", "states": (*ADAMW_STATES, optim.State("ema"))},
            "write the state 'ema', which vectors do not have; theirs are master, exp_avg,",
        ),
        (
            {"vectors": optim.Optimizer(optim.adamw, ADAMW_STATES[1:])},
            "write the state 'master', which vectors do not have; theirs are exp_avg,",
        ),
        (
            {"vectors": optim.Optimizer(lambda u: u.weight.zero_(), ADAMW_STATES)},
            "a step that is not finite changes 'weight'",
        ),
    ],
)
def test_optimizers_name_a_state_that_all_weights_have(changes, says):
    """An optimizer is refused if some weights lack the state that an export would write.

    Catches an export with zeros in place of norms, and vectors without a master weight.
    """
    for name in ("ema", "muon"):
        optim.check_optimizer(name, optim.OPTIMIZERS[name])
    averaged_muon = replace(
        ema.averaged(optim.OPTIMIZERS["muon"]), vectors=ema.averaged(optim.ADAMW)
    )
    optim.check_optimizer("averaged muon", averaged_muon)
    with raises(ValueError, match=f"--optimizer other: .*{says}"):
        optim.check_optimizer("other", replace(optim.ADAMW, **changes))


def test_a_state_that_does_not_exist_is_refused(group):
    """States.full_param refuses a state that the optimizer does not have.

    Catches zeros in place of a state.
    """
    with torch.device("meta"):
        llama = model.LLaMA(replace(model.MODELS["tiny"], layers=1))
    states = train.States(llama, torch.device("cpu"), torch.float32)
    for name in ("embed.weight", "norm.weight"):
        with raises(ValueError, match=f"{name} has no state 'ema', but master, exp_avg, exp_avg_"):
            states.full_param(name, "ema")


@parametrize("flags", ["", "--moments bf16", "--optimizer muon", "--optimizer ema"])
def test_a_planned_command_has_the_optimizer(flags):
    """The command that a plan prints has the plan's optimizer.

    Catches flags that train.py refuses together, and an optimizer that has two names.
    """
    asked = planner.PlannerFlags(model="tiny", ranks=2, batch=2)
    asked = replace(asked, **train.parse(flags.split()))
    plan = planner.shapes(asked, model.MODELS["tiny"], planner.Hardware(2, 2, None))[0]
    _, _, command = planner.command(plan, asked).partition("train.py ")
    again = train.Config(**train.parse(command.split()))
    assert again.matrix_optimizer == asked.matrix_optimizer == plan.optimizer
    assert flags in command
    with raises(ValueError, match="--optimizer adamw-bf16: say --optimizer adamw --moments bf16"):
        _ = planner.Constraints(optimizer="adamw-bf16").matrix_optimizer


# ---------------------------------------------------------------------------- schedules


def test_linear_schedules_have_their_closed_form():
    """The linear schedules fall in a straight line. On resume, they behave as cosine and wsd do.

    Catches a schedule of an example that ignores --decay-steps, --min-lr or a resume.
    """
    warm = [0.25, 0.5, 0.75, 1.0]
    linear = rates_of(10, schedule="linear", warmup=4, min_lr=0.0)
    assert linear == approx([*warm, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0, 0, 0])
    wsd = dict(schedule="wsd-linear", decay_steps=4.0, warmup=4, min_lr=0.0)
    assert rates_of(10, **wsd) == approx([*warm, 1, 1, 1, 3 / 4, 2 / 4, 1 / 4, 0, 0, 0])
    # before its decay has begun, a resumed run moves the decay; after that it does not
    assert resumed_at(6, 10, 20, wsd) == approx(rates_of(20, **wsd)[:21])
    assert resumed_at(7, 10, 20, wsd) == approx(rates_of(10, **wsd)[:11] + 10 * [0.0])
    assert resumed_at(5, 10, 20, wsd, schedule="wsd")[16:20:3] == approx([1, 1 - 0.75**0.5])
    with raises(ValueError, match="--decay-steps 5 belongs to --schedule wsd or wsd-linear"):
        train.Config(schedule="linear", decay_steps=5.0)


# ---------------------------------------------------------------------------- layers


@slow
def test_what_an_example_cannot_do_is_refused(tmp_path):
    """Imports, exports and resumes with another architecture than the checkpoint's are refused, and
    the error names it.

    So are an average that would begin in the middle of a run, and documents for a kernel that
    ignores them. Catches weights of one layer that have the shapes of another one's and would train
    on in it without an error.
    """
    main(f"--architecture geglu --steps 1 --out {tmp_path}/o")
    old, new, export = f"--out {tmp_path}/o", f"--out {tmp_path}/a", f"--export {tmp_path}/e"
    refused = {
        f"--resume --architecture llama --steps 2 {old}": r"architecture geglu \(here llama\)",
        f"--resume --optimizer ema --steps 2 {old}": "does not hold ema.*Drop .*--optimizer",
        f"--attention local --document-token 9 {new}": "local takes no documents",
        f"--attention local {new} {export}": "cannot compute --attention local",
        f"--architecture gemma --init hf:{tmp_path} {new}": "--architecture gemma: .*own layers",
        f"--architecture geglu {new} {export}": "no key for architecture='geglu'",
        f"--architecture gelu2 {new}": "--architecture gelu2: choose one of llama, .*geglu",
    }
    hf_model(tmp_path)
    for flags, says in refused.items():
        with raises(ConfigError, match=says):
            main(flags)
        dist.destroy_process_group()
    with raises(
        ValueError, match="architecture is 'gelu2', which is no row of model.ARCHITECTURES: llama, "
    ):
        replace(model.MODELS["tiny"], architecture="gelu2")


def test_matrices_and_parameters_are_those_of_the_layer():
    """Sizes, FLOPs and planned states of a model are those of its own layers.

    Catches a planner that counts LLaMA's matrices for another layer.
    """
    llama = model.MODELS["tiny"]
    gelu = replace(llama, architecture="gelu")
    fewer = llama.layers * llama.ffn * llama.dim  # no gate
    assert model.param_count(llama) - model.param_count(gelu) == fewer
    plans = [costs.Plan(cfg, torch.float32, 1, 1, 64) for cfg in (llama, gelu)]
    assert plans[0].params - plans[1].params == fewer
    saved = [costs.skeletal_bytes(plan) for plan in plans]
    assert saved[0][2] - saved[1][2] == 4 * plans[0].tokens * llama.ffn


class TwoAhead(model.LLaMA):
    """A model that predicts the token after the next."""

    labels_ahead = 2

    def apply_head(self, x, labels, scale, per_token, positions):
        return super().apply_head(x, labels[..., 1], scale, per_token, positions)


def test_a_row_names_the_class_of_the_model(tmp_path, monkeypatch):
    """LLaMA(cfg) makes an object of the class that the row of its architecture names. A class with
    labels_ahead = 2 gets two labels per token.

    Catches a program that makes a LLaMA of another architecture's sizes.
    """
    row = model.Architecture(model.Block, TwoAhead)
    monkeypatch.setitem(model.ARCHITECTURES, "two-ahead", row)
    for name in ("llama", "gemma", "two-ahead"):
        cfg = replace(model.MODELS["tiny"], layers=1, architecture=name)
        row = model.ARCHITECTURES[name]
        made = model.LLaMA(cfg)
        assert type(made) is row.model and type(made.blocks[0]) is row.block
        assert type(copy.deepcopy(made)) is row.model
    main(f"--architecture two-ahead --steps 1 --eval-every 1 --out {tmp_path}")
    assert read_log(tmp_path)[0]["val_loss"] > 0
