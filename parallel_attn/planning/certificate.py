"""The comparison behind a certificate, as every rank of its world runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from parallel_attn.errors import SettingsError
from parallel_attn.mesh import AxisGroup
from parallel_attn.planning import mutants
from parallel_attn.planning.parity import Parity, compare, projected
from parallel_attn.planning.subjects import Subject, cross_subject, layer_subject, model_subject
from parallel_attn.training import Config, gradient_norm

SUBJECTS = {"layer": layer_subject, "cross": cross_subject, "model": model_subject}


def subjects_of(config: Config, parts: Sequence[str], device: str = "cpu") -> list[Subject]:
    """What `parts` of a configuration are; a part that it does not have is left out."""
    made = (SUBJECTS[part](config, device) for part in parts)
    return [subject for subject in made if subject is not None]


@dataclass
class Outcome:
    """Of one subject: its worst errors, and how often the mutant (if one was asked for) was met, on all ranks."""

    parity: Parity
    hits: int = 0


def certify(config: Config, parts: Sequence[str], mutate: str | None = None, *, steps: int = 3) -> dict[str, Outcome]:
    """Compares the subjects `parts` of a configuration on the axis of the whole world with one process.

    Raises SettingsError when the mutant `mutate` meets nothing here, naming those that do.
    """
    axis = AxisGroup.of(dist.group.WORLD)
    subjects = subjects_of(config, parts)
    if mutate is not None:
        require_touch(mutate, touching(subjects, axis))
    outcomes = {}
    for subject in subjects:
        patches, found = mutants.applied(mutate), Parity()
        for forward in subject.passes.values():
            settings = {"steps": steps, "seed": config.train.seed, "mutation": patches}
            found = found.merge(compare(axis, subject.build, forward, subject.inputs, **settings))
        outcomes[subject.name] = Outcome(found, sum(patches.total_hits(axis).values()))
    return outcomes


def touching(subjects: Sequence[Subject], axis: AxisGroup) -> list[str]:
    """Names of the mutants that building and one training pass of the subjects would meet; the same on every rank."""
    with mutants.watched() as patches:
        for subject in subjects:
            module = subject.build(axis)
            for forward in subject.passes.values():
                fed = [x.clone().requires_grad_() if x.is_floating_point() else x for x in subject.inputs]
                output = forward(module, fed)
                (projected(output) if output.dim() else output).backward()
                gradient_norm(module, axis)
    return [name for name, hits in patches.total_hits(axis).items() if hits]


def require_touch(mutate: str, met: Sequence[str]) -> None:
    if mutate not in met:
        raise SettingsError(f"--mutate {mutate}: nothing here to get wrong; mutants that touch this: {', '.join(met)}")
