"""One tokenising process (pool.py): takes a tokenizer, then tasks, until its pipe ends or its parent is gone."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection

from parallel_attn.data.encode import encode_task
from parallel_attn.errors import SettingsError

WATCH_SECONDS = 0.5


def main() -> None:
    """Runs in a fresh interpreter; its last arguments: the parent's process id, the file descriptor of the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which ends this
    threading.Thread(target=_end_with, args=(int(sys.argv[-2]),), daemon=True).start()
    pipe = Connection(int(sys.argv[-1]))
    try:
        module, name, text, end_of_text = pipe.recv()
        cls = importlib.import_module(module)
        for part in name.split("."):
            cls = getattr(cls, part)
        tokenizer = cls.from_json(text, end_of_text)
        while True:
            task = pipe.recv()
            try:
                answer = None, encode_task(tokenizer, task)
            except SettingsError as error:
                answer = str(error), None
            pipe.send(answer)
    except (EOFError, ConnectionError):
        return  # the parent is done, or gone


def _end_with(parent: int) -> None:
    """The end of the pipe shows only between two tasks; this also ends a process in the middle of one."""
    while os.getppid() == parent:
        time.sleep(WATCH_SECONDS)
    os._exit(1)
