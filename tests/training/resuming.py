"""Runs that are stopped and gone on with: what a rank of a test world does and reports."""

from __future__ import annotations

import hashlib
import signal

import torch
import torch.distributed as dist

from parallel_attn import sharded_parameters
from parallel_attn.data import TrainBatches
from parallel_attn.errors import Interrupted
from parallel_attn.training import pretrain
from parallel_attn.training.engines import DeepSpeedEngine, TorchEngine
from parallel_attn.training.signals import Signals
from tests.parity import assemble, axis_of
from tests.training.composed import SMALL, composed, records
from tests.world import run

ENGINES = {
    "ddp": ["engine=torch"],
    "fsdp2": ["engine.sharding=full"],
    **{f"zero{stage}": ["engine=deepspeed", f"engine.zero_stage={stage}"] for stage in range(4)},
}


def training_case(run_dir: str, overrides: tuple[str, ...], stop_in: int | None = None) -> dict:
    """Trains; `stop_in`: the last rank gets a SIGTERM while it reads the batches of that step (from 0).

    Returns the full state at the end (`assemble` also checks that copies are bitwise equal), a hash of each step's
    batches on this replica, whether it was stopped, and what pretrain returned.
    """
    seen: dict = {"state": {}, "batches": {}, "stopped": False}
    signals, step = Signals(), TrainBatches.step

    def watched(self, index):
        batches = step(self, index)
        text = b"".join(batch.tokens.numpy().tobytes() for batch in batches)
        seen["batches"][index] = hashlib.sha256(text).hexdigest()[:12]
        if index == stop_in and dist.get_rank() == dist.get_world_size() - 1:
            signals.requested = signal.SIGTERM
        return batches

    def spy(cls):
        close = cls.close

        def closing(engine):
            shards = {name: shard for name, _, shard in sharded_parameters(engine.module)}
            for kind in ("master", "exp_avg", "exp_avg_sq"):
                local = {name: engine.state_of(name)[kind].clone() for name in shards}
                full = assemble(local, shards, axis_of(engine.module))
                seen["state"] |= {f"{kind}/{name}": tensor for name, tensor in full.items()}
            close(engine)

        cls.close = closing
        return cls, close

    originals = [spy(cls) for cls in (TorchEngine, DeepSpeedEngine)]
    TrainBatches.step = watched
    settings = [*SMALL, "train.log_every=1", "eval.every=0", "checkpoint.every=1000", f"run_dir={run_dir}", *overrides]
    choices = {"model": "nano", "attention": "gqa", "tokenizer": "bytes"}
    choices |= {key: value for key, _, value in (text.partition("=") for text in overrides) if key in choices}
    try:
        seen["summary"] = pretrain(
            composed(*settings), signals=signals, overrides=list(overrides), choices=choices
        )
    except Interrupted:
        seen["stopped"] = True
    finally:
        TrainBatches.step = step
        for cls, close in originals:
            cls.close = close
    if dist.get_rank():
        seen["state"] = {}
    return seen


def trained(size: int, run_dir, *overrides: str, stop_in: int | None = None, timeout: float = 150.0) -> list[dict]:
    return run(size, training_case, str(run_dir), overrides, stop_in, timeout=timeout)


def curve(run_dir) -> dict[int, tuple[float, float, float]]:
    """Step -> (loss, gradient norm, learning rate); of a step done twice the later record counts."""
    keys = ("train/loss", "train/grad_norm", "train/lr")
    return {record["step"]: tuple(record[key] for key in keys) for record in records(run_dir) if keys[0] in record}


def require_same_state(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys() and got
    different = [key for key, tensor in wanted.items() if not torch.equal(got[key], tensor)]
    assert not different, different
