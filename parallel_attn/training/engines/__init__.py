from parallel_attn.training.engines.base import Engine, Job, compute_dtypes
from parallel_attn.training.engines.deepspeed import DeepSpeedEngine, DeepSpeedEngineConfig
from parallel_attn.training.engines.torch import TorchEngine, TorchEngineConfig

__all__ = [
    "DeepSpeedEngine",
    "DeepSpeedEngineConfig",
    "Engine",
    "Job",
    "TorchEngine",
    "TorchEngineConfig",
    "compute_dtypes",
]
