"""`parallel-attn export`: a run as a folder that transformers loads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel_attn.checkpoint import Reader
from parallel_attn.checkpoint.files import write_file
from parallel_attn.errors import SettingsError
from parallel_attn.interop import Architecture, Translation, to_hugging_face
from parallel_attn.interop.files import (
    CONFIG,
    GENERATION,
    MAX_FILE_BYTES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    write_tensors,
)
from parallel_attn.models import DecoderLM
from parallel_attn.runs.command import Settings, usage, write_json
from parallel_attn.runs.command import run as run_command
from parallel_attn.runs.opened import OpenedRun, open_run
from parallel_attn.runs.written import check_out, new_folder

DESCRIPTION = """\
Writes a run as transformers does: config, weights (safetensors), generation config and tokenizer, so that transformers,
vLLM or lm-evaluation-harness load it. One process, whatever layout trained it.

  parallel-attn export run=runs/a out=hf_model
  parallel-attn export run=runs/a out=hf_model model_type=qwen3 dtype=bfloat16

Expressed: grouped attention as llama, qwen2, qwen3, qwen3_next or qwen3_5_text, MLA as deepseek_v3 or deepseek_v2. What
they cannot express (a window, sinks, a soft cap, ...) is refused by name. The tokenizer adds no token of its own to a text,
as in training here."""
KEYS = {
    "run": "a run folder (its newest checkpoint) or one of its checkpoints",
    "out": "the folder to write; it must not be there yet",
    "model_type": "transformers' model type; default: the one it was imported from, or the nearest",
    "dtype": "float32 (the default: exact), bfloat16 or float16",
    "max_file_bytes": f"bytes of one weights file ({MAX_FILE_BYTES:,})",
    "--json": "FILE: write what was written there",
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Masters(Mapping[str, Tensor]):
    """The full parameters of a checkpoint, each read when it is asked for."""

    def __init__(self, reader: Reader) -> None:
        self.reader, self.shapes = reader, reader.checkpoint.index.names()

    def __getitem__(self, name: str) -> Tensor:
        return self.reader.slice(f"master/{name}", (0,) * len(self.shapes[name]), self.shapes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    return run_command(export, arguments, usage("export", DESCRIPTION, KEYS))


def export(arguments: Sequence[str]) -> None:
    settings = Settings(arguments, KEYS)
    settings.check_json()
    run = open_run(settings.text("run"))
    out = check_out(settings.text("out"))
    name = settings.choice("dtype", list(DTYPES), "float32")
    most = settings.number("max_file_bytes", MAX_FILE_BYTES)
    if most is None or most < 1:
        raise SettingsError(f"max_file_bytes={most} must be at least 1")
    imported = (run.meta.get("from") or {}).get("config") or {}
    translation = translated(run, settings.text("model_type", "") or imported.get("model_type"))
    run.verify()
    with new_folder(out) as temporary, Reader(run.checkpoint) as reader:
        files = write_small(temporary, run, translation, name)
        for file, size in write_tensors(temporary, translation, Masters(reader), DTYPES[name], most):
            print(f"{file}: {size:,} bytes", flush=True)
            files[file] = size
    own = takes_its_own_tokenizer(run, translation.kind)
    parameters = run.checkpoint.index.parameters()
    print(
        f"{out}: {translation.kind}, {parameters:,} parameters in {name}, {sum(files.values()):,} bytes in {len(files)} files, "
        f"of step {run.checkpoint.step}\n"
        f"  model = AutoModelForCausalLM.from_pretrained({str(out)!r})\n"
        f"  tokenizer = {'PreTrainedTokenizerFast' if own else 'AutoTokenizer'}.from_pretrained({str(out)!r})"
    )
    if own:
        print(
            f"warning: for a {translation.kind} folder AutoTokenizer of transformers 5 builds Qwen2's own tokenizer, which gives "
            f"other tokens than this one: load it with PreTrainedTokenizerFast, and tell evaluation harnesses to"
        )
    write_json(settings, {
        "out": str(out), "model_type": translation.kind, "parameters": parameters, "dtype": name,
        "step": run.checkpoint.step, "files": files, "auto_tokenizer": not own, "config": translation.config,
    })  # fmt: skip


def translated(run: OpenedRun, model_type: str | None) -> Translation:
    """Raises SettingsError, naming the setting, for what transformers cannot express."""
    config = run.config
    if config.model_class is not DecoderLM:
        raise SettingsError(
            f"model._target_={config.model_class.__name__} has no model type in transformers here, only DecoderLM"
        )
    architecture = Architecture(config.model, config.attention.cls, config.attention.config)
    return to_hugging_face(architecture, max_position_embeddings=run.length, model_type=model_type)


def write_small(folder: Path, run: OpenedRun, translation: Translation, dtype: str) -> dict[str, int]:
    """All files but the weights; returns their names and bytes. Raises OSError."""
    end = run.tokenizer.end_of_text
    special = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": None}
    spec, end_token = plain_tokenizer(run)
    contents: dict[str, Any] = {
        CONFIG: translation.config | special | {"torch_dtype": dtype, "dtype": dtype},
        GENERATION: {"eos_token_id": end, "pad_token_id": end, "do_sample": False},
        TOKENIZER: spec,
        TOKENIZER_CONFIG: {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": end_token,
            "model_max_length": run.length,
            "clean_up_tokenization_spaces": False,
        },
    }
    return {
        name: write_file(folder / name, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())["bytes"]
        for name, content in contents.items()
    }


def plain_tokenizer(run: OpenedRun) -> tuple[dict, str]:
    """Its tokenizer.json as training used it (nothing added, nothing cut), and the token that ends a text."""
    import tokenizers

    spec = json.loads(run.tokenizer.to_json())
    spec |= dict.fromkeys(("truncation", "padding", "post_processor"))
    end_token = tokenizers.Tokenizer.from_str(json.dumps(spec)).id_to_token(run.tokenizer.end_of_text)
    added = spec["added_tokens"] = spec.get("added_tokens") or []
    entry = next((entry for entry in added if entry["content"] == end_token), None)
    if entry is None:
        entry = {"id": run.tokenizer.end_of_text, "content": end_token}
        added.append(
            entry | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
        )
    else:
        entry["special"] = True
    return spec, end_token


QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def takes_its_own_tokenizer(run: OpenedRun, model_type: str) -> bool:
    """Whether transformers 5 replaces this tokenizer: of every qwen2 folder it takes vocabulary and merges alone, whatever
    class tokenizer_config.json names, and cuts words as Qwen2 does (MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS)."""
    if model_type != "qwen2":
        return False
    spec = json.loads(run.tokenizer.to_json())
    steps = (spec.get("pre_tokenizer") or {}).get("pretokenizers") or [{}, {}]
    wanted = [
        spec["model"].get("type") == "BPE",
        not spec["model"].get("byte_fallback"),
        (spec.get("normalizer") or {}).get("type") == "NFC",
        [step.get("type") for step in steps] == ["Split", "ByteLevel"],
        steps[0].get("pattern") == {"Regex": QWEN2_WORDS},
        not steps[-1].get("use_regex", True) and not steps[-1].get("add_prefix_space", True),
    ]
    return not all(wanted)
