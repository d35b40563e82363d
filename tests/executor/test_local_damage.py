"""A batch of tasks that is damaged while it waits, on processes of this machine: the map ends with its key, and starts no more functions."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import pytest
import redis

from ephemeron.communication.channels.credentials import environment
from ephemeron.errors import EphemeronError
from ephemeron.executor import FunctionExecutor

pytestmark = pytest.mark.slow


def waiting(x: float, damaged: Path) -> float:
    """Ends when a batch was damaged."""
    while not damaged.exists():
        time.sleep(0.01)
    return x


@pytest.mark.parametrize("where", ["folder", "valkey"])
def test_a_damaged_batch_ends_the_map_with_its_key(where: str, tmp_path, monkeypatch, valkey_server) -> None:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    damaged: list[str] = []
    over = threading.Event()

    def in_folder() -> None:
        for path in sorted((tmp_path / "store").glob("*.work/*"), reverse=True):  # of the last ones nobody has a lease yet
            if "." not in path.name and path.name != "closed":
                with contextlib.suppress(FileNotFoundError):
                    data = path.read_bytes()
                    if data and not damaged:
                        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
                        damaged.append(path.name)

    def in_cache() -> None:
        with redis.Redis.from_url(valkey_server.address) as client:
            for key in client.scan_iter("*.queue/batch/*"):
                data = client.hget(key, "tasks")
                if data and not damaged:
                    client.hset(key, "tasks", data[:-1] + bytes([data[-1] ^ 1]))
                    damaged.append(key.decode().rpartition("/")[2])

    def watch() -> None:
        while not damaged and not over.is_set():
            (in_folder if where == "folder" else in_cache)()
            time.sleep(0.002)
        (tmp_path / "damaged").touch()

    thread = threading.Thread(target=watch)
    thread.start()
    address = (tmp_path / "store").as_uri() if where == "folder" else valkey_server.address
    errors = []
    with environment({}), FunctionExecutor(max_workers=2, channel=address, progress=False) as pool:
        futures = [pool.submit(waiting, n, tmp_path / "damaged") for n in range(60)]
        for n, future in enumerate(futures):
            try:
                assert future.result(timeout=120) == n
            except EphemeronError as e:
                errors.append(str(e))
        invocations = pool.bill().invocations
    over.set()
    thread.join()
    assert damaged
    assert all(damaged[0] in error for error in errors), (damaged, errors[:1])
    assert invocations <= 6
