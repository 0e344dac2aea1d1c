"""What goes wrong around checkpoints: damage, full disks, folders that ranks do not share, contradictions, NaN, hangs."""

import errno
import os
import shutil
import time

import pytest
import torch
import torch.distributed as dist

from parallel_attn.checkpoint import CheckpointFolder, newest_in
from parallel_attn.checkpoint import save as saving
from parallel_attn.errors import CheckpointError, SettingsError
from parallel_attn.training import pretrain
from parallel_attn.training.engines import TorchEngine
from tests.command import torchrun
from tests.training.composed import SMALL, composed, records
from tests.training.resuming import trained
from tests.world import run

QUICK = ("eval.every=0", "train.log_every=1", "parallel.tensor=2")


def refused_case(overrides: tuple[str, ...], given: tuple[str, ...] = (), chdir: str = "") -> tuple[str, str]:
    """(kind, message) of the error of this rank. chdir: where all ranks but the first stand."""
    if chdir and dist.get_rank():
        os.chdir(chdir)
    with pytest.raises((CheckpointError, SettingsError)) as caught:
        pretrain(composed(*SMALL, *QUICK, *given, *overrides), overrides=list(given))
    return type(caught.value).__name__, str(caught.value)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run folder with the checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("whole")
    trained(2, folder / "a", "train.steps=4", "checkpoint.every=2", "parallel.tensor=2", "attention=mqa", "attention.bias=qkv")
    return folder / "a"


def spoil(folder, kind: str):
    """Damages one shard by hand; returns its path."""
    path = sorted(folder.glob("tensors-*"))[-1]
    content = bytearray(path.read_bytes())
    if kind == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "flipped":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    else:
        path.unlink()
    return path


@pytest.mark.parametrize("kind", ["flipped", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("truncated", "deleted"))])
def test_a_damaged_shard_is_named_on_all_ranks_and_the_one_before_goes_on(tmp_path, whole, kind):
    run_dir = tmp_path / "a"
    shutil.copytree(whole, run_dir)
    before, newest = CheckpointFolder(run_dir / "checkpoints").published()
    path = spoil(newest, kind)
    command = (f"run_dir={run_dir}", "train.steps=6", "attention=mqa", "attention.bias=qkv")
    began = time.monotonic()
    errors = run(2, refused_case, command, timeout=100)
    assert len(set(errors)) == 1 and errors[0][0] == "CheckpointError" and time.monotonic() - began < 60
    assert str(path) in errors[0][1] and f"checkpoint.resume={before}" in errors[0][1]
    # The offer is taken, by the same command with what was offered; then the same command goes on from there.
    parts = trained(2, run_dir, *command[1:], f"checkpoint.resume={before}", "parallel.tensor=2")
    assert sorted(parts[0]["batches"]) == [2, 3, 4, 5]
    assert (run_dir / "checkpoints" / "set-aside-1-step-00000004").is_dir()
    parts = trained(2, run_dir, "train.steps=8", *command[2:], f"checkpoint.resume={before}", "parallel.tensor=2")
    assert sorted(parts[0]["batches"]) == [6, 7]


CONTRADICTIONS = [
    ("attention=gqa", "attention=gqa contradicts checkpoint.resume={0}, whose attention has attention=mqa"),
    ("model.hidden_size=64", "model.hidden_size=64 contradicts checkpoint.resume={0}, whose model has model.hidden_size=32"),
    ("attention.bias=none", "attention.bias=none contradicts"),
    ("tokenizer=bpe", "tokenizer=bpe contradicts checkpoint.resume={0}, whose tokenizer has tokenizer=bytes"),
]


@pytest.mark.parametrize("given, message", CONTRADICTIONS)
def test_an_override_that_contradicts_the_checkpoint_is_refused_by_name(tmp_path, monkeypatch, whole, given, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError) as caught:
        pretrain(composed(given, f"checkpoint.resume={whole}", "train.steps=9"), overrides=[given, "train.steps=9"])
    assert message.format(whole) in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_model_and_attention_come_from_the_checkpoint_and_all_else_from_the_command(tmp_path, whole):
    """No word of the model on the command line: it is MQA of width 32, not the default."""
    given = ("attention.bias=qkv", "model.vocab_size=null")  # the same as saved: no contradiction
    (seen,) = run(1, resumed_case, str(tmp_path / "b"), f"checkpoint.resume={whole}", given, timeout=100)
    assert seen == {"parameters": 33504, "layout": {"data": 1, "tensor": 1, "device": "cpu"}}
    assert newest_in(tmp_path / "b").step == 6
    # What it is a choice of goes along: the next command may say attention=mqa, not this one's default.
    choices = {"model": "nano", "attention": "mqa", "tokenizer": "bytes", "engine": "torch"}
    assert newest_in(tmp_path / "b").index.meta["choices"] == choices
    # The same command again, with more steps: it goes on where it was, not where it once began.
    run(1, resumed_case, str(tmp_path / "b"), f"checkpoint.resume={whole}", (*given, "train.steps=7"), timeout=100)
    assert [record["step"] for record in records(tmp_path / "b") if "train/loss" in record][-1] == 7
    assert newest_in(tmp_path / "b").index.meta["data"]["samples"] == 4 * 12 + 3 * 8


