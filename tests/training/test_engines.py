"""Every engine gives the curve, the gradient norms and the weights of one plain process."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from parallel_attn import SettingsError, sharded_parameters
from parallel_attn.training import pretrain
from parallel_attn.training.engines import DeepSpeedEngine, TorchEngine
from tests.parity import assemble, axis_of
from tests.training.composed import SMALL, composed, records
from tests.world import run

ENGINES = {
    "ddp": ["engine=torch"],
    "fsdp2": ["engine.sharding=full"],
    **{f"zero{stage}": ["engine=deepspeed", f"engine.zero_stage={stage}"] for stage in range(4)},
}
# (processes, tensor): KV heads 2, so degree 3 is uneven and holds copies
PAIRS = [(engine, 4, 2) for engine in ENGINES] + [(engine, 3, 3) for engine in ("fsdp2", "zero1")]
REST = [(engine, size, tensor) for engine in ENGINES for size, tensor in [(2, 1), (2, 2), (3, 1), (3, 3)]]
PAIRS += [pytest.param(*pair, marks=pytest.mark.slow) for pair in REST if pair not in PAIRS]


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """This tensor rank's shard, gathered over the replicas."""
    if isinstance(parameter, DTensor):
        return parameter.full_tensor().detach().clone()
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
    return parameter.detach().clone()


