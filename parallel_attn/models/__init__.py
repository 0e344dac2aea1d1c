from parallel_attn.models.decoder import Block, DecoderLM, MlpConfig, ModelConfig

__all__ = ["Block", "DecoderLM", "MlpConfig", "ModelConfig"]
