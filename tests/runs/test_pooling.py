"""MHA, GQA and MQA into each other: repetition is exact, pooling is the mean, and training goes on."""

import json

import pytest
import torch

from parallel_attn import AxisGroup, GroupedQueryAttention, SettingsError
from parallel_attn.attention import GroupedConfig, LatentConfig
from parallel_attn.attention.pooling import changed, with_kv_heads
from parallel_attn.checkpoint import KINDS
from parallel_attn.runs import open_run
from parallel_attn.runs.convert import main as convert
from parallel_attn.runs.pooling import validation_loss
from tests.parity import world_axis
from tests.runs.made import made_run
from tests.training.composed import records
from tests.training.resuming import ENGINES, trained
from tests.world import run

TOKENS = torch.randint(0, 257, (2, 24), generator=torch.Generator().manual_seed(5))
ODD = ("attention.bias=all", "attention.gate=elementwise", "attention.qk_norm=full", "attention.sinks=true")


def test_pooling_is_the_mean_of_neighbours():
    full = torch.randn(6 * 4, 5)
    pooled = changed(full, 6, 2)
    for j in range(2):
        for row in range(4):
            wanted = torch.stack([full[(3 * j + i) * 4 + row] for i in range(3)]).mean(0)
            torch.testing.assert_close(pooled[j * 4 + row], wanted)
    bias = torch.arange(12.0)
    assert changed(bias, 4, 1).tolist() == bias.view(4, 3).mean(0).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_repetition_then_pooling_is_the_identity(kind):
    full = torch.rand(2 * 4, 5)
    repeated = changed(full, 2, 8, kind)
    assert repeated.shape == (8 * 4, 5)
    torch.testing.assert_close(changed(repeated, 8, 2, kind), full, rtol=1e-6, atol=0)
    assert kind != "master" or torch.equal(changed(repeated, 8, 2), full)
    assert kind != "master" or all(torch.equal(repeated[i * 4 : i * 4 + 4], full[i // 4 * 4 : i // 4 * 4 + 4]) for i in range(8))


def test_moments_are_those_of_the_shared_weight():
    """The gradient of pooled weights is the sum of the members', its square at most n times the sum of their squares."""
    torch.manual_seed(0)
    wide = GroupedQueryAttention(24, num_heads=6, num_kv_heads=6, head_dim=4, name="a", dtype=torch.float64)
    narrow = GroupedQueryAttention(24, num_heads=6, num_kv_heads=2, head_dim=4, name="a", dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in narrow.named_parameters():
            is_kv = name[0] in "kv"
            dict(wide.named_parameters())[name].copy_(changed(parameter, 2, 6) if is_kv else parameter)
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    for layer in (wide, narrow):
        layer(x).square().sum().backward()
    for part in ("k", "v"):
        members, shared = getattr(wide, part).weight.grad, getattr(narrow, part).weight.grad
        torch.testing.assert_close(changed(members, 6, 2, "exp_avg"), shared, rtol=1e-9, atol=1e-9)
        assert (changed(members.square(), 6, 2, "exp_avg_sq") >= shared.square() - 1e-9).all()


def our_logits(run_dir):
    with torch.no_grad():
        return open_run(run_dir).model(world_axis(), dtype=torch.float64)(TOKENS)


@pytest.mark.parametrize("overrides", [(), ODD], ids=["plain", "full-norm-biases-gate-sinks"])
def test_gqa_to_mha_is_exact(overrides, tmp_path):
    made_run(tmp_path / "gqa", "attention.num_kv_heads=2", *overrides)
    assert convert([f"run={tmp_path}/gqa", "attention=mha", f"out={tmp_path}/mha"]) == 0
    (wanted,) = run(1, our_logits, str(tmp_path / "gqa"))
    for degree in (1, 2):
        for found in run(degree, our_logits, str(tmp_path / "mha")):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert convert([f"run={tmp_path}/mha", "attention=gqa", "attention.num_kv_heads=2", f"out={tmp_path}/back"]) == 0
    torch.testing.assert_close(run(1, our_logits, str(tmp_path / "back"))[0], wanted, rtol=1e-6, atol=2e-6)


def test_what_is_printed_is_so_and_training_goes_on(tmp_path, capsys):
    trained(2, tmp_path / "a", "attention=mha", "train.steps=6", "parallel.tensor=2")
    arguments = [f"run={tmp_path}/a", "attention=gqa", "attention.num_kv_heads=2", "--json", str(tmp_path / "o.json")]
    assert convert([*arguments, f"out={tmp_path}/gqa"]) == 0
    shown = capsys.readouterr().out
    assert "6 KV heads -> 2, means of 3" in shown and "4 parameters (keys and values) pooled, 17 kept" in shown
    found = json.loads((tmp_path / "o.json").read_text())
    before, after = (open_run(tmp_path / name) for name in ("a", "gqa"))
    assert found["val/loss"] == [validation_loss(before), validation_loss(after)]
    models = [opened.build(AxisGroup()) for opened in (before, after)]
    assert found["cache_bytes_per_token"] == [4 * model.cache_elements_per_token() for model in models]
    assert after.meta["updates"] == 6 and after.checkpoint.step == 0 and after.meta["data"]["samples"] == 72
    # The next step is that of the tied weights: with the moments, and the loss that was printed at its start.
    (state, _) = trained(2, tmp_path / "b", "parallel.tensor=2", f"checkpoint.resume={tmp_path}/gqa", "train.steps=1")
    again = open_run(tmp_path / "b")
    assert again.config.attention.config.num_kv_heads == 2 and again.meta["updates"] == 1
    assert records(tmp_path / "b")[-1]["train/loss"] < 5.7


@pytest.mark.parametrize("engine", [pytest.param(name, marks=() if name == "ddp" else pytest.mark.slow) for name in ENGINES])
def test_fresh_moments_begin_as_in_a_new_run(engine, tmp_path):
    """Adam's first step moves every weight by the learning rate, whatever its gradient: only at zero moments and count."""
    trained(2, tmp_path / "a", "attention=mha", "train.steps=3")
    assert convert([f"run={tmp_path}/a", "attention=mqa", "moments=fresh", f"out={tmp_path}/mqa"]) == 0
    settings = ["schedule=constant", "schedule.warmup_steps=0", "optimizer.weight_decay=0", "optimizer.grad_clip=null"]
    first, _ = trained(
        2, tmp_path / "b", *ENGINES[engine], f"checkpoint.resume={tmp_path}/mqa", "train.steps=1", "optimizer.lr=0.001", *settings
    )
    opened = open_run(tmp_path / "mqa")
    begun = dict(opened.model().named_parameters())
    assert not [key for key in opened.checkpoint.index.tensors if not key.startswith("master/")]
    for name in ("layers.0.attention.k.weight", "layers.1.mlp.up.weight"):
        moved = (first["state"][f"master/{name}"] - begun[name]).abs()
        torch.testing.assert_close(moved.median(), torch.tensor(0.001), rtol=1e-2, atol=0)


@pytest.mark.parametrize("own, kept", [("gated_gqa", "gated_gqa"), ("mha", "gqa"), (None, None)])
def test_a_choice_that_says_more_than_the_heads_stays(own, kept, tmp_path):
    """So that training may be told attention=gated_gqa, what the run was begun with."""
    gated = ("attention.gate=elementwise",) if own == "gated_gqa" else ()
    made_run(tmp_path / "a", "attention=mha", *gated, choices={} if own is None else {"attention": own})
    assert convert([f"run={tmp_path}/a", f"attention={kept or 'gqa'}", "attention.num_kv_heads=2", f"out={tmp_path}/b"]) == 0
    opened = open_run(tmp_path / "b")
    assert opened.meta["choices"].get("attention") == kept and opened.config.attention.config.num_kv_heads == 2


def test_what_cannot_be_converted(tmp_path, capsys):
    mha = made_run(tmp_path / "mha", "attention=mha")

    def no(message, *arguments, run_dir=mha):
        capsys.readouterr()
        assert convert([f"run={run_dir}", f"out={tmp_path}/out", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and message in error and not (tmp_path / "out").exists(), error

    no("num_kv_heads=4 cannot be made of 6 KV heads and 6 query heads: use one of 1, 2, 3, 6", "attention.num_kv_heads=4")
    no("has 6 KV heads already", "attention=mha")
    no("attention is missing")
    no("attention=mla is not one of: mha, mqa, gqa", "attention=mla")
    no("attention.num_kv_heads=2 is not mqa", "attention=mqa", "attention.num_kv_heads=2")
    no("attention.window=4: only the KV heads", "attention=mqa", "attention.window=4")
    no("moments=old is not one of", "attention=mqa", "moments=old")
    no("belongs to hf_model", "attention=mqa", "tokenizer=bytes")
    mla = made_run(tmp_path / "mla", "attention=mla", "attention.head_dim=null")
    no("LatentConfig has no KV heads", "attention=mqa", run_dir=mla)
    with pytest.raises(SettingsError, match="has no KV heads"):
        with_kv_heads(LatentConfig(4), 1)
    assert with_kv_heads(GroupedConfig(8, num_kv_heads=2), 4).num_kv_heads == 4
