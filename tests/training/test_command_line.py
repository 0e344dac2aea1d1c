"""Whole jobs as a user starts them: files, W&B, run folders, Ctrl-C, restarts, installed package."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.command import ROOT, TRAIN, execute, kill_tree, python_train, torchrun
from tests.tracking.wandb_reading import offline_runs, read_run
from tests.training.composed import SMALL, records

FEW = (*SMALL, "train.steps=4", "train.log_every=1", "eval.samples=4", "eval.every=2")


def run_dirs(folder):
    return sorted(path.parent for path in folder.glob("runs/*/config.yaml"))


def test_a_job_on_four_ranks_is_one_wandb_run_with_nested_config_and_right_steps(tmp_path):
    result = torchrun(4, *FEW, "parallel.tensor=2", "tracking.wandb.mode=offline", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (run_dir,) = run_dirs(tmp_path)
    assert re.fullmatch(r"\d{8}-\d{6}-nano-gqa", run_dir.name)
    (folder,) = offline_runs(run_dir)
    run = read_run(folder)
    assert run.config["attention"]["num_heads"] == 6 and run.config["parallel"]["tensor"] == 2
    assert run.name == run_dir.name and run.exit_code == 0
    train = [row for row in run.history if "train/loss" in row]
    assert [row["step"] for row in train] == [1, 2, 3, 4]
    logged = {record["step"]: record["train/loss"] for record in records(run_dir) if "train/loss" in record}
    assert {row["step"]: row["train/loss"] for row in train} == logged
    assert [row["step"] for row in run.history if "val/loss" in row] == [2, 4]


def test_two_jobs_in_the_same_second_get_two_folders(tmp_path):
    command = [sys.executable, str(TRAIN), *FEW, "tracking.wandb.mode=disabled"]
    jobs = [subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [job.wait(120) for job in jobs] == [0, 0]
    found = run_dirs(tmp_path)
    assert len(found) == 2
    assert all(json.loads((run_dir / "summary.json").read_text())["step"] == 4 for run_dir in found)


def test_a_fixed_run_dir_is_used_once_and_a_second_run_is_refused(tmp_path, command_here, monkeypatch):
    settings = (*FEW, "tracking.wandb.mode=disabled", "run_dir=nested/a", "checkpoint.every=0")
    assert python_train(*settings, cwd=tmp_path).returncode == 0
    before = (tmp_path / "nested/a/metrics.jsonl").read_bytes()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another launch")
    result = command_here(*settings)
    assert result.returncode == 2 and "error: run_dir=nested/a already holds a run" in result.stderr
    assert (tmp_path / "nested/a/metrics.jsonl").read_bytes() == before


def test_a_restart_by_torchrun_finds_its_folder_and_keeps_the_broken_log(tmp_path):
    script = tmp_path / "breaks_once.py"
    script.write_text(
        "import os\n"
        "from parallel_attn.data import TrainBatches\n"
        "from parallel_attn.training.entry import main\n"
        "step = TrainBatches.step\n"
        "def dying(self, number):\n"
        "    if number == 2 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.environ['RANK'] == '1':\n"
        "        raise OSError('once')\n"
        "    return step(self, number)\n"
        "TrainBatches.step = dying\n"
        "main()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    result = execute(
        [*command, str(script), *FEW, "parallel.tensor=2", "tracking.wandb.mode=disabled"], cwd=tmp_path, timeout=150
    )
    assert result.returncode == 0, result.stderr
    (run_dir,) = run_dirs(tmp_path)
    assert [record["step"] for record in records(run_dir) if "train/loss" in record] == [1, 2, 3, 4]
    assert "step" in (run_dir / "metrics-attempt-1.jsonl").read_text()


@pytest.mark.slow
def test_a_run_id_that_never_changes_takes_over_no_finished_run(tmp_path):
    """`--rdzv-id 100`, copied from many tutorials."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-id", "100"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(TRAIN), *FEW, "tracking.wandb.mode=disabled"]
    for extra in ("train.seed=1", "train.seed=2", "train.seed=2"):
        result = execute([*command, "parallel.tensor=2", extra], cwd=tmp_path, timeout=150)
        assert result.returncode == 0, result.stderr
    assert len(run_dirs(tmp_path)) == 3
    fixed = [*command, "parallel.tensor=2", "run_dir=a"]
    assert execute(fixed, cwd=tmp_path, timeout=150).returncode == 0
    again = execute(fixed, cwd=tmp_path, timeout=150)
    assert again.returncode == 0 and "nothing to do: run_dir=a has finished its 4 steps" in again.stdout


