"""DeepSeek-V2 and DeepSeek-V3 with dense layers, as MultiHeadLatentAttention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from parallel_attn.attention import LatentConfig, MultiHeadLatentAttention
from parallel_attn.interop.architecture import Architecture, Unwritten
from parallel_attn.interop.config_json import ConfigJson
from parallel_attn.interop.rope import read_rope, write_rope
from parallel_attn.interop.tensors import Entry, same

LATENT_NORM_EPS = 1e-6
"""transformers gives the norms of the latents this eps, whatever rms_norm_eps is."""


@dataclass(frozen=True)
class LatentFamily:
    """One model type of transformers with multi-head latent attention.

    V2 turns interleaved pairs and leaves them so. V3 does too with `rope_interleave` (its default) and then puts the
    pairs half by half, in queries and keys alike: the scores are the same, so our style is `interleaved` for both, and
    no row moves. Without `rope_interleave` it is `half`.
    """

    model_type: str
    class_name: str
    first_dense: int
    """Their default of first_k_dense_replace."""
    styles: tuple[str, ...] = ("interleaved",)

    attention_class = MultiHeadLatentAttention
    zero_centered = False

    def read(self, config: ConfigJson) -> LatentConfig:
        """The attention settings of a config.json. Raises SettingsError for what cannot be expressed."""
        layers, heads = config.count("num_hidden_layers"), config.count("num_attention_heads")
        if config.number("first_k_dense_replace", self.first_dense) < layers:
            config.refuse("first_k_dense_replace", f"layers with experts cannot be expressed, only all {layers} dense")
        config.must_be_off("mlp_bias", "the MLP here has no biases")
        if config.get("num_key_value_heads", None) not in (None, heads):
            config.refuse("num_key_value_heads", f"latent attention has as many as query heads, {heads}")
        interleaved = len(self.styles) == 1 or config.flag("rope_interleave", True)
        return LatentConfig(
            num_heads=heads,
            q_lora_rank=None if config.get("q_lora_rank") is None else config.count("q_lora_rank"),
            kv_lora_rank=config.count("kv_lora_rank"),
            qk_nope_head_dim=config.count("qk_nope_head_dim"),
            qk_rope_head_dim=config.count("qk_rope_head_dim"),
            v_head_dim=config.count("v_head_dim"),
            latent_norm_eps=LATENT_NORM_EPS,
            bias="all" if config.flag("attention_bias") else "none",
            dropout=config.number("attention_dropout", 0.0),
            rope=read_rope(config, style="interleaved" if interleaved else "half", whole_softmax=True),
        )

    def likeness(self, attention: LatentConfig) -> int:
        """How much of its structure a layer shares with this type."""
        return attention.rope.style in self.styles

    def write(self, architecture: Architecture) -> dict[str, Any]:
        """The keys of a config.json that belong to attention. Raises SettingsError for what cannot be expressed."""
        layer, model = architecture.layer(), architecture.model
        settings = Unwritten(layer.config, self.model_type)
        settings.skip("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")  # read off the layer
        if layer.rope_dim == 0 or layer.nope_dim == 0:
            key = "qk_rope_head_dim" if layer.rope_dim == 0 else "qk_nope_head_dim"
            settings.refuse(key, 0, "at least 1")
        settings.must_be("latent_norm", True)
        settings.must_be("latent_norm_eps", LATENT_NORM_EPS)
        settings.skip("down_projection")
        bias = settings.must_be("bias", "none", "all")
        heads, dropout = settings.take("num_heads"), settings.take("dropout")
        rope = settings.take("rope")
        if rope.style not in self.styles:
            settings.refuse("rope.style", rope.style, " or ".join(self.styles))
        rank = settings.take("q_lora_rank")
        settings.finish()
        if model.hidden_size % heads and self.model_type == "deepseek_v2":
            settings.refuse("num_heads", heads, f"a divisor of model.hidden_size={model.hidden_size}")
        return {
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "q_lora_rank": rank,
            "kv_lora_rank": layer.latent_dim,
            "qk_nope_head_dim": layer.nope_dim,
            "qk_rope_head_dim": layer.rope_dim,
            "v_head_dim": layer.v_head_dim,
            "attention_bias": bias == "all",
            "attention_dropout": dropout,
            "first_k_dense_replace": model.num_layers,
            "num_nextn_predict_layers": 0,
            **({"rope_interleave": rope.style == "interleaved"} if len(self.styles) > 1 else {}),
            **write_rope(rope),
        }

    def entries(self, architecture: Architecture, ours: str, theirs: str) -> list[Entry]:
        """The tensors of one attention layer, under our prefix and theirs."""
        biased = ("weight", "bias") if architecture.attention.bias == "all" else ("weight",)
        pairs = [("kv_a", "kv_a_proj_with_mqa", biased), ("kv_b", "kv_b_proj", ("weight",)), ("o", "o_proj", biased)]
        norms = [("kv_a_norm", "kv_a_layernorm", ("weight",))]
        if architecture.attention.q_lora_rank is None:
            pairs.append(("q", "q_proj", ("weight",)))
        else:
            pairs += [("q_a", "q_a_proj", biased), ("q_b", "q_b_proj", ("weight",))]
            norms.append(("q_a_norm", "q_a_layernorm", ("weight",)))
        return [
            same(f"{ours}.{mine}.{kind}", f"{theirs}.{other}.{kind}")
            for mine, other, kinds in pairs + norms
            for kind in kinds
        ]


LATENT = (
    LatentFamily("deepseek_v3", "DeepseekV3ForCausalLM", first_dense=3, styles=("interleaved", "half")),
    LatentFamily("deepseek_v2", "DeepseekV2ForCausalLM", first_dense=0),
)
