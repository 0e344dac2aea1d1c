"""One W&B run, driven from a thread of its own, so that training never waits for W&B nor dies of it."""

import os
import queue
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from parallel_attn.tracking.config import WandbConfig
from parallel_attn.tracking.plain import plain_config
from parallel_attn.tracking.wandb_key import find_api_key
from parallel_attn.tracking.wandb_service import teardown_before_exit

# An online start that takes longer falls back to offline. Shorter than FINISH_SECONDS, so that a short run without a
# network still has time to fall back and write its records.
INIT_SECONDS = 15.0
UPLOAD_SECONDS = 15.0  # W&B itself gives up uploading after this long at the end of the run
FINISH_SECONDS = 22.0  # what finish() waits for the thread
START_SECONDS = 13.0  # and this much more if W&B is still starting (a short run without a network, a busy machine)
_QUEUE_LENGTH = 100_000  # records; only a service that hangs for the whole run gets there

_FINISH = object()


class WandbSink:
    """Hands records to one W&B run. `log` returns at once; start, records and end happen on a daemon thread.

    Files go to `run_dir/wandb`. Without an API key the run is offline, with one notice; there is never a prompt. An
    online start that fails or takes longer than INIT_SECONDS falls back to offline. Whatever W&B raises becomes one
    warning line. A run in the same `run_dir` goes on under the same W&B id (`run_dir/wandb/run_id.txt`, or `run_id`);
    its steps go on because each record carries its own `step`. Offline pieces of one run are synced in order of time.

    `notice` and `warn` take one line of text and are called from the thread.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        config: Mapping[str, Any],
        settings: WandbConfig,
        name: str,
        notice: Callable[[str], None],
        warn: Callable[[str], None],
        run_id: str | None = None,
    ) -> None:
        self._run_dir = Path(run_dir).absolute()
        # Copied here, on the caller's thread: the caller may change its config afterwards.
        self._config = plain_config(config)
        self._settings, self._name = settings, settings.name or name
        self._notice, self._warn = notice, warn
        self._run_id = run_id
        self._run: Any = None
        self._mode: str | None = None
        self._queue: queue.Queue = queue.Queue(maxsize=_QUEUE_LENGTH)
        self._dropped = self._started = False
        self._thread: threading.Thread | None = None
        if settings.mode != "disabled":
            self._thread = threading.Thread(target=self._work, name="wandb-sink", daemon=True)
            self._thread.start()

    @property
    def directory(self) -> Path | None:
        """The folder of the W&B run (`.../wandb/offline-run-...`), once it has started."""
        return Path(self._run.settings.sync_dir) if self._run is not None else None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queues one record; never blocks, never raises for what W&B does."""
        self._put((int(step), dict(metrics)))

    def finish(self, exit_code: int = 0) -> None:
        """Ends the run and waits for it, at most FINISH_SECONDS (and START_SECONDS more if it has not begun).

        Says how to upload what did not get through.
        """
        if self._thread is None:
            return
        self._put((_FINISH, exit_code))
        self._thread.join(FINISH_SECONDS)
        if self._thread.is_alive() and not self._started:
            self._thread.join(START_SECONDS)
        if self._thread.is_alive():
            where = self.directory or self._run_dir / "wandb"
            self._warn(f"W&B did not finish in time; upload what there is with: wandb sync {where}")
        elif self._mode == "offline" and self.directory is not None:
            self._notice(f"W&B ran offline; upload with: wandb sync {self.directory}")
        self._thread = None

    def _put(self, item: tuple) -> None:
        if self._thread is None:
            return
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            if not self._dropped:
                self._dropped = True
                self._warn("W&B does not keep up: further records go to metrics.jsonl only")

    def _work(self) -> None:
        try:
            self._start()
        # A logger must never kill training, and W&B raises errors of many kinds (its own, pydantic's, OSError).
        except Exception as error:
            self._warn(f"W&B could not start, the run goes on without it: {_one_line(error)}")
        self._started = True
        warned = False
        while True:
            step, value = self._queue.get()
            try:
                if step is _FINISH:
                    if self._run is not None:
                        self._run.finish(exit_code=value)
                    return
                if self._run is not None:
                    self._run.log({"step": step, **value}, step=step)
            # As above: one warning, then silence; metrics.jsonl has every record anyway.
            except Exception as error:
                if not warned:
                    warned = True
                    self._warn(f"W&B failed, the run goes on: {_one_line(error)}")
                if step is _FINISH:
                    return

    def _start(self) -> None:
        folder = self._run_dir / "wandb"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(b"\0" * 4096)
        except OSError as error:
            # W&B would silently move to the system's temporary folder, where nobody looks for it.
            self._warn(f"W&B is off: {folder} cannot be written ({error.strerror or error})")
            return
        import wandb

        quiet = wandb.Settings(silent=True, console="off")
        found = wandb.setup(quiet).settings
        teardown_before_exit()
        mode = self._settings.mode
        if mode == "auto" and found.mode != "online":
            mode = found.mode  # WANDB_MODE, or `wandb offline` on this machine
            if mode == "disabled":
                self._notice("W&B is off (WANDB_MODE)")
                return
        key = None
        if mode in ("auto", "online"):
            key = find_api_key(found.base_url, found.api_key)
            if key is None and not os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
                self._notice("W&B: no API key found, the run is logged offline (`wandb login` once for online runs)")
                mode = "offline"
            else:
                mode = "online"
        run_id = self._run_id or _stored_run_id(folder)
        if mode == "online":
            try:
                self._open(wandb, "online", run_id, key)
            # Any failure of an online start (network, server, refused key) has the same remedy.
            except Exception as error:
                self._notice(f"W&B cannot be reached, the run is logged offline: {_one_line(error)}")
                mode = "offline"
        if self._run is None:
            self._open(wandb, "offline", run_id, None)
        (folder / "run_id.txt").write_text(self._run.id + "\n", encoding="utf-8")

    def _open(self, wandb: Any, mode: str, run_id: str | None, key: str | None) -> None:
        settings = wandb.Settings(
            silent=True,
            console="off",
            init_timeout=INIT_SECONDS,
            finish_timeout=UPLOAD_SECONDS,
            # Not the process's global run: jobs of a sweep follow one another, and a caller may have a run as well.
            reinit="create_new",
            # Handing the key over is what makes a prompt impossible.
            **({"api_key": key} if key else {}),
        )
        run = wandb.init(
            mode=mode,
            dir=str(self._run_dir),
            project=self._settings.project,
            entity=self._settings.entity,
            group=self._settings.group,
            name=self._name,
            tags=list(self._settings.tags),
            config=self._config,
            id=run_id,
            resume="allow" if run_id else None,
            allow_val_change=True,  # a resumed run may have other steps or another layout
            settings=settings,
        )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        self._mode, self._run = mode, run


def _stored_run_id(folder: Path) -> str | None:
    path = folder / "run_id.txt"
    return (path.read_text(encoding="utf-8").strip() or None) if path.is_file() else None


def _one_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"
