from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from ephemeron.config import user_code


@pytest.fixture
def clean_imports() -> Iterator[None]:
    """Forgets what a test put on `sys.path` and imported from there."""
    path, modules, served = list(sys.path), set(sys.modules), set(user_code._served)
    yield
    sys.path[:] = path
    user_code._served.clear()
    user_code._served.update(served)
    for name in set(sys.modules) - modules:
        origin = getattr(getattr(sys.modules[name], "__spec__", None), "origin", None)
        if origin is None or "-packages" not in origin:
            del sys.modules[name]
