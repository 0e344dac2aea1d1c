"""Wrong settings stop on every rank, before the first collective, with one line and a code that is not zero.

Most cases run here, in one process that believes to be a rank of a larger world whose other ranks do not exist: whatever
waited for them, a rendezvous or a collective, would hang until the test's clock.
"""

import json

import pytest
import torch.distributed as dist

from parallel_attn import SettingsError
from parallel_attn.training import pretrain
from tests.command import python_train, torchrun
from tests.training.composed import SMALL, composed

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=[0, 1], ids=["rank0", "rank1"])
def lonely_rank(request, monkeypatch, tmp_path):
    """Environment of one rank of two."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": request.param, "LOCAL_RANK": request.param, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "9")
    return tmp_path


def refusal(*overrides: str) -> str:
    with pytest.raises(SettingsError) as caught:
        pretrain(composed(*SMALL, *overrides))
    assert not dist.is_initialized()
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@pytest.mark.parametrize(
    "overrides, wanted",
    [
        (["parallel.tensor=3"], "parallel.tensor=3 does not divide the 2 started processes: use one of 1, 2"),
        (["parallel.tensor=0"], "parallel.tensor=0"),
        (["parallel.tensor=2", "parallel.data=2"], "use parallel.data=1"),
        (["parallel.tensor=2", "model.num_heads=1"], "parallel.tensor=2 exceeds attention.num_heads=1"),
        (["attention.num_kv_heads=4"], "attention.num_kv_heads=4 does not divide attention.num_heads=6: use one of 1, 2, 3, 6"),
        (["attention.head_dim=15"], "rotary width of 15"),
        (["attention.head_dim=null"], "attention.num_heads=6 does not divide model.hidden_size=32: set attention.head_dim"),
        (["attention.causal=false"], "attention.causal=false"),
        (["model.vocab_size=100"], "model.vocab_size=100 is less than the 257 tokens"),
        (["train.global_batch_size=7"], "train.global_batch_size=7 is not a multiple of the 2 replicas (parallel.data): use 6 or 8"),
        (["train.micro_batch_size=5"], "train.global_batch_size=12 is not train.micro_batch_size=5 x 2 replicas"),
        (["train.micro_batch_size=0"], "train.micro_batch_size=0"),
        (["train.steps=0"], "train.steps=0 must be at least 1"),
        (["train.steps=1.5"], "train.steps: Value '1.5'"),
        (["train.seq_len=abc"], "train.seq_len: Value 'abc'"),
        (["train.precision=fp8"], "train.precision=fp8 is not one of: fp32, bf16, fp64"),
        (["train.label_smoothing=1.0"], "train.label_smoothing=1.0"),
        (["train.seed=-1"], "train.seed=-1"),
        (["optimizer.lr=-1"], "optimizer.lr=-1.0"),
        (["optimizer.lr=nan"], "optimizer.lr=nan"),
        (["optimizer.betas=[0.9]"], "optimizer.betas=[0.9]"),
        (["optimizer.grad_clip=0"], "optimizer.grad_clip=0.0"),
        (["schedule.warmup_steps=600"], "schedule.warmup_steps=600 must lie in 0 .. 599"),
        (["schedule.final_fraction=2"], "schedule.final_fraction=2.0"),
        (["run_dir=''"], "run_dir='' must be a folder, or null"),
        (["train=null"], "train=None is a group of keys"),
        (["model.norm_eps=nan"], "model.norm_eps=nan"),
        (["eval.samples=0"], "eval.samples=0"),
        (["tracking.console=loud"], "tracking.console='loud'"),
        (["tracking.wandb.mode=on"], "tracking.wandb.mode='on'"),
        (["device=tpu"], "device=tpu is not one of: auto, cpu, cuda"),
        (["+train.stepz=3"], "train.stepz"),
        (["+nonsense=3"], "nonsense"),
        (["data=text"], "data.path has no value"),
        (["data=text", "data.path=nowhere.txt"], "nowhere.txt"),
        (["attention._target_=os.path.join"], "attention._target_=os.path.join"),
        (["attention._target_=no.such.Thing"], "attention._target_=no.such.Thing"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refused_by_name(lonely_rank, overrides, wanted):
    assert wanted in refusal(*overrides)


def test_data_that_cannot_be_used(lonely_rank, monkeypatch):
    monkeypatch.setattr("parallel_attn.data.prepare.TAKEOVER_SECONDS", 0.2)  # rank 1 waits for a builder that is not there
    (lonely_rank / "empty.txt").write_bytes(b"")
    (lonely_rank / "short.txt").write_bytes(b"x" * 40)
    (lonely_rank / "folder").mkdir()
    assert "empty.txt" in refusal("data=text", "data.path=empty.txt")
    assert "folder" in refusal("data=text", "data.path=folder")
    message = refusal("data=text", "data.path=short.txt")
    assert "short.txt" in message and "train.seq_len=32" in message and "tokens" in message


def test_a_run_dir_that_holds_a_run(lonely_rank):
    (lonely_rank / "a").mkdir()
    (lonely_rank / "a" / "config.yaml").write_text("{}")
    assert "run_dir=a already holds a run" in refusal("run_dir=a")
    (lonely_rank / "file").write_text("")
    assert "run_dir=file is not a folder" in refusal("run_dir=file")


def error_lines(result) -> list[str]:
    return [line for line in result.stderr.splitlines() if line.startswith("error")]


@pytest.mark.parametrize(
    "overrides, wanted",
    [
        (["train.stepz=3"], "error: train.stepz=3: train.stepz is not a key; did you mean train.steps?"),
        (["engine.zero_stage=2"], "error: engine.zero_stage=2: engine.zero_stage is a key of engine=deepspeed, not of"),
        (["schedule=constant", "schedule.decay_steps=3"], "schedule.decay_steps is a key of schedule=wsd, not of"),
        (["engine=deepspeed", "engine.sharding=full"], "engine.sharding is a key of engine=torch"),
        (["model=7"], "error: Config group override must be a string"),
        (["lr=3"], "error: lr=3: lr is not a key; did you mean optimizer.lr?"),
        (["attention=nope"], "error: attention=nope is not one of: cross, gated_gqa, gla, gqa, gta, mha, mla,"),
        (["data.path=a=b.txt"], "quote a value with special characters"),
        (["--local-rank=0"], "error: --local-rank=0: start with torchrun"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_hydra_refuses_is_one_line_with_a_hint(tmp_path, command_here, overrides, wanted):
    result = command_here(*overrides)
    assert result.returncode == 2 and result.stdout == ""
    assert wanted in result.stderr and len(result.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_in_a_process_of_its_own(tmp_path):
    result = python_train("train.stepz=3", cwd=tmp_path)
    wanted = "error: train.stepz=3: train.stepz is not a key; did you mean train.steps?\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", wanted)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["attention=nope"], marks=pytest.mark.slow, id="choice"),  # refused one step earlier, in the same way
        pytest.param(["attention.num_kv_heads=3"], id="heads"),
    ],
)
def test_under_torchrun_one_line_from_one_rank_and_codes_that_are_not_zero(tmp_path, overrides):
    result = torchrun(2, "parallel.tensor=2", *overrides, cwd=tmp_path)
    assert result.returncode != 0
    lines = error_lines(result)
    assert len(lines) == 1 and "attention" in lines[0]
    assert "exitcode  : 2" in result.stderr, "torchrun's own summary names the code"
    assert "exitcode  : 0" not in result.stderr


def test_one_rank_that_dies_ends_the_others_with_the_first_cause(tmp_path):
    script = tmp_path / "dying.py"
    script.write_text(
        "import os\n"
        "from parallel_attn.data import TrainBatches\n"
        "from parallel_attn.training.entry import main\n"
        "step = TrainBatches.step\n"
        "def dying(self, number):\n"
        "    if number == 2 and os.environ['RANK'] == '1':\n"
        "        raise OSError('the disk of rank 1 is gone')\n"
        "    return step(self, number)\n"
        "TrainBatches.step = dying\n"
        "main()\n"
    )
    result = torchrun(2, "parallel.tensor=2", *SMALL, "tracking.wandb.mode=disabled", cwd=tmp_path, script=script)
    assert result.returncode == 1
    assert "error on rank 1:" in result.stderr and "the disk of rank 1 is gone" in result.stderr
    summary = json.loads(next(tmp_path.glob("runs/*/summary.json")).read_text())
    assert summary["status"] == "failed" and "another rank left or died" in summary["error"]
    assert "error on rank 0" not in result.stderr, "rank 0 only lost its peer: not the cause"
