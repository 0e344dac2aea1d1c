"""Errors that a user is meant to read."""

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager


class SettingsError(ValueError):
    """A setting or an input that cannot work. The message is one line: the key, its value, the values that would work.

    Raised before the first collective, alike on every rank that sees the same input.
    """


@contextmanager
def keys_renamed(names: dict[str, str]) -> Iterator[None]:
    """SettingsErrors raised inside name the keys where they stand: {"attention.": "model.cross_attention."}."""
    try:
        yield
    except SettingsError as error:
        pattern = "|".join(re.escape(name) for name in names)
        message = re.sub(rf"(?<![\w.])({pattern})", lambda match: names[match.group()], str(error))
        raise SettingsError(message) from error


class NonFiniteLoss(RuntimeError):
    """The loss or the gradient norm of an optimizer step is NaN or infinite; the message names the step."""


class PeerLost(RuntimeError):
    """A collective failed because another rank left or died: that rank's own error is the cause."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read. The message is one line: the path, what is wrong, what would work."""


class Interrupted(KeyboardInterrupt):
    """A signal (its only argument) asked this process to end. Not an Exception: only who ends the process catches it."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.signal = number
