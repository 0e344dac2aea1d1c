"""The training loop."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from parallel_attn import costs
from parallel_attn.collectives import all_reduce
from parallel_attn.data import IGNORE, Batch
from parallel_attn.errors import CheckpointError, Interrupted, NonFiniteLoss
from parallel_attn.tracking import MemoryMeter, device_peak_bytes, mfu, peak_flops, process_peak_bytes
from parallel_attn.training.checkpoints import Checkpoints
from parallel_attn.training.engines import compute_dtypes
from parallel_attn.training.evaluation import evaluate
from parallel_attn.training.signals import Signals
from parallel_attn.training.stopping import Abandoned, Agreement, Paced
from parallel_attn.training.watchdog import Watchdog


class Loop:
    """The training loop. All ranks run it in step; only rank 0's tracker writes."""

    def __init__(
        self, config, engine, mesh, tracker, train, validation, signals: Signals | None = None,
        checkpoints: Checkpoints | None = None, watchdog: Watchdog | None = None,
    ) -> None:  # fmt: skip
        self.config, self.engine, self.mesh, self.tracker = config, engine, mesh, tracker
        self.signals = signals or Signals()
        self.checkpoints, self.watchdog = checkpoints, watchdog or Watchdog(mesh, 0.0)
        accumulates = config.train.micro_batches(mesh.data.degree)[1] > 1
        self.agreement = Agreement(self.signals, mesh) if accumulates else None
        self.start_step, self.seconds_before, self.validated = 0, 0.0, 0
        self.model = model = engine.module
        self.train, self.validation = train, validation
        self.schedule = config.schedule.cls(config.schedule.config, config.optimizer.config.lr, config.train.steps)
        self.loss_settings = {"label_smoothing": config.train.label_smoothing, "z_loss": config.train.z_loss}
        flops_dtype = compute_dtypes(config.train.precision)[1] or model.embedding.weight.dtype
        self.peak = peak_flops(mesh.device, flops_dtype)
        self.flops_per_token = costs.train_flops_per_token(model, config.train.seq_len)
        self.pending: list[tuple[int, Tensor]] = []
        self.stop: signal.Signals | None = None
        """The signal on which all ranks have agreed to end after the step they are in."""
        self.best: dict[str, float] = {}

    def restore(self, step: int, progress: Mapping[str, Any], *, saved: bool) -> None:
        """Goes on after `step` optimizer steps. saved: the run folder has the checkpoint of that step."""
        self.start_step, self.best, self.seconds_before = step, dict(progress["best"]), progress["seconds"]
        self.validated = progress["validated"]
        if saved and self.checkpoints is not None:
            self.checkpoints.saved_step = step

    def run(self) -> float:
        """Runs all optimizer steps; returns the seconds they took since the run began, validation included.

        Raises NonFiniteLoss, CheckpointError or Interrupted (a signal on any rank) on every rank after the same step.
        """
        try:
            return self._run()
        except Abandoned as error:
            self.save(self.step_now)
            self.finish_saving()
            raise Interrupted(error.signal) from None
        except (NonFiniteLoss, Interrupted):
            self.finish_saving()  # all ranks are here: what was being saved can be finished
            raise
        finally:
            if self.checkpoints is not None:
                self.checkpoints.say_where()

    def _run(self) -> float:
        settings, self.began = self.config.train, time.perf_counter()
        # The second step: optimizer state exists by then.
        measured_step = min(self.start_step + 1, settings.steps - 1)
        every = self.config.eval.every
        due = every and (self.start_step % every == 0 or self.start_step == settings.steps)
        if self.start_step and due and self.validated != self.start_step:
            self.validate(self.start_step)  # the run was told to stop before it
        window = Window()
        for step in range(self.start_step, settings.steps):
            self.step_now = step
            self.watchdog.at(f"reading the batches of step {step + 1}")
            batches = [batch.to(self.mesh.device) for batch in self.train.step(step)]
            metrics: dict[str, float] = {}
            if step == measured_step:
                with window.paused():  # counting slows the step down
                    loss, norm, metrics = self.measured(step, batches)
            else:
                loss, norm = self.step(step, batches)
                window.steps += 1
            self.read_flags(keep_newest=self.mesh.device.type != "cpu")
            done = step + 1
            last = done == settings.steps
            if done % settings.log_every == 0 or last or metrics:
                metrics |= {"train/loss": loss.item(), "train/grad_norm": norm.item()}
                metrics |= {"train/lr": self.schedule.rate(step)} | self.peaks()
                if window.steps:
                    metrics |= self.speed(window.steps, window.seconds())
                    window = Window()
                self.tracker.log(done, metrics)
            if self.stop is not None and not last:
                self.save(done)
                raise Interrupted(self.stop)
            if every and (done % every == 0 or last):
                with window.paused():
                    self.validate(done)
            if self.checkpoints is not None and self.checkpoints.due(done, last):
                with window.paused():
                    self.save(done)
        self.read_flags(keep_newest=False)
        self.finish_saving()
        return self.seconds()

    def seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.began

    def save(self, done: int) -> None:
        """A checkpoint after `done` optimizer steps, where they are kept at all; the disk follows in a thread."""
        if self.checkpoints is None or done == 0 or not self.checkpoints.due(done, last=True):
            return
        self.watchdog.at(f"copying the state after step {done} for a checkpoint")
        self.read_flags(keep_newest=False)
        next_rate = self.schedule.rate(min(done, self.config.train.steps - 1))
        self.checkpoints.save(done, next_rate, {"best": self.best, "seconds": self.seconds(), "validated": self.validated})

    def finish_saving(self) -> None:
        if self.checkpoints is not None:
            self.watchdog.at("writing a checkpoint")
            self.checkpoints.wait()

    def measured(self, step: int, batches: list[Batch]) -> tuple[Tensor, Tensor, dict[str, float]]:
        """A step with its memory counted by kind."""
        with MemoryMeter(
            parameters=self.engine.parameter_tensors(),
            optimizer=self.engine.optimizer,
            gradients=self.engine.gradient_buffers(),
        ) as meter:
            loss, norm = self.step(step, batches)
        return loss, norm, self.memory(meter.report())

    def validate(self, done: int) -> None:
        watched = Paced(self.validation, lambda index: self.watchdog.at(f"validation batch {index} after step {done}"))
        metrics = evaluate(self.model, watched, self.mesh)
        self.validated = done
        self.tracker.log(done, metrics)
        if not self.best or metrics["val/loss"] < self.best["val/loss"]:
            self.best = {"step": done, **metrics}

    def step(self, step: int, batches: list[Batch]) -> tuple[Tensor, Tensor]:
        """One optimizer step: (mean loss over the valid targets of the global batch, gradient norm before clipping)."""
        self.watchdog.at(f"counting the targets of step {step + 1}")
        # Known before the first backward, so that any split into micro batches and replicas gives the same gradient.
        valid = sum((batch.targets != IGNORE).sum() for batch in batches).double()
        # A signal may reach one rank a step before the others: it travels with the count, over the whole world.
        failed = self.checkpoints is not None and self.checkpoints.failed
        asked = torch.tensor([float(failed), *self.signals.flags()], dtype=torch.float64, device=valid.device)
        sums = all_reduce(torch.cat([valid[None], asked]), self.mesh.world)
        valid, asked = sums[0] / self.mesh.tensor.degree, sums[1:]  # exact: a sum of equal whole numbers
        scale = 1 / valid.clamp(min=1)
        paced = Paced(batches, self.before_micro_batch)
        loss_sum = self.engine.forward_backward(paced, scale, step=step, **self.loss_settings)
        self.watchdog.at(f"the update of step {step + 1}")
        loss = all_reduce(loss_sum.double(), self.mesh.data) * scale
        norm = self.engine.step(self.schedule.rate(step), loss.isfinite())
        finite = loss.isfinite() & norm.isfinite()
        self.pending.append((step, torch.cat([finite.double()[None], asked])))
        return loss, norm

    def before_micro_batch(self, index: int) -> None:
        self.watchdog.at(f"micro batch {index + 1} of step {self.step_now + 1}")
        if self.agreement is not None:
            self.agreement(index)

    def read_flags(self, *, keep_newest: bool) -> None:
        """Reads the flags of the steps so far, but for the newest where the device would have to be waited for: the
        update was masked on the device, so the host may look one step late. Sets `stop`; raises NonFiniteLoss, and
        CheckpointError or PeerLost for a save that failed."""
        newest = self.pending[-1:] if keep_newest else []
        for step, flags in self.pending[: len(self.pending) - len(newest)]:
            finite, failed, *asked = flags.tolist()
            self.stop = self.stop or self.signals.agreed(asked)
            if failed:
                self.finish_saving()  # raises on every rank, with the cause
                raise CheckpointError("a checkpoint could not be written on another rank")
            if not finite:
                raise NonFiniteLoss(
                    f"loss or gradient norm is not finite at optimizer step {step + 1}: no parameter was changed by it; "
                    f"try a smaller optimizer.lr, or a longer schedule.warmup_steps"
                )
        self.pending = newest

    def speed(self, steps: int, seconds: float) -> dict[str, float]:
        settings = self.config.train
        rate = steps * settings.global_batch_size * settings.seq_len / seconds
        utilisation = mfu(self.flops_per_token, rate / self.mesh.world.degree, self.peak)
        known = {} if utilisation is None else {"train/mfu": utilisation}
        return {"train/tokens_per_second": rate, **known}

    def peaks(self) -> dict[str, float]:
        """What the operating system and the device's allocator saw on this rank."""
        peak = device_peak_bytes(self.mesh.device)
        known = {} if peak is None else {"memory/device_peak_bytes": peak}
        return {"memory/process_peak_bytes": process_peak_bytes(), **known}

    def memory(self, report: dict[str, int]) -> dict[str, float]:
        """Bytes by kind on the fullest rank of each kind, and what a token costs in a real cache."""
        report = report | {"memory/kv_cache_bytes_per_token": int(self.model.new_cache(1, 1).bytes_per_token())}
        names = sorted(report)
        values = torch.tensor([report[name] for name in names], dtype=torch.int64, device=self.mesh.device)
        return dict(zip(names, all_reduce(values, self.mesh.world, "max").tolist()))


class Window:
    """Optimizer steps since the last record and the seconds they took, without what else was done between."""

    def __init__(self) -> None:
        self.steps, self._began, self._elsewhere = 0, time.perf_counter(), 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._elsewhere += time.perf_counter() - start

    def seconds(self) -> float:
        return time.perf_counter() - self._began - self._elsewhere
