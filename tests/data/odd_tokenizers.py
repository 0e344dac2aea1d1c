"""Tokenizers that do what no tokenizer should, for the processes that have to live with it."""

import os
import signal
import time
from pathlib import Path

from parallel_attn.data.byte_tokenizer import ByteTokenizer
from parallel_attn.errors import SettingsError


class Odd(ByteTokenizer):
    """Does what the text says."""

    fingerprint = "odd"

    def encode_piece(self, piece):
        if b"refuse" in piece.text:
            raise SettingsError("tokenizer=odd: will not; use another")
        if b"die" in piece.text:
            os.kill(os.getpid(), signal.SIGKILL)
        if b"bug" in piece.text:
            raise ZeroDivisionError("a bug in a tokenizer")
        if b"sleep" in piece.text:
            Path(os.environ["ODD_MARKS"], str(os.getpid())).touch()
            time.sleep(600)
        return super().encode_piece(piece)
