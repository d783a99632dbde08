"""Show that commands which cannot run are refused with a helpful sentence. Check dry runs, too."""

import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from pytest import raises
from torch.distributed.elastic.utils.distributed import get_free_port

import train
from helpers import edit_meta, on_file_event
from test_all import QUICK_FLAGS, main, parametrize, run, slow

# Commands that are refused. A row has the command, after edits of a copy of the sandbox (in sh, or
# "meta ...", which edits a meta.json and its checksum), and a regular expression for the error. A
# train.py in a row gets the flags of a short run and --out new.
REFUSED = [
    # ---- flags
    ("train.py --batch-size 5", "unrecognized.*--batch-size 5"),
    ("train.py --timeout -1", "--timeout -1.0: choose a value from 1"),
    (
        f"train.py --seq {'4' * 400}",
        "argument --seq: 4{400} is not a whole number. Write it as 4096",
    ),
    ("train.py --export /", "--export / is the root of all folders. Name a folder in it"),
    ("train.py --out=", "--out '' cannot be written: "),
    ("train.py --seq 5T", "5T is not a whole number. Write it as 4096"),
    ("train.py --seq 0.3K", "0.3K is not a whole number"),
    ("train.py --model llama-8b", "llama-8b: choose one of .*65b.*llama3-8b"),
    ("train.py --attention fa4", "fa4.*needs a GPU.*Usable here: cpu"),
    ("train.py --dtype int8", "int8.*bf16, fp32"),
    ("train.py --steps -3", "--steps -3: choose a value from 0"),
    ("train.py --alpha 2", "--alpha 2.0: choose a value from 0 to 1"),
    ("train.py --resident-layers 1", "--resident-layers 1: choose a value from 2"),
    ("train.py --lr nan", "--lr nan: choose a value from 0"),
    ("train.py --seed -1", "--seed -1: choose a value from 0"),
    ("train.py --stop-after 3h55", "--stop-after 3h55: choose a time .*, such as 3h55m, 90m"),
    ("train.py --schedule exp", "--schedule exp: choose one of cosine, constant, wsd"),
    (
        "train.py --warmup 7",
        "--warmup 7 is longer than the 6 steps .* Choose at most --warmup 6, or more --steps",
    ),
    ("train.py --decay-steps 2", "--decay-steps 2 belongs to --schedule wsd"),
    (
        "train.py --schedule wsd --warmup 4 --decay-steps 3",
        "a decay of 3 steps that ends with step 6 .* at most --decay-steps 2, at most --warmup 3, ",
    ),
    ("train.py --out=~nobody-here/x", "--out: ~nobody-here/x: this machine knows no home"),
    ("train.py --sp 0", "--sp 0: choose a value from 1"),
    ("train.py --batch 0", "--batch 0: choose a value from 1"),
    ("train.py --rope-scaling theta:0.5", "theta:0.5: .*theta:BASE, with a number of at least 1"),
    ("train.py --rope-scaling ntk:2", "ntk:2.*llama3:FACTOR, yarn:FACTOR or theta:BASE"),
    ("train.py --init gpt2", "--init gpt2 is unknown. Say random, or hf:DIR"),
    ("train.py --init hf:", "--init hf: is unknown. Say random, or hf:DIR"),
    ("train.py --strategy zero4", "zero4 is unknown; choose one of ddp, zero1.*mics:K"),
    ("train.py --os-layout whole", "whole: choose one of auto, intra, inter"),
    ("train.py --os-place disk", "--os-place disk: choose one of auto, gpu, host"),
    ("train.py --tp-mode isp", "--tp-mode isp: choose one of mtp, msp, fsp"),
    ("train.py --overlap grad_reduce,all", "all: choose a list of param_gather"),
    ("train.py --alpha 0.5 --recompute none", "--alpha and --recompute none contradict each other"),
    ("train.py --document-token 10 --memplan on", "--memplan on cannot plan steps with documents"),
    ("planner.py --tokenizer x --memplan on", "--memplan on cannot plan steps with documents"),
    (
        "planner.py --document-token 2 --attention cudnn",
        "--attention cudnn takes no documents. Choose auto or fa4, .*--document-token -1",
    ),
    # ---- flags that this model, these ranks or this memory cannot have
    (
        "train.py --document-token -5",
        "--document-token -5: choose a value from -1 to 4294967295$",
    ),
    ("train.py --document-token 256", "--document-token 256: .*vocabulary ends at token 255"),
    ("train.py --micro-batch 4", "--micro-batch 4: .* 6 sequences .* --micro-batch 3, .* 6$"),
    ("train.py --head-groups 4", "a rank's 6 query heads .* legal .* 3, --head-groups 6$"),
    (
        "train.py --resident-layers 5",
        "--resident-layers 5: backward reaches 4 layers of a virtual stage; at most 4",
    ),
    (
        "train.py --resident-layers 4 --alpha 0.5",
        "4: backward reaches 4 .*; at most 3 can stay on the GPU",
    ),
    (
        "train.py --chunk 8 --alpha 1 --host-memory 0",
        "rank of 0.0 GiB.*The command fixes .* --alpha 1",
    ),
    (
        "train.py --os-place host --resident-states 0 --host-memory 1M",
        "of any size .*, and 21.4 MiB of host memory per rank of 1.0 MiB.* states on the host",
    ),
    (
        "train.py --p 2",
        "--p 2: 2 shards do not fit 1 ranks.*Nearest legal choices: --p 1",
    ),
    ("train.py --tp 2", "--tp 2: .* must divide the 1 GPUs of a node, .* choices: --tp 1$"),
    # ---- data
    ("train.py --seq 64M", r"67108864.*longest that fits is --seq \d{7}"),
    (
        "train.py --batch 1M",
        "--batch 1048576: the data has only [0-9]+ training sequences of "
        "32 tokens.*--batch counts sequences",
    ),
    ("train.py --data none", "no such file or folder"),
    (
        "train.py --data 'docs/*.md'",
        r"no such file or folder.* Name one file or folder, or a.bin:0.7,b.bin:0.3$",
    ),
    ("mkdir empty && train.py --data empty", "no files in it"),
    ("mkdir empty && train.py --tokenizer empty", "empty: the folder has no tokenizer.json"),
    ("train.py --tokenizer gpt2", "--tokenizer gpt2: there is no such folder. `hf download NAME"),
    ("train.py --tokenizer bytes", "no such folder. Drop --tokenizer: .* a text are its bytes"),
    (
        "touch tokenizer.json && train.py --tokenizer ./tokenizer.json",
        "tokenizer.json is a file. Pass its folder: --tokenizer .$",
    ),
    (
        "printf 'of twenty letters...' > a.txt && train.py --data a.txt",
        "--seq 32.*20 tokens.*--seq 9",
    ),
    (
        "printf x > a.txt && train.py --data a.txt",
        "--seq 32: the data has 1 tokens, too few for training and validation; .* at least 3: .*",
    ),
    (
        "printf x > locked.txt && train.py --data locked.txt",
        "locked.txt exists, but user .* may not read it .Permission denied.: it has mode",
    ),
    ("head -c 2001 /dev/zero > a.bin && train.py --data a.bin", "a.bin is not a whole number of 2"),
    ("train.py --data big.bin", "token 3 of big.bin is 999.*255"),
    (
        """echo '{"token_bytes": 4}' > big.bin.json && train.py --data big.bin""",
        f"token 1 of big.bin is {999 << 16}, .*another token_bytes in FILE.bin.json",
    ),
    ("mkfifo big.bin.json && train.py --data big.bin", "big.bin.json is not of the form"),
    ("mkfifo tokenizer.json && train.py --tokenizer .", "tokenizer.json is no regular file"),
    # ---- folders that are written
    ("train.py --out big.bin/x", "big.bin/x cannot be written"),
    ("train.py --out big.bin", "--out big.bin is a file. Name a folder$"),
    ("train.py --export big.bin", "--export big.bin is a file. Name a folder$"),
    ("train.py --export hf", "--export hf is not empty. Name another folder"),
    ("train.py --export new", "--export new is also --out. Name another folder"),
    (
        "train.py --attention alibi --export hf2",
        "Hugging Face's models cannot compute --attention alibi",
    ),
    (
        "rm o/log.jsonl && mkfifo o/log.jsonl && train.py --resume --out o --steps 2",
        "log.jsonl is no regular file",
    ),
    # ---- Hugging Face models
    (
        "truncate -s -100 hf/model-00002* && train.py --init hf:hf",
        "00002.* is truncated, or no safetensors file",
    ),
    (
        "rm hf/model-00002* && train.py --init hf:hf",
        "index.json names model-00002.*, which is missing",
    ),
    ("rm hf/config.json && train.py --init hf:hf", "there is no hf/config.json; `hf download"),
    (
        "rm hf/model* && touch hf/pytorch_model.bin && train.py --init hf:hf",
        r"neither model.safetensors nor .*Pickles such as .* are never read.*from_pretrained\(.hf.,"
        " dtype=.auto., output_loading_info=True.*save_pretrained..hf.",
    ),
    ("ln -sf /dev/zero hf/config.json && train.py --init hf:hf", "config.json is no regular file"),
    (
        "f=$(ls hf/model-00001*) && rm $f && mkfifo $f && train.py --init hf:hf",
        "model-00001.*is (no regular file|not of the form)",
    ),
    (
        """sed -i 's/_size": 96/_size": 97/' hf/config.json && train.py --init hf:hf""",
        r"6 tensors are of another shape .*down_proj.weight \(\(64, 96\), not \(64, 97\)\), .*, "
        r"\.\.\.",
    ),
    (
        """sed -i 's/"llama"/"gpt2"/' hf/config.json && train.py --init hf:hf""",
        "model_type is 'gpt2'; only qwen2, qwen3, llama, mistral are supported",
    ),
    (
        """sed -i '1s/{/{"quantization_config": {"quant_method": "gptq"},/' hf/config.json"""
        " && train.py --init hf:hf",
        "quantization_config is .*gptq.*; only None is supported",
    ),
    (
        """sed -i '1s/{/{"sliding_window": 16,/; s/"llama"/"mistral"/' hf/config.json"""
        " && train.py --init hf:hf",
        "--seq 32: .*sliding windows of 16 tokens.*Take at most --seq 16",
    ),
    (
        """sed -i 's/"default"/"linear", "factor": 2.0/' hf/config.json"""
        " && train.py --init hf:hf --rope-scaling yarn:2",
        "yarn:2: the model's rotary.* linear scaling already; extend it with linear:F",
    ),
    (
        r"f=$(ls hf/model-00002*) && printf '\377\377\377\377' | dd of=$f bs=1 conv=notrunc"
        " seek=$(($(stat -c %s $f) - 4)) && train.py --init hf:hf",
        "model.*weight has values that are not finite",
    ),
    (
        """sed -i 's/"F32"/"I32"/' hf/model-00002* && train.py --init hf:hf""",
        "k_proj.weight is of dtype torch.int32; only floating point",
    ),
    # ---- checkpoints
    ("train.py --resume", "there is no checkpoint in new"),
    ("train.py --resume none", "none is not a whole checkpoint: .*No such file"),
    ("train.py --resume big.bin", "not a whole checkpoint"),
    (
        "rm o/step*/meta.json && mkfifo o/step-00000001/meta.json && train.py --resume --out o",
        "there is no checkpoint in o",
    ),
    (
        "rm o/step*/rank* && train.py --resume o/step-00000001",
        "whole checkpoint: rank.* is missing",
    ),
    (
        "truncate -s -1 o/step*/rank*-0* && train.py --resume o/step-00000001",
        r"rank-00000-0.safetensors has \d+ bytes, not \d+; name another",
    ),
    (
        """sed -i 's/"step": 1/"step": 3/' o/step*/meta.json"""
        " && train.py --resume o/step-00000001",
        "meta.json is not what was written: its checksum differs",
    ),
    (
        "printf X | dd of=o/step-00000001/rank-00000-0.safetensors bs=1 conv=notrunc seek=500000"
        " && train.py --resume o/step-00000001",
        "rank-00000-0.safetensors is not what was written: its checksum differs",
    ),
    (
        r"""printf "cos\nsystem\n(S'touch ran'\ntR." | dd conv=notrunc """
        "of=o/step-00000001/rank-00000-0.safetensors && train.py --resume o/step-00000001",
        "is not a whole checkpoint",
    ),  # a pickle
    ("meta c['model']['experts'] = 8 && train.py --resume --out o", "of another model.*experts"),
    (
        "meta c['source'] |= dict(model_type='mistral', sliding_window=16) && train.py --resume"
        " --out o",
        "--seq 32: .*windows of 16 tokens.*Take at most --seq 16",
    ),
    ("train.py --resume --out o --model 160m", r"another model.* dim 64 \(here 768\)"),
    (
        "train.py --resume --out o --init hf:hf",
        "--init cannot change on resume, .* began with --init hf:/.*",
    ),
    (
        "train.py --device auto --seq 1M",
        "--seq 1048576: there is no GPU here.* --device cpu .* or --seq 16384",
    ),
    # ---- bench.py
    ("bench.py trace", "table trace measures GPUs, and there are none here"),
    ("bench.py ring", "table ring needs 2 ranks or more: torchrun --nproc_per_node 2 bench.py"),
    ("bench.py steps", "invalid choice: 'steps' .*choose from '?machine'?, '?step'?, '?long"),
    ("bench.py step --nodes 0", "--nodes: table step takes only --quick, --host-memory"),
    ("bench.py step --seq 64K", "--seq: table step takes"),
    ("bench.py step --profile new", "--profile: not allowed with argument table"),
    ("bench.py --profile new --quick", "--quick: --profile takes no flag but --out"),
    ("bench.py long --seq 0", "--seq 0: choose a value from 1 to"),
    (
        "bench.py long --rows foo",
        "--rows foo: there is no such row; the rows are ours, ours planned memory, ",
    ),
    ("bench.py step --skip foo", "unrecognized arguments: --skip foo"),
    ("bench.py step --gpu-memory -1", "--gpu-memory -1: choose a value from 1"),
    ("bench.py --gpu-memory 1M --out new", "none of the models .* fits this machine"),
    ("bench.py --out big.bin/x", "big.bin/x/.* cannot be written.*Name another folder"),
]


