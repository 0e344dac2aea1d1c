"""Llama, Qwen2, Qwen3, and the full-attention layers of Qwen3-Next and Qwen3.5, as GroupedQueryAttention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from parallel_attn.attention import GroupedConfig, GroupedQueryAttention
from parallel_attn.interop.architecture import Architecture, Unwritten
from parallel_attn.interop.config_json import ConfigJson
from parallel_attn.interop.rope import read_rope, write_rope
from parallel_attn.interop.tensors import Entry, gain, same, side_by_side


@dataclass(frozen=True)
class GroupedFamily:
    """One model type of transformers with grouped-query attention.

    biases: our `attention.bias` for their `attention_bias` false and true; a single one where they have no such key.
    head_dim: their default width of a head, None for hidden_size / num_attention_heads.
    gated: q_proj holds [query | gate] per head, norms per head, all gains stored as 1 + w, part of each head turned.
    """

    model_type: str
    class_name: str
    biases: tuple[str, ...] = ("none", "all")
    head_norms: bool = False
    head_dim: int | None = None
    windows: bool = False
    gated: bool = False
    experts: bool = False

    attention_class = GroupedQueryAttention

    @property
    def zero_centered(self) -> bool:
        return self.gated

    def read(self, config: ConfigJson) -> GroupedConfig:
        """The attention settings of a config.json. Raises SettingsError for what cannot be expressed."""
        heads = config.count("num_attention_heads")
        kv_heads = config.get("num_key_value_heads", *(() if self.head_norms or self.windows else (None,)))
        window = self.read_layers(config)
        gated = {"gate": "elementwise"} if self.gated else {}
        norms = {"qk_norm": "head", "qk_norm_zero_centered": self.zero_centered} if self.head_norms else {}
        return GroupedConfig(
            num_heads=heads,
            num_kv_heads=heads if kv_heads is None else config.count("num_key_value_heads"),
            head_dim=self.read_head_dim(config, heads),
            bias=self.biases[config.flag("attention_bias")] if len(self.biases) > 1 else self.biases[0],
            window=window,
            dropout=config.number("attention_dropout", 0.0),
            rope=read_rope(config, style="half", fraction=0.25 if self.gated else None),
            **gated,
            **norms,
        )

    def read_head_dim(self, config: ConfigJson, heads: int) -> int:
        if config.get("head_dim", self.head_dim) is not None:
            return config.count("head_dim", self.head_dim)
        width = config.count("hidden_size")
        if width % heads:
            config.refuse("num_attention_heads", f"it does not divide hidden_size={width} and head_dim is not given")
        return width // heads

    def read_layers(self, config: ConfigJson) -> int | None:
        """The window that all layers have. Raises SettingsError where layers differ or are of another kind."""
        layers = config.count("num_hidden_layers")
        config.must_be_off("mlp_bias", "the MLP here has no biases")
        if self.experts and config.get("num_experts", 512):
            step, dense = config.count("decoder_sparse_step", 1), config.get("mlp_only_layers", None) or []
            if not isinstance(dense, list):
                config.refuse("mlp_only_layers", "it must be a list of layers")
            if any((i + 1) % step == 0 and i not in dense for i in range(layers)):
                config.refuse("num_experts", "layers with experts cannot be expressed, only dense ones")
        kinds = config.names("layer_types")
        if kinds is None and self.gated:
            every = config.count("full_attention_interval", 4)
            kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
        if kinds is None:
            first = config.number("max_window_layers", 28) if config.flag("use_sliding_window") else layers
            kinds = ["sliding_attention" if self.windows and i >= first else "full_attention" for i in range(layers)]
        if set(kinds) == {"full_attention"}:
            return None
        if set(kinds) == {"sliding_attention"} and self.windows and config.flag("use_sliding_window"):
            return config.count("sliding_window")
        return config.refuse(
            "layer_types", f"layers of {sorted(set(kinds))} cannot be expressed, only all full_attention"
        )

    def likeness(self, attention: GroupedConfig) -> int:
        """How much of its structure a layer shares with this type."""
        return sum(
            [
                (attention.gate != "none") == self.gated,
                (attention.qk_norm != "none") == self.head_norms,
                attention.bias in self.biases,
            ]
        )

    def write(self, architecture: Architecture) -> dict[str, Any]:
        """The keys of a config.json that belong to attention. Raises SettingsError for what cannot be expressed."""
        layer, model = architecture.layer(), architecture.model
        settings = Unwritten(layer.config, self.model_type)
        heads, head_dim = settings.take("num_heads"), layer.head_dim
        settings.skip("num_kv_heads", "head_dim")  # read off the layer
        settings.must_be("v_head_dim", None, head_dim, note="values as wide as keys")
        settings.must_be("gate", "elementwise" if self.gated else "none")
        settings.must_be("qk_norm", "head" if self.head_norms else "none")
        settings.skip("qk_norm_zero_centered")  # both ways of storing a gain can be turned into theirs
        bias = settings.must_be("bias", *self.biases)
        rope = settings.take("rope")
        if rope.style != "half":
            settings.refuse("rope.style", rope.style, "half")
        if rope.fraction != 1.0 and not self.gated or rope.fraction == 0:
            settings.refuse("rope.fraction", rope.fraction, "a part of each head" if self.gated else "1.0")
        window = settings.take("window")
        if window is not None and not self.windows:
            settings.refuse("window", window, "null")
        dropout = settings.take("dropout")
        settings.finish()
        if head_dim * heads != model.hidden_size and self.model_type == "qwen2":
            settings.refuse("head_dim", head_dim, f"hidden_size / num_heads = {model.hidden_size / heads:g}")
        if model.hidden_size % heads and self.model_type == "llama":
            settings.refuse("num_heads", heads, f"a divisor of model.hidden_size={model.hidden_size}")
        return {
            "num_attention_heads": heads,
            "num_key_value_heads": layer.plan.num_kv_heads,
            **({} if self.model_type == "qwen2" else {"head_dim": head_dim}),
            **({"attention_bias": bias == "all"} if len(self.biases) > 1 else {}),
            "attention_dropout": dropout,
            **self.write_layers(model.num_layers, window),
            **write_rope(rope, partial=self.gated),
        }

    def write_layers(self, layers: int, window: int | None) -> dict[str, Any]:
        written: dict[str, Any] = {}
        if self.windows or self.gated:
            written["layer_types"] = ["full_attention" if window is None else "sliding_attention"] * layers
        if self.windows:
            on = window is not None
            written |= {"use_sliding_window": on, "sliding_window": window, "max_window_layers": 0 if on else layers}
        if self.experts:
            written |= {"num_experts": 0, "mlp_only_layers": list(range(layers)), "decoder_sparse_step": 1}
        return written

    def entries(self, architecture: Architecture, ours: str, theirs: str) -> list[Entry]:
        """The tensors of one attention layer, under our prefix and theirs."""
        config = architecture.attention
        biased = {part: config.bias == "all" if part == "o" else config.bias != "none" for part in "qkvo"}
        entries = []
        for part, bias in biased.items():
            for kind in ("weight", "bias")[: 1 + bias]:
                if part == "q" and self.gated:
                    width = architecture.layer().head_dim
                    names = (f"{ours}.q.{kind}", f"{ours}.gate.{kind}")
                    entries.append(side_by_side(names, f"{theirs}.q_proj.{kind}", (width, width), config.num_heads))
                else:
                    entries.append(same(f"{ours}.{part}.{kind}", f"{theirs}.{part}_proj.{kind}"))
        if self.head_norms:
            shift = float(config.qk_norm_zero_centered) - float(self.zero_centered)
            for name in ("q_norm", "k_norm"):
                entries.append(gain(f"{ours}.{name}.weight", f"{theirs}.{name}.weight", shift=shift))
        return entries


GROUPED = (
    GroupedFamily("llama", "LlamaForCausalLM"),
    GroupedFamily("qwen2", "Qwen2ForCausalLM", biases=("qkv",), windows=True),
    GroupedFamily("qwen3", "Qwen3ForCausalLM", head_norms=True, head_dim=128, windows=True),
    GroupedFamily("qwen3_next", "Qwen3NextForCausalLM", head_norms=True, head_dim=256, gated=True, experts=True),
    GroupedFamily("qwen3_5_text", "Qwen3_5ForCausalLM", head_norms=True, head_dim=256, gated=True),
)
