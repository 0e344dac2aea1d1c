from parallel_attn.training.config import Config, parse
from parallel_attn.training.engine import Engine, TorchEngine
from parallel_attn.training.optimizer import AdamW, clip_gradients, gradient_norm, parameter_groups
from parallel_attn.training.pretrain import pretrain
from parallel_attn.training.schedule import Cosine, Schedule

__all__ = [
    "AdamW",
    "Config",
    "Cosine",
    "Engine",
    "Schedule",
    "TorchEngine",
    "clip_gradients",
    "gradient_norm",
    "parameter_groups",
    "parse",
    "pretrain",
]
