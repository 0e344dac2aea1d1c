"""What the README shows is run: its commands as written (with few steps, unless --all), its Python as it stands."""

import contextlib
import io
import os
import re
import shlex
import shutil
import sys
from unittest import mock

import pytest

from parallel_attn import AxisGroup
from parallel_attn.training.config import parse
from tests.command import ROOT, execute, torchrun
from tests.training.composed import composed
from tests.world import run

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.DOTALL)
SHORT = ("train.steps=3", "eval.samples=4", "tracking.wandb.mode=disabled")


def commands() -> list[str]:
    lines = [line.split("  #")[0].strip() for kind, block in BLOCKS if kind == "bash" for line in block.splitlines()]
    found = []
    for line in filter(None, lines):
        loop = re.fullmatch(r"for (\w+) in (.+?); do (.+); done", line)
        names = loop[2].split() if loop else [""]
        each = [loop[3].replace(f"${loop[1]}", name) if loop else line for name in names]
        found += [each[0], *(pytest.param(command, marks=pytest.mark.slow) for command in each[1:])]
    return found


def test_the_readme_has_commands():
    assert len(commands()) >= 10 and any("torchrun" in command for command in commands() if isinstance(command, str))


@pytest.mark.parametrize("command", commands())
def test_commands_of_the_readme(command, tmp_path):
    """In a world of as many ranks as the command starts, through the function that train.py calls."""
    shutil.copy(ROOT / "README.md", tmp_path)
    launcher, overrides = (shlex.split(part) for part in command.split(" train.py"))
    options = ["--standalone", "--nproc-per-node"]
    assert launcher == ["python"] or (launcher[:3] == ["torchrun", *options] and len(launcher) == 4), command
    size = int(launcher[3]) if len(launcher) > 1 else 1
    shown = run(size, main_case, [*overrides, *SHORT], str(tmp_path), timeout=100)
    jobs = 4 if "-m" in overrides else 1
    assert len(list(tmp_path.glob("runs/**/summary.json"))) == jobs
    assert [text.count("validation bits per byte") for text in shown] == [jobs] + [0] * (size - 1)


def main_case(overrides: list[str], folder: str) -> str:
    """What train.py's main prints on this rank."""
    from parallel_attn.training import entry

    os.chdir(folder)
    with (
        contextlib.redirect_stdout(io.StringIO()) as shown,
        mock.patch.object(sys, "argv", ["train.py", *overrides]),
        mock.patch("parallel_attn.mesh.shutdown"),  # the process group is the world's
    ):
        entry.main()
    return shown.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("command", commands())
def test_commands_of_the_readme_in_processes_of_their_own(command, tmp_path):
    shutil.copy(ROOT / "README.md", tmp_path)
    arguments = shlex.split(command)
    if arguments[0] == "torchrun":
        arguments[:1] = [sys.executable, "-m", "torch.distributed.run"]
    elif arguments[0] == "python":
        arguments[0] = sys.executable
    arguments[arguments.index("train.py")] = str(ROOT / "train.py")
    result = execute([*arguments, *SHORT], cwd=tmp_path, timeout=200)
    assert result.returncode == 0, result.stderr
    assert len(list(tmp_path.glob("runs/**/summary.json"))) == (4 if "-m" in arguments[2:] else 1)
    assert "validation bits per byte" in result.stdout


def test_the_layer_example_runs_on_two_ranks_and_is_short(tmp_path):
    example = next(block for kind, block in BLOCKS if kind == "python" and "layer.py" in block)
    code = [line for line in example.splitlines() if line.strip() and not line.startswith(("import", "from", "#"))]
    assert len(code) < 30
    script = tmp_path / "layer.py"
    script.write_text(example)
    result = torchrun(2, cwd=tmp_path, script=script)
    assert result.returncode == 0, result.stderr
    losses = {rank: re.findall(rf"rank {rank} step \d loss (\d+\.\d{{6}})", result.stdout) for rank in (0, 1)}
    assert len(losses[0]) == 5 and losses[0] == losses[1] and float(losses[0][-1]) < float(losses[0][0])


