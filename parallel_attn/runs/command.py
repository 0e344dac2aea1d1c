"""What the commands on trained models share: KEY=VALUE with raw values, one line for what is wrong, exit codes."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from parallel_attn.errors import CheckpointError, Interrupted, SettingsError
from parallel_attn.training.exits import FAILED_EXIT, SETTINGS_EXIT


class Settings:
    """The arguments of a command: a value is everything behind the first `=`, whatever it holds.

    known: key -> what it means, for --help. repeated: keys that may be given several times. others: whether further keys,
    those of train.py, are taken (`overrides`).
    """

    def __init__(
        self, arguments: Sequence[str], known: Mapping[str, str], *, repeated: Sequence[str] = (), others: bool = False
    ) -> None:
        self.given: dict[str, list[str]] = {}
        self.overrides: list[str] = []
        arguments = _json_as_key(arguments)
        for argument in arguments:
            key, equals, value = argument.partition("=")
            if key in known and equals:
                if key in self.given and key not in repeated:
                    raise SettingsError(f"{key} is given twice: give it once")
                self.given.setdefault(key, []).append(value)
            elif others and equals and not argument.startswith("-"):
                self.overrides.append(argument)
            else:
                wanted = "" if equals else " (KEY=VALUE is wanted)"
                raise SettingsError(f"{argument} is not a key of this command{wanted}: it has {', '.join(known)}")

    def text(self, key: str, default: str | None = None) -> str:
        """Raises SettingsError where it is missing and has no default."""
        if key in self.given:
            return self.given[key][-1]
        if default is None:
            raise SettingsError(f"{key} is missing: give {key}=...")
        return default

    def texts(self, key: str) -> list[str]:
        return self.given.get(key, [])

    def number(self, key: str, default: Any, kind: type = int) -> Any:
        """Raises SettingsError for what is no number of that kind."""
        if key not in self.given:
            return default
        value = self.text(key)
        if value == "null":
            return None
        try:
            return kind(value)
        except ValueError as error:
            wanted = "a whole number" if kind is int else "a number"
            raise SettingsError(f"{key}={value} must be {wanted}") from error

    def check_json(self) -> None:
        """Raises SettingsError where the file of --json cannot be written, before any work is done."""
        if "--json" in self.given:
            path = Path(self.text("--json")).expanduser()
            if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
                raise SettingsError(f"--json {self.text('--json')} cannot be written: name a file in a folder that exists")

    def choice(self, key: str, choices: Sequence[str], default: str) -> str:
        value = self.text(key, default)
        if value not in choices:
            raise SettingsError(f"{key}={value} is not one of: {', '.join(choices)}")
        return value


def _json_as_key(arguments: Sequence[str]) -> list[str]:
    """`--json FILE` and `--json=FILE` as `--json=FILE`."""
    found, rest = [], list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--json":
            if not rest:
                raise SettingsError("--json has no value: name a file")
            argument = f"--json={rest.pop(0)}"
        found.append(argument)
    return found


def usage(prog: str, description: str, known: Mapping[str, str]) -> str:
    width = max(map(len, known)) + 2
    keys = "\n".join(f"  {key.ljust(width)}{text}" for key, text in known.items())
    return f"usage: parallel-attn {prog} [KEY=VALUE ...]\n\n{description.strip()}\n\nkeys:\n{keys}"


def run(command: Callable[[Sequence[str]], None], arguments: Sequence[str], help_text: str) -> int:
    """Runs a command of one process; returns the exit code: 0, 1 (failed), 2 (settings), 130 (Ctrl-C), 143 (SIGTERM)."""
    if any(argument in ("-h", "--help") for argument in arguments) or not arguments:
        print(help_text)
        return 0 if arguments else SETTINGS_EXIT
    try:
        with _terminated():
            command(arguments)
    except (SettingsError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return SETTINGS_EXIT if isinstance(error, SettingsError) else FAILED_EXIT
    except OSError as error:
        print(f"error: {error.filename or ''}: {error.strerror or error}", file=sys.stderr)
        return FAILED_EXIT
    except KeyboardInterrupt as error:
        print("interrupted", file=sys.stderr)
        return 128 + (error.signal if isinstance(error, Interrupted) else signal.SIGINT)
    return 0


@contextmanager
def _terminated() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, so that what is half written goes away."""

    def end(number: int, _frame: object) -> None:
        raise Interrupted(signal.Signals(number))

    if threading.current_thread() is not threading.main_thread():  # Python hears signals in the main thread alone
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def write_json(settings: Settings, content: Any) -> None:
    """For --json. Raises SettingsError."""
    if "--json" in settings.given:
        path = settings.text("--json")
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        try:  # bytes of an argument that are no UTF-8 stay what they are to Python, escaped as JSON has it
            Path(path).expanduser().write_bytes(text.encode("utf-8", "backslashreplace"))
        except OSError as error:
            raise SettingsError(f"--json {path} cannot be written ({error.strerror})") from error
