from parallel_attn.models.base import LanguageModel
from parallel_attn.models.blocks import Block, CrossBlock
from parallel_attn.models.config import EncoderConfig, EncoderDecoderConfig, EncoderMlpConfig, MlpConfig, ModelConfig
from parallel_attn.models.decoder import DecoderLM
from parallel_attn.models.encoder_decoder import EncoderDecoderLM
from parallel_attn.models.generation import Continuation, Generated, generate
from parallel_attn.models.sampling import Sampling

__all__ = [
    "Block",
    "Continuation",
    "CrossBlock",
    "DecoderLM",
    "EncoderConfig",
    "EncoderDecoderConfig",
    "EncoderDecoderLM",
    "EncoderMlpConfig",
    "Generated",
    "LanguageModel",
    "MlpConfig",
    "ModelConfig",
    "Sampling",
    "generate",
]
