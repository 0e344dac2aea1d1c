"""What a run says before its first step: what runs where, and what a colleague would warn of."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from parallel_attn import costs
from parallel_attn.mesh import Mesh
from parallel_attn.models import LanguageModel
from parallel_attn.tracking import Tracker
from parallel_attn.training.config import Config
from parallel_attn.training.resume import Resume
from parallel_attn.training.schedule import Schedule

IMBALANCE_WARNING = 1.25


def announce(
    tracker: Tracker, config: Config, model: LanguageModel, mesh: Mesh, micro: int, accumulation: int, samples: int
):
    """Layout table and warnings, on rank 0's console. `samples`: training samples in an epoch."""
    replicas, degree = mesh.data.degree, mesh.tensor.degree
    settings = config.train
    tracker.notice(
        f"{costs.full_parameters(model):,} parameters; {replicas} replica{'s' * (replicas > 1)} x {degree} tensor "
        f"rank{'s' * (degree > 1)} on {mesh.device.type}; {settings.global_batch_size} samples of {settings.seq_len} "
        f"tokens per step = {replicas} x {accumulation} x {micro}; {samples:,} samples in an epoch"
    )
    if context := model.context_tokens(settings.seq_len):
        tracker.notice(
            f"the encoder reads the first {context} tokens of a sample, the decoder writes the other {settings.seq_len - context}"
        )
    if degree > 1:
        parameters = [f"{costs.local_parameters(model, rank):,}" for rank in range(degree)]
        for layers, plan in model.plans.items():
            for line in f"{layers}: {plan.table(parameters=parameters)}".splitlines():
                tracker.notice(line)
    imbalance = max(plan.imbalance for plan in model.plans.values())
    for warning in warnings(config, imbalance, mesh, samples):
        tracker.warn(warning)


def announce_resume(tracker: Tracker, config: Config, resume: Resume, origin: tuple[int, int], schedule: Schedule) -> None:
    """From where a run goes on, and what is no longer as it was."""
    tracker.notice(f"goes on from {resume.checkpoint.folder} at step {resume.step} of {config.train.steps}")
    saved = resume.meta["schedule"]
    if config.train.steps != saved["steps"] and resume.step < config.train.steps:
        tracker.notice(
            f"the learning rate follows the plan of {config.train.steps} steps: {schedule.rate(resume.step):.3g} at the "
            f"next step (the plan of {saved['steps']} had {saved['next_rate']:.3g})"
        )
    if origin[1] == 0 and resume.meta["data"]["samples"]:
        tracker.notice("other text, train.seq_len or train.seed than before: the data begins at its first sample")


def warnings(config: Config, imbalance: float, mesh: Mesh, samples: int) -> Iterator[str]:
    settings = config.train
    if imbalance > IMBALANCE_WARNING:
        yield (
            f"the fullest rank holds {imbalance:.2f}x the mean of query heads and the others wait for it: "
            f"choose parallel.tensor so that the heads spread evenly"
        )
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    if mesh.device.type == "cpu" and processes * threads > cores and (threads > 1 or processes > cores):
        yield (
            f"{processes} processes x {threads} threads on {cores} cores: they wait for each other, "
            f"set OMP_NUM_THREADS={max(1, cores // processes)} or start fewer"
        )
    if mesh.data.degree > 1 and settings.global_batch_size == mesh.data.degree:
        yield (
            f"train.global_batch_size={settings.global_batch_size} leaves one sample per replica and step: "
            f"communication outweighs work, use a larger one or fewer replicas"
        )
    epochs = settings.steps * settings.global_batch_size / samples
    if epochs > 4:
        yield f"train.steps={settings.steps} goes {epochs:.1f} times over the {samples:,} samples of the corpus"
