"""Settings of the tracking room, and plain values for JSON and W&B."""

import math

import numpy
import pytest
import torch
from omegaconf import OmegaConf

from parallel_attn.errors import SettingsError
from parallel_attn.tracking import TrackingConfig, WandbConfig
from parallel_attn.tracking.plain import FROM_ENVIRONMENT, plain_config, plain_json, plain_number


@pytest.mark.parametrize(
    "settings, words",
    [
        pytest.param(TrackingConfig(console="loud"), ["tracking.console='loud'", "auto, bar, lines"], id="console"),
        pytest.param(
            TrackingConfig(wandb=WandbConfig(mode="on")), ["tracking.wandb.mode='on'", "online, offline"], id="mode"
        ),
        pytest.param(TrackingConfig(wandb=WandbConfig(project="a/b")), ["tracking.wandb.project='a/b'"], id="project"),
        pytest.param(TrackingConfig(wandb=WandbConfig(tags=["x" * 65])), ["tracking.wandb.tags", "65"], id="tag"),
    ],
)
def test_wrong_choice_names_key_value_and_what_works(settings, words):
    with pytest.raises(SettingsError) as error:
        settings.check()
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


def test_defaults_pass_and_hydra_accepts_the_dataclass():
    TrackingConfig().check()
    typed = OmegaConf.structured(TrackingConfig)
    typed.wandb.tags = ["a", "b"]
    assert OmegaConf.to_object(typed) == TrackingConfig(wandb=WandbConfig(tags=["a", "b"]))


def test_config_becomes_nested_plain_values_without_environment_values(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "secret-value")
    node = OmegaConf.create(
        {
            "model": {"num_heads": 8},
            "attention": {"num_heads": "${model.num_heads}", "sizes": [1, 2]},
            "missing": "???",
            "token": "${oc.env:MY_TOKEN}",
            "again": "${token}",
        }
    )
    plain = plain_config({"run": node, "part": node.attention, "shape": (3, 4), "dtype": torch.float32})
    assert plain == {
        "run": {
            "model": {"num_heads": 8},
            "attention": {"num_heads": 8, "sizes": [1, 2]},
            "missing": None,
            "token": FROM_ENVIRONMENT,
            "again": FROM_ENVIRONMENT,
        },
        "part": {"num_heads": 8, "sizes": [1, 2]},
        "shape": [3, 4],
        "dtype": "torch.float32",
    }
    assert type(plain["run"]["attention"]) is dict and type(plain["part"]["sizes"]) is list


def test_numbers_keep_their_value_and_non_finite_ones_become_none():
    assert plain_number(torch.tensor(0.1, dtype=torch.float64)) == 0.1
    assert plain_number(numpy.float32(0.5)) == 0.5
    assert plain_number(2**60 + 1) == 2**60 + 1
    assert [plain_number(value) for value in (math.nan, math.inf, -math.inf, torch.tensor(math.nan))] == [None] * 4
    nested = {"a": [1, math.nan, {"b": (numpy.int64(3), "x", None)}]}
    assert plain_json(nested) == {"a": [1, None, {"b": [3, "x", None]}]}
