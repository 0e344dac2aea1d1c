"""The default corpus: source code of the running Python's standard library. Real text on every machine, no download."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

from parallel_attn.data.files import FileCorpus, SourceFile, find_files
from parallel_attn.errors import SettingsError

LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def _leave_out(folder: str) -> bool:
    return folder in LEFT_OUT or folder.startswith("config-")  # config-3.x-<platform>: written when Python was built


class StdlibCorpus(FileCorpus):
    """Every *.py of the standard library, about 12 MB; tests, installed packages and generated files left out.

    One file in twenty is validation text, chosen by the hash of its name: a patch release of Python keeps the split.
    """

    @dataclass
    class Config:
        num_workers: int = 0
        documents: bool = False
        cache_dir: str | None = None

    def __init__(self, config, root: Path | None = None):
        """config: a Config. root: another library folder than the running Python's."""
        super().__init__(config)
        self.root = Path(root or sysconfig.get_paths()["stdlib"])

    def label(self, split: str) -> str:
        return "data=stdlib"

    def find(self, split: str) -> list[SourceFile]:
        if split == "val":
            return []
        try:
            files = find_files(self.root, ".py", _leave_out)
        except OSError as error:
            raise SettingsError(
                f"data=stdlib: cannot list {error.filename} ({error.strerror}); use data=text data.path=FILE"
            ) from error
        # _sysconfigdata_*.py is generated too: it holds the build machine's compiler flags
        files = [file for file in files if not file.name.startswith("_sysconfigdata")]
        if not files:
            raise SettingsError(f"data=stdlib: no Python source in {self.root}; use data=text data.path=FILE")
        return files
