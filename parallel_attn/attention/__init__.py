from parallel_attn.attention.base import Attention, AttentionConfig
from parallel_attn.attention.grouped import GroupedConfig, GroupedQueryAttention

__all__ = ["Attention", "AttentionConfig", "GroupedConfig", "GroupedQueryAttention"]