def resumed_case(run_dir: str, resume: str, given: tuple[str, ...]) -> dict:
    overrides = (resume, f"run_dir={run_dir}", "train.steps=6", "train.seq_len=32", "eval.every=0", "checkpoint.every=50", *given)
    choices = {"model": "nano", "attention": "gqa", "tokenizer": "bpe", "engine": "torch"}  # Hydra's, by default
    summary = pretrain(composed(*overrides), overrides=list(overrides), choices=choices)
    return {key: summary[key] for key in ("parameters", "layout")}


def test_another_model_in_the_same_run_dir_is_refused_by_its_first_key(tmp_path, monkeypatch, whole):
    monkeypatch.chdir(tmp_path)
    for override, message in [
        ("model.num_layers=3", "model.num_layers=3: the run in run_dir={0} has 2 and goes on with it"),
        ("attention=gqa", "attention.num_kv_heads=None: the run in run_dir={0} has 1 and goes on with it"),
    ]:
        settings = (*SMALL, "attention=mqa", "attention.bias=qkv")
        with pytest.raises(SettingsError) as caught:
            pretrain(composed(*settings, override, f"run_dir={whole}", "train.steps=9"))
        assert message.format(whole) in str(caught.value)


@pytest.mark.parametrize(
    "overrides, kind, message",
    [
        (("checkpoint.resume=nowhere",), "SettingsError", "checkpoint.resume=nowhere is not there"),
        (("checkpoint.resume=.",), "CheckpointError", "holds no whole, finite checkpoint"),
        (("checkpoint.resume=''",), "SettingsError", "checkpoint.resume='' must be auto, never, or"),
        (("checkpoint.keep=0",), "SettingsError", "checkpoint.keep=0 must be at least 1"),
        (("checkpoint.every=-1",), "SettingsError", "checkpoint.every=-1 must be 0 (off) or more"),
        (("train.hang_timeout=-1",), "SettingsError", "train.hang_timeout=-1.0 must be 0 (off) or more seconds"),
    ],
)
def test_settings_that_cannot_work(tmp_path, monkeypatch, overrides, kind, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((CheckpointError, SettingsError)) as caught:
        pretrain(composed(*SMALL, *overrides))
    assert type(caught.value).__name__ == kind and message in str(caught.value)


def test_a_checkpoint_beyond_the_plan(tmp_path, monkeypatch, whole):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match="train.steps=3: checkpoint.resume=.* is at step 4 already, use more than that"):
        pretrain(composed(f"checkpoint.resume={whole}", "train.steps=3"))


def test_a_run_dir_of_another_run_is_not_overwritten(tmp_path, monkeypatch, whole):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(whole, tmp_path / "b")
    for resume, message in [(f"checkpoint.resume={whole}", "already holds a run that did not begin from"),
                            ("checkpoint.resume=never", "already holds a run: leave checkpoint.resume out to go on")]:  # fmt: skip
        with pytest.raises(SettingsError, match=message):
            pretrain(composed(*SMALL, "attention=mqa", "attention.bias=qkv", resume, "run_dir=b", "train.steps=9"))


def test_ranks_that_see_different_folders_are_told(tmp_path, whole):
    """A relative run_dir, and ranks that stand elsewhere, as on nodes without shared storage."""
    there = tmp_path / "there"
    there.mkdir()
    shutil.copytree(whole, tmp_path / "a")
    here = os.getcwd()
    os.chdir(tmp_path)
    try:
        command = ("run_dir=a", "train.steps=6", "attention=mqa", "attention.bias=qkv")
        errors = run(2, there_case, str(tmp_path), command, str(there), timeout=100)
        assert len(set(errors)) == 1 and "the checkpoints that are there to go on from on rank 1 differ" in errors[0][1]
        errors = run(2, local_disk_case, str(tmp_path / "c"), timeout=100)
        assert len(set(errors)) == 1 and errors[0].endswith("or checkpoint.every=0)")
        assert "on rank 1 is not the folder that rank 0 sees" in errors[0]
    finally:
        os.chdir(here)


def there_case(folder: str, overrides: tuple[str, ...], chdir: str) -> tuple[str, str]:
    os.chdir(folder)
    return refused_case(overrides, chdir=chdir)


def local_disk_case(run_dir: str) -> str:
    """What rank 1 takes for the run folder is one on its own disk."""
    if dist.get_rank():
        exists = saving.Path.exists
        saving.Path.exists = lambda path: not path.name.endswith(".tmp") and exists(path)
    try:
        with pytest.raises(CheckpointError) as caught:
            pretrain(composed(*SMALL, *QUICK, f"run_dir={run_dir}", "checkpoint.every=2"))
    finally:
        if dist.get_rank():
            saving.Path.exists = exists
    return str(caught.value)


