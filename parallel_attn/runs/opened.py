"""A run folder or one of its checkpoints, opened: configuration, tokenizer, and the model at any degree."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from parallel_attn import checkpoint as checkpoints
from parallel_attn.checkpoint import Checkpoint, Reader, require_same_parameters
from parallel_attn.data import Tokenizer
from parallel_attn.errors import CheckpointError, SettingsError
from parallel_attn.mesh import AxisGroup, Mesh
from parallel_attn.models import LanguageModel
from parallel_attn.nn import ShardedModule, parameter_shards
from parallel_attn.training.checkpoints import verify
from parallel_attn.training.config import Config, parse
from parallel_attn.training.engines import compute_dtypes
from parallel_attn.training.pretrain import with_vocabulary
from parallel_attn.training.resume import TOKENIZER_FILE


@dataclass(frozen=True)
class OpenedRun:
    """A checkpoint and the settings of the run that wrote it, the vocabulary filled in."""

    checkpoint: Checkpoint
    config: Config

    @property
    def meta(self) -> dict:
        return self.checkpoint.index.meta

    @property
    def length(self) -> int:
        """Tokens of the longest sequence that the model was trained for."""
        return self.meta.get("length") or self.config.train.seq_len

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Raises CheckpointError for a file that is damaged."""
        text = self.checkpoint.text(TOKENIZER_FILE)
        return self.config.tokenizer.cls.from_json(text, self.meta["tokenizer"]["end_of_text"])

    def verify(self, mesh: Mesh | None = None, prefix: str = "master/") -> None:
        """Compares the checksums of the weights (all tensors: prefix ""); the ranks of a mesh share the files and all hear
        of it. Raises CheckpointError."""
        with _offers_by("run"):
            if mesh is None:
                self.checkpoint.verify(prefix=prefix)
            else:
                verify(self.checkpoint, mesh, prefix)

    @property
    def compute_dtype(self) -> torch.dtype:
        dtype, compute_dtype = compute_dtypes(self.config.train.precision)
        return compute_dtype or dtype

    def build(self, tensor: AxisGroup, device: torch.device | str = "meta", **dtypes: torch.dtype) -> LanguageModel:
        """The model without its weights. Raises SettingsError for a degree that cannot work."""
        config = self.config
        attention = config.attention
        return config.model_class(
            config.model, attention.cls, attention.config, tensor_parallel=tensor, device=device, **dtypes
        )

    def model(
        self, tensor: AxisGroup | None = None, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> LanguageModel:
        """The model with its weights, in eval mode: this rank's slices are read, nothing else.

        dtype: of the computation, by default the run's; matrices are kept in it, gains and biases in float32 or higher.
        Raises SettingsError for a degree that cannot work, CheckpointError for a checkpoint that cannot be read.
        """
        dtype = dtype or self.compute_dtype
        narrow = dtype if dtype in (torch.bfloat16, torch.float16) else None
        master = torch.float32 if narrow else dtype
        model = self.build(tensor or AxisGroup(), dtype=master, compute_dtype=narrow)
        shards = parameter_shards(model)
        require_same_parameters(self.checkpoint, shards, "run")
        places = _places(model)
        with Reader(self.checkpoint) as reader:
            for name, meta in list(model.named_parameters()):
                value = reader.parameter(name, shards[name], kinds=("master",))["master"]
                wanted = narrow if narrow and value.dim() > 1 else master
                parameter = nn.Parameter(value.to(device=device, dtype=wanted).contiguous(), requires_grad=False)
                for owner, local in places[id(meta)]:  # one more than one for a tied table
                    owner.register_parameter(local, parameter)
        return model.eval()


def _places(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """id of a parameter -> the modules that hold it, and under which name."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        if isinstance(module, ShardedModule):
            for local, parameter in module._parameters.items():
                if parameter is not None:
                    places.setdefault(id(parameter), []).append((module, local))
    return places


def open_run(path: str | Path, key: str = "run") -> OpenedRun:
    """The newest checkpoint of a run folder, or the checkpoint that is named. key: of the setting, for messages.

    Raises SettingsError for what is no folder, CheckpointError where it holds no whole checkpoint.
    """
    folder = Path(path).expanduser()
    if not str(path).strip() or not folder.is_dir():
        raise SettingsError(f"{key}={path} is not a folder: name a run folder or one of its checkpoints")
    with _offers_by(key):
        try:
            checkpoint = checkpoints.find(folder)
        except CheckpointError as error:
            raise CheckpointError(f"{key}={path}: {error}") from error
    return OpenedRun(checkpoint, with_vocabulary(parse(checkpoint.index.meta["config"]), _vocabulary(checkpoint)))


@contextmanager
def _offers_by(key: str) -> Iterator[None]:
    """CheckpointErrors that offer another checkpoint do so by the key that is used here."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(str(error).replace("checkpoint.resume=", f"{key}=")) from error


def _vocabulary(checkpoint: Checkpoint) -> int:
    return checkpoint.index.names()["embedding.weight"][0]
