"""W&B: offline runs read back, one run per job, never a prompt, never in the way. Each case is a process of its own,
because W&B keeps a service, settings and exit hooks per process."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from parallel_attn.tracking import read_jsonl
from tests.tracking.wandb_reading import offline_runs, read_run

_HEAD = """
import os, signal, sys, threading, time
from pathlib import Path
from parallel_attn.tracking import Tracker, TrackingConfig, WandbConfig
root = Path(sys.argv[1])
def track(name="run", mode="offline", config=None, main=True, start_step=0, **keys):
    settings = TrackingConfig(wandb=WandbConfig(mode=mode, **keys), console="lines")
    return Tracker(root / name, config=config or {}, settings=settings, total_steps=40, main=main, run_name=name,
                   start_step=start_step)
"""
_TRAIN = "for step in range(10, 41, 10): run.log(step, {'train/loss': 5 - step / 10})\n"


def start(tmp_path, code, *, key=None, **options):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    (tmp_path / "home").mkdir(exist_ok=True)
    environment.update(HOME=str(tmp_path / "home"), NO_PROXY="*", **({"WANDB_API_KEY": key} if key else {}))
    environment.update(options.pop("env", {}))
    command = [sys.executable, "-c", _HEAD + textwrap.dedent(code), str(tmp_path)]
    return subprocess.Popen(
        command, env=environment, text=True, **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options}
    )


def run(tmp_path, code, *, timeout=120, code_wanted=0, **options):
    process = start(tmp_path, code, **options)
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == code_wanted, output
    return output


# Nothing listens there: refused at once, W&B retries until its time is up, as without a network.
NO_NETWORK = {"WANDB_BASE_URL": "http://127.0.0.1:9"}
FAKE_KEY = "0123456789" * 4


def test_offline_run_read_back(tmp_path):
    output = run(
        tmp_path,
        f"""
        config = {{"attention": {{"num_heads": 8, "rope": {{"theta": 1e4}}}}, "seed": None, "betas": [0.9, 0.95]}}
        for other in [track(main=False) for rank in (1, 2, 3)]:  # the other ranks of the job
            other.log(1, {{"train/loss": 1.0}})
            other.finish({{}})
        with track(config=config, project="p", group="g", tags=["a", "b"]) as run:
            {_TRAIN}            run.log(40, {{"val/loss": 1.5}})
        """,
    )
    (folder,) = offline_runs(tmp_path / "run")
    found = read_run(folder)
    assert [row["step"] for row in found.history] == [10, 20, 30, 40]
    assert [row["train/loss"] for row in found.history] == [4, 3, 2, 1] and found.history[-1]["val/loss"] == 1.5
    assert found.config == {"attention": {"num_heads": 8, "rope": {"theta": 1e4}}, "seed": None, "betas": [0.9, 0.95]}
    assert (found.project, found.group, found.tags, found.name, found.exit_code) == ("p", "g", ["a", "b"], "run", 0)
    assert found.metrics["*"] == "step"
    assert f"wandb sync {folder}" in output


@pytest.mark.slow  # test_sweep.py sees the same through the command line
def test_jobs_of_a_sweep_are_runs_of_their_own(tmp_path):
    run(
        tmp_path,
        f"""
        for seed in (1, 2, 3):
            with track(f"job{{seed}}", config={{"seed": seed}}) as run:
                {_TRAIN}
        """,
    )
    runs = [read_run(folder) for seed in (1, 2, 3) for folder in offline_runs(tmp_path / f"job{seed}")]
    assert [one.config["seed"] for one in runs] == [1, 2, 3] and len({one.id for one in runs}) == 3
    assert all([row["step"] for row in one.history] == [10, 20, 30, 40] for one in runs)


def test_a_run_that_the_caller_has_already_is_left_alone(tmp_path):
    run(
        tmp_path,
        f"""
        import wandb
        (root / "own").mkdir()
        own = wandb.init(mode="offline", dir=root / "own", settings=wandb.Settings(console="off"))
        with track() as run:
            {_TRAIN}
        own.log({{"mine": 1}})
        own.finish()
        """,
    )
    (theirs,), (ours,) = offline_runs(tmp_path / "own"), offline_runs(tmp_path / "run")
    assert [row["mine"] for row in read_run(theirs).history] == [1]
    assert [row["step"] for row in read_run(ours).history] == [10, 20, 30, 40]


def test_a_resumed_run_keeps_its_id_and_its_steps_go_on(tmp_path):
    run(tmp_path, "with track(config={'train': {'steps': 20}}) as run: run.log(20, {'train/loss': 2.0})")
    first = {folder: read_run(folder) for folder in offline_runs(tmp_path / "run")}
    time.sleep(1.1)  # W&B names folders by the second
    run(
        tmp_path,
        "with track(config={'train': {'steps': 40}}, start_step=20) as run: run.log(40, {'train/loss': 1.0})",
    )
    (before,) = first.values()
    (after,) = [read_run(folder) for folder in offline_runs(tmp_path / "run") if folder not in first]
    assert after.id == before.id and after.config == {"train": {"steps": 40}}
    assert [row["step"] for row in before.history + after.history] == [20, 40]


@pytest.mark.parametrize(
    "mode, terminal",
    [
        pytest.param("auto", False, id="auto-no-terminal"),
        pytest.param("online", True, id="online-pseudo-terminal"),
        pytest.param("auto", True, id="auto-pseudo-terminal", marks=pytest.mark.slow),
        pytest.param("online", False, id="online-no-terminal", marks=pytest.mark.slow),
    ],
)
def test_without_a_key_offline_with_one_notice_and_no_prompt(tmp_path, mode, terminal):
    code = f"with track(mode='{mode}') as run:\n    {_TRAIN}"
    if terminal:
        import pty

        ours, theirs = pty.openpty()
        process = start(tmp_path, code, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        pieces, deadline = [], time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                pieces.append(os.read(ours, 65536))
            except OSError:  # Linux: the process has closed its side
                break
        output = b"".join(pieces).decode()
        assert process.wait(timeout=30) == 0
    else:
        output = run(tmp_path, code, stdin=subprocess.DEVNULL)
    assert output.count("no API key found") == 1
    assert "cannot be reached" not in output  # it was not even tried
    assert "Enter your choice" not in output and "paste an API key" not in output
    (folder,) = offline_runs(tmp_path / "run")
    assert len(read_run(folder).history) == 4


def test_a_key_in_netrc_is_found(tmp_path, monkeypatch):
    from parallel_attn.tracking.wandb_key import find_api_key

    netrc = tmp_path / "netrc"
    netrc.write_text(f"machine w.example login user password {FAKE_KEY}\n")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(netrc))
    assert find_api_key("https://w.example") == FAKE_KEY
    assert find_api_key("https://other.example") is None
    assert find_api_key("https://other.example", "stored") == "stored"
    netrc.write_text("machine w.example login")
    assert find_api_key("https://w.example") is None
    monkeypatch.setenv("WANDB_API_KEY", "from-env")
    assert find_api_key("https://w.example") == "from-env"


def test_wandb_mode_of_the_machine_counts_under_auto(tmp_path):
    output = run(tmp_path, f"with track(mode='auto') as run:\n    {_TRAIN}", env={"WANDB_MODE": "disabled"})
    assert "W&B is off (WANDB_MODE)" in output and offline_runs(tmp_path / "run") == []
    assert len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) == 4


def test_online_without_a_network_ends_in_time_and_loses_nothing(tmp_path):
    ends = {"end": "", "exception": "    raise RuntimeError('boom')\n", "ctrl-c": "    time.sleep(600)\n"}
    processes = {}
    for end, last in ends.items():  # all at once: each waits, most of its time, for W&B to give up
        (tmp_path / end).mkdir()
        # In earnest 15 and 22: here so short that it is soon over, and so long that a busy machine writes all records.
        code = "from parallel_attn.tracking import wandb_sink\nwandb_sink.INIT_SECONDS, wandb_sink.FINISH_SECONDS = 5, 90\n"
        code += f"with track(mode='online') as run:\n    {_TRAIN}    print('trained', flush=True)\n{last}"
        processes[end] = start(tmp_path / end, code, key=FAKE_KEY, env=NO_NETWORK)
    try:
        for end, process in processes.items():
            check_online_end(tmp_path / end, process, end)
    finally:
        for process in processes.values():
            process.kill()


def check_online_end(folder, process, end):
    head = ""
    while "trained" not in head:
        line = process.stdout.readline()
        assert line, head
        head += line
    assert "cannot be reached" not in head  # W&B was still starting: training did not wait for it
    if end == "ctrl-c":
        process.send_signal(signal.SIGINT)
    output = process.stdout.read()  # not communicate(): it would miss what readline() has read ahead
    process.wait()
    assert (process.returncode == 0) == (end == "end")
    assert output.count("cannot be reached, the run is logged offline") == 1
    (run_folder,) = offline_runs(folder / "run")
    assert len(read_run(run_folder).history) == 4
    status = json.loads((folder / "run" / "summary.json").read_text())["status"]
    assert status == {"end": "finished", "exception": "failed", "ctrl-c": "interrupted"}[end]
    assert all(FAKE_KEY not in file.read_text(errors="replace") for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize("end", ["exception", "ctrl-c"])  # a plain end: the first test
def test_offline_ends_in_seconds(tmp_path, end):
    ends = {"exception": "raise RuntimeError('boom')", "ctrl-c": "os.kill(os.getpid(), signal.SIGINT)"}
    code = f"with track() as run:\n    {_TRAIN}    {ends[end]}\n"
    wanted = {"exception": 1, "ctrl-c": -signal.SIGINT}[end]
    output = run(tmp_path, code, code_wanted=wanted)
    (folder,) = offline_runs(tmp_path / "run")
    found = read_run(folder)
    assert len(found.history) == 4 and found.exit_code == 1, output


def test_a_service_that_hangs_does_not_hold_the_process(tmp_path):
    code = f"""
