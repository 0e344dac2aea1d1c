"""Configurations for tests, composed by Hydra as train.py composes them."""

from __future__ import annotations

import json
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from parallel_attn.training.overrides import config_dir

QUIET = ("tracking.wandb.mode=disabled", "tracking.console=none", "checkpoint.every=0")
SMALL = (  # a model of ~30k parameters whose heads, KV heads, MLP width and vocabulary divide by little
    "model.hidden_size=32",
    "model.num_layers=2",
    "model.num_heads=6",
    "attention.head_dim=8",
    "model.mlp.hidden_size=50",
    "train.seq_len=32",
    "train.global_batch_size=12",
)


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return compose("config", overrides=[*QUIET, *overrides])


def records(run_dir: str | Path) -> list[dict]:
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
