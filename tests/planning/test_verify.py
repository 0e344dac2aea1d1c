"""`parallel-attn verify`: settings that stop it, the processes it starts, what it prints and writes."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from parallel_attn import SettingsError
from parallel_attn.planning import verify
from parallel_attn.planning.processes import RankFailed, run_world
from tests.command import ROOT

TINY = ("model.hidden_size=32", "attention.head_dim=8", "model.num_heads=6", "model.mlp.hidden_size=50")


def refusal(capsys, *arguments: str) -> str:
    assert verify.main(arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and len(said.err.splitlines()) == 1
    return said.err


@pytest.mark.parametrize(
    "arguments, wanted",
    [
        (["parallel.tensor=9"], "parallel.tensor=9 exceeds attention.num_heads=8"),
        (["attention.num_heads=6"], "attention.num_heads=6 does not divide model.hidden_size=128: set attention.head_dim"),
        (["parallel.tensor=1"], "parallel.tensor=1: one rank leaves nothing to compare, use 2 or more"),
        (["parallel.tensor=2,4"], "parallel.tensor: several values make a sweep, give one"),
        (["parallel.data=2"], "parallel.data=2"),
        (["device=cuda"], "device=cuda"),
        (["attention=mqaa"], "attention=mqaa is not one of:"),
        (["attention.heads=6"], "attention.heads is not a key; did you mean"),
        (["attention.causal=false"], "use true (--part layer verifies the layer alone)"),
        (["model.vocab_size=3", "parallel.tensor=4"], "model.vocab_size=3 is less than parallel.tensor=4"),
        (["mqa"], "mqa: not KEY=VALUE"),
        (["-m", "attention=mqa"], "unrecognized arguments: -m"),
        (["--dtype", "float16"], "--dtype float16 is not one of: float64, float32, bfloat16"),
        (["--dtype", "float64", "train.precision=bf16"], "train.precision=bf16 and --dtype float64 disagree"),
        (["--part", "head"], "--part head is not one of: layer, cross, model, all"),
        (["--mutate", "output_not_sumed"], "did you mean output_not_summed?"),
        (["--json", "/no/such/folder/a.json"], "--json /no/such/folder/a.json: there is no folder /no/such/folder"),
        (["--json", "/"], "--json / is a folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_work_is_one_line(capsys, arguments, wanted):
    assert wanted in refusal(capsys, *arguments)


def test_an_unwritable_file_is_refused_before_the_work(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # also where the tests run as root
    assert "permission denied" in refusal(capsys, "--json", str(tmp_path / "a.json"))
    assert not list(tmp_path.iterdir())


def test_what_is_cut_and_chosen_is_told():
    config, notes = verify.configuration(["model=small", "model.vocab_size=32000", "train.precision=bf16"], None)
    assert (config.parallel.tensor, config.model.num_layers, config.model.vocab_size) == (2, 2, 257)
    assert config.train.precision == "bf16" and config.model.hidden_size == 768
    assert [note.split()[0] for note in notes] == ["parallel.tensor", "model.num_layers=8", "model.vocab_size=32000"]
    config, notes = verify.configuration(["++parallel.tensor=3", "model.num_layers=1", "model.vocab_size=99"], "float32")
    assert (config.parallel.tensor, config.model.num_layers, config.model.vocab_size, notes) == (3, 1, 99, [])


def test_mutants_are_listed(capsys):
    assert verify.main(["--mutate", "list"]) == 0
    assert "kv_copies_not_summed\n    A KV head held by several ranks" in capsys.readouterr().out


def test_the_command_line_of_a_certificate(tmp_path):
    """Green, with everything in the JSON file; the model's documents and the layer's masks take part."""
    file = tmp_path / "certificate.json"
    overrides = [*TINY, "parallel.tensor=4", "attention.num_kv_heads=2", "data.documents=true", "train.z_loss=0.01"]
    done = command(*overrides, "--dtype", "float32", "--json", str(file), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1] == "GroupedQueryAttention of width 32 on 4 ranks against one process, in float32"
    assert "  3     5            1         2" in lines and "key_padding_mask and document_ids" in done.stdout
    assert lines[-1].startswith("GREEN: equal to one process within the bounds of float32")
    record = json.loads(file.read_text())
    assert record["holds"] and record["degree"] == 4 and record["config"]["train"]["z_loss"] == 0.01
    for part, parameters in (("layer", 4), ("model", 2 * 9 + 3)):
        found = record["parts"][part]
        assert found["failures"] == {} and len(found["parameter_gradients"]) == parameters
        assert all(error <= found["bounds"][kind] for kind, error in found["errors"].items())
    assert os.listdir(tmp_path) == ["certificate.json"]


def test_the_command_line_of_a_mutant(tmp_path):
    done = command(*TINY, "attention=mqa", "--part", "layer", "--mutate", "kv_copies_not_summed", cwd=tmp_path)
    assert done.returncode == 1 and "parallel.tensor is not given: 2 ranks" in done.stdout
    assert "copies that differ in the layer: k.weight, v.weight" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("RED, as it must be: ")


def command(*arguments: str, cwd) -> subprocess.CompletedProcess:
    """`parallel-attn verify` as a process of its own, with this checkout's code."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    code = [sys.executable, "-m", "parallel_attn.cli", "verify", *arguments]
    return subprocess.run(code, cwd=cwd, env=environment, capture_output=True, text=True, timeout=200, check=False)


