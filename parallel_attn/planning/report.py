"""What a certificate prints: what is verified, a table of the worst errors, one line of verdict."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from parallel_attn import costs
from parallel_attn.attention.base import Attention
from parallel_attn.planning.certificate import Outcome
from parallel_attn.planning.parity import COPIES, KINDS
from parallel_attn.planning.subjects import Subject
from parallel_attn.training.config import Config

DTYPE_NOTES = {torch.bfloat16: "bfloat16 compute with float32 weights"}


def heading(config: Config, dtype: torch.dtype, subjects: Sequence[Subject], built: Sequence[nn.Module]) -> str:
    """Type, degree, dtype, which heads stand on which rank, and the sizes of what is run."""
    precision = DTYPE_NOTES.get(dtype, str(dtype).removeprefix("torch."))
    name, width, degree = config.attention.cls.__name__, config.model.hidden_size, config.parallel.tensor
    lines = [f"{name} of width {width} on {degree} ranks against one process, in {precision}"]
    plans = [part.plan for module in built for part in module.modules() if isinstance(part, Attention)]
    for plan in dict.fromkeys(plans):
        lines.append(textwrap.indent(str(plan), "  "))
    for subject, module in zip(subjects, built):
        lines.append(f"{subject.name}: {costs.full_parameters(module):,} parameters; {subject.what}")
    return "\n".join(lines)


def table(
    outcomes: Mapping[str, Outcome],
    bounds: Mapping[str, Mapping[str, float]],
    failures: Mapping[str, Mapping[str, str]],
) -> str:
    """kind | error of each part | bound | ok. Where the parts have different bounds both are shown."""
    rows = [["kind", *outcomes, "bound", "ok"]]
    for kind in KINDS:
        errors = [outcome.parity.errors.get(kind) for outcome in outcomes.values()]
        if all(error is None for error in errors):
            continue
        allowed = dict.fromkeys(f"{of[kind]:g}" for of in bounds.values())
        red = any(kind in found for found in failures.values())
        cells = ["-" if error is None else f"{error:.1e}" for error in errors]
        rows.append([kind, *cells, " / ".join(allowed), "NO" if red else "yes"])
    copies = ["differ" if outcome.parity.unequal else "equal" for outcome in outcomes.values()]
    rows.append([COPIES, *copies, "bitwise", "NO" if any(COPIES in found for found in failures.values()) else "yes"])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    for name, outcome in outcomes.items():
        worst = outcome.parity.worst_parameter()
        if worst is not None:
            lines.append(f"worst parameter gradient of the {name}: {worst[0]} {worst[1]:.1e}")
        if outcome.parity.unequal:
            lines.append(f"copies that differ in the {name}: {shortened(outcome.parity.unequal)}")
    return "\n".join(lines)


def shortened(names: Sequence[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def verdict(
    outcomes: Mapping[str, Outcome],
    failures: Mapping[str, Mapping[str, str]],
    dtype: torch.dtype,
    mutate: str | None,
    seconds: float,
) -> str:
    """One line. With a mutant it says how often that was met, and whether it was seen."""
    red = [f"{kind} of the {part}" for part, found in failures.items() for kind in found]
    name = str(dtype).removeprefix("torch.")
    if mutate is not None:
        met = ", ".join(f"{outcome.hits} times in the {part}" for part, outcome in outcomes.items())
        seen = f"RED, as it must be: {shortened(red)}" if red else f"GREEN: {name} does not see this mistake"
        return f"{seen} (mutant {mutate}, met {met}; {seconds:.1f} s)"
    if red:
        return f"RED: not equal to one process within the bounds of {name}: {shortened(red)} ({seconds:.1f} s)"
    return f"GREEN: equal to one process within the bounds of {name} ({seconds:.1f} s)"
