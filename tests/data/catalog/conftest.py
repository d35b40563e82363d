"""Stores of every kind, and a home folder of the test's own."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from ephemeron.data.catalog import DatasetStore
from ephemeron.data.catalog.files import Files
from ephemeron.data.catalog.objects import ObjectFiles
from ephemeron.data.catalog.open_files import open_files


@pytest.fixture(params=["folder", "memory", "s3"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    """An empty place of each kind."""
    if request.param == "folder":
        return open_files(str(tmp_path / "files"))
    if request.param == "memory":
        return ObjectFiles(MemoryStore(), url="memory://test")
    return open_files(f"{request.getfixturevalue('s3')}/{secrets.token_hex(4)}")


@pytest.fixture
def any_store(files: Files) -> DatasetStore:
    """An empty store of each kind."""
    return DatasetStore(files)


@pytest.fixture
def store(tmp_path: Path) -> DatasetStore:
    """An empty store in a folder."""
    return DatasetStore.open(str(tmp_path / "store"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the default store is."""
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    return tmp_path / "home"
