"""A run that is stopped and gone on with is bitwise the run that never stopped."""

import json

import pytest
from omegaconf import OmegaConf

from parallel_attn.checkpoint import Checkpoint, CheckpointFolder, newest_in
from tests.training.composed import records
from tests.training.resuming import ENGINES, curve, require_same_state, trained

ACCUMULATED = ("train.steps=10", "train.micro_batch_size=1", "train.global_batch_size=6")
DETERMINISTIC = ("train.deterministic=true", "train.global_batch_size=12")
SLOW = [
    ("ddp", 1, 1, ()),
    ("zero3", 2, 1, ("train.precision=bf16",)),
    ("zero0", 2, 2, ()),
    ("zero2", 2, 1, ("train.precision=bf16",)),
    ("zero1", 2, 1, ("train.precision=bf16", "attention.dropout=0.1")),
    ("zero3", 4, 2, ()),
    ("fsdp2", 4, 2, ("train.precision=bf16",)),
    ("ddp", 2, 1, ("train.precision=fp64",)),
    ("ddp", 3, 1, DETERMINISTIC),
    ("ddp", 6, 2, DETERMINISTIC),
    ("fsdp2", 6, 2, DETERMINISTIC),
    ("zero1", 6, 2, DETERMINISTIC),
    ("zero3", 3, 1, DETERMINISTIC),
]
CASES = [
    ("ddp", 2, 2, ("attention=mqa", "model.tie_embeddings=true")),
    ("ddp", 4, 2, ("attention.dropout=0.2",)),
    ("fsdp2", 2, 1, ("train.micro_batch_size=null",)),
    ("zero1", 4, 2, ("attention.dropout=0.2",)),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
]


@pytest.mark.parametrize("engine, size, tensor, extra", CASES)
def test_stopped_twice_it_is_bitwise_the_unbroken_run(tmp_path, engine, size, tensor, extra):
    settings = (*ACCUMULATED, *ENGINES[engine], f"parallel.tensor={tensor}", *extra)
    whole = trained(size, tmp_path / "whole", *settings)
    for stop_in in (2, 6, None):
        parts = trained(size, tmp_path / "parts", *settings, stop_in=stop_in)
        assert [part["stopped"] for part in parts] == [stop_in is not None] * size
        for part, one in zip(parts, whole, strict=True):
            assert part["batches"].items() <= one["batches"].items()
    # With accumulation the step in which the signal came was left in its middle and is done again.
    assert sorted(parts[0]["batches"]) in ([6, 7, 8, 9], [7, 8, 9])
    assert len(set(whole[0]["batches"].values())) == 10 and curve(tmp_path / "parts") == curve(tmp_path / "whole")
    require_same_state(parts[0]["state"], whole[0]["state"])


def text_of(folder, samples: int):
    """A corpus of exactly so many training samples of 32 tokens."""
    (folder / "train.txt").write_text("".join(chr(97 + i * i % 26) for i in range(32 * samples)))
    (folder / "val.txt").write_text("x" * 200)
    return "data=text", f"data.path={folder}/train.txt", f"data.val_path={folder}/val.txt", f"data.cache_dir={folder}/cache"


@pytest.mark.parametrize("stop_in", [3, *(pytest.param(step, marks=pytest.mark.slow) for step in (2, 4))])
def test_across_the_border_of_an_epoch(tmp_path, stop_in):
    """Four steps of six samples are an epoch."""
    settings = (*ACCUMULATED, *text_of(tmp_path, 24))
    trained(2, tmp_path / "whole", *settings)
    trained(2, tmp_path / "parts", *settings, stop_in=stop_in)
    trained(2, tmp_path / "parts", *settings)
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")