SHARED = {"mha": "kv", "mqa": "kv", "gqa": "kv", "mla": "c", "gla": "c", "gta": "t"}


@pytest.mark.parametrize("name", SHARED)
def test_the_drawing_of_heads_on_ranks_is_that_of_the_plans(name):
    config = parse(composed(f"attention={name}")).attention
    plan = config.cls(128, config.config, tensor_parallel=AxisGroup(None, 0, 4), name="a", device="meta").plan
    cells = []
    for rank in range(4):
        prime = "" if plan.owns_kv(rank) else "'"
        numbered = plan.num_kv_heads > 1 or SHARED[name] == "kv"
        held = [f"{SHARED[name]}{head if numbered else ''}{prime}" for head in range(*plan.kv_heads[rank])]
        rope_key = ["r" + "'" * (rank > 0)] if SHARED[name] != "kv" else []
        cells.append(" ".join([f"q{head}" for head in range(*plan.query_heads[rank])]) + " | " + " ".join(held + rope_key))
    line = next(line for line in README.splitlines() if line.split()[:2] == [name, "q0"])
    assert re.split(r"\s{2,}", line.strip()) == [name, *cells]


def test_settings_of_attention_named_in_the_readme_are_taken():
    row = next(line for line in README.splitlines() if line.startswith("| its settings |"))
    settings = re.findall(r"`(attention\.[^`]*)`", row)
    assert len(settings) >= 10
    for setting in settings:
        config = parse(composed("attention=gqa", setting)).attention
        config.cls(128, config.config, name="a", device="meta")


def test_the_plan_example_prints_what_the_readme_shows(capsys):
    example = next(block for kind, block in BLOCKS if kind == "python" and "HeadPlan" in block)
    exec(example, {})
    shown = capsys.readouterr().out.strip()
    assert "\n".join(f"    {line}" for line in shown.splitlines()) in README


def test_no_key_of_the_readme_is_unknown():
    """Every `group.key=` in the text exists in the configuration."""
    from parallel_attn.training.overrides import _keys
    from tests.training.composed import composed

    known = set(_keys(composed())) | set(_keys(composed("data=text", "data.path=x")))
    for choices in (["attention=mla"], ["model=encoder_decoder"], ["data=hub"], ["tokenizer=bpe"], ["tokenizer=file"], ["engine=deepspeed"], ["schedule=wsd"]):
        known |= set(_keys(composed(*choices)))
    written = set(re.findall(r"\b((?:model|attention|data|tokenizer|engine|train|optimizer|schedule|eval|tracking|parallel)\.[\w.]+)=", README))
    assert written and written <= known, written - known


STORY = re.compile(r"^    ((?:parallel-attn (?:generate|export|convert)|python train.py checkpoint.resume).*?)(?:  +#.*)?$", re.M)


@pytest.mark.slow
def test_what_comes_after_training_as_written(tmp_path):
    """Generate, export, import, conversion: the README's commands in their order, on a run of the default model."""
    shutil.copy(ROOT / "README.md", tmp_path / "corpus.txt")
    lines = STORY.findall(README)
    assert len(lines) == 7, lines
    environment = {"PYTHONPATH": str(ROOT)}
    cli, train = [sys.executable, "-m", "parallel_attn.cli"], [sys.executable, str(ROOT / "train.py")]
    made = execute([*train, "attention=mha", "run_dir=runs/a", *SHORT], cwd=tmp_path, timeout=200, env=environment)
    assert made.returncode == 0, made.stderr
    for line in lines:
        words = shlex.split(line.replace("hf_model=DIR", "hf_model=hf_model"))
        short = [*SHORT, "train.global_batch_size=2"] if words[0] == "python" else []
        command = [*train, *words[2:], *short] if words[0] == "python" else [*cli, *words[1:]]
        result = execute(command, cwd=tmp_path, timeout=200, env=environment)
        assert result.returncode == 0, (line, result.stderr)
        assert "error" not in result.stderr.lower(), result.stderr
