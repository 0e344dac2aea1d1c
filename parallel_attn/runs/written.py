"""A run folder written out of full tensors: of an imported or a converted model."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torch import Tensor

from parallel_attn.checkpoint import CHECKPOINTS, CheckpointFolder, Index
from parallel_attn.checkpoint.files import DTYPES, flush_folder, remove, write_file, write_tensor_file
from parallel_attn.checkpoint.index import INDEX_FILE, Entry, Piece
from parallel_attn.data import Tokenizer
from parallel_attn.errors import CheckpointError, SettingsError
from parallel_attn.training.config import Config
from parallel_attn.training.resume import TOKENIZER_FILE
from parallel_attn.training.run_folder import CONFIG_FILE

FILE_BYTES = 1 << 30
"""So much is held in memory at a time, and stands in a file."""


def check_out(out: str, key: str = "out") -> Path:
    """A folder that can be made. Raises SettingsError for one that is there already and holds something, and for one that
    cannot be put in place of what is there."""
    if not out.strip():
        raise SettingsError(f"{key} has no value: name the folder to write, {key}=FOLDER")
    folder = Path(out).expanduser()
    folder = folder if folder.name not in ("", "..") else folder.resolve()
    try:
        if folder.is_symlink():
            raise SettingsError(f"{key}={out} is a link: name the folder itself")
        if folder.exists():
            if not folder.is_dir() or any(folder.iterdir()):
                raise SettingsError(f"{key}={out} is there already: name another folder, or remove it")
            if folder.is_mount() or folder.samefile(Path.cwd()):
                raise SettingsError(f"{key}={out} is a mount or where you stand: name a folder inside it")
        above = next(parent for parent in folder.absolute().parents if parent.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise SettingsError(f"{key}={out} cannot be written: {above} is no folder that can be written to")
    except OSError as error:
        raise SettingsError(f"{key}={out} cannot be written ({error.strerror})") from error
    return folder


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder beside it, which takes its name when all is written and goes away when it is not.

    Raises CheckpointError for what the disk refuses.
    """
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        yield temporary
        flush_folder(temporary)
        if folder.exists():
            folder.rmdir()  # empty: check_out has looked
        temporary.rename(folder)
        flush_folder(folder.parent)
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{folder} cannot be written ({reason}): free space or name another folder") from error
    finally:
        remove([temporary] if temporary.exists() else [])


def first_meta(config: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    """What the index of a run says that has not begun: no step, no data seen."""
    schedule = config.schedule.cls(config.schedule.config, config.optimizer.config.lr, config.train.steps)
    return {
        "choices": {},
        "layout": {"data": 1, "tensor": 1, "engine": "none", "precision": config.train.precision},
        "tokenizer": {
            "name": tokenizer.name,
            "fingerprint": tokenizer.fingerprint,
            "end_of_text": tokenizer.end_of_text,
        },
        "updates": 0,
        "schedule": {"steps": config.train.steps, "next_rate": schedule.rate(0)},
        "data": {"fingerprint": "", "seq_len": config.train.seq_len, "seed": config.train.seed, "samples": 0},
        "progress": {"best": {}, "seconds": 0.0, "validated": None},
    }


def write_run(
    folder: Path,
    plain: dict,
    tensors: Iterable[tuple[str, Tensor]],
    tokenizer: str,
    meta: dict[str, Any],
    on_file: Callable[[str, int], None] = lambda name, size: None,
) -> Path:
    """A run folder with config.yaml and one checkpoint, of step 0; returns the checkpoint's folder.

    plain: the configuration as nested plain values. tensors: (KIND/NAME, full tensor), taken one by one; a kind that none
    has begins at zero where training goes on. tokenizer: the text of its tokenizer.json. meta: for the index, see
    `first_meta`. on_file: told the name and the bytes of each file of tensors that is done.
    What is half done has a hidden name and goes away. Raises CheckpointError, and what `tensors` raise.
    """
    with new_folder(folder) as temporary:
        checkpoints = CheckpointFolder(temporary / CHECKPOINTS)
        checkpoints.prepare()
        inner = checkpoints.temporary(0, "0")
        inner.mkdir()
        found, files, finite = {}, {}, True
        for number, batch in enumerate(_batches(tensors)):
            name = f"tensors-{number:05d}.safetensors"
            checksums, files[name], all_finite = write_tensor_file(inner / name, batch)
            finite = finite and all_finite
            for key, tensor in batch.items():
                piece = Piece(name, (0,) * tensor.dim(), tuple(tensor.shape), checksums[key])
                found[key] = Entry(tuple(tensor.shape), DTYPES[tensor.dtype], (piece,))
            on_file(name, files[name]["bytes"])
        files[TOKENIZER_FILE] = write_file(inner / TOKENIZER_FILE, tokenizer.encode())
        index = Index(0, finite, found, files, meta | {"config": plain})
        write_file(inner / INDEX_FILE, index.to_json().encode())
        published = checkpoints.publish(inner, index, keep=1)
        write_file(temporary / CONFIG_FILE, OmegaConf.to_yaml(OmegaConf.create(plain)).encode())
    return folder / CHECKPOINTS / published.name


def _batches(tensors: Iterable[tuple[str, Tensor]]) -> Iterable[dict[str, Tensor]]:
    batch: dict[str, Tensor] = {}
    size = 0
    for key, tensor in tensors:
        tensor = tensor.detach().cpu().contiguous()
        if batch and size + tensor.nbytes > FILE_BYTES:
            yield batch
            batch, size = {}, 0
        batch[key] = tensor
        size += tensor.nbytes
    if batch:
        yield batch
