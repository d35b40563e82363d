"""Fixtures of runs; see `tests/training/training_runs.py`."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))

from training_runs import home  # noqa: F401


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Programs of these tests can be imported."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "code"))
