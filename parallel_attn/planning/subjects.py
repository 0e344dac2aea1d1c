"""What a certificate looks at: the attention layer alone and the whole model of a configuration, with their inputs.

Shapes: B batch, S sequence, D model width, V vocabulary. Everything here is built on any axis, also on paper.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from parallel_attn.attention import Attention, AttentionConfig, CrossAttention
from parallel_attn.initialization import named_generator
from parallel_attn.mesh import AxisGroup
from parallel_attn.nn import IGNORE
from parallel_attn.training.config import Config
from parallel_attn.training.engines import compute_dtypes
from parallel_attn.training.pretrain import build_model

BATCH, LENGTH = 2, 24  # of the inputs; the widths are the configuration's
DEPTH = 2  # blocks of the model at most: a third one adds no new path
VOCABULARY = 257  # at most
_MOST = {"num_layers": DEPTH, "seq_len": LENGTH // 2}  # seq_len: of a part that reads a share of the sample
PRECISIONS = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16"}


@dataclass
class Subject:
    """Something that is built on an axis and run.

    passes: name -> forward(module, inputs), each compared in full
    """

    name: str
    build: Callable[[AxisGroup], nn.Module]
    inputs: list[Tensor]
    passes: dict[str, Callable[[nn.Module, list[Tensor]], Tensor]]
    what: str


def cut(config: Config, dtype: torch.dtype) -> Config:
    """The configuration with at most `DEPTH` blocks (of each stack), at most `VOCABULARY` tokens, in this precision."""
    model = _shallow(config.model)
    model = replace(model, vocab_size=min(model.vocab_size or VOCABULARY, VOCABULARY))
    return replace(config, model=model, train=replace(config.train, precision=PRECISIONS[dtype]))


def _shallow(part: Any) -> Any:
    changed = {}
    for field in fields(part):
        value = getattr(part, field.name)
        if field.name in _MOST and value is not None:
            changed[field.name] = min(value, _MOST[field.name])
        elif is_dataclass(value):
            changed[field.name] = _shallow(value)
    return replace(part, **changed)


def layer_subject(config: Config, device: str = "cpu") -> Subject:
    """The attention layer alone: x (B, S, D) -> (B, S, D), without masks and, where the type takes them, with masks."""
    return _layer("layer", config, config.attention.cls, config.attention.config, config.model.hidden_size, device)


def cross_subject(config: Config, device: str = "cpu") -> Subject | None:
    """The cross attention of the model alone, its memory (B, T, M) an input of its own; None in a model without one."""
    settings = getattr(config.model, "cross_attention", None)
    if settings is None:
        return None
    return _layer("cross", config, CrossAttention, settings, config.model.encoder_model().hidden_size, device)


def _layer(
    name: str, config: Config, cls: type[Attention], settings: AttentionConfig, memory_size: int, device: str
) -> Subject:
    """memory_size: M, for a type that reads a memory."""
    width = config.model.hidden_size
    dtype, compute_dtype = compute_dtypes(config.train.precision)
    generator = named_generator(config.train.seed, "verify.layer")

    def drawn(length: int, width: int) -> Tensor:
        x = torch.randn(BATCH, length, width, generator=generator, dtype=torch.float64)
        return x.to(compute_dtype or dtype)

    inputs, extra = [drawn(LENGTH, width)], {}
    if cls.reads_memory:
        inputs, extra = [drawn(LENGTH - 5, width), drawn(LENGTH, memory_size)], {"memory_size": memory_size}
    masks = layer_masks(cls)

    def build(axis: AxisGroup) -> nn.Module:
        return cls(
            width,
            settings,
            tensor_parallel=axis,
            seed=config.train.seed,
            name="attention",
            norm_eps=config.model.norm_eps,
            device=device,
            dtype=dtype,
            **extra,
        )

    passes = {"no masks": lambda layer, inputs: layer(*inputs, **dropout_place())}
    if masks:
        passes[" and ".join(masks)] = lambda layer, inputs: layer(*inputs, **masks, **dropout_place())
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in zip(("x", "memory"), inputs))
    return Subject(name, build, inputs, passes, f"{shapes}; {', then '.join(passes)}")


def layer_masks(cls: type) -> dict[str, Tensor]:
    """The masks that a type takes, by name: (B, S) each, with padding at the end of one row, several documents in both."""
    slots = torch.arange(LENGTH)
    masks = {
        "key_padding_mask": slots < torch.tensor([[LENGTH - 7], [LENGTH]]),
        "document_ids": torch.stack([slots // 10, (slots + 5) // 9]),
    }
    taken = inspect.signature(cls.forward).parameters
    return {name: mask for name, mask in masks.items() if name in taken}


def dropout_place() -> dict[str, Any]:
    """Where in a run the inputs stand: what dropout masks depend on."""
    return {"samples": torch.arange(BATCH) + 5, "step": 3}


def model_subject(config: Config, device: str = "cpu") -> Subject:
    """The whole model: tokens and targets (B, S), some targets ignored -> the mean loss, as the configuration smooths it."""
    vocabulary = config.model.vocab_size
    generator = named_generator(config.train.seed, "verify.model")
    tokens = torch.randint(0, vocabulary, (BATCH, LENGTH), generator=generator)
    targets = torch.randint(0, vocabulary, (BATCH, LENGTH), generator=generator)
    targets[:, ::7] = IGNORE
    valid = (targets[:, config.model.context_tokens(LENGTH) :] != IGNORE).sum()
    settings: dict[str, Any] = {"label_smoothing": config.train.label_smoothing, "z_loss": config.train.z_loss}
    settings |= dropout_place()
    if config.data.config.documents:
        settings["document_ids"] = layer_masks(config.attention.cls)["document_ids"]
    what = f"{_depth(config.model)}, vocabulary {vocabulary}, tokens ({BATCH}, {LENGTH}), {int(valid)} valid targets"
    return Subject(
        "model",
        lambda axis: build_model(config, axis, device),
        [tokens, targets],
        {"loss": lambda model, inputs: model(*inputs, **settings) / valid},
        what,
    )


def _depth(model: Any) -> str:
    return f"{model.num_layers} block{'s' * (model.num_layers > 1)}"
