"""A tokenizer from a file that somebody else made."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from parallel_attn.data.text_tokenizer import TextTokenizer
from parallel_attn.errors import SettingsError

MISSING = "???"  # OmegaConf's word for a value that the user must give


class FileTokenizer(TextTokenizer):
    """Any Hugging Face tokenizer.json, given as a file or as a folder that holds one. V counts added tokens too."""

    @dataclass
    class Config:
        path: str = MISSING
        end_of_text: str | None = None

    name = "file"

    @classmethod
    def load(cls, config, corpus, *, builder, progress=None, wait_seconds=None) -> FileTokenizer:
        """Reads the file, on every rank. Raises SettingsError where it is no usable tokenizer."""
        label = f"tokenizer.path={config.path}"
        path = Path(os.path.expanduser(config.path))
        try:
            if path.is_dir():
                path /= "tokenizer.json"
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise SettingsError(
                f"{label}: not UTF-8, so no tokenizer.json; give the tokenizer.json beside it"
            ) from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise SettingsError(f"{label}: cannot read {path} ({reason}); give a tokenizer.json") from error
        return cls(text, label=label, end_of_text=config.end_of_text)
