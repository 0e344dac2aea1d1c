"""A folder as transformers writes it: config.json, and safetensors files with an index where they are several.

Tensors are read and written one entry at a time; nothing is unpickled.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel_attn.errors import SettingsError
from parallel_attn.interop.translation import Translation

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = {"F32": torch.float32, "F64": torch.float64, "BF16": torch.bfloat16, "F16": torch.float16}
MAX_FILE_BYTES = 5 * 10**9


def read_json(folder: Path, name: str, *, optional: bool = False) -> dict[str, Any]:
    """A JSON file of a folder. Raises SettingsError, naming it, where it is missing or no JSON object."""
    path = folder / name
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if optional:
            return {}
        raise SettingsError(f"{path} is missing: name a folder that transformers' save_pretrained wrote") from error
    except OSError as error:
        raise SettingsError(f"{path} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise SettingsError(f"{path} is no JSON ({error})") from error
    if not isinstance(content, dict):
        raise SettingsError(f"{path} is no JSON object: name a folder that transformers' save_pretrained wrote")
    return content


class FolderTensors(Mapping[str, Tensor]):
    """The tensors of a folder by name, each read when it is asked for, in float32 (float64 stays).

    Raises SettingsError, naming the file, for one that is missing, is no safetensors file, or has not what the index says.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.folder = folder
        self.files: dict[str, Any] = {}
        self.where: dict[str, str] = {}
        for file, wanted in self._listed().items():
            path = folder / file
            if not path.is_file():
                raise SettingsError(f"{path} is missing: {INDEX} names it")
            try:
                self.files[file] = safe_open(path, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise SettingsError(f"{path} is no whole safetensors file ({error})") from error
            held = set(self.files[file].keys())
            absent = sorted(set(wanted or ()) - held)
            if absent:
                raise SettingsError(f"{path} has no tensor {absent[0]}: {INDEX} says it has")
            self.where |= dict.fromkeys(wanted or held, file)

    def _listed(self) -> dict[str, list[str] | None]:
        """File -> the tensors that the index puts there; None: all that it has. As transformers looks for them: the one
        file first, so that an index left over from another save is not heard."""
        if (self.folder / SINGLE).is_file():
            return {SINGLE: None}
        if (self.folder / INDEX).is_file():
            placed = read_json(self.folder, INDEX).get("weight_map")
            if not isinstance(placed, dict) or not all(isinstance(file, str) for file in placed.values()):
                raise SettingsError(f"{self.folder / INDEX} has no weight_map: it is no index of safetensors files")
            outside = [file for file in placed.values() if Path(file).name != file]
            if outside:
                raise SettingsError(f"{self.folder / INDEX} names {outside[0]}: only files beside it are read")
            files: dict[str, list[str] | None] = {}
            for name, file in placed.items():
                files.setdefault(file, []).append(name)
            return files
        pickled = sorted(path.name for path in self.folder.glob("*.bin"))
        if pickled:
            raise SettingsError(
                f"{self.folder / pickled[0]}: pickled weights are not read; write safetensors with transformers' "
                f"save_pretrained(..., safe_serialization=True)"
            )
        raise SettingsError(f"{self.folder} has neither {SINGLE} nor {INDEX}: it holds no weights")

    def __getitem__(self, name: str) -> Tensor:
        file = self.files[self.where[name]]
        stored = file.get_slice(name).get_dtype()
        if stored not in FLOATS:
            raise SettingsError(f"tensor {name} is stored as {stored}, only {', '.join(FLOATS)} can be read")
        tensor = file.get_tensor(name)
        if not tensor.isfinite().all():
            raise SettingsError(f"tensor {name} of {self.folder / self.where[name]} holds values that are not finite")
        return tensor if tensor.dtype == torch.float64 else tensor.float()

    def __iter__(self) -> Iterator[str]:
        return iter(self.where)

    def __len__(self) -> int:
        return len(self.where)


def planned_files(translation: Translation, dtype: torch.dtype, max_file_bytes: int) -> list[list[str]]:
    """The names of the tensors of each file, in the order in which the translation makes them; a tensor is never cut."""
    files: list[list[str]] = [[]]
    size = 0
    for entry in translation.entries:
        for name in entry.theirs:
            held = math.prod(translation.their_shapes[name]) * dtype.itemsize
            if files[-1] and size + held > max_file_bytes:
                files.append([])
                size = 0
            files[-1].append(name)
            size += held
    return files


def write_tensors(
    folder: Path, translation: Translation, ours: Mapping[str, Tensor], dtype: torch.dtype, max_file_bytes: int
) -> Iterator[tuple[str, int]]:
    """Writes the weights into a folder; yields (file, bytes) as each is done.

    Raises OSError, and SettingsError, naming the tensor, for a value that is too large for `dtype`.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    plan = planned_files(translation, dtype, max_file_bytes)
    several = len(plan) > 1
    tensors, placed, total = translation.to_theirs(ours), {}, 0
    for number, names in enumerate(plan, 1):
        file = f"model-{number:05d}-of-{len(plan):05d}.safetensors" if several else SINGLE
        batch = {}
        for wanted in names:
            name, tensor = next(tensors)
            assert name == wanted, (name, wanted)
            batch[name] = narrowed(name, tensor, dtype)
        try:
            save_file(batch, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:  # its word for what the disk says
            raise OSError(None, str(error), str(folder / file)) from error
        flush(folder / file)
        placed |= dict.fromkeys(batch, file)
        size = sum(tensor.nbytes for tensor in batch.values())
        total += size
        yield file, size
    if several:
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
        (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n")


def narrowed(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous and in `dtype`. Raises SettingsError for values that are not finite, or no longer."""
    result = tensor.to(dtype).contiguous()
    if not result.isfinite().all():
        if not tensor.isfinite().all():
            raise SettingsError(f"{name} holds values that are not finite: take another checkpoint")
        kind = str(dtype).removeprefix("torch.")
        raise SettingsError(
            f"dtype={kind}: {name} holds {tensor.abs().max().item():.4g}, {kind} ends at {torch.finfo(dtype).max:.4g}: "
            f"use bfloat16 or float32"
        )
    return result


def flush(path: Path) -> None:
    """Puts what was written on the disk. Raises OSError."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
