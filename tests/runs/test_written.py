"""Run folders written out of full tensors: training begins from them as from its own start; what is in the way is refused."""

import os
import resource

import pytest
import torch

from parallel_attn.checkpoint import find
from parallel_attn.checkpoint.show import describe
from parallel_attn.errors import CheckpointError, SettingsError
from parallel_attn.runs.written import check_out, first_meta, new_folder, write_run
from tests.runs.made import made_run
from tests.training.resuming import ENGINES, curve, require_same_state, trained

CASES = [
    ("ddp", 2, ()),
    *(
        pytest.param(engine, 1, extra, marks=pytest.mark.slow)
        for engine in ENGINES
        for extra in ((), ("train.precision=bf16",))
        if (engine, extra) != ("zero0", ("train.precision=bf16",))
    ),
]


@pytest.mark.parametrize("engine, tensor, extra", CASES)
def test_training_begins_from_it_as_from_its_own_start(tmp_path, engine, tensor, extra):
    """The initial weights, written without moments, then trained: bitwise the run that began with them itself. So moments
    are zero, Adam counts from its first step, and schedule and data begin at their start.

    (In bf16 DeepSpeed's own start rounds the masters to bf16 once: so are those written here.)"""
    settings = (*ENGINES[engine], f"parallel.tensor={tensor}", "train.steps=4", "schedule.warmup_steps=2", *extra)
    whole = trained(2, tmp_path / "whole", *settings)
    by_deepspeed = engine.startswith("zero") and "train.precision=bf16" in extra
    rounded = torch.bfloat16 if by_deepspeed else torch.float32
    made_run(tmp_path / "made", *extra, scale=1.0, rounded=rounded)
    assert not any(key.startswith("exp_avg") for key in find(tmp_path / "made").index.tensors)
    begun = trained(2, tmp_path / "begun", *settings, f"checkpoint.resume={tmp_path}/made")
    assert begun[0]["batches"] == whole[0]["batches"] and curve(tmp_path / "begun") == curve(tmp_path / "whole")
    require_same_state(begun[0]["state"], whole[0]["state"])


def test_it_goes_on_with_its_own_checkpoints_when_started_again(tmp_path):
    made_run(tmp_path / "made")
    resume = f"checkpoint.resume={tmp_path}/made"
    trained(1, tmp_path / "whole", resume, "train.steps=4")
    parts = trained(1, tmp_path / "parts", resume, "train.steps=4", stop_in=1)
    parts = trained(1, tmp_path / "parts", resume, "train.steps=4")
    assert sorted(parts[0]["batches"]) == [2, 3] and curve(tmp_path / "parts") == curve(tmp_path / "whole")


def test_what_is_inside_is_told(tmp_path):
    told = describe(find(made_run(tmp_path / "made")).folder)
    assert told["problem"] is None and told["step"] == 0 and not told["moments"]


def test_where_it_cannot_stand(tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    monkeypatch.chdir(tmp_path / "empty")
    cases = {
        "": "has no value", " ": "has no value", ".": "where you stand", "..": "is there already", "/": "is there already",
        f"{tmp_path}/full": "is there already", f"{tmp_path}/full/file": "is there already", f"{tmp_path}/link": "is a link",
        f"{tmp_path}/dangling": "is a link", f"{tmp_path}/full/file/x": "file is no folder", "x" * 300: "cannot be written",
    }  # fmt: skip
    for out, message in cases.items():
        with pytest.raises(SettingsError, match=message):
            check_out(out)
    monkeypatch.chdir(tmp_path)
    for out in ("empty", "a/b/c", f"{tmp_path}/new/"):
        check_out(out)
    assert sorted(os.listdir(tmp_path)) == ["dangling", "empty", "full", "link"]  # looking makes nothing


def test_a_disk_that_refuses_leaves_nothing(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="made cannot be written .*: free space or name another folder"):
            made_run(tmp_path / "made")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not os.listdir(tmp_path)


def test_what_breaks_inside_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "deep" / "made") as folder:
        (folder / "half").touch()
        raise ZeroDivisionError
    assert not os.listdir(tmp_path / "deep")


def test_tensors_are_taken_one_by_one(tmp_path, monkeypatch):
    """At most what a file holds, and the tensor that did not fit any more, are in memory."""
    from parallel_attn.data import ByteTokenizer
    from parallel_attn.runs import written
    from parallel_attn.training.config import parse, plain_config
    from tests.training.composed import SMALL, composed

    monkeypatch.setattr(written, "FILE_BYTES", 1000)
    alive = most = 0

    def tensors():
        nonlocal alive, most
        for i in range(20):
            alive += 1
            most = max(most, alive)
            yield f"master/{i}", torch.zeros(100)

    def done(name, size):
        nonlocal alive
        alive -= 2  # 400 bytes each: two to a file

    config = parse(composed(*SMALL))
    write_run(
        tmp_path / "run", plain_config(config), tensors(), "{}", first_meta(config, ByteTokenizer()), on_file=done
    )
    assert most == 3 and len(list(tmp_path.glob("run/checkpoints/*/*.safetensors"))) == 10
