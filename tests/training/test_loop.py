"""What a run leaves behind, evaluation, non-finite losses, and copies that stay equal."""

import json
import math
import time

import pytest
import torch.distributed as dist
from omegaconf import OmegaConf

from parallel_attn import NonFiniteLoss, SettingsError, parameter_shards
from parallel_attn.models import DecoderLM
from parallel_attn.training import AdamW, pretrain
from tests.parity import assemble
from tests.training.composed import SMALL, composed, records
from tests.world import CaseFailed, run


def train_case(run_dir: str, *overrides: str) -> dict:
    return pretrain(composed(*SMALL, f"run_dir={run_dir}", *overrides))


def test_a_run_folder_holds_config_metrics_and_summary(tmp_path):
    run_dir = tmp_path / "a"
    run(2, train_case, str(run_dir), "parallel.tensor=2", "train.steps=7", "train.log_every=3", "eval.every=4", "eval.samples=5")
    steps = [(record["step"], sorted({key.partition("/")[0] for key in record if key != "step"})) for record in records(run_dir)]
    logged = [step for step, groups in steps if "train" in groups]
    assert logged == [2, 3, 6, 7] and [step for step, groups in steps if "val" in groups] == [4, 7]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["step"] == 7
    for key in (
        "train/loss", "train/grad_norm", "train/lr", "train/tokens_per_second", "train/mfu",
        "val/loss", "val/perplexity", "val/bits_per_byte", "memory/parameters_bytes", "memory/gradients_bytes",
        "memory/optimizer_bytes", "memory/activations_peak_bytes", "memory/total_peak_bytes",
        "memory/process_peak_bytes", "memory/kv_cache_bytes_per_token", "data_fingerprint", "versions", "layout", "seconds",
    ):  # fmt: skip
        assert key in summary, key
    assert summary["val/bits_per_byte"] == pytest.approx(summary["val/loss"] / math.log(2), rel=0.01)
    assert summary["memory/kv_cache_bytes_per_token"] == 2 * 2 * 8 * 1 * 4  # layers x (k, v) x width x KV heads x fp32
    config = OmegaConf.load(run_dir / "config.yaml")
    assert config.attention.num_heads == 6 and config.model.vocab_size == 257 and config.parallel.tensor == 2


def test_memory_by_kind_of_a_rank_against_a_hand_count(tmp_path):
    run_dir = tmp_path / "a"
    run(2, memory_case, str(run_dir))
    summary = json.loads((run_dir / "summary.json").read_text())
    local = summary["memory/parameters_bytes"]
    # rank 0 holds 129 of 257 rows, 25 of 50 columns, 3 of 6 heads, 1 of 2 KV heads, and all norm gains
    block = 32 * 8 * (3 + 1 + 1 + 3) + 3 * 32 * 25 + 2 * 32
    assert local == 4 * (2 * block + 2 * 129 * 32 + 32)
    assert summary["memory/gradients_bytes"] == local
    moments = summary["memory/optimizer_bytes"] - 2 * local
    assert 0 < moments <= 4 * 40  # a step counter per parameter
    assert summary["memory/activations_peak_bytes"] > 0
    assert summary["memory/total_peak_bytes"] >= local * 3


def memory_case(run_dir: str) -> None:
    train_case(run_dir, "parallel.tensor=2", "train.steps=3", "eval.every=0")


def test_validation_does_not_depend_on_batch_or_replicas(tmp_path):
    values = {}
    for layout in [(1, "parallel.tensor=1"), (1, "train.micro_batch_size=1"), (1, "train.micro_batch_size=6"),
                   (2, "parallel.tensor=1"), (4, "parallel.tensor=2"), (3, "parallel.tensor=1")]:  # fmt: skip
        size, override = layout
        run_dir = tmp_path / str(len(values))
        run(size, train_case, str(run_dir), override, "train.steps=1", "train.precision=fp64", "eval.samples=7")
        values[layout] = json.loads((run_dir / "summary.json").read_text())["val/loss"]
    assert values == pytest.approx(dict.fromkeys(values, values[1, "parallel.tensor=1"]), rel=1e-12)


class Broken(AdamW):
    @staticmethod
    def build(model, config):
        raise NotImplementedError("the optimizer that was named")


