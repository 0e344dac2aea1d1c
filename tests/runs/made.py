"""Runs for tests, written without training: a model with its initial weights as a run folder."""

from __future__ import annotations

from pathlib import Path

import torch

from parallel_attn.data import ByteTokenizer
from parallel_attn.runs import write_run
from parallel_attn.runs.written import first_meta
from parallel_attn.training.config import parse, plain_config
from parallel_attn.training.pretrain import build_model, with_vocabulary
from parallel_attn import AxisGroup
from tests.training.composed import SMALL, composed

TABLES = ("embedding.weight", "head.weight")


def made_run(
    folder: Path,
    *overrides: str,
    tokenizer=None,
    vocab_size: int = 257,
    scale: float = 8.0,
    rounded: torch.dtype = torch.float32,
    choices: dict[str, str] | None = None,
) -> Path:
    """A run folder of a small model (seed 0), its tables times `scale`, so that logits are of order one; all `rounded`.
    choices: Hydra's."""
    tokenizer = tokenizer or ByteTokenizer()
    config = with_vocabulary(parse(composed(*SMALL, *overrides)), vocab_size)
    model = build_model(config, AxisGroup(), "cpu")
    tensors = (
        (f"master/{name}", (parameter.detach() * (scale if name in TABLES else 1.0)).to(rounded).to(parameter.dtype))
        for name, parameter in model.named_parameters()
    )
    plain = plain_config(config)
    write_run(Path(folder), plain, tensors, tokenizer.to_json(), first_meta(config, tokenizer) | {"choices": choices or {}})
    return Path(folder)