def full_disk_case(run_dir: str, where: int, number: int) -> str:
    """The disk of one rank is full from its second checkpoint on."""
    write, calls = saving.write_tensor_file, [0]

    def full(path, tensors, tick):
        calls[0] += 1
        if calls[0] == 2 and dist.get_rank() == where:
            path.write_bytes(b"half")
            raise OSError(number, os.strerror(number), str(path))
        return write(path, tensors, tick)

    saving.write_tensor_file = full
    try:
        with pytest.raises(CheckpointError) as caught:
            pretrain(composed(*SMALL, *QUICK, f"run_dir={run_dir}", "checkpoint.every=2", "train.steps=400"))
    finally:
        saving.write_tensor_file = write
    return str(caught.value)


@pytest.mark.parametrize("where, number", [(1, errno.ENOSPC), pytest.param(0, errno.EROFS, marks=pytest.mark.slow)])
def test_a_full_disk_ends_all_ranks_with_the_path_and_leaves_the_one_before(tmp_path, where, number):
    run_dir = tmp_path / "a"
    messages = run(2, full_disk_case, str(run_dir), where, number, timeout=60)
    assert len(set(messages)) == 1 and os.strerror(number) in messages[0]
    assert "/.step-00000004." in messages[0] and f"tensors-0000{where}-of-00002.safetensors" in messages[0]
    (left,) = CheckpointFolder(run_dir / "checkpoints").published()
    assert messages[0].endswith(f"the last whole checkpoint is {left}") and left.name == "step-00000002"
    assert sorted(path.name for path in left.parent.iterdir()) == ["latest", "step-00000002"]


def test_a_checkpoints_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/checkpoints").write_text("")
    errors = run(2, refused_case, (f"run_dir={tmp_path}/a", "checkpoint.every=2"), timeout=60)
    assert len(set(errors)) == 1 and f"{tmp_path}/a/checkpoints cannot be written" in errors[0][1]


def spoiled_case(run_dir: str) -> None:
    """A moment of one rank is infinite when the third checkpoint is made, and only there."""
    state_of, updates = TorchEngine.state_of, [0]
    step = TorchEngine.step

    def counted(engine, *arguments):
        updates[0] += 1
        return step(engine, *arguments)

    def spoiled(engine, name):
        state = dict(state_of(engine, name))
        if updates[0] == 6 and dist.get_rank() == 1 and name.endswith("mlp.down.weight"):
            state["exp_avg"] = torch.full_like(state["exp_avg"], torch.inf)
        return state

    TorchEngine.state_of, TorchEngine.step = spoiled, counted
    try:
        settings = ("checkpoint.every=2", "checkpoint.keep=1", "train.steps=7")
        pretrain(composed(*SMALL, *QUICK, f"run_dir={run_dir}", *settings))
    finally:
        TorchEngine.state_of, TorchEngine.step = state_of, step


def test_a_checkpoint_that_is_not_finite_never_becomes_the_latest(tmp_path, monkeypatch):
    run(2, spoiled_case, str(tmp_path / "a"), timeout=60)
    folder = CheckpointFolder(tmp_path / "a/checkpoints")
    assert [path.name for path in folder.published()] == ["step-00000007"]
    # at the end it is gone: it was older than the one that was kept; looked at in between, see test_format


HANGS = """
import os, signal, sys, time
from parallel_attn.data import TrainBatches
from parallel_attn.training.entry import main
step, how = TrainBatches.step, os.environ["HOW"]
def hanging(self, number):
    if number == 3 and os.environ["RANK"] == "1":
        time.sleep(1000) if how == "sleeps" else os.kill(os.getpid(), signal.SIGSTOP)
    return step(self, number)
TrainBatches.step = hanging
main()
"""


@pytest.mark.parametrize("how", ["sleeps", pytest.param("stopped", marks=pytest.mark.slow)])
def test_a_rank_that_hangs_is_named(tmp_path, how):
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    settings = ("parallel.tensor=2", "train.hang_timeout=4", "tracking.wandb.mode=disabled", "checkpoint.every=2")
    began = time.monotonic()
    result = torchrun(2, *SMALL, *settings, cwd=tmp_path, script=script, env={"HOW": how}, timeout=110)
    assert result.returncode != 0 and time.monotonic() - began < 100
    where = "hangs in reading the batches of step 4" if how == "sleeps" else "gives no sign of life"
    assert f"error: rank 1 {where}: no progress for 4 s (train.hang_timeout), the others wait for it" in result.stderr
    if how == "sleeps":
        assert "rank 1 is here:" in result.stderr and 'hangs.py", line 8 in hanging' in result.stderr
