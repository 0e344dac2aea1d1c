"""A model type of transformers and a model here that compute the same function: config and tensors, both ways.

Tensors in, tensors out: reading and writing files is not done here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from parallel_attn.errors import SettingsError
from parallel_attn.interop.architecture import Architecture
from parallel_attn.interop.config_json import ConfigJson
from parallel_attn.interop.grouped import GROUPED
from parallel_attn.interop.latent import LATENT
from parallel_attn.interop.tensors import Entry, decoder_entries
from parallel_attn.models import DecoderLM, MlpConfig, ModelConfig
from parallel_attn.nn import parameter_shards

FAMILIES = {family.model_type: family for family in (*GROUPED, *LATENT)}

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Translation:
    """Their config.json, our architecture, and the entries that turn full tensors into each other."""

    config: dict[str, Any]
    architecture: Architecture
    entries: tuple[Entry, ...]

    @cached_property
    def our_shapes(self) -> dict[str, tuple[int, ...]]:
        """Full shapes of our parameters, by full name."""
        a = self.architecture
        model = DecoderLM(a.model, a.attention_class, a.attention, device="meta")
        return {name: shard.full_shape for name, shard in parameter_shards(model).items()}

    @cached_property
    def their_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of their tensors, by name."""
        shapes = {}
        for entry in self.entries:
            tensors = entry.to_theirs(*(torch.empty(self.our_shapes[name], device="meta") for name in entry.ours))
            shapes |= {name: tuple(tensor.shape) for name, tensor in zip(entry.theirs, tensors, strict=True)}
        return shapes

    def check_names(self, names: Iterable[str]) -> None:
        """Raises SettingsError for a tensor that is missing and for one that has no place here.

        Left aside: tables that old versions stored (`rotary_emb.inv_freq`), layers for multi-token prediction, and
        under tied embeddings either name of the one tensor.
        """
        names = set(names)
        if self.tied and HEAD in names:
            names |= {EMBEDDING}
        missing = [name for name in self.their_shapes if name not in names]
        if missing:
            raise SettingsError(f"tensor {missing[0]} is missing{others(missing)}: the config.json asks for it")
        left_over = sorted(name for name in names if name not in self.their_shapes and not self.aside(name))
        if left_over:
            raise SettingsError(
                f"tensor {left_over[0]} has no place in a {self.kind} model of this config.json{others(left_over)}"
            )

    def aside(self, name: str) -> bool:
        """Whether a stored tensor is no part of the model's own function."""
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        extra_layer = layer is not None and int(layer[1]) >= self.architecture.model.num_layers
        predicts = self.config.get("num_nextn_predict_layers") or name.startswith("mtp.")
        return (
            name.endswith("rotary_emb.inv_freq")
            or name.startswith("mtp.")
            or (extra_layer and bool(predicts))
            or (self.tied and name == HEAD)
        )

    def to_ours(self, theirs: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Their tensors -> (full name, full tensor) of each of our parameters, an entry at a time.

        Raises SettingsError, before the first tensor is read, for missing and extra names; then for a wrong shape, and
        for two different tensors where embedding and head are tied.
        """
        self.check_names(theirs)
        for entry in self.entries:
            tensors = [self.taken(theirs, name) for name in entry.theirs]
            yield from zip(entry.ours, entry.to_ours(*tensors), strict=True)

    def taken(self, theirs: Mapping[str, Tensor], name: str) -> Tensor:
        if self.tied and name == EMBEDDING and HEAD in theirs:
            if name not in theirs:
                return self.shaped(HEAD, theirs[HEAD], name)
            if not torch.equal(theirs[name], theirs[HEAD]):
                raise SettingsError(
                    f"config.json: tie_word_embeddings=true, but {name} and {HEAD} differ: set it to false"
                )
        return self.shaped(name, theirs[name], name)

    def shaped(self, name: str, tensor: Tensor, key: str) -> Tensor:
        wanted = self.their_shapes[key]
        if tuple(tensor.shape) != wanted:
            raise SettingsError(f"tensor {name} has the shape {tuple(tensor.shape)}, its config.json says {wanted}")
        return tensor

    def to_theirs(self, ours: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Our full tensors, by full name -> (name, tensor) of each of theirs, an entry at a time; exactly V rows."""
        for entry in self.entries:
            tensors = entry.to_theirs(*(ours[name] for name in entry.ours))
            yield from zip(entry.theirs, tensors, strict=True)

    @property
    def kind(self) -> str:
        return self.config["model_type"]

    @property
    def tied(self) -> bool:
        return self.architecture.model.tie_embeddings


def others(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def from_hugging_face(config: dict[str, Any]) -> Translation:
    """A config.json -> the model here that computes the same. Raises SettingsError for what cannot be expressed."""
    theirs = ConfigJson(config)
    if theirs.kind not in FAMILIES:
        reason = {
            "olmo2": "its norms stand behind attention and MLP, here they stand before; only",
            "qwen3_5": "it holds a vision tower; take its text_config (qwen3_5_text); only",
        }.get(theirs.kind, "only")
        theirs.refuse("model_type", f"cannot be expressed, {reason} {', '.join(sorted(FAMILIES))}")
    family = FAMILIES[theirs.kind]
    if theirs.get("hidden_act", "silu") not in ("silu", "swish"):
        theirs.refuse("hidden_act", "cannot be expressed, only silu")
    attention = family.read(theirs)
    model = ModelConfig(
        hidden_size=theirs.count("hidden_size"),
        num_layers=theirs.count("num_hidden_layers"),
        num_heads=attention.num_heads,
        mlp=MlpConfig(theirs.count("intermediate_size")),
        tie_embeddings=theirs.flag("tie_word_embeddings"),
        norm_eps=theirs.number("rms_norm_eps", 1e-6),
        norm_zero_centered=family.zero_centered,
        vocab_size=theirs.count("vocab_size"),
    )
    return translation(family, config, Architecture(model, family.attention_class, attention))


def to_hugging_face(
    architecture: Architecture, *, max_position_embeddings: int, model_type: str | None = None
) -> Translation:
    """A model here -> the model of transformers that computes the same, its config.json and its tensors.

    max_position_embeddings: the longest sequence in tokens, for readers that ask. model_type: theirs, or the nearest
    one. Raises SettingsError, naming the setting, for what it cannot express.
    """
    families = [f for f in FAMILIES.values() if f.attention_class is architecture.attention_class]
    if not families:
        known = sorted({f.attention_class.__name__ for f in FAMILIES.values()})
        raise SettingsError(
            f"attention._target_={architecture.attention_class.__name__} has no model type in transformers, only: "
            f"{', '.join(known)}"
        )
    if model_type is not None:
        able = ", ".join(sorted(f.model_type for f in families))
        families = [f for f in families if f.model_type == model_type]
        if not families:
            kind = architecture.attention_class.__name__
            raise SettingsError(f"model_type={model_type} cannot express {kind}, only: {able}")
    attention = architecture.layer().config
    nearest = max(families, key=lambda family: family.likeness(attention))  # of equals the first
    return written(nearest, architecture, max_position_embeddings)


def written(family, architecture: Architecture, length: int) -> Translation:
    model = architecture.model
    if model.vocab_size is None:
        raise SettingsError("model.vocab_size=null: an export needs the number of tokens")
    config = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.mlp.hidden_size,
        "num_hidden_layers": model.num_layers,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "max_position_embeddings": length,
        **family.write(architecture),
    }
    return translation(family, config, architecture)


def translation(family, config: dict[str, Any], architecture: Architecture) -> Translation:
    model = architecture.model
    shift = float(model.norm_zero_centered) - float(family.zero_centered)
    entries = decoder_entries(model.num_layers, model.tie_embeddings, norm_shift=shift)
    for i in range(model.num_layers):
        entries += family.entries(architecture, f"layers.{i}.attention", f"model.layers.{i}.self_attn")
    return Translation(config, architecture, tuple(entries))
