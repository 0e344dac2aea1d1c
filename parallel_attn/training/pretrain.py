"""One pretraining job, from a composed configuration to a run folder with its metrics and summary."""

from __future__ import annotations

import hashlib
import json
import platform
from contextlib import closing
from dataclasses import replace

import torch

from parallel_attn import costs, mesh as meshes
from parallel_attn.data import EvalBatches, TrainBatches, fingerprint, prepare_tokens
from parallel_attn.errors import SettingsError
from parallel_attn.mesh import AxisGroup
from parallel_attn.models import DecoderLM
from parallel_attn.tracking import Tracker
from parallel_attn.training.announce import announce
from parallel_attn.training.config import Config, parse, plain_config
from parallel_attn.training.engines import Job, compute_dtypes
from parallel_attn.training.loop import Loop
from parallel_attn.training.run_folder import check_run_dir, open_run_dir, require_same_on_all_ranks
from parallel_attn.training.signals import Signals


def pretrain(raw, *, name: str | None = None, restart: bool = False, signals: Signals | None = None) -> dict:
    """Trains as `raw` (the composed configuration) says; returns what summary.json holds beside the last metrics.

    name: ending of the default run folder. restart: run_dir may hold an attempt that broke. signals: those that end the
    job in order; the caller has entered them.

    Raises SettingsError before the first collective for settings that cannot work, NonFiniteLoss on every rank at the
    same optimizer step, Interrupted on a signal, PeerLost when another rank is gone.
    """
    signals = signals or Signals()
    config = parse(raw)
    rank, local_rank, world_size = meshes.launcher_ranks()
    device = meshes.choose_device(config.device, local_rank)
    data, tensor = meshes.layout(world_size, config.parallel.tensor, config.parallel.data)
    micro_batch, accumulation = config.train.micro_batches(data)
    config.engine.cls.check(config.engine.config, config.train.precision, tensor)
    on_paper = AxisGroup(None, rank % tensor, tensor)
    # Every refusal of a layer comes here, before any text is read; the vocabulary is looked at again when it is known.
    build_model(with_vocabulary(config, max(config.model.vocab_size or 0, tensor, 2)), on_paper, "meta")
    if not restart:
        check_run_dir(config.run_dir, config.plain)
    corpus = config.data.cls(config.data.config)
    preparing = {
        "builder": local_rank == 0,
        "progress": (lambda line: print(line, flush=True)) if local_rank == 0 else None,
    }
    tokenizer = config.tokenizer.cls.load(config.tokenizer.config, corpus, **preparing)
    config = with_vocabulary(config, vocabulary(config, tokenizer.vocab_size))
    build_model(config, on_paper, "meta")
    tokens = prepare_tokens(corpus, tokenizer, seq_len=config.train.seq_len, **preparing)

    with signals.peers_expected():
        mesh = meshes.start(device, tensor=tensor, data=data)
    # Held until the run's files are whole: from here on a signal ends the job where check() stands, or in the loop.
    with signals.held():
        return _train(config, mesh, tokenizer, tokens, micro_batch, accumulation, name, signals)


def _train(config, mesh, tokenizer, tokens, micro_batch: int, accumulation: int, name: str | None, signals: Signals) -> dict:
    """The part of a job that all ranks do together."""
    settings = {key: value for key, value in config.plain.items() if key not in ("device", "run_dir", "data")}
    name = name or f"{config.attention.cls.__name__}"
    with signals.peers_expected():
        require_same_on_all_ranks("the settings", _digest(settings), mesh)
        require_same_on_all_ranks("the tokens (data fingerprint)", fingerprint(tokens), mesh)
        run_dir = open_run_dir(config.run_dir, name, config.plain, plain_config(config), mesh)

    tracker = Tracker(
        run_dir,
        config=plain_config(config),
        settings=config.tracking,
        total_steps=config.train.steps,
        main=mesh.is_main,
        run_name=run_dir.name,
    )
    with tracker, signals.peers_expected():
        model = build_model(config, mesh.tensor, mesh.device)
        job = Job(mesh, config.optimizer.cls, config.optimizer.config, config.train.precision, micro_batch, accumulation)
        engine = config.engine.cls(model, job, config.engine.config)
        shapes = {
            "seq_len": config.train.seq_len,
            "micro_batch_size": micro_batch,
            "data_rank": mesh.data.rank,
            "data_degree": mesh.data.degree,
            "documents": config.data.config.documents,
        }
        train = TrainBatches(
            tokens.train, global_batch_size=config.train.global_batch_size, seed=config.train.seed, **shapes
        )
        validation = EvalBatches(tokens.val, samples=config.eval.samples, **shapes)
        announce(tracker, config, model, mesh, micro_batch, accumulation, train.num_samples)
        for note in tokenizer.notes():
            tracker.notice(note)
        with closing(engine):
            signals.check()
            loop = Loop(config, engine, mesh, tracker, train, validation, signals)
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


def versions() -> dict[str, str]:
    from importlib.metadata import version

    import parallel_attn

    versions = {name: version(name) for name in ("torch", "numpy", "hydra-core")}
    return {"parallel_attn": parallel_attn.__version__, **versions, "python": platform.python_version()}


def _digest(plain: dict) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()
