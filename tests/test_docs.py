"""The example of docs/adding_a_type.md, as a reader would copy it."""

import re
from pathlib import Path

import pytest

from parallel_attn.planning.verify import main

DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.fixture
def own_type(tmp_path, monkeypatch):
    """A folder with the files of the page; the folder is on the path of this process and of those it starts."""
    for kind, text in re.findall(r"```(python|yaml)\n(.*?)```", (DOCS / "adding_a_type.md").read_text(), re.DOTALL):
        path = tmp_path / text.splitlines()[0].removeprefix("# ")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return tmp_path


def test_a_type_of_ones_own_is_certified_and_a_missing_sum_turns_it_red(own_type, capsys):
    command = [f"hydra.searchpath=[file://{own_type}/configs]", "attention=factorized", "parallel.tensor=3"]
    assert main([*command, "attention.gate=headwise"]) == 0
    assert "GREEN" in capsys.readouterr().out
    file = own_type / "factorized.py"
    right = "column_parallel(self.q_down(x), [self.q])"
    assert right in file.read_text()
    file.write_text(file.read_text().replace(right, "column_parallel(self.q_down(x), [self.q], summed=False)"))
    assert main([*command, "--part", "layer"]) == 1
    assert "parameter gradients" in capsys.readouterr().out
