"""Errors that a user is meant to read."""

import signal


class SettingsError(ValueError):
    """A setting or an input that cannot work. The message is one line: the key, its value, the values that would work.

    Raised before the first collective, alike on every rank that sees the same input.
    """


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
