from parallel_attn.models.base import LanguageModel
from parallel_attn.models.blocks import Block, CrossBlock
from parallel_attn.models.config import EncoderConfig, EncoderDecoderConfig, EncoderMlpConfig, MlpConfig, ModelConfig
from parallel_attn.models.decoder import DecoderLM
from parallel_attn.models.encoder_decoder import EncoderDecoderLM

__all__ = [
    "Block",
    "CrossBlock",
    "DecoderLM",
    "EncoderConfig",
    "EncoderDecoderConfig",
    "EncoderDecoderLM",
    "EncoderMlpConfig",
    "LanguageModel",
    "MlpConfig",
    "ModelConfig",
]
