"""Small models of transformers with random weights, and ours with the same ones."""

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_attn import AxisGroup, DecoderLM, sharded_parameters
from parallel_attn.interop import Translation, from_hugging_face
from tests.parity import assemble, world_axis

SIZES = {"hidden_size": 48, "intermediate_size": 37, "num_hidden_layers": 2, "vocab_size": 101, "rms_norm_eps": 1e-3}
DEEPSEEK = {
    **SIZES, "num_attention_heads": 6, "num_key_value_heads": 6, "kv_lora_rank": 20, "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "first_k_dense_replace": 2,
}  # fmt: skip
QWEN3_NEXT = {
    **SIZES, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "layer_types": ["full_attention"] * 2,
    "mlp_only_layers": [0, 1],
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "rope_theta": 500.0,
}  # fmt: skip


def their_config(model_type: str, **settings):
    from transformers import AutoConfig

    defaults = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "max_position_embeddings": 128}
    config = AutoConfig.for_model(model_type, **{**defaults, **settings})
    config._attn_implementation = "eager"
    return config


def their_model(config, dtype: torch.dtype, seed: int = 0):
    """Weights of std 1/sqrt(fan in), gains 1 +- 0.3 (zero-centred: +- 0.3), biases of std 0.3.

    With biases of order one all tokens would look alike after the first layer, and q's gradient would be what is left
    of a cancellation: 4 times the rounding."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() > 1:
                value *= parameter.shape[-1] ** -0.5
            elif name.endswith("bias"):
                value *= 0.3
            else:
                fresh = 0.0 if type(model).__name__.startswith(("Qwen3Next", "Qwen3_5")) else 1.0
                value = value.clamp(-1, 1) * 0.3 + fresh
            parameter.copy_(value)
    return model


def our_model(translation: Translation, tensors: dict[str, Tensor], axis: AxisGroup | None, dtype) -> DecoderLM:
    """The model at the axis's degree, each rank with its slices of the translated tensors."""
    a = translation.architecture
    model = DecoderLM(a.model, a.attention_class, a.attention, tensor_parallel=axis, dtype=dtype)
    full = dict(translation.to_ours(tensors))
    with torch.no_grad():
        for name, parameter, shard in sharded_parameters(model):
            parameter.copy_(full.pop(name)[shard.index()])
    assert not full
    return model


def passed(model, tokens: Tensor, weights: Tensor) -> Tensor:
    """Logits (B, S, V); gradients are those of a random projection of them."""
    logits = model(tokens)
    logits = getattr(logits, "logits", logits)
    (logits * weights).sum().backward()
    return logits.detach()


def ours_on(config: dict, tensors: dict, tokens: Tensor, weights: Tensor, *, world: bool = False, change=None):
    """(logits, full gradients under their names), on one process or on the world's tensor axis.

    change: a function that spoils the translation, to see that it would be noticed."""
    translation = from_hugging_face(config)
    translation = translation if change is None else change(translation)
    model = our_model(translation, tensors, world_axis() if world else None, weights.dtype)
    logits = passed(model, tokens, weights)
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    if world:
        grads = assemble(grads, {name: shard for name, _, shard in sharded_parameters(model)}, world_axis())
    return logits, dict(translation.to_theirs(grads))


def ours_on_the_world(config: dict, tensors: dict, tokens: Tensor, weights: Tensor):
    result = ours_on(config, tensors, tokens, weights, world=True)
    return result if dist.get_rank() == 0 else None
