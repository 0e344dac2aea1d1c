from parallel_attn.nn.cross_entropy import IGNORE, vocab_parallel_cross_entropy
from parallel_attn.nn.linear import ColumnParallelLinear, HeadLinear, ReplicatedLinear, RowParallelLinear, column_parallel
from parallel_attn.nn.mlp import SwiGLU
from parallel_attn.nn.module import Placement, ShardedModule, parameter_shards, sharded_parameters
from parallel_attn.nn.norm import HeadGain, RMSNorm
from parallel_attn.nn.rope_scaling import RopeScaling
from parallel_attn.nn.rotary import RopeConfig, Rotary
from parallel_attn.nn.vocabulary import VocabParallelEmbedding, output_head

__all__ = [
    "IGNORE",
    "ColumnParallelLinear",
    "HeadGain",
    "HeadLinear",
    "Placement",
    "RMSNorm",
    "RopeConfig",
    "RopeScaling",
    "ReplicatedLinear",
    "Rotary",
    "RowParallelLinear",
    "ShardedModule",
    "SwiGLU",
    "VocabParallelEmbedding",
    "column_parallel",
    "output_head",
    "parameter_shards",
    "sharded_parameters",
    "vocab_parallel_cross_entropy",
]