@parametrize("command, sentence", REFUSED)
def test_refused(command, sentence, sandbox, tmp_path, monkeypatch, capsys):
    """Each command of REFUSED ends with its error message before any work begins.

    Catches bad input that is found late, or an error without the numbers that would help.
    """

    def deny():
        raise PermissionError(13, "Permission denied", "locked.txt")  # root could read the file

    monkeypatch.chdir(tmp_path)
    *edits, command = command.split(" && ")
    edits = [f"cp -r {sandbox}/. .", *edits]
    shell = " && ".join(edit for edit in edits if not edit.startswith("meta "))
    subprocess.run(shell, shell=True, check=True, stderr=subprocess.DEVNULL)
    for edit in edits:
        if edit.startswith("meta "):
            edit_meta(Path("o/step-00000001/meta.json"), edit.removeprefix("meta "))
    program, *flags = command.split()
    if program == "train.py":
        flags = [*QUICK_FLAGS.split(), "--out", "new", *flags]
    if "locked" in command:
        on_file_event(r"locked\.txt", deny)
    monkeypatch.setattr(sys, "argv", [program, *flags])
    with raises((ValueError, SystemExit)) as refused:
        importlib.import_module(program.removesuffix(".py")).main()
    said = f"{capsys.readouterr().err.strip()}\n{refused.value}"
    assert re.search(sentence, said, re.MULTILINE), said
    assert not Path("new/log.jsonl").exists() and not Path("ran").exists()


