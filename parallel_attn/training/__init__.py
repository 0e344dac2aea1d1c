from parallel_attn.training.config import Config, parse
from parallel_attn.training.engines import DeepSpeedEngine, Engine, TorchEngine
from parallel_attn.training.optimizer import AdamW, clip_gradients, gradient_norm, parameter_groups
from parallel_attn.training.pretrain import pretrain
from parallel_attn.training.schedule import Constant, Cosine, Schedule, WarmupStableDecay

__all__ = [
    "AdamW",
    "Config",
    "Constant",
    "Cosine",
    "DeepSpeedEngine",
    "Engine",
    "Schedule",
    "TorchEngine",
    "WarmupStableDecay",
    "clip_gradients",
    "gradient_norm",
    "parameter_groups",
    "parse",
    "pretrain",
]