def dying_rank(how: str) -> str:
    if dist.get_rank() == 1:
        if how == "raises":
            raise ZeroDivisionError("of rank one")
        if how == "refuses":
            raise SettingsError("attention.x=1: of rank one")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
    return "not reached"


@pytest.mark.parametrize(
    "how, error, message",
    [
        ("raises", RankFailed, "rank 1 of 2 ZeroDivisionError: of rank one"),
        ("refuses", SettingsError, "attention.x=1: of rank one"),
        ("dies", RankFailed, "rank 1 of 2 died: killed by SIGKILL"),
    ],
)
def test_the_first_cause_is_reported_and_nobody_is_left(how, error, message):
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(error, match=message):
        run_world(2, dying_rank, how)
    # New children of this process are the fork server and its tracker, which stay for the next world; ranks are below.
    assert not [child for child in set(psutil.Process().children(recursive=True)) - before if child.ppid() != os.getpid()]


def rank_and_size() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def test_the_first_ranks_result_comes_back():
    assert run_world(2, rank_and_size) == (0, 2)


ENDLESS = """
import sys, time
from parallel_attn.planning import processes, verify

processes_of = processes.run_world
verify.run_world = lambda size, *_: processes_of(size, time.sleep, 1000)
sys.exit(verify.main(["attention=mha", "parallel.tensor=2"]))
"""


@pytest.mark.parametrize("name, code", [("SIGINT", 130), ("SIGKILL", -signal.SIGKILL)])
def test_interrupted_or_killed_it_leaves_no_process(tmp_path, name, code):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", ENDLESS], cwd=tmp_path, env=environment, start_new_session=True)
    family = [process.pid]
    try:
        family = wait_for_family(process.pid, 4)  # it, the fork server, the resource tracker, two ranks: at least
        os.killpg(process.pid, signal.SIGINT) if name == "SIGINT" else process.kill()
        assert process.wait(30) == code
        end = time.monotonic() + 20
        while (left := [pid for pid in family if psutil.pid_exists(pid)]) and time.monotonic() < end:
            time.sleep(0.1)
        assert not left
    finally:
        for pid in family:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)


def wait_for_family(pid: int, least: int) -> list[int]:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        family = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
        if len(family) > least:
            return family
        time.sleep(0.2)
    raise AssertionError(f"only {family} after a minute")


def test_cross_attention_has_a_certificate_of_its_own(capsys):
    """Alone, and beside the self attention in an encoder-decoder; a memory whose gradient is not summed turns it red."""
    assert verify.main(["attention=cross", "--part", "layer", "parallel.tensor=2", *TINY]) == 0
    assert "memory (2, 24, " in capsys.readouterr().out
    command = ["model=encoder_decoder", "--part", "cross", "parallel.tensor=2", *TINY[:1], "model.num_heads=4"]
    assert verify.main([*command, "--mutate", "memory_gradient_not_summed"]) == 1
    assert "input gradient of the cross" in capsys.readouterr().out
    assert "this model has no cross attention" in refusal(capsys, "--part", "cross")
