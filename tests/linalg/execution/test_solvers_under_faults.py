"""The one task of a solver (decision 0038) while its function, the host of functions and the client are killed: the same bits."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from ephemeron import FunctionExecutor
from ephemeron.linalg import BigMatrix, clean, eigh

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
from ephemeron import FunctionExecutor
from ephemeron.linalg import BigMatrix, eigh
with FunctionExecutor("local", progress=False, max_workers=1) as pool:
    print(pool.folder, flush=True)
    eigh(BigMatrix.open(sys.argv[1], "a"), executor=pool)
"""


def is_leased(folder: Path) -> bool:
    """Whether a function has taken a task of the queue in this executor's folder."""
    return any(".l" in path.name for path in (folder / "objects").glob("*.work/*"))


def kill_all(marked: str, *, meanwhile: Callable[[], object] = lambda: None) -> int:
    """Kills all processes but this one whose environment has the mark: functions, and the process that hosts them.

    They are stopped first, so that none goes on without another; `meanwhile` is called in between.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get("LC_MARKS") == marked:
                process.suspend()
                found.append(process)
    meanwhile()
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):  # functions end with their host
            process.kill()
    return len(found)


def test_eigenvectors_do_not_depend_on_deaths(tmp_path, monkeypatch):
    """Who reads the matrix comes to no end before all were killed twice: one of its tiles is a pipe into which nobody writes."""
    monkeypatch.setenv("LC_MARKS", str(tmp_path))
    g = np.random.default_rng(3).standard_normal((90, 90))
    store, again = ((tmp_path / name).as_uri() for name in ("store", "again"))
    a = BigMatrix.from_numpy(g + g.T, tile=30, store=store, name="a")
    tile = next((tmp_path / "store" / "a").glob("*.0.0"))
    tile.rename(tmp_path / "tile")
    os.mkfifo(tile)
    with subprocess.Popen([sys.executable, "-c", SCRIPT, store], stdout=subprocess.PIPE, text=True) as client:
        folder = Path(client.stdout.readline().strip())
        while not is_leased(folder):
            assert client.poll() is None, "it ended too early"
            time.sleep(0.001)
        assert kill_all(str(tmp_path)) >= 3, "client, host, function"
    [found] = clean(store, dry_run=False, lease_s=0.5)
    assert found.program.startswith("eigh-")
    assert not found.running

    with FunctionExecutor("local", progress=False, max_workers=1) as pool:
        killed, is_over = list[int](), threading.Event()

        def kill_once() -> None:
            while not is_leased(pool.folder):
                if is_over.wait(0.001):
                    return
            killed.append(kill_all(str(tmp_path), meanwhile=lambda: (tmp_path / "tile").replace(tile)))

        killing = threading.Thread(target=kill_once)
        killing.start()
        try:
            w, v = eigh(a, executor=pool)
        finally:
            is_over.set()
            killing.join()
        assert killed[0] >= 2, "host, function"
        expected, vectors = eigh(BigMatrix.from_numpy(g + g.T, tile=30, store=again), executor=pool)
    assert w.tobytes() == expected.tobytes()
    assert v.to_numpy().tobytes() == vectors.to_numpy().tobytes()
    left = {path.parent.name for path in (tmp_path / "store").rglob("*") if path.is_file()}
    assert left == {"a", v.stored.name}, "neither claims nor the stored eigenvalues"
