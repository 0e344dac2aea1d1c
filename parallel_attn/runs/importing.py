"""`parallel-attn convert hf_model=...`: a folder that transformers wrote as a run folder that training goes on with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from parallel_attn.data import ByteTokenizer, FileTokenizer, Tokenizer
from parallel_attn.errors import SettingsError
from parallel_attn.interop import Translation, from_hugging_face
from parallel_attn.interop.files import (
    CONFIG,
    GENERATION,
    TOKENIZER,
    TOKENIZER_CONFIG,
    FolderTensors,
    read_json,
)
from parallel_attn.models import DecoderLM
from parallel_attn.runs.command import Settings, write_json
from parallel_attn.runs.written import check_out, first_meta, write_run
from parallel_attn.training.config import parse, plain_config
from parallel_attn.training.overrides import compose_checked


def convert(settings: Settings) -> None:
    """The command, of one process. Raises SettingsError before anything is written."""
    given = settings.text("hf_model")
    folder = Path(given).expanduser()
    if not given.strip() or not folder.is_dir():
        raise SettingsError(f"hf_model={given} is not a folder: name one that transformers' save_pretrained wrote")
    if settings.overrides:
        raise SettingsError(f"{settings.overrides[0]}: with hf_model the model's settings come from its {CONFIG}, leave it out")
    out = check_out(settings.text("out"))
    config = read_json(folder, CONFIG)
    translation = from_hugging_face(config)
    theirs = FolderTensors(folder)
    translation.check_names(theirs)
    tokenizer = tokenizer_of(settings, folder, config)
    vocab_size = translation.architecture.model.vocab_size
    if tokenizer.vocab_size > vocab_size:
        raise SettingsError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, {folder / CONFIG} vocab_size={vocab_size}: give the "
            f"model's own with tokenizer=FILE"
        )
    plain = plain_config(parse(settings_of(translation, tokenizer, settings.text("tokenizer", str(folder / TOKENIZER)))))
    length = config.get("max_position_embeddings")
    meta = first_meta(parse(plain), tokenizer) | {"length": length, "from": {"hf_model": str(folder), "config": config}}
    count = 0

    def tensors() -> Iterator[tuple[str, Tensor]]:
        nonlocal count
        for name, tensor in translation.to_ours(theirs):
            count += tensor.numel()
            yield f"master/{name}", tensor.to(torch.float32)

    checkpoint = write_run(out, plain, tensors(), tokenizer.to_json(), meta)
    print(
        f"{checkpoint}: {translation.kind}, {count:,} parameters as float32 masters, moments begin at zero\n"
        f"  parallel-attn generate run={out} prompt=...\n"
        f"  python train.py checkpoint.resume={out} data=text data.path=... train.seq_len={min(length or 1024, 1024)}"
    )
    write_json(settings, {"out": str(out), "model_type": translation.kind, "parameters": count})


def settings_of(translation: Translation, tokenizer: Tokenizer, path: str) -> dict[str, Any]:
    """The default configuration with this model, attention and tokenizer."""
    plain = OmegaConf.to_container(compose_checked([]), resolve=True)
    architecture = translation.architecture
    plain["model"] = _named(DecoderLM, asdict(architecture.model))
    plain["attention"] = _named(architecture.attention_class, asdict(architecture.attention))
    plain["tokenizer"] = _named(type(tokenizer), {"path": path} if isinstance(tokenizer, FileTokenizer) else {})
    return plain


def _named(kind: type, leaves: dict[str, Any]) -> dict[str, Any]:
    return {"_target_": f"{kind.__module__}.{kind.__qualname__}", **leaves}


def tokenizer_of(settings: Settings, folder: Path, config: dict[str, Any]) -> Tokenizer:
    """The folder's own, or the one of tokenizer=FILE or tokenizer=bytes. Raises SettingsError."""
    given = settings.text("tokenizer", "")
    if given == "bytes":
        return ByteTokenizer()
    path = Path(given).expanduser() if given else folder / TOKENIZER
    path = path / TOKENIZER if path.is_dir() else path
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(
            f"{path} cannot be read ({reason}): save it with AutoTokenizer.from_pretrained(...).save_pretrained(...), or give "
            f"tokenizer=FILE (a tokenizer.json) or tokenizer=bytes"
        ) from error
    return FileTokenizer(text, label=str(path), end_of_text=end_of_text(folder, config))


def end_of_text(folder: Path, config: dict[str, Any]) -> int | str | None:
    """The token that ends a text, an id or a name, as the folder's files say; None where they do not."""
    ids = [read_json(folder, GENERATION, optional=True).get("eos_token_id"), config.get("eos_token_id")]
    for found in ids:
        found = found[0] if isinstance(found, list) and found else found
        if type(found) is int:
            return found
    name = read_json(folder, TOKENIZER_CONFIG, optional=True).get("eos_token")
    return name.get("content") if isinstance(name, dict) else name
