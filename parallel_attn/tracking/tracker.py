"""One object that a training loop reports to: the run's files, W&B and the console behind it."""

import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from parallel_attn.tracking.config import TrackingConfig
from parallel_attn.tracking.console import Console
from parallel_attn.tracking.jsonl import JsonlWriter, read_jsonl, write_summary
from parallel_attn.tracking.plain import plain_number
from parallel_attn.tracking.wandb_sink import WandbSink

# Rows of the final table, in order: (key in summary.json, label, format).
_ROWS = (
    ("status", "status", "{}"),
    ("step", "optimizer steps", "{:,}"),
    ("seconds", "seconds", "{:,.1f}"),
    ("train/loss", "training loss", "{:.4f}"),
    ("val/loss", "validation loss", "{:.4f}"),
    ("val/perplexity", "validation perplexity", "{:.3f}"),
    ("val/bits_per_byte", "validation bits per byte", "{:.4f}"),
    ("train/tokens_per_second", "tokens per second", "{:,.0f}"),
    ("train/mfu", "model-FLOPs utilisation", "{:.1%}"),
    ("memory/parameters_bytes", "memory: parameters", "{:,} bytes"),
    ("memory/gradients_bytes", "memory: gradients", "{:,} bytes"),
    ("memory/optimizer_bytes", "memory: optimizer", "{:,} bytes"),
    ("memory/activations_peak_bytes", "memory: activations, peak", "{:,} bytes"),
    ("memory/total_peak_bytes", "memory: all live tensors, peak", "{:,} bytes"),
    ("memory/kv_cache_bytes_per_token", "KV cache of a token, later", "{:,} bytes"),
    ("memory/process_peak_bytes", "peak of the process", "{:,} bytes"),
    ("memory/device_peak_bytes", "peak on the device", "{:,} bytes"),
)


class Tracker:
    """Records a run: `metrics.jsonl` (each record), `summary.json` (the end), W&B, console. One per run, on each rank.

    Only the rank with `main=True` does anything; on the others every method returns at once. The step of every record
    is the optimizer step. Metric names are those of a run folder, such as `train/loss` or `val/bits_per_byte`.

    As a context manager it finishes the run whatever happens: `status` in `summary.json` is finished, failed (an
    exception; `error` holds its line) or interrupted (Ctrl-C). A run folder that already has a `metrics.jsonl` is gone
    on with: records are appended, and their last values are known to the summary. `start_step` is the last optimizer
    step that was already done. Records of steps that are done a second time go to the files, not to W&B, whose step
    never goes back.

    Raises SettingsError for wrong `settings` (on every rank), OSError when the run folder cannot be written.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        config: Mapping[str, Any],
        settings: TrackingConfig,
        total_steps: int,
        main: bool,
        run_name: str,
        start_step: int = 0,
        wandb_run_id: str | None = None,
    ) -> None:
        settings.check()
        self._main, self._finished = main, False
        if not main:
            return
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._began = time.monotonic()
        metrics_path = self.run_dir / "metrics.jsonl"
        self._jsonl = JsonlWriter(metrics_path)  # first: it mends a half last line
        self._last: dict[str, Any] = {"step": start_step}
        for record in read_jsonl(metrics_path):
            if record["step"] <= start_step:  # later ones belong to steps that this run does again
                self._last.update(record)
        # Also of attempts that were put aside: they went to the same W&B run.
        told = (record["step"] for path in self.run_dir.glob("metrics*.jsonl") for record in read_jsonl(path))
        self._told_wandb = max(told, default=0)
        self._console = Console(settings.console, total_steps, start_step=start_step)
        self._wandb = WandbSink(
            self.run_dir,
            config=config,
            settings=settings.wandb,
            name=run_name,
            notice=self._console.notice,
            warn=self._console.warn,
            run_id=wandb_run_id,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One record of metrics at an optimizer step. Raises OSError if `metrics.jsonl` cannot take it (disk full)."""
        if not self._main:
            return
        # Numbers from here on: a tensor would be held, and read by W&B's thread while training goes on.
        metrics = {key: value if isinstance(value, (int, float)) else float(value) for key, value in metrics.items()}
        self._jsonl.write(step, metrics)
        self._last.update({key: plain_number(value) for key, value in metrics.items()}, step=int(step))
        if step > self._told_wandb:
            self._wandb.log(step, metrics)
        self._console.step(step, metrics)

    def notice(self, text: str) -> None:
        """One line on the console."""
        if self._main:
            self._console.notice(text)

    def warn(self, text: str) -> None:
        """One warning line on the console."""
        if self._main:
            self._console.warn(text)

    def finish(
        self, summary: Mapping[str, Any] | None = None, exit_code: int = 0, *, status: str | None = None
    ) -> None:
        """Ends the run: closes the log, writes `summary.json` (last value of each metric, `seconds`, `summary`,
        `status`), ends W&B (a bounded wait) and prints the final table. A second call does nothing.
        """
        if not self._main or self._finished:
            return
        self._finished = True
        status = status or ("finished" if exit_code == 0 else "failed")
        whole = {**self._last, "seconds": time.monotonic() - self._began, **(summary or {}), "status": status}
        try:
            # The files first: a second Ctrl-C while W&B uploads must not cost them.
            self._jsonl.close()
            write_summary(self.run_dir / "summary.json", whole)
        finally:
            self._wandb.finish(exit_code)
            self._console.summary(self._rows(whole))

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self.finish()
            return
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        line = next(iter(str(error).splitlines()), "")
        try:
            self.finish({"error": f"{type(error).__name__}: {line}"}, exit_code=1, status=status)
        except OSError as second:
            # The first error is what the user must see (often it is the same full disk).
            self.warn(str(second))

    def _rows(self, summary: Mapping[str, Any]) -> dict[str, str]:
        rows = {label: form.format(summary[key]) for key, label, form in _ROWS if summary.get(key) is not None}
        best = summary.get("best")
        if best:
            rows["best validation"] = ", ".join(
                f"{key.removeprefix('val/')} {value:.4f}" for key, value in best.items() if key.startswith("val/")
            ) + f" at step {best['step']:,}"
        if "error" in summary:
            rows["error"] = str(summary["error"])
        rows["run folder"] = str(self.run_dir)
        if self._wandb.directory is not None:
            rows["W&B folder"] = str(self._wandb.directory)
        return rows