def test_a_run_is_extended_by_the_new_plan_and_a_finished_one_says_so(tmp_path):
    trained(1, tmp_path / "a", "train.steps=4", "schedule.final_fraction=0")
    assert curve(tmp_path / "a")[4][2] == 0.0
    (again,) = trained(1, tmp_path / "a", "train.steps=4", "schedule.final_fraction=0")
    assert again["batches"] == {} and again["summary"]["status"] == "finished"
    (longer,) = trained(1, tmp_path / "a", "train.steps=8", "schedule.final_fraction=0")
    assert sorted(longer["batches"]) == [4, 5, 6, 7]
    trained(1, tmp_path / "plan", "train.steps=8", "schedule.final_fraction=0")
    rates = [{step: values[2] for step, values in curve(tmp_path / name).items() if step > 4} for name in ("a", "plan")]
    assert rates[0] == rates[1] and all(rate > 0 for step, rate in rates[0].items() if step < 8)
    assert json.loads((tmp_path / "a/summary.json").read_text())["step"] == 8


def test_another_global_batch_goes_on_at_the_sample_where_the_run_left_off(tmp_path):
    settings = text_of(tmp_path, 24)
    (first,) = trained(1, tmp_path / "a", "train.steps=3", "train.global_batch_size=4", *settings)
    (second,) = trained(1, tmp_path / "a", "train.steps=5", "train.global_batch_size=6", *settings)
    (whole,) = trained(1, tmp_path / "b", "train.steps=4", "train.global_batch_size=6", *settings)
    assert second["batches"] == {3: whole["batches"][2], 4: whole["batches"][3]}
    assert newest_in(tmp_path / "a").index.meta["data"]["samples"] == 3 * 4 + 2 * 6
    (third,) = trained(1, tmp_path / "a", "train.steps=6", "train.global_batch_size=6", *settings, "train.seed=1")
    (seeded,) = trained(1, tmp_path / "c", "train.steps=1", "train.global_batch_size=6", *settings, "train.seed=1")
    assert third["batches"][5] == seeded["batches"][0]


def test_what_a_checkpoint_holds(tmp_path):
    trained(2, tmp_path / "a", "train.steps=5", "checkpoint.every=2", "checkpoint.keep=2", "parallel.tensor=2", "eval.every=5")
    folder = CheckpointFolder(tmp_path / "a/checkpoints")
    assert [path.name for path in folder.published()] == ["step-00000004", "step-00000005"]
    assert (folder.path / "latest").read_text() == "step-00000005\n"
    assert sorted(path.name for path in folder.path.iterdir()) == ["latest", "step-00000004", "step-00000005"]
    checkpoint = Checkpoint.open(folder.published()[-1])
    checkpoint.verify()
    index = checkpoint.index
    assert index.step == 5 and index.finite and index.meta["updates"] == 5
    assert index.parameters() == json.loads((tmp_path / "a/summary.json").read_text())["parameters"]
    assert {kind: len(index.names(kind)) for kind in ("master", "exp_avg", "exp_avg_sq")} == dict.fromkeys(
        ("master", "exp_avg", "exp_avg_sq"), len(index.names())
    )
    # float32, three of them per parameter, each element once, whatever is copied in memory
    data = sum(piece.elements() * 4 for entry in index.tensors.values() for piece in entry.pieces)
    assert data == 12 * index.parameters()
    config = OmegaConf.load(tmp_path / "a/config.yaml")
    assert index.meta["config"] == OmegaConf.to_container(config)
    assert index.meta["progress"]["best"]["step"] == 5


def test_metrics_before_a_checkpoint_are_kept_once_and_the_best_is_remembered(tmp_path):
    settings = ("train.steps=6", "eval.every=1", "eval.samples=4")
    trained(1, tmp_path / "whole", *settings)
    trained(1, tmp_path / "a", *settings, stop_in=3)
    trained(1, tmp_path / "a", *settings)
    assert [record["step"] for record in records(tmp_path / "a") if "train/loss" in record] == [1, 2, 3, 4, 5, 6]
    values = [[record["val/loss"] for record in records(tmp_path / name) if "val/loss" in record] for name in ("whole", "a")]
    assert values[0] == values[1] and len(values[0]) == 6
    best = [json.loads((tmp_path / name / "summary.json").read_text())["best"] for name in ("whole", "a")]
    assert best[0]["val/loss"] == best[1]["val/loss"]
