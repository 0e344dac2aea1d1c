"""The checkpoints of a training job: when they are written, what training wants to know again, and putting it back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from parallel_attn.checkpoint import (
    CHECKPOINTS,
    Checkpoint,
    CheckpointFolder,
    Exchange,
    Reader,
    Saver,
    require_same_parameters,
)
from parallel_attn.data import Tokenizer, TrainBatches
from parallel_attn.errors import CheckpointError
from parallel_attn.mesh import Mesh
from parallel_attn.nn import parameter_shards
from parallel_attn.tracking import Tracker
from parallel_attn.training.config import Config, plain_config
from parallel_attn.training.engines import Engine
from parallel_attn.training.resume import TOKENIZER_FILE, Resume


class Checkpoints:
    """Saves the state of a job every `checkpoint.every` steps, at its end and when it is asked to stop.

    length: tokens of the longest sequence that the model was trained for, here or before. choices: Hydra's (group ->
    choice), where there are some. tick: told that the disk is at work. Raises CheckpointError
    on every rank.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        mesh: Mesh,
        tracker: Tracker,
        run_dir: Path,
        *,
        train: TrainBatches,
        tokenizer: Tokenizer,
        data_fingerprint: str,
        length: int,
        choices: Mapping[str, str] | None = None,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        self.config, self.engine, self.mesh, self.tracker, self.train = config, engine, mesh, tracker, train
        self.every = config.checkpoint.every
        self.shards = parameter_shards(engine.module)
        self.saved_step: int | None = None
        self.last: Path | None = None
        self.run_dir = run_dir
        self.saver: Saver | None = None
        self._tokenizer = tokenizer.to_json()
        self._known = {
            "config": plain_config(config),
            "choices": dict(choices or {}),
            "length": length,
            "layout": {
                "data": mesh.data.degree,
                "tensor": mesh.tensor.degree,
                "engine": type(engine).__name__,
                "precision": config.train.precision,
            },
            "tokenizer": {
                "name": tokenizer.name,
                "fingerprint": tokenizer.fingerprint,
                "end_of_text": tokenizer.end_of_text,
            },
        }
        self._data = {
            "fingerprint": data_fingerprint,
            "seq_len": config.train.seq_len,
            "seed": config.train.seed,
        }
        if self.every:
            folder = CheckpointFolder(run_dir / CHECKPOINTS)
            self.saver = Saver(folder, mesh, self.shards, config.checkpoint.keep, self._on_saved, tick)

    def due(self, step: int, last: bool) -> bool:
        """Whether a checkpoint is to be written after `step` optimizer steps."""
        return self.saver is not None and self.saved_step != step and (last or step % self.every == 0)

    def save(self, step: int, next_rate: float, progress: dict[str, Any]) -> None:
        """Returns once the state is copied. next_rate: learning rate of the step to come. progress: plain values that
        the loop wants back. Raises CheckpointError when the save before this one failed."""
        assert self.saver is not None
        self._equalize_copies()
        meta = self._known | {
            "updates": step,
            "schedule": {"steps": self.config.train.steps, "next_rate": next_rate},
            "data": self._data | {"samples": self.train.position(step)},
            "progress": progress,
        }
        self.saver.save(step, self.engine.state_of, meta, {TOKENIZER_FILE: self._tokenizer})
        self.saved_step = step

    @property
    def failed(self) -> bool:
        """Whether a save has failed, as far as this rank knows."""
        return self.saver is not None and self.saver.failed

    def wait(self) -> Path | None:
        """Waits until what was saved is on the disk; returns where. Raises CheckpointError on every rank."""
        done = self.saver.wait() if self.saver is not None else None
        self.last = done or self.last
        return done

    def say_where(self) -> None:
        """Tells the user how to go on with a run that did not come to its end."""
        if self.last is not None and self.saved_step is not None and self.saved_step < self.config.train.steps:
            self.tracker.notice(f"saved {self.last}: run_dir={self.run_dir} goes on from there")

    def _equalize_copies(self) -> None:
        """Rewrites copies from their first holder. At three or more replicas, sums over them may differ by an ulp between
        the tensor ranks; what a resumed run reads must be what this one goes on with."""
        if self.mesh.data.degree < 3:
            return
        copied = [name for name, shard in self.shards.items() if len(shard.holders) > 1]
        for name in copied:
            state = self.engine.state_of(name)
            axis = self.mesh.tensor.subgroup(self.shards[name].holders)
            for kind, tensor in state.items():
                state[kind] = tensor.contiguous()
                dist.broadcast(state[kind], group_src=0, group=axis.group)
            self.engine.set_state_of(name, state)
        if copied:
            self.engine.end_state()

    def _on_saved(self, step: int, folder: Path, finite: bool) -> None:
        if not finite:
            self.tracker.warn(f"{folder} holds values that are not finite: it is kept to look at, not to go on from")


def load(engine: Engine, resume: Resume) -> None:
    """Puts the checkpoint's state into a new engine. Raises CheckpointError."""
    require_same_parameters(resume.checkpoint, parameter_shards(engine.module), resume.given)
    with Reader(resume.checkpoint) as reader:
        engine.load(reader.parameter, resume.meta["updates"])


def verify(checkpoint: Checkpoint, mesh: Mesh, prefix: str = "") -> None:
    """Compares the checksums of all tensors, or those of `prefix`, each file by one of the ranks. Raises CheckpointError on
    every rank, offering another one."""
    problem = None
    try:
        checkpoint.verify(mesh.world.rank, mesh.world.degree, prefix)
    except CheckpointError as error:
        problem = str(error)
    found = [text for text in Exchange(mesh.world).gather(problem) if text]
    if found:
        raise CheckpointError(f"{found[0]}; {CheckpointFolder(checkpoint.folder.parent).offer(checkpoint.folder)}")
