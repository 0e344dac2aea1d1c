"""Memory by kind of a whole run, for every engine, against a hand count of what each keeps on a rank."""

import json

import pytest

from parallel_attn.training import pretrain
from tests.training.composed import SMALL, composed
from tests.world import run

BLOCK = 32 * 8 * (3 + 1 + 1 + 3) + 3 * 32 * 25 + 2 * 32
FULL = 2 * BLOCK + 2 * 129 * 32 + 32  # parameters of tensor rank 0 of 2: 129 of 257 rows, 25 of 50 columns, 3 of 6 heads
ROUNDING = 0.03  # shards are padded to the replicas, DeepSpeed's partitions are aligned, each parameter has a step counter


def memory_case(run_dir: str, overrides: list[str]) -> None:
    settings = ("parallel.tensor=2", "train.steps=3", "eval.every=0", f"run_dir={run_dir}")
    pretrain(composed(*SMALL, *settings, *overrides))


def measured(tmp_path, overrides: list[str]) -> dict[str, float]:
    """Bytes by kind in units of the full fp32 parameters of a tensor rank."""
    run(4, memory_case, str(tmp_path / "a"), overrides, timeout=100)
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    kinds = ("parameters", "gradients", "optimizer", "activations_peak", "total_peak")
    return {kind: summary[f"memory/{kind}_bytes"] / (4 * FULL) for kind in kinds}


@pytest.mark.parametrize(
    "overrides, parameters, optimizer",
    [
        pytest.param(["engine=torch"], 1, 2, marks=pytest.mark.slow),
        (["engine.sharding=full"], 1 / 2, 2 / 2),
        pytest.param(["engine=deepspeed", "engine.zero_stage=0"], 1, 2, marks=pytest.mark.slow),
        (["engine=deepspeed", "engine.zero_stage=1"], 1, 3 / 2),  # it keeps its part of the fp32 weights a second time
        (["engine=deepspeed", "engine.zero_stage=3"], 1 / 2, 2 / 2),
        (["engine=deepspeed", "engine.zero_stage=1", "train.precision=bf16"], 1 / 2, 3 / 2),  # masters and moments
    ],
    ids=["ddp", "fsdp2", "zero0", "zero1", "zero3", "zero1-bf16"],
)
def test_parameters_and_optimizer_state_of_two_replicas(tmp_path, overrides, parameters, optimizer):
    found = measured(tmp_path, overrides)
    assert found["parameters"] == pytest.approx(parameters, rel=ROUNDING), found
    assert found["optimizer"] == pytest.approx(optimizer, rel=ROUNDING), found
    assert found["gradients"] >= 0.45 * parameters and found["activations_peak"] > 0, found
    assert found["total_peak"] >= found["parameters"] + found["optimizer"], found
