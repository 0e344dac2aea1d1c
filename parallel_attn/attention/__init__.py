from parallel_attn.attention.base import Attention
from parallel_attn.attention.caches import Cache
from parallel_attn.attention.config import AttentionConfig
from parallel_attn.attention.cross import CrossAttention, CrossConfig
from parallel_attn.attention.given import Given, with_rope_key, without_padding
from parallel_attn.attention.grouped import GroupedConfig, GroupedQueryAttention
from parallel_attn.attention.grouped_latent import GroupedLatentAttention, GroupedLatentConfig
from parallel_attn.attention.latent import LatentConfig, MultiHeadLatentAttention
from parallel_attn.attention.tied import GroupedTiedAttention, TiedConfig

__all__ = [
    "Attention",
    "AttentionConfig",
    "Cache",
    "CrossAttention",
    "CrossConfig",
    "Given",
    "GroupedConfig",
    "GroupedLatentAttention",
    "GroupedLatentConfig",
    "GroupedQueryAttention",
    "GroupedTiedAttention",
    "LatentConfig",
    "MultiHeadLatentAttention",
    "TiedConfig",
    "with_rope_key",
    "without_padding",
]
