"""The command line inside this process, for what ends before a process group is started."""

import subprocess
import sys

import pytest

from parallel_attn.training.entry import main


@pytest.fixture
def command_here(monkeypatch, capfd, tmp_path):
    """Calls train.py's main with overrides in `tmp_path`; returns code, stdout and stderr like tests.command's helpers.

    Saves the seconds that an interpreter takes to start. Only for commands that are refused.
    """

    def call(*overrides: str) -> subprocess.CompletedProcess:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["train.py", *overrides])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return subprocess.CompletedProcess(overrides, ended.value.code, *capfd.readouterr())

    return call
