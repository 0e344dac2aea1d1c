"""One pretraining job, from a composed configuration to a run folder with its metrics and summary."""

from __future__ import annotations

import hashlib
import json
import platform
import time
from contextlib import closing
from dataclasses import replace

import torch
from torch import Tensor

from parallel_attn import costs, mesh as meshes
from parallel_attn.collectives import all_reduce
from parallel_attn.data import IGNORE, Batch, ByteTokenizer, EvalBatches, TrainBatches, fingerprint, prepare_tokens
from parallel_attn.errors import NonFiniteLoss, SettingsError
from parallel_attn.mesh import AxisGroup, Mesh
from parallel_attn.models import DecoderLM
from parallel_attn.tracking import MemoryMeter, Tracker, device_peak_bytes, mfu, peak_flops, process_peak_bytes
from parallel_attn.training.config import Config, parse, plain_config
from parallel_attn.training.engines import Job, compute_dtypes
from parallel_attn.training.evaluation import evaluate
from parallel_attn.training.run_folder import check_run_dir, open_run_dir, require_same_on_all_ranks

IMBALANCE_WARNING = 1.25


def pretrain(raw, *, name: str | None = None) -> dict:
    """Trains as `raw` (the composed configuration) says and returns what summary.json holds (on rank 0; {} elsewhere).

    name: ending of the default run folder. Raises SettingsError before the first collective for settings that cannot
    work, NonFiniteLoss on every rank at the same optimizer step.
    """
    config = parse(raw)
    rank, local_rank, world_size = meshes.launcher_ranks()
    device = meshes.choose_device(config.device, local_rank)
    data, tensor = meshes.layout(world_size, config.parallel.tensor, config.parallel.data)
    micro_batch, accumulation = config.train.micro_batches(data)
    tokenizer = ByteTokenizer()
    resolve_vocabulary(config, tokenizer.vocab_size)
    build_model(config, AxisGroup(None, rank % tensor, tensor), "meta")  # every refusal of a layer comes here
    config.engine.cls.check(config.engine.config, config.train.precision, tensor)
    check_run_dir(config.run_dir)
    corpus = config.data.cls(config.data.config)
    tokens = prepare_tokens(
        corpus,
        tokenizer,
        builder=local_rank == 0,
        seq_len=config.train.seq_len,
        progress=(lambda line: print(line, flush=True)) if local_rank == 0 else None,
    )

    mesh = meshes.start(device, tensor=tensor, data=data)
    settings = {key: value for key, value in config.plain.items() if key not in ("device", "run_dir", "data")}
    require_same_on_all_ranks("the settings", _digest(settings), mesh)
    require_same_on_all_ranks("the tokens (data fingerprint)", fingerprint(tokens), mesh)
    name = name or f"{config.attention.cls.__name__}"
    run_dir = open_run_dir(config.run_dir, name, plain_config(config), mesh)

    tracker = Tracker(
        run_dir,
        config=plain_config(config),
        settings=config.tracking,
        total_steps=config.train.steps,
        main=mesh.is_main,
        run_name=run_dir.name,
    )
    with tracker, meshes.peers_expected():
        model = build_model(config, mesh.tensor, device)
        job = Job(mesh, config.optimizer.config, config.train.precision, micro_batch, accumulation)
        engine = config.engine.cls(model, job, config.engine.config)
        train = TrainBatches(
            tokens.train,
            seq_len=config.train.seq_len,
            global_batch_size=config.train.global_batch_size,
            micro_batch_size=micro_batch,
            seed=config.train.seed,
            data_rank=mesh.data.rank,
            data_degree=mesh.data.degree,
        )
        validation = EvalBatches(
            tokens.val,
            seq_len=config.train.seq_len,
            samples=config.eval.samples,
            micro_batch_size=micro_batch,
            data_rank=mesh.data.rank,
            data_degree=mesh.data.degree,
        )
        announce(tracker, config, model, mesh, accumulation, micro_batch, train)
        token_bytes = torch.from_numpy(tokenizer.token_bytes()).to(device)
        with closing(engine):
            seconds = Loop(config, model, engine, mesh, tracker, train, validation, token_bytes).run()
        summary = {
            "train_seconds": seconds,
            "parameters": costs.full_parameters(model),
            "layout": {"data": mesh.data.degree, "tensor": mesh.tensor.degree, "device": str(device.type)},
            "data_fingerprint": fingerprint(tokens),
            "versions": versions(),
        }
        tracker.finish(summary)
    return summary


