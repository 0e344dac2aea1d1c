"""Tensor-parallel attention layers, and a small pretraining harness around them."""

from parallel_attn.attention import (
    Attention,
    AttentionConfig,
    CrossAttention,
    GroupedLatentAttention,
    GroupedQueryAttention,
    GroupedTiedAttention,
    MultiHeadLatentAttention,
)
from parallel_attn.errors import NonFiniteLoss, SettingsError
from parallel_attn.mesh import AxisGroup
from parallel_attn.models import DecoderLM, ModelConfig
from parallel_attn.nn import parameter_shards, sharded_parameters
from parallel_attn.sharding import HeadPlan, ParameterShard

__version__ = "0.1.0"

__all__ = [
    "Attention",
    "AttentionConfig",
    "AxisGroup",
    "CrossAttention",
    "DecoderLM",
    "GroupedLatentAttention",
    "GroupedQueryAttention",
    "GroupedTiedAttention",
    "HeadPlan",
    "ModelConfig",
    "MultiHeadLatentAttention",
    "NonFiniteLoss",
    "ParameterShard",
    "SettingsError",
    "parameter_shards",
    "sharded_parameters",
]