DIFFERENT = [  # flags of rank {rank}, which starts in a folder of its own, and both ranks' error
    ("--lr 0.{rank}1", r"ranks were started differently: --lr is 0\.01 on rank 0, 0\.11 on rank 1"),
    ("--data only-0.txt", r".*no such file or folder.* \(on ranks \[1\]\)"),
    ("--data both.txt", ".*?the data is .*? on rank 0, .*? on rank 1"),
    ("--data ids.bin", r"--document-token 900: .* ends at token 255 \(on ranks \[1\]\)"),
    ("--out out", ".*?lock of --out out, .*?storage that all nodes share, .*?missing on rank 1"),
]


def refused_on_two(folder: str, ports: list[int]) -> None:
    """Print why each row of DIFFERENT is refused. Runs on two ranks."""
    rank = os.environ["RANK"]
    os.chdir(Path(folder) / rank)
    for port, (flags, _) in zip(ports, DIFFERENT):
        os.environ["MASTER_PORT"] = str(port)
        try:
            main(f"--timeout 30 --out {folder}/out {flags.format(rank=rank)}")
        except train.ConfigError as e:
            # one write: the other rank's line must not come between the text and its end
            sys.stdout.write(f"{flags} on {rank}: {e}\n")
            sys.stdout.flush()
        dist.destroy_process_group()
    os._exit(0)


