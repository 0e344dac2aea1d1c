"""`parallel-attn checkpoint run=RUN`: what it lists, what it finds damaged, what it refuses."""

import json

import pytest

from parallel_attn.checkpoint.show import main
from tests.checkpoint.test_format import FIRST, flip
from tests.training.resuming import trained


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shown") / "a"
    trained(2, folder, "train.steps=4", "checkpoint.every=2", "parallel.tensor=2", "eval.every=4")
    return folder.rename(folder.with_name("a run=1"))  # the command takes it as it stands


def test_what_is_inside(run_dir, capsys, tmp_path):
    assert main([f"run={run_dir}", "--json", str(tmp_path / "all.json")]) == 0
    shown = capsys.readouterr().out
    for text in (
        "step-00000002  whole          1 x 2          TorchEngine  fp32       3      0.4 MB",
        "step-00000004  whole, latest  1 x 2          TorchEngine  fp32       3      0.4 MB",
        "step-00000004: step 4 of 4, next learning rate 0.0004, 48 samples of 32 tokens seen",
        "  34,400 parameters in float masters and two moments: 63 tensors; model=nano, attention=gqa, tokenizer=bytes",
        "  best validation loss 5.",
    ):
        assert text in shown, shown
    first, last = json.loads((tmp_path / "all.json").read_text())
    assert (first["step"], last["step"], last["parameters"], last["problem"]) == (2, 4, 34400, None)
    assert last["bytes"] > 12 * 34400 and last["config"]["model"]["hidden_size"] == 32
    assert main([f"run={run_dir}/checkpoints/step-00000002"]) == 0
    assert "step-00000004" not in capsys.readouterr().out


def test_damage_is_found_and_told(run_dir, capsys):
    path = run_dir / "checkpoints/step-00000002" / FIRST
    flip(path, -1)
    try:
        assert main([f"run={run_dir}"]) == 1
        shown = capsys.readouterr().out
        assert "step-00000002  damaged" in shown and f"damaged: {path} is damaged: the checksum of" in shown
        assert "step-00000004  whole, latest" in shown
    finally:
        flip(path, -1)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "run has no value"),
        (["run="], "run has no value"),
        (["run=nowhere"], "run=nowhere is not a folder"),
        (["run=."], "run=. holds no checkpoints"),
        (["runs=a"], "runs=a is not a key of this command"),
    ],
)
def test_refusals(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and len(error.splitlines()) == 1