def resolve_vocabulary(config: Config, tokens: int) -> None:
    """`model.vocab_size=null` is the tokenizer's; a smaller one is refused."""
    wanted = config.model.vocab_size
    if wanted is None:
        config.model = replace(config.model, vocab_size=tokens)
    elif wanted < tokens:
        raise SettingsError(f"model.vocab_size={wanted} is less than the {tokens} tokens of the tokenizer: use {tokens}")


def build_model(config: Config, tensor: AxisGroup, device: torch.device | str) -> DecoderLM:
    dtype, compute_dtype = compute_dtypes(config.train.precision)
    return DecoderLM(
        config.model,
        config.attention.cls,
        config.attention.config,
        tensor_parallel=tensor,
        seed=config.train.seed,
        device=device,
        dtype=dtype,
        compute_dtype=compute_dtype,
    )


def announce(tracker: Tracker, config: Config, model, mesh: Mesh, accumulation: int, micro: int, train) -> None:
    """What runs where, before the first step, and what a colleague would warn of."""
    plan = model.plan
    tracker.notice(
        f"{costs.full_parameters(model):,} parameters ({costs.local_parameters(model):,} on this rank), "
        f"{mesh.data.degree} replica(s) x {mesh.tensor.degree} tensor rank(s) on {mesh.device.type}, "
        f"{config.train.global_batch_size} samples of {config.train.seq_len} tokens per step "
        f"({mesh.data.degree} x {accumulation} x {micro}), {train.num_samples:,} samples"
    )
    if mesh.tensor.degree > 1:
        for line in str(plan).splitlines():
            tracker.notice(line)
    if plan.imbalance > IMBALANCE_WARNING:
        tracker.warn(
            f"the fullest rank holds {plan.imbalance:.2f}x the mean of query heads and the others wait for it: "
            f"choose parallel.tensor so that the heads spread evenly"
        )