import psutil
from parallel_attn.tracking import wandb_service, wandb_sink
wandb_sink.FINISH_SECONDS, wandb_service.TEARDOWN_SECONDS = 3, 3  # as in earnest, only sooner
with track() as run:
    run.log(1, {{"train/loss": 1.0}})
    while not list((root / "run" / "wandb").glob("offline-run-*")): time.sleep(0.05)
    time.sleep(1)
    (core,) = [child for child in psutil.Process().children() if child.name().startswith("wandb-core")]
    core.suspend()
    {_TRAIN}"""
    output = run(tmp_path, code)
    assert "W&B did not finish in time" in output and "wandb sync" in output
    assert len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) == 5


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path):
    obstacles = ("file", "read-only")
    for obstacle in obstacles:
        (tmp_path / obstacle).mkdir()
    (tmp_path / "file" / "wandb").write_text("in the way")
    (tmp_path / "read-only" / "wandb").symlink_to("/proc/self")  # takes no new files from anybody, root included
    output = run(tmp_path, "".join(f"with track({obstacle!r}) as run:\n    {_TRAIN}" for obstacle in obstacles))
    for obstacle in obstacles:
        assert output.count(f"warning: W&B is off: {tmp_path / obstacle / 'wandb'} cannot be written") == 1
        assert len(read_jsonl(tmp_path / obstacle / "metrics.jsonl")) == 4


def test_what_wandb_raises_is_one_warning(tmp_path):
    code = f"""
import wandb
def broken(*args, **keys): raise RuntimeError("no luck\\nmore text")
init, wandb.init = wandb.init, broken
with track() as run:
    {_TRAIN}
wandb.init, wandb.sdk.wandb_run.Run.log = init, lambda *args, **keys: 1 / 0
with track("second") as run:
    {_TRAIN}"""
    output = run(tmp_path, code)
    assert output.count("warning: W&B could not start, the run goes on without it: RuntimeError: no luck\n") == 1
    assert output.count("warning: W&B failed, the run goes on: ZeroDivisionError") == 1
    for name in ("run", "second"):
        assert json.loads((tmp_path / name / "summary.json").read_text())["status"] == "finished"


def test_disabled_does_not_even_import_wandb(tmp_path):
    output = run(tmp_path, f"with track(mode='disabled') as run:\n    {_TRAIN}\nprint('wandb' in sys.modules)")
    assert output.splitlines()[-1] == "False" and not (tmp_path / "run" / "wandb").exists()
