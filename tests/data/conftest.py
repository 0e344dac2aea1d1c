"""Young files settle for a tenth of a second before they are read: too long for hundreds of tests."""

import pytest

from parallel_attn.data import identity


@pytest.fixture(autouse=True)
def quick_settling(request, monkeypatch):
    if request.module.__name__ != "tests.data.test_prepare":  # which is about edits in quick succession
        monkeypatch.setattr(identity, "SETTLE_SECONDS", 0.005)