def train_case(run_dir: str, overrides: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Trains and returns the full weights."""
    weights = {}

    def spy(cls):
        close = cls.close

        def closing(engine):
            shards = {name: shard for name, _, shard in sharded_parameters(engine.module)}
            local = {name: whole(parameter) for name, parameter in engine.module.named_parameters()}
            weights.update(assemble(local, shards, axis_of(engine.module)))
            close(engine)

        cls.close = closing
        return cls, close

    originals = [spy(cls) for cls in (TorchEngine, DeepSpeedEngine)]
    try:
        pretrain(composed(*SMALL, f"run_dir={run_dir}", "train.log_every=1", "eval.every=0", *overrides))
    finally:
        for cls, close in originals:
            cls.close = close
    return weights


def trained(tmp_path, size, *overrides):
    run_dir = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
    weights = run(size, train_case, str(run_dir), overrides, timeout=150)[0]
    return [(record["train/loss"], record["train/grad_norm"]) for record in records(run_dir)], weights


SETTINGS = ("train.steps=30", "optimizer.lr=1e-3", "optimizer.eps=1e-4", "optimizer.grad_clip=1.0")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    curve, weights = trained(tmp_path_factory.mktemp("alone"), 1, *SETTINGS)
    assert max(norm for _, norm in curve) > 1.0, "nothing was clipped"
    return curve, weights


@pytest.mark.parametrize("engine, size, tensor", PAIRS)
def test_float32_curve_norms_and_weights(tmp_path, alone, engine, size, tensor):
    """30 clipped steps with two micro batches each: losses and norms within 1e-5, weights within 1e-4 of their scale."""
    curve, weights = trained(
        tmp_path, size, *SETTINGS, *ENGINES[engine], f"parallel.tensor={tensor}",
        f"train.micro_batch_size={12 // 2 // (size // tensor)}",
    )  # fmt: skip
    wanted_curve, wanted = alone
    assert max(abs(a - b) / b for (a, _), (b, _) in zip(curve, wanted_curve, strict=True)) < 1e-5
    assert max(abs(a - b) / b for (_, a), (_, b) in zip(curve, wanted_curve, strict=True)) < 1e-4
    for name, tensor in wanted.items():
        assert (weights[name] - tensor).abs().max() <= 1e-4 * tensor.abs().max(), name


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "engine, size, tensor",
    [("zero1", 4, 2), ("zero3", 2, 1)]
    + [pytest.param(engine, *layout, marks=SLOW) for engine in ("fsdp2", "zero1", "zero2", "zero3") for layout in ((2, 1), (2, 2), (3, 3))],
)
def test_bf16_stays_within_the_bound_that_the_readme_states(tmp_path, alone, engine, size, tensor):
    curve, _ = trained(
        tmp_path, size, *SETTINGS, *ENGINES[engine], f"parallel.tensor={tensor}", "train.precision=bf16"
    )
    assert max(abs(a - b) / b for (a, _), (b, _) in zip(curve, alone[0], strict=True)) < 0.01


@pytest.mark.parametrize("engine", ["zero0", *(pytest.param(engine, marks=SLOW) for engine in ("zero2", "fsdp2"))])
def test_clipping_off_means_off(tmp_path, engine):
    """DeepSpeed clips at 1.0 when nothing is said."""
    settings = ("train.steps=5", "optimizer.lr=1e-3", "optimizer.eps=1e-2", "optimizer.grad_clip=null")
    _, wanted = trained(tmp_path, 1, *settings)
    _, clipped = trained(tmp_path, 1, *settings[:-1], "optimizer.grad_clip=1.0")
    _, weights = trained(tmp_path, 2, *settings, *ENGINES[engine])
    gap = max((weights[name] - tensor).abs().max().item() for name, tensor in wanted.items())
    assert gap < 1e-6
    assert max((clipped[name] - tensor).abs().max().item() for name, tensor in wanted.items()) > 100 * gap


@pytest.mark.parametrize("engine", ["zero3", *(pytest.param(engine, marks=SLOW) for engine in ("zero1", "fsdp2"))])
def test_tied_embeddings(tmp_path, engine):
    settings = ("train.steps=10", "optimizer.lr=1e-3", "optimizer.eps=1e-4", "model.tie_embeddings=true")
    wanted, _ = trained(tmp_path, 1, *settings)
    curve, _ = trained(tmp_path, 4, *settings, *ENGINES[engine], "parallel.tensor=2")
    assert max(abs(a - b) / b for (a, _), (b, _) in zip(curve, wanted, strict=True)) < 1e-5


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["engine=deepspeed", "engine.zero_stage=0", "train.precision=bf16"], "engine.zero_stage=0 with train.precision=bf16"),
        (["engine=deepspeed", "train.precision=fp64"], "train.precision=fp64: DeepSpeed has no float64"),
        (["engine=deepspeed", "engine.zero_stage=4"], "engine.zero_stage=4 is not one of: 0, 1, 2, 3"),
        (["engine.sharding=half"], "engine.sharding=half is not one of: none"),
        (["engine=deepspeed", "+engine.sharding=full"], "engine.sharding"),
        (["+engine.zero_stage=1"], "engine.zero_stage"),
        (["engine=deepspeed", "+engine.ds_config.train_batch_size=3"], "train_batch_size is not yours to set, use train.global_batch_size"),
        (["engine=deepspeed", "+engine.ds_config.zero_optimization.stage=3"], "zero_optimization.stage is not yours to set, use engine.zero_stage"),
        (["engine=deepspeed", "+engine.ds_config.fp16.enabled=true"], "fp16 is not yours to set, use train.precision"),
        (["engine=deepspeed", "engine.ds_config=nowhere.json"], "engine.ds_config=nowhere.json cannot be read"),
        (["engine=deepspeed", "engine.ds_config=7"], "engine.ds_config=7 is not a mapping"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_refused_by_name(overrides, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError) as caught:
        pretrain(composed(*SMALL, *overrides))
    assert message in str(caught.value) and len(str(caught.value).splitlines()) == 1


def merged_case(run_dir: str) -> int:
    from parallel_attn.training.engines import deepspeed as engines

    seen = []
    merged = engines._merged
    engines._merged = lambda ours, theirs: seen.append(merged(ours, theirs)) or seen[-1]
    try:
        overrides = ["engine=deepspeed", "engine.zero_stage=2", "+engine.ds_config.zero_optimization.reduce_bucket_size=5000"]
        train_case(run_dir, ("train.steps=2", *overrides))
    finally:
        engines._merged = merged
    return seen[-1]["zero_optimization"]


def test_a_users_own_deepspeed_settings_are_merged(tmp_path):
    assert run(2, merged_case, str(tmp_path / "a"), timeout=100) == [{"stage": 2, "reduce_bucket_size": 5000}] * 2
