"""Models this small only lose by more threads, and forked stages have one each."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # the models


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    torch = pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