@slow
def test_refused_on_all_ranks(tmp_path):
    """If ranks were started differently, or only one rank finds an error, all end with the same
    message, and none waits for the others.

    Catches bad input that only one rank finds, so that the others wait or report something else.
    """
    for rank in "01":
        (tmp_path / rank).mkdir()
        (tmp_path / rank / "both.txt").write_text((1000 + int(rank)) * "x")
        (tmp_path / rank / "ids.bin").write_bytes(bytes(4000))
        about = {"token_bytes": 2, "document_token": 900 * int(rank)}
        (tmp_path / rank / "ids.bin.json").write_text(json.dumps(about))
    (tmp_path / "0" / "only-0.txt").write_text(1000 * "x")
    ports = [get_free_port() for _ in DIFFERENT]
    text = run(
        "", 2, f"from test_command_line import *\nrefused_on_two({str(tmp_path)!r}, {ports})"
    )
    for flags, sentence in DIFFERENT:
        assert len(re.findall(f"{flags} on [01]: {sentence}", text)) == 2, (flags, text)


def test_versions_that_are_too_old_are_refused(monkeypatch):
    """A torch that is too old is refused, and the error names the version that is needed. A
    pre-release of that version is not refused.

    Catches a run that ends in a missing function, and containers that cannot run it.
    """
    version = torch.torch_version.TorchVersion
    monkeypatch.setattr(torch, "__version__", version("2.9.1"))
    with raises(ValueError, match="torch 2.9.1 is too old: .* at least 2.11"):
        main("")
    monkeypatch.setattr(torch, "__version__", version("2.11.0a0+abc"))
    assert train.choose_device(train.Config(device="cpu"), 0).type == "cpu"


