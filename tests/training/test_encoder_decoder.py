"""model=encoder_decoder through the training loop: curves, validation, engines, what a run says, wrong settings."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from parallel_attn import AxisGroup, SettingsError
from parallel_attn.training import parse, pretrain
from parallel_attn.training.announce import announce
from parallel_attn.training.pretrain import build_model, with_vocabulary
from tests.training.composed import SMALL, composed, records
from tests.world import run

MODEL = ("model=encoder_decoder", *SMALL, "model.cross_attention.head_dim=8", "model.encoder.hidden_size=24")


def train_case(overrides: tuple[str, ...], run_dir: str) -> None:
    pretrain(composed(*MODEL, f"run_dir={run_dir}", "train.log_every=1", "eval.samples=7", *overrides))


def trained(tmp_path, size: int, *overrides: str) -> tuple[list[float], dict]:
    """Loss and gradient norm of each step, and the summary."""
    run_dir = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
    run(size, train_case, overrides, str(run_dir), timeout=150)
    rows = [(row["train/loss"], row["train/grad_norm"]) for row in records(run_dir) if "train/loss" in row]
    return [value for row in rows for value in row], json.loads((run_dir / "summary.json").read_text())


def gap(got: list[float], wanted: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(got, wanted, strict=True))


def test_float64_curves_and_validation_are_equal_at_every_layout(tmp_path):
    """With dropout in all three kinds of attention; two thirds of a sample go to the encoder."""
    settings = (
        "train.precision=fp64", "train.steps=12", "optimizer.lr=1e-3", "attention.dropout=0.1",
        "attention@model.cross_attention=gated_gqa", "model.cross_attention.dropout=0.1", "model.encoder.seq_len=20",
    )  # fmt: skip
    alone, summary = trained(tmp_path, 1, *settings)
    assert alone[-2] < alone[0] - 0.2, "nothing was learnt: equal curves would prove nothing"
    assert abs(alone[0] - math.log(257)) < 0.2 and abs(summary["val/loss"] - alone[-2]) < 1.0
    assert summary["val/bits_per_byte"] == pytest.approx(summary["val/loss"] / math.log(2), rel=0.02)
    for size, layout in [(2, "parallel.tensor=2"), (2, "parallel.data=2 train.micro_batch_size=3")]:
        curve, other = trained(tmp_path, size, *settings, *layout.split())
        assert gap(curve, alone) < 1e-9, layout
        for key in ("val/loss", "val/bits_per_byte"):
            assert other[key] == pytest.approx(summary[key], rel=1e-9)


@pytest.mark.parametrize("engine", [["engine.sharding=full"], ["engine=deepspeed", "engine.zero_stage=3"]], ids=["fsdp2", "zero3"])
def test_engines_that_shard_parameters(tmp_path, engine):
    settings = ("train.steps=6", "optimizer.lr=1e-3", "optimizer.eps=1e-4")
    alone, _ = trained(tmp_path, 1, *settings)
    curve, _ = trained(tmp_path, 4, *settings, *engine, "parallel.tensor=2", "train.micro_batch_size=3")
    assert gap(curve, alone) < 1e-4


def test_what_a_run_says_at_its_start():
    """The command line itself is in the README, whose commands tests/test_readme.py runs."""
    config = with_vocabulary(parse(composed(*MODEL, "attention=mha", "attention@model.cross_attention=mqa")), 257)
    axis, said = AxisGroup(None, 0, 2), []
    tracker = SimpleNamespace(notice=said.append, warn=said.append)
    mesh = SimpleNamespace(data=AxisGroup(), tensor=axis, device=torch.device("cpu"))
    announce(tracker, config, build_model(config, axis, "meta"), mesh, 12, 1, 100)
    assert "the encoder reads the first 16 tokens of a sample, the decoder writes the other 16" in said
    titles = [line.partition(" on ")[0] for line in said if "imbalance" in line]
    assert titles == ["attention: 6 query heads, 6 KV heads", "cross attention: 6 query heads, 1 KV head"]


@pytest.mark.parametrize(
    "overrides, wanted",
    [
        (["model.cross_attention.window=4"], "model.cross_attention.window=4"),
        (["attention@model.cross_attention=gqa", "model.cross_attention.window=4"], "model.cross_attention.window=4"),
        (["attention@model.cross_attention=mla"], "model.cross_attention: MultiHeadLatentAttention has no cross form; choose cross or a grouped-query type"),
        (["model.cross_attention.num_kv_heads=4"], "model.cross_attention.num_kv_heads=4 does not divide model.cross_attention.num_heads=6"),
        (["model.cross_attention.head_dim=null"], "model.cross_attention.num_heads=6 does not divide model.hidden_size=32: set model.cross_attention.head_dim"),
        (["model.cross_attention=gqa"], "choose one with attention@model.cross_attention=CHOICE"),
        (["attention=cross"], "attention: CrossAttention reads an encoder's states: here it is model.cross_attention"),
        (["attention.head_dim=null", "model.hidden_size=48", "model.encoder.hidden_size=32"], "attention.num_heads=6 does not divide model.encoder.hidden_size=32"),
        (["model.encoder.seq_len=32"], "model.encoder.seq_len=32 leaves the decoder nothing of train.seq_len=32: use 1 to 31"),
        (["model.encoder.seq_len=0"], "model.encoder.seq_len=0 must be at least 1"),
        (["train.seq_len=1"], "train.seq_len=1: encoder and decoder need a token each"),
        (["model.encoder.num_layers=0"], "model.encoder.num_layers=0"),
        (["+model.encoder.depth=3"], "model.encoder.depth"),
        (["data.documents=true"], "data.documents=true with model=encoder_decoder"),
        (["model._target_=parallel_attn.nn.RMSNorm"], "model._target_=parallel_attn.nn.RMSNorm is not a subclass of LanguageModel"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_refused_by_name(overrides, wanted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError) as caught:
        pretrain(composed(*MODEL, *overrides))
    assert wanted in str(caught.value) and len(str(caught.value).splitlines()) == 1
    assert not dist.is_initialized() and not list(tmp_path.iterdir())


def test_a_key_of_the_encoder_decoder_alone_is_told_so():
    from parallel_attn.training.overrides import check_overrides

    for override in ("attention@model.cross_attention=gqa", "model.cross_attention.window=3", "model.encoder.seq_len=8"):
        with pytest.raises(SettingsError, match="is a key of model=encoder_decoder, not of the choice made here"):
            check_overrides([override])
