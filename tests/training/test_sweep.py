"""Sweeps as a user starts them, plain and under torchrun."""

import json
import sys

import pytest
from omegaconf import OmegaConf

from parallel_attn.training.overrides import check_overrides
from parallel_attn.training.sweep import folder_name
from tests.command import python_train, torchrun
from tests.tracking.wandb_reading import offline_runs, read_run
from tests.training.composed import SMALL, records

FEW = (*SMALL, "train.steps=3", "train.log_every=1", "eval.every=0", "tracking.console=none")
OFF = "tracking.wandb.mode=disabled"


def jobs(folder):
    return {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/summary.json")}


def test_a_sweep_under_torchrun_gives_every_job_a_folder_and_a_wandb_run(tmp_path):
    result = torchrun(
        2, "-m", *FEW, "attention=mha,mqa", "parallel.tensor=1,2", "tracking.wandb.mode=offline", "run_dir=s w/a", cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "s w" / "a"
    found = jobs(folder)
    assert sorted(found) == [
        "0-attention=mha,tensor=1", "1-attention=mha,tensor=2", "2-attention=mqa,tensor=1", "3-attention=mqa,tensor=2",
    ]  # fmt: skip
    assert (folder / "multirun.yaml").is_file()
    runs = [read_run(*offline_runs(folder / name)) for name in sorted(found)]
    assert [run.config["parallel"]["tensor"] for run in runs] == [1, 2, 1, 2]
    assert len({run.id for run in runs}) == 4 and [run.name for run in runs] == sorted(found)
    for first, second in (("0-attention=mha,tensor=1", "1-attention=mha,tensor=2"),):
        losses = [[record["train/loss"] for record in records(folder / name)] for name in (first, second)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert "4 of 4 jobs finished" in result.stdout


def test_a_plain_sweep_and_engines_in_one_process_that_is_not_run_again_nor_mixed_with_another(tmp_path):
    command = ("-m", *FEW, OFF, "engine=torch,deepspeed", "run_dir=a")
    result = python_train(*command, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    found = jobs(tmp_path / "a")
    assert sorted(found) == ["0-engine=torch", "1-engine=deepspeed"]
    losses = [summary["train/loss"] for _, summary in sorted(found.items())]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert OmegaConf.load(tmp_path / "a" / "1-engine=deepspeed" / "config.yaml").engine.zero_stage == 1
    again = python_train(*command, cwd=tmp_path)
    assert again.returncode == 0 and again.stdout.count("finished before") == 2
    other = python_train("-m", *FEW, OFF, "train.seed=3,4", "run_dir=a", cwd=tmp_path)
    assert other.returncode != 0 and "holds the sweep of another command" in other.stderr


@pytest.mark.slow
def test_a_job_that_fails_on_all_ranks_is_named_and_the_others_run(tmp_path):
    command = ("-m", *FEW, OFF, "attention.num_kv_heads=1,4,2", "parallel.tensor=2")
    result = torchrun(2, *command, cwd=tmp_path)
    assert result.returncode != 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.endswith("-sweep") and sorted(jobs(folder)) == ["0-num_kv_heads=1", "2-num_kv_heads=2"]
    assert "error: sweep job 1-num_kv_heads=4 failed: attention.num_kv_heads=4 does not divide" in result.stderr
    assert "2 of 3 jobs finished" in result.stdout
    again = torchrun(2, *command, cwd=tmp_path)  # the same command goes on in the same folder
    assert again.returncode != 0 and again.stdout.count("finished before") == 2
    assert list((tmp_path / "runs").iterdir()) == [folder]


DYING = """
import os
from parallel_attn.data import TrainBatches
from parallel_attn.training.entry import main
step = TrainBatches.step
def dying(self, number):
    if self.seed == 2 and os.environ["RANK"] == "1" and not os.path.exists("healed"):
        raise OSError("the disk of rank 1 is gone")
    return step(self, number)
TrainBatches.step = dying
init = TrainBatches.__init__
def remember(self, *arguments, seed, **settings):
    self.seed = seed
    init(self, *arguments, seed=seed, **settings)
TrainBatches.__init__ = remember
main()
"""


@pytest.mark.slow
@pytest.mark.long
def test_one_rank_that_fails_alone_ends_the_sweep_and_the_same_command_goes_on(tmp_path):
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    command = ("-m", *FEW, OFF, "train.seed=1,2,3", "parallel.tensor=2")
    result = torchrun(2, *command, cwd=tmp_path, script=script)
    assert result.returncode == 1
    assert "error on rank 1: sweep job 1-seed=2" in result.stderr and "the disk of rank 1 is gone" in result.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert jobs(folder)["0-seed=1"]["status"] == "finished"
    (tmp_path / "healed").touch()
    again = torchrun(2, *command, cwd=tmp_path, script=script)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("finished before") == 1 and "3 of 3 jobs finished" in again.stdout
    assert list((tmp_path / "runs").iterdir()) == [folder]
    assert {name: summary["status"] for name, summary in jobs(folder).items()} == dict.fromkeys(
        ["0-seed=1", "1-seed=2", "2-seed=3"], "finished"
    )


@pytest.mark.parametrize(
    "overrides, wanted",
    [
        (["attention=mha,nope"], "attention=nope is not one of: cross, gated_gqa, gla, gqa, gta, mha, mla, mqa, qwen3_5"),
        (["train.sed=1,2"], "train.sed is not a key; did you mean train.seed?"),
        (["run_dir=a,b"], "run_dir cannot be swept"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_sweep_with_a_misspelt_value_stops_before_its_first_job(tmp_path, command_here, overrides, wanted):
    result = command_here("-m", *FEW, OFF, *overrides)
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1 and wanted in result.stderr
    assert not list(tmp_path.iterdir())


def test_names_of_jobs_are_safe_and_short():
    task = ["data.path='/a b/c.txt'", "optimizer.lr=1e-3", "train.steps=4"]
    assert folder_name(3, task, ["data.path", "optimizer.lr"]) == "3-path=_a_b_c.txt_,lr=1e-3"
    assert len(folder_name(12, ["data.path=" + "x" * 500], ["data.path"])) <= 83
    assert folder_name(0, task, []) == "0"


def test_every_swept_value_is_tried_once():
    check_overrides(["-m", "attention=mha,mqa", "train.seed=range(1,4)", "model=choice(nano,tiny)"])
    assert "parallel_attn.training.overrides" in sys.modules
