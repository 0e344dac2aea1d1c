"""What a person sees of a run: a line or a bar per log, notices, and a table at the end."""

import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

_SHOWN = ("loss", "grad_norm", "lr", "tokens_per_second", "mfu")


class Console:
    """Prints on stdout as `style` says: bar, lines, none (warnings only), or auto (bar on a terminal, else lines).

    Safe to call from several threads. A stdout that is closed or a broken pipe silences it for good: a run must not die
    because nobody reads along. NO_COLOR is respected (by rich). Steps are optimizer steps, `start_step` is the last one
    already done (a resumed run), so that the ETA counts only what this process does.
    """

    def __init__(self, style: str, total_steps: int, *, start_step: int = 0) -> None:
        self._total, self._start_step = total_steps, start_step
        self._began: float = time.monotonic()
        self._lock = threading.RLock()
        self._bar: Any = None
        self._task: Any = None
        self._dead = sys.stdout is None
        if style == "auto":
            style = "bar" if _is_terminal() else "lines"
        self.style = style
        self._rich: Any = None

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the metrics of an optimizer step: those under `train/`, and those under `val/` on their own line."""
        if self.style == "none":
            return
        train = {key.removeprefix("train/"): value for key, value in metrics.items() if key.startswith("train/")}
        val = {key.removeprefix("val/"): value for key, value in metrics.items() if key.startswith("val/")}
        with self._lock:
            if train:
                text = "  ".join(_format(name, train[name]) for name in _SHOWN if train.get(name) is not None)
                if self.style == "bar":
                    self._guarded(self._update_bar, step, text)
                else:
                    self._line(f"step {step}/{self._total}  {text}  ETA {self._eta(step)}")
            if val:
                text = "  ".join(_format(name, value) for name, value in val.items() if value is not None)
                self._line(f"step {step}/{self._total}  validation  {text}")

    def notice(self, text: str) -> None:
        """One line that is good to know."""
        if self.style != "none":
            self._line(text)

    def warn(self, text: str) -> None:
        """One line that somebody should act on; shown in every style."""
        self._line(f"warning: {text}")

    def summary(self, rows: Mapping[str, str]) -> None:
        """The table at the end of a run; ends the bar."""
        with self._lock:
            self.stop()
            if self.style != "none":
                self._guarded(self._print_table, rows)

    def stop(self) -> None:
        """Ends the bar and gives the cursor back."""
        with self._lock:
            if self._bar is not None:
                self._guarded(self._bar.stop)
                self._bar = None

    def _line(self, text: str) -> None:
        with self._lock:
            if self._bar is not None:
                self._guarded(self._bar.console.print, text, markup=False, highlight=False, soft_wrap=True)
            else:
                self._guarded(_print, text)

    def _guarded(self, function: Any, *arguments: Any, **options: Any) -> None:
        if self._dead:
            return
        try:
            function(*arguments, **options)
        except UnicodeEncodeError:
            return  # a terminal without Unicode loses this line, not the next ones
        except (OSError, ValueError) as error:  # ValueError: I/O operation on closed file
            self._dead = True
            if isinstance(error, BrokenPipeError):
                _discard_stdout()

    def _eta(self, step: int) -> str:
        done = step - self._start_step
        if done <= 0:
            return "-"
        seconds = (time.monotonic() - self._began) / done * max(0, self._total - step)
        return _clock(seconds)

    def _update_bar(self, step: int, text: str) -> None:
        if self._bar is None:
            self._open_bar()
        self._bar.update(self._task, completed=step, metrics=text, eta=self._eta(step), refresh=True)

    def _open_bar(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        self._bar = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[metrics]}  ETA {task.fields[eta]}", markup=False),
            console=self._rich_console(),
            # Drawn at each log, by us: a drawing thread would raise where nobody catches it.
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("train", total=self._total, metrics="", eta="-")
        self._bar.start()

    def _rich_console(self) -> Any:
        if self._rich is None:
            from rich.console import Console as RichConsole

            class Patient(RichConsole):
                def on_broken_pipe(self) -> None:
                    """rich would end the process here; raised instead, `_guarded` silences the console."""
                    raise BrokenPipeError

            self._rich = Patient(file=sys.stdout)
        return self._rich

    def _print_table(self, rows: Mapping[str, str]) -> None:
        from rich.table import Table
        from rich.text import Text

        table = Table(show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows.items():
            table.add_row(Text(name), Text(value))
        console = self._rich_console()
        # In a file nobody can widen the window: a path must stay on one line there.
        frame = len("│ ") + len(" │ ") + len(" │")
        wanted = max(map(len, rows), default=0) + max(map(len, rows.values()), default=0) + frame
        if not console.is_terminal:
            console.width = max(console.width, wanted)
        console.print(table)


def _is_terminal() -> bool:
    try:
        return sys.stdout is not None and sys.stdout.isatty()
    except ValueError:  # closed
        return False


def _print(text: str) -> None:
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def _discard_stdout() -> None:
    """Points a broken stdout at the null device: else Python's last flush fails and the exit code becomes 120."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _format(name: str, value: float) -> str:
    if name == "tokens_per_second":
        return f"{value:,.0f} tok/s"
    if name == "lr":
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"lr {mantissa}e{int(exponent)}"
    if name == "mfu":
        return f"mfu {value:.1%}"
    if name == "grad_norm":
        return f"grad_norm {value:.2f}"
    return f"{name} {value:.4f}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