@pytest.mark.parametrize(
    "size, number",
    [
        (1, signal.SIGTERM),
        (2, signal.SIGINT),  # Ctrl-C
        pytest.param(1, signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(2, signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_all_ranks_in_seconds_with_the_log_whole(tmp_path, size, number):
    launcher = [] if size == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    settings = (*SMALL, "train.steps=3000", "train.log_every=1", "eval.every=0", f"parallel.tensor={size}")
    job = subprocess.Popen(
        [sys.executable, *launcher, str(TRAIN), *settings, "tracking.wandb.mode=offline"],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        until = time.monotonic() + 90
        while time.monotonic() < until and not (run_dirs(tmp_path) and len(log(tmp_path)) > 5):
            time.sleep(0.1)
        assert len(log(tmp_path)) > 5
        os.killpg(job.pid, number)  # what a terminal does
        pressed = time.monotonic()
        errors = job.communicate(timeout=60)[1]
        assert time.monotonic() - pressed < 30
        assert job.returncode == (128 + number if size == 1 else 1)  # torchrun keeps its ranks' codes for itself
        assert errors.count(f"interrupted: {number.name}\n") == 1
    finally:
        kill_tree(job.pid)
    (run_dir,) = run_dirs(tmp_path)
    steps = [record["step"] for record in records(run_dir)]  # every line is whole
    assert steps == list(range(1, len(steps) + 1))
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("interrupted", f"Interrupted: {number.name}")
    assert summary["step"] == steps[-1]


def log(folder):
    path = run_dirs(folder)[0] / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def test_settings_by_environment_relative_paths_and_no_api_key(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "données 1.txt").write_text("a quick brown fox jumps over the lazy dog\n" * 400)
    result = python_train(
        *FEW, "data=text", "data.path=./text", "optimizer.lr=${oc.env:LR}", "hydra.job.chdir=true", "hydra.run.dir=elsewhere",
        cwd=tmp_path, env={"LR": "1e-4", "HOME": str(tmp_path)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    (run_dir,) = run_dirs(tmp_path)
    assert max(record["train/lr"] for record in records(run_dir) if "train/lr" in record) == 1e-4
    assert len(offline_runs(run_dir)) == 1 and "no API key found" in result.stdout  # W&B asked nothing


def test_help_teaches_groups_and_keys(tmp_path):
    result = python_train("--help", cwd=tmp_path)
    assert result.returncode == 0
    attention = ", ".join(sorted(path.stem for path in (ROOT / "configs" / "attention").glob("*.yaml")))
    for text in (f"attention: {attention}", "model: ", "nano", "torchrun", "num_kv_heads", "precision: fp32"):
        assert text in result.stdout, text
    assert list(tmp_path.iterdir()) == []


def test_the_installed_package_brings_its_configs(tmp_path):
    """A wheel, unpacked far from the checkout: `parallel-attn train` and `python -m parallel_attn.cli train`."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    made = execute([*pip, "install", "--no-deps", "--target", str(tmp_path / "site"), str(ROOT)], cwd=tmp_path, timeout=200)
    assert made.returncode == 0, made.stderr
    environment = {"PYTHONPATH": str(tmp_path / "site")}
    where = [sys.executable, "-c", "import importlib.util; print(importlib.util.find_spec('parallel_attn').origin)"]
    assert str(tmp_path) in execute(where, cwd=tmp_path, timeout=60, env=environment).stdout
    command = [sys.executable, "-m", "parallel_attn.cli"]
    result = execute([*command, "train", *FEW, "tracking.wandb.mode=disabled"], cwd=tmp_path, timeout=120, env=environment)
    assert result.returncode == 0 and len(run_dirs(tmp_path)) == 1, result.stderr
    result = execute([*command, "fly"], cwd=tmp_path, timeout=60, env=environment)
    assert result.returncode == 2 and result.stderr.startswith("error: parallel-attn fly: unknown subcommand, use one of: train, ")
