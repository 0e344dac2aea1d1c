"""One pretraining job, from a composed configuration to a run folder with its metrics and summary."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from parallel_attn import costs, mesh as meshes
from parallel_attn.checkpoint import CHECKPOINTS, CheckpointFolder
from parallel_attn.data import EvalBatches, Tokenizer, TokenSplits, TrainBatches, fingerprint, prepare_tokens
from parallel_attn.errors import SettingsError
from parallel_attn.mesh import AxisGroup, Mesh
from parallel_attn.models import LanguageModel
from parallel_attn.tracking import Tracker
from parallel_attn.training import checkpoints
from parallel_attn.training.announce import announce, announce_resume
from parallel_attn.training.checkpoints import Checkpoints
from parallel_attn.training.config import Config, parse, plain_config
from parallel_attn.training.determinism import deterministic_kernels
from parallel_attn.training.engines import Job, compute_dtypes
from parallel_attn.training.loop import Loop
from parallel_attn.training.resume import Resume, choices_after, find_resume, take_over
from parallel_attn.training.run_folder import (
    check_run_dir,
    find_run_dir,
    finished_summary,
    keep_broken_attempt,
    open_run_dir,
    require_same_on_all_ranks,
    write_config,
)
from parallel_attn.training.signals import Signals
from parallel_attn.training.watchdog import Watchdog


@dataclass(frozen=True)
class Prepared:
    """A job that every rank has made ready on its own, before the first collective."""

    config: Config
    given: dict
    """The settings as they were given, before a checkpoint brought its own: what tells one launch from another."""
    resume: Resume | None
    tokenizer: Tokenizer
    tokens: TokenSplits
    micro_batch: int
    accumulation: int
    name: str
    choices: Mapping[str, str]


def pretrain(
    raw,
    *,
    name: str | None = None,
    restart: bool = False,
    signals: Signals | None = None,
    overrides: Sequence[str] = (),
    choices: Mapping[str, str] | None = None,
) -> dict:
    """Trains as `raw` (the composed configuration) says; returns what summary.json holds beside the last metrics.

    name: ending of the default run folder, by default the choices of model and attention. restart: run_dir may hold an
    attempt that broke. signals: those that end the job in order; the caller has entered them. overrides, choices: Hydra's,
    where it composed `raw`: what a checkpoint to go on from must not contradict.

    Raises SettingsError before the first collective for settings that cannot work, CheckpointError for a checkpoint that
    cannot be read or written, NonFiniteLoss on every rank at the same optimizer step, Interrupted on a signal, PeerLost
    when another rank is gone.
    """
    signals = signals or Signals()
    config = parse(raw)
    given = config.plain
    resume = find_resume(config.checkpoint.resume, find_run_dir(config.run_dir, given))
    if resume is not None:
        config = parse(take_over(raw, config, resume, overrides))
    rank, local_rank, world_size = meshes.launcher_ranks()
    device = meshes.choose_device(config.device, local_rank)
    data, tensor = meshes.layout(world_size, config.parallel.tensor, config.parallel.data)
    micro_batch, accumulation = config.train.micro_batches(data)
    config.engine.cls.check(config.engine.config, config.train.precision, tensor)
    on_paper = AxisGroup(None, rank % tensor, tensor)
    # Every refusal of a layer comes here, before any text is read; the vocabulary is looked at again when it is known.
    build_model(with_vocabulary(config, max(config.model.vocab_size or 0, tensor, 2)), on_paper, "meta")
    if not restart:
        check_run_dir(config.run_dir, given, resume is not None and resume.own)
    if resume is not None and config.train.steps < resume.step:
        raise SettingsError(
            f"train.steps={config.train.steps}: {resume.given} is at step {resume.step} already, use more than that"
        )
    corpus = config.data.cls(config.data.config)
    preparing = {
        "builder": local_rank == 0,
        "progress": (lambda line: print(line, flush=True)) if local_rank == 0 else None,
    }
    if resume is not None:
        tokenizer = resume.tokenizer(config.tokenizer)
    else:
        tokenizer = config.tokenizer.cls.load(config.tokenizer.config, corpus, **preparing)
    config = with_vocabulary(config, vocabulary(config, tokenizer.vocab_size))
    build_model(config, on_paper, "meta")
    tokens = prepare_tokens(corpus, tokenizer, seq_len=config.train.seq_len, **preparing)
    choices = choices_after(choices or {}, resume)
    name = name or _default_name(config, choices)
    prepared = Prepared(config, given, resume, tokenizer, tokens, micro_batch, accumulation, name, choices)

    with deterministic_kernels(config.train.deterministic):
        with signals.peers_expected():
            mesh = meshes.start(device, tensor=tensor, data=data)
        # Held until the run's files are whole: from here on a signal ends the job where check() stands, or in the loop.
        with signals.held():
            return _together(prepared, mesh, signals)


def _default_name(config: Config, choices: Mapping[str, str]) -> str:
    """`<model>-<attention>`, as far as it is known by which choices they came."""
    return "-".join(filter(None, (choices.get("model"), choices.get("attention") or config.attention.cls.__name__)))


def _together(prepared: Prepared, mesh: Mesh, signals: Signals) -> dict:
    """The part of a job that all ranks do together."""
    config, given, resume = prepared.config, prepared.given, prepared.resume
    with signals.peers_expected():
        settings = {key: value for key, value in given.items() if key not in ("device", "run_dir", "data")}
        require_same_on_all_ranks("the settings", _digest(settings), mesh)
        require_same_on_all_ranks("the tokens (data fingerprint)", fingerprint(prepared.tokens), mesh)
        _require_same_checkpoint(resume, mesh)
        if resume is not None and config.train.steps == resume.step:
            done = finished_summary(resume.run_dir) if resume.own else {}
            if done is not None:
                if mesh.is_main:
                    print(f"nothing to do: {resume.given} has finished its {resume.step} steps; "
                          f"more train.steps go on with it", flush=True)  # fmt: skip
                return done
        with open_run_dir(config.run_dir, prepared.name, given, mesh) as run_dir:
            if resume is None or resume.own:  # what an attempt saved that was still there a moment ago counts, too
                fresh = find_resume(config.checkpoint.resume, run_dir)
                resume = fresh if fresh is not None and (resume is None or fresh.step > resume.step) else resume
                _require_same_checkpoint(resume, mesh)
            if resume is not None:
                checkpoints.verify(resume.checkpoint, mesh)
            if mesh.is_main:
                _begin_in(run_dir, resume, given, plain_config(config))
            return _train(replace(prepared, resume=resume), mesh, run_dir, signals)


def _require_same_checkpoint(resume: Resume | None, mesh: Mesh) -> None:
    what = None if resume is None else (resume.step, resume.checkpoint.index.to_json())
    require_same_on_all_ranks("the checkpoints that are there to go on from", _digest({"checkpoint": what}), mesh)


def _begin_in(run_dir: Path, resume: Resume | None, given: dict, written: dict) -> None:
    """Leaves in a run folder only what belongs to the course that begins now. On the first rank."""
    try:
        CheckpointFolder(run_dir / CHECKPOINTS).set_aside_after(resume.step if resume is not None and resume.own else 0)
        kept = None if resume is not None and resume.own else keep_broken_attempt(run_dir)
        (run_dir / "summary.json").unlink(missing_ok=True)
        write_config(run_dir, given, written)
    except OSError as error:
        raise SettingsError(f"run_dir={run_dir} cannot be written: {error.strerror} ({error.filename})") from error
    if kept:
        print(f"{run_dir}: an attempt before left no checkpoint, this one starts anew (its log: {kept})", flush=True)


def _train(prepared: Prepared, mesh: Mesh, run_dir: Path, signals: Signals) -> dict:
    config, resume, tokenizer, tokens = prepared.config, prepared.resume, prepared.tokenizer, prepared.tokens
    start_step = 0 if resume is None else resume.step
    tracker = Tracker(
        run_dir,
        config=plain_config(config),
        settings=config.tracking,
        total_steps=config.train.steps,
        main=mesh.is_main,
        run_name=run_dir.name,
        start_step=start_step,
    )
    with tracker, signals.peers_expected():
        model = build_model(config, mesh.tensor, mesh.device)
        job = Job(
            mesh, config.optimizer.cls, config.optimizer.config, config.train.precision, prepared.micro_batch,
            prepared.accumulation, config.train.deterministic,
        )  # fmt: skip
        engine = config.engine.cls(model, job, config.engine.config)
        shapes = {
            "seq_len": config.train.seq_len,
            "micro_batch_size": prepared.micro_batch,
            "data_rank": mesh.data.rank,
            "data_degree": mesh.data.degree,
            "documents": config.data.config.documents,
            "context": model.context_tokens(config.train.seq_len),
        }
        origin = (0, 0) if resume is None else resume.data_origin(
            fingerprint(tokens), config.train.seq_len, config.train.seed
        )  # fmt: skip
        batch, seed = config.train.global_batch_size, config.train.seed
        train = TrainBatches(tokens.train, global_batch_size=batch, seed=seed, origin=origin, **shapes)
        validation = EvalBatches(tokens.val, samples=config.eval.samples, **shapes)
        announce(tracker, config, model, mesh, prepared.micro_batch, prepared.accumulation, train.num_samples)
        for note in tokenizer.notes():
            tracker.notice(note)
        # Innermost once more: whether a signal came before the loss of a peer is seen before anything is torn down.
        with closing(engine), Watchdog(mesh, config.train.hang_timeout) as watchdog, signals.peers_expected():
            keeper = Checkpoints(
                config, engine, mesh, tracker, run_dir, train=train, tokenizer=tokenizer,
                data_fingerprint=fingerprint(tokens), choices=prepared.choices, tick=watchdog.tick,
                length=max(config.train.seq_len, (resume.meta.get("length") or 0) if resume else 0),
            )  # fmt: skip
            loop = Loop(config, engine, mesh, tracker, train, validation, signals, keeper, watchdog)
            if resume is not None:
                watchdog.at("loading the checkpoint")
                checkpoints.load(engine, resume)
                announce_resume(tracker, config, resume, origin, loop.schedule)
                loop.restore(resume.step, resume.meta["progress"], saved=resume.own)
            signals.check()
            seconds = loop.run()
        summary = {
            "train_seconds": seconds,
            "best": loop.best,
            "parameters": costs.full_parameters(model),
            "layout": {"data": mesh.data.degree, "tensor": mesh.tensor.degree, "device": mesh.device.type},
            "data_fingerprint": fingerprint(tokens),
            "tokenizer": tokenizer.name,
            "versions": versions(),
        }
        tracker.finish(summary)
    return summary


def vocabulary(config: Config, tokens: int) -> int:
    """`model.vocab_size`, null being the tokenizer's. Raises SettingsError when it is smaller than that."""
    wanted = config.model.vocab_size
    if wanted is not None and wanted < tokens:
        raise SettingsError(f"model.vocab_size={wanted} is less than the {tokens} tokens of the tokenizer: use {tokens}")
    return wanted or tokens


def with_vocabulary(config: Config, vocab_size: int) -> Config:
    return replace(config, model=replace(config.model, vocab_size=vocab_size))


def build_model(config: Config, tensor: AxisGroup, device: torch.device | str) -> LanguageModel:
    dtype, compute_dtype = compute_dtypes(config.train.precision)
    return config.model_class(
        config.model,
        config.attention.cls,
        config.attention.config,
        tensor_parallel=tensor,
        seed=config.train.seed,
        device=device,
        dtype=dtype,
        compute_dtype=compute_dtype,
    )


def versions() -> dict[str, str]:
    from importlib.metadata import version

    import parallel_attn

    versions = {name: version(name) for name in ("torch", "numpy", "hydra-core")}
    return {"parallel_attn": parallel_attn.__version__, **versions, "python": platform.python_version()}


def _digest(plain: dict) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()