def own_optimizer_case(run_dir: str) -> None:
    train_case(run_dir, "optimizer._target_=tests.training.test_loop.Broken", "train.steps=1")


def test_the_named_optimizer_is_the_one_that_is_built(tmp_path):
    with pytest.raises(CaseFailed, match="the optimizer that was named"):
        run(1, own_optimizer_case, str(tmp_path / "a"))


def slow_validation_case(run_dir: str) -> None:
    from parallel_attn.training import loop

    evaluate = loop.evaluate
    loop.evaluate = lambda *arguments: time.sleep(1.0) or evaluate(*arguments)
    try:
        train_case(run_dir, "train.steps=12", "train.log_every=4", "eval.every=5", "eval.samples=1")
    finally:
        loop.evaluate = evaluate


def test_speed_counts_training_alone(tmp_path):
    """Validation of a second each between the records: no record may hold it (a step takes some milliseconds)."""
    run(1, slow_validation_case, str(tmp_path / "a"))
    speeds = [record["train/tokens_per_second"] for record in records(tmp_path / "a") if "train/tokens_per_second" in record]
    most = 4 * 12 * 32 / 1.0  # what a record that held one would show at best
    assert len(speeds) >= 3 and all(speed > most for speed in speeds[1:])


def poisoned_case(run_dir: str, where: int, *overrides: str) -> str:
    """The loss of one rank becomes NaN at its third forward pass."""
    calls = [0]
    forward = DecoderLM.forward

    def spoiled(model, tokens, targets=None, **settings):
        loss = forward(model, tokens, targets, **settings)
        calls[0] += 1
        return loss * math.nan if calls[0] == 3 and dist.get_rank() == where else loss

    DecoderLM.forward = spoiled
    try:
        with pytest.raises(NonFiniteLoss) as caught:
            train_case(run_dir, "eval.every=0", "train.log_every=1", *overrides)
    finally:
        DecoderLM.forward = forward
    return str(caught.value)


@pytest.mark.parametrize("size, tensor", [(2, 2), (2, 1), (4, 2)])
def test_all_ranks_stop_at_the_same_step_when_one_loss_is_not_finite(tmp_path, size, tensor):
    messages = run(size, poisoned_case, str(tmp_path / "a"), size - 1, f"parallel.tensor={tensor}")
    assert len(set(messages)) == 1 and "optimizer step 3" in messages[0]
    assert [record["step"] for record in records(tmp_path / "a")] == [1, 2]
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["status"] == "failed" and "optimizer step 3" in summary["error"]


def copies_case(run_dir: str) -> None:
    from parallel_attn.training.engines import torch as engines

    models = []
    build = engines.TorchEngine.__init__

    def kept(self, module, *arguments):
        models.append(module)
        build(self, module, *arguments)

    engines.TorchEngine.__init__ = kept
    try:
        train_case(run_dir, "parallel.tensor=4", "attention=mqa", "attention.qk_norm=full", "attention.bias=all",
                   "train.steps=20", "eval.every=0")  # fmt: skip
    finally:
        engines.TorchEngine.__init__ = build
    (model,) = models
    assemble(dict(model.named_parameters()), parameter_shards(model), model.tensor_axis)  # fails when copies are not bitwise equal


def test_copies_are_bitwise_equal_after_twenty_steps(tmp_path):
    run(4, copies_case, str(tmp_path / "a"))


def differing_case(run_dir: str) -> str:
    with pytest.raises(SettingsError) as caught:
        train_case(run_dir, "parallel.tensor=2", f"optimizer.lr={0.001 * (1 + dist.get_rank())}")
    return str(caught.value)


def test_ranks_started_with_different_settings_are_told(tmp_path):
    messages = run(2, differing_case, str(tmp_path / "a"))
    assert messages[0] == messages[1] and "the settings on rank 1 differ from rank 0's" in messages[0]


def test_a_failure_of_one_rank_is_not_waited_for(tmp_path):
    with pytest.raises(CaseFailed, match="rank 1.*bad disk"):
        run(2, one_bad_rank_case, str(tmp_path / "a"))


def one_bad_rank_case(run_dir: str) -> None:
    from parallel_attn.data import TrainBatches

    if dist.get_rank() == 1:
        TrainBatches.step = lambda *_: (_ for _ in ()).throw(OSError("bad disk"))
    train_case(run_dir, "parallel.tensor=2")