class Loop:
    """The training loop. All ranks run it in step; only rank 0's tracker writes."""

    def __init__(self, config, model, engine, mesh, tracker, train, validation, token_bytes) -> None:
        self.config, self.model, self.engine, self.mesh, self.tracker = config, engine.module, engine, mesh, tracker
        self.train, self.validation, self.token_bytes = train, validation, token_bytes
        self.schedule = config.schedule.cls(config.schedule.config, config.optimizer.config.lr, config.train.steps)
        self.loss_settings = {"label_smoothing": config.train.label_smoothing, "z_loss": config.train.z_loss}
        flops_dtype = compute_dtypes(config.train.precision)[1] or model.embedding.weight.dtype
        self.peak = peak_flops(mesh.device, flops_dtype)
        self.flops_per_token = costs.train_flops_per_token(model, config.train.seq_len)
        self.pending: list[tuple[int, Tensor]] = []

    def run(self) -> float:
        """Runs all optimizer steps; returns the seconds they took, validation included."""
        settings, began, device_type = self.config.train, time.perf_counter(), self.mesh.device.type
        measured_step = min(1, settings.steps - 1)  # the second step: optimizer state exists by then
        window_began, window_steps = began, 0
        for step in range(settings.steps):
            batches = [self.to_device(batch) for batch in self.train.step(step)]
            metrics: dict[str, float] = {}
            if step == measured_step:
                with MemoryMeter(parameters=self.model.parameters(), optimizer=self.engine.optimizer) as meter:
                    loss, norm = self.step(step, batches)
                metrics |= self.memory(meter.report())
            else:
                loss, norm = self.step(step, batches)
            self.stop_if_not_finite(keep_newest=device_type != "cpu")
            window_steps += 1
            done = step + 1
            last = done == settings.steps
            if done % settings.log_every == 0 or last or metrics:
                metrics |= {"train/loss": loss.item(), "train/grad_norm": norm.item()}
                metrics |= {"train/lr": self.schedule.rate(step)}
                metrics |= self.speed(window_steps, time.perf_counter() - window_began)
                self.tracker.log(done, metrics)
                window_began, window_steps = time.perf_counter(), 0
            if self.config.eval.every and (done % self.config.eval.every == 0 or last):
                self.tracker.log(done, evaluate(self.model, self.validation, self.token_bytes, self.mesh))
                window_began = time.perf_counter() if window_steps == 0 else window_began
        self.stop_if_not_finite(keep_newest=False)
        return time.perf_counter() - began

    def step(self, step: int, batches: list[Batch]) -> tuple[Tensor, Tensor]:
        """One optimizer step: (mean loss over the valid targets of the global batch, gradient norm before clipping)."""
        # Known before the first backward, so that any split into micro batches and replicas gives the same gradient.
        valid = sum((batch.targets != IGNORE).sum() for batch in batches).double()
        scale = 1 / all_reduce(valid, self.mesh.data).clamp(min=1)
        loss_sum = self.engine.forward_backward(batches, scale, **self.loss_settings)
        loss = all_reduce(loss_sum.double(), self.mesh.data) * scale
        norm = self.engine.step(self.schedule.rate(step), loss.isfinite())
        self.pending.append((step, loss.isfinite() & norm.isfinite()))
        return loss, norm

    def stop_if_not_finite(self, *, keep_newest: bool) -> None:
        """Reads the flags of the steps so far, but for the newest where the device would have to be waited for: the
        update was masked on the device, so the host may look one step late."""
        newest = self.pending[-1:] if keep_newest else []
        for step, finite in self.pending[: len(self.pending) - len(newest)]:
            if not bool(finite):
                raise NonFiniteLoss(
                    f"loss or gradient norm is not finite at optimizer step {step + 1}: no parameter was changed by it; "
                    f"try a smaller optimizer.lr, or a longer schedule.warmup_steps"
                )
        self.pending = newest

    def to_device(self, batch: Batch) -> Batch:
        device = self.mesh.device
        if device.type == "cpu":
            return batch
        tensors = (batch.tokens, batch.targets, batch.document_ids)
        return Batch(*(None if t is None else t.pin_memory().to(device, non_blocking=True) for t in tensors))

    def speed(self, steps: int, seconds: float) -> dict[str, float]:
        settings = self.config.train
        rate = steps * settings.global_batch_size * settings.seq_len / seconds
        metrics = {"train/tokens_per_second": rate, "memory/process_peak_bytes": process_peak_bytes()}
        utilisation = mfu(self.flops_per_token, rate / self.mesh.world.degree, self.peak)
        if utilisation is not None:
            metrics["train/mfu"] = utilisation
        peak = device_peak_bytes(self.mesh.device)
        if peak is not None:
            metrics["memory/device_peak_bytes"] = peak
        return metrics

    def memory(self, report: dict[str, int]) -> dict[str, float]:
        """Bytes by kind on the fullest rank of each kind, and what a token will cost in a cache."""
        names = sorted(report)
        values = torch.tensor([report[name] for name in names], dtype=torch.int64, device=self.mesh.device)
        fullest = dict(zip(names, all_reduce(values, self.mesh.world, "max").tolist()))
        dtype = compute_dtypes(self.config.train.precision)[1] or self.model.embedding.weight.dtype
        per_rank = (self.model.cache_elements_per_token(r) for r in range(self.mesh.tensor.degree))
        return fullest | {"memory/kv_cache_bytes_per_token": max(per_rank) * dtype.itemsize}


def versions() -> dict[str, str]:
    from importlib.metadata import version

    import parallel_attn

    versions = {name: version(name) for name in ("torch", "numpy", "hydra-core")}
    return {"parallel_attn": parallel_attn.__version__, **versions, "python": platform.python_version()}


def _digest(plain: dict) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()