@parametrize("name", ["data", "out", "tokenizer", "init"])
def test_names_of_files_that_are_not_utf8_are_refused(name):
    """A path whose bytes are not UTF-8 is refused by its flag.

    Catches checkpoints that are written under such a path, and that safetensors cannot read again.
    """
    path = os.fsdecode(b"caf\xe9")
    with raises(ValueError, match=rf"--{name} b'caf\\xe9': these bytes are not UTF-8"):
        train.Config(**{name: path})
    train.Config(data="caf\u00e9")


def test_an_import_is_not_a_random_start():
    """A run that began with random weights cannot go on from an import, whatever its folder's name.

    Catches --init hf:random, which names a folder, and is taken for --init random.
    """
    with raises(ValueError, match="--init hf:random: --init cannot change on resume"):
        train.resumed_flags({"init": "hf:random"}, {"init": "random"})


@parametrize(
    "old, given, merged",
    [
        ("--p 2 --g 2 --os 2", "--strategy zero1", "--strategy zero1"),
        ("--strategy zero1", "--p 1", "--p 1"),
        ("--strategy zero1", "--seed 3", "--strategy zero1 --seed 3"),
        ("--alpha 0.1 --chunk 16", "--recompute full", "--recompute full"),
        ("--alpha 0.1 --chunk 16", "--recompute auto", "--alpha 0.1 --chunk 16"),
        ("--recompute full", "--resident-layers 3", "--resident-layers 3"),
        ("--os-place gpu", "--resident-states 2", "--resident-states 2"),
        ("--os-place host", "--resident-states 2", "--os-place host --resident-states 2"),
        ("--os-place host --resident-states 2", "--os-place gpu", "--os-place gpu"),
    ],
)
def test_a_resumed_run_drops_old_flags_that_contradict_new_ones(old, given, merged):
    """On resume, a flag of the command replaces old flags that contradict it.

    Catches an error that tells a user to drop a flag which the command does not have.
    """
    always = "--seq 64 --batch 4"
    meta = asdict(train.Config(**train.parse(f"{always} {old}".split())))
    flags = train.resumed_flags(train.parse(given.split()), meta)
    assert flags == train.Config(**train.parse(f"{always} {merged}".split()))


def test_dry_run(tmp_path, capsys):
    """A dry run prints the plan of planner.py and writes nothing.

    Parameters and gradients take 12.55 GiB each: 2 bytes for each of the 6,738,415,616 parameters.
    The optimizer's 75.30 GiB are 12 bytes for each parameter in a matrix. Catches a dry run that
    prints another plan, or that makes its folder.
    """
    main(f"--dry-run --dtype bf16 --model 7b --seq 16K --batch 1 --out {tmp_path}/a")
    text = capsys.readouterr().out
    assert "6,738,415,616 parameters" in text
    assert re.search("^parameters +12.55\ngradients +12.55$", text, re.M)
    assert re.search("^optimizer +75.30$", text, re.M) and "per GPU per second" in text
    assert "MFU" not in text and "nan" not in text  # a CPU has no MFU
    assert not (tmp_path / "a").exists()
