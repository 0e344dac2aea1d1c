"""`parallel-attn convert hf_model=...`: a folder that transformers wrote as a run folder that training goes on with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from parallel_attn.data import ByteTokenizer, FileTokenizer, Tokenizer
from parallel_attn.data.text_tokenizer import ENDS_OF_TEXT
from parallel_attn.errors import SettingsError
from parallel_attn.interop import Translation, from_hugging_face
from parallel_attn.interop.config_json import ConfigJson
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

OWN_KEYS = ("hf_model", "out", "tokenizer", "tokenizer.end_of_text", "--json")


def convert(settings: Settings) -> None:
    """The command, of one process. Raises SettingsError before anything is written."""
    if settings.overrides:
        raise SettingsError(
            f"{settings.overrides[0]} is not a key of convert hf_model=..., which has {', '.join(OWN_KEYS)}: the model's "
            f"settings come from its {CONFIG}"
        )
    folder = folder_of(settings.text("hf_model"))
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
    plain = plain_config(
        parse(settings_of(translation, tokenizer, settings.text("tokenizer", str(folder / TOKENIZER))))
    )
    length = longest(config)
    meta = first_meta(parse(plain), tokenizer) | {"length": length, "from": {"hf_model": str(folder), "config": config}}
    counts = {"parameters": 0, "bytes": 0}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in translation.to_ours(theirs):
            counts["parameters"] += tensor.numel()
            yield f"master/{name}", tensor.to(torch.float32)

    def told(name: str, size: int) -> None:
        counts["bytes"] += size
        print(f"{name}: {size:,} bytes", flush=True)

    checkpoint = write_run(out, plain, tensors(), tokenizer.to_json(), meta, on_file=told)
    print(
        f"{checkpoint}: {translation.kind}, {counts['parameters']:,} parameters as float32 masters, {counts['bytes']:,} bytes; "
        f"moments begin at zero\n"
        f"  a text ends with token {tokenizer.end_of_text}; the longest sequence has {length or 'no stated number of'} tokens\n"
        f"  parallel-attn generate run={out} prompt=...\n"
        f"  python train.py checkpoint.resume={out} data=text data.path=... train.seq_len={min(length or 1024, 1024)}"
    )
    for note in tokenizer.notes():
        print(f"  note: {note}")
    known = {"end_of_text": tokenizer.end_of_text, "length": length, "checkpoint": str(checkpoint)}
    write_json(settings, {"out": str(out), "model_type": translation.kind} | counts | known)


def folder_of(given: str) -> Path:
    """The folder of hf_model. Raises SettingsError."""
    folder = Path(given).expanduser()
    if not given.strip() or not folder.is_dir():
        raise SettingsError(
            f"hf_model={given} is not a folder: name one that transformers' save_pretrained wrote, or that "
            f"`hf download MODEL --local-dir DIR` fetched"
        )
    snapshots = sorted(folder.glob(f"snapshots/*/{CONFIG}"))
    if snapshots and not (folder / CONFIG).exists():
        raise SettingsError(f"hf_model={given} is a model's place in the hub's cache: name {snapshots[-1].parent}")
    return folder


def longest(config: dict[str, Any]) -> int | None:
    """Tokens of the longest sequence that the model was trained for. Raises SettingsError."""
    for key in ("max_position_embeddings", "max_sequence_length"):  # the second of LLaMA's first release
        if config.get(key) is not None:
            return ConfigJson(config).count(key)
    return None


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
    given, end = settings.text("tokenizer", ""), settings.text("tokenizer.end_of_text", "")
    if given == "bytes":
        if end:
            raise SettingsError(f"tokenizer.end_of_text={end}: tokenizer=bytes has its own, leave it out")
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
    found = end or end_of_text(path.parent, text, config if not given else {})
    return FileTokenizer(text, label=str(path), end_of_text=found)


def end_of_text(folder: Path, tokenizer: str, config: dict[str, Any]) -> int | str | None:
    """The token that ends a text, an id or a name, as the files beside a tokenizer.json say; None where they do not.

    Of several (a chat model ends its turns with one, texts with another) the one that is known to end texts.
    config: of the model that the tokenizer belongs to.
    """
    for found in (read_json(folder, GENERATION, optional=True).get("eos_token_id"), config.get("eos_token_id")):
        ids = [token for token in (found if isinstance(found, list) else [found]) if type(token) is int]
        if ids:
            named = names_of(tokenizer, ids) if len(ids) > 1 else {}
            return next((token for name in ENDS_OF_TEXT for token in ids if named.get(token) == name), ids[0])
    name = read_json(folder, TOKENIZER_CONFIG, optional=True).get("eos_token")
    return name.get("content") if isinstance(name, dict) else name if isinstance(name, str) else None


def names_of(tokenizer: str, ids: list[int]) -> dict[int, str]:
    """The names of added tokens of a tokenizer.json; none where it is no such file, which is said elsewhere."""
    try:
        return {entry["id"]: entry["content"] for entry in json.loads(tokenizer)["added_tokens"] if entry["id"] in ids}
    except (ValueError, TypeError, KeyError):
        return {}
