"""Either side may be killed at any time: the other learns it, and nothing stays that is in the way later."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from faces import PATIENCE_S, TOKEN, Handlers, Loop, Served, in_thread

from ephemeron.communication.rpc import BlockingClient
from ephemeron.errors import ConnectionLost

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
FACES = ("blocking", "asyncio")


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a mortal and waits for its first word."""
    with ExitStack() as stack:

        def run(role: str, face: str, path: Path, word: str = "ready") -> subprocess.Popen[str]:
            paths = os.pathsep.join([str(HERE), *(entry for entry in sys.path if entry)])
            process = subprocess.Popen(
                [sys.executable, str(HERE / "mortal.py"), role, face, str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": paths},
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            assert process.stdout is not None
            if word:
                assert process.stdout.readline().startswith(word)
            return process

        yield run


def eventually(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.01)


def segments() -> int:
    """Shared segments that this process has mapped."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("/memfd:ephemeron") if os.path.exists("/proc/self/maps") else 0


@pytest.mark.parametrize("face", FACES)
def test_a_killed_server_fails_its_clients_and_its_place_is_free(
    face: str, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    path = tmp_path / "s"
    mapped = segments()
    process = start("server", face, path)
    client = BlockingClient.connect_shared(path, token=TOKEN)
    assert client.transport == "shared"
    (view,) = client.call("echo", {}, [b"x" * 500_000])[1]
    assert segments() > mapped
    hanging = in_thread(lambda: client.call("hang"))
    eventually(lambda: any(answer.left for answer in list(client._session.answers.values())))
    process.kill()
    with pytest.raises(ConnectionLost) as caught:
        hanging()
    assert not caught.value.may_repeat
    assert bytes(view) == b"x" * 500_000  # the dead process's memory, as long as we look at it
    start("server", face, path)  # over the socket file that the dead one left
    again = BlockingClient.connect_shared(path, token=TOKEN)
    assert again.call("echo", {"a": 1}, [bytes(500_000)])[0] == {"a": 1}
    again.close()
    client.close()
    del view
    eventually(lambda: segments() == mapped)


@pytest.mark.parametrize("face", FACES)
def test_a_killed_client_leaves_nothing_at_the_server(face: str, start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    mapped = segments()
    loop = Loop()
    served = Served(face, loop, Handlers(), tmp_path / "s", None)
    for client_face in FACES:
        process = start("client", client_face, served.path)
        assert served.handlers.entered.acquire(timeout=PATIENCE_S)
        assert served.server.connections == 1
        process.kill()
        assert served.handlers.cancelled.acquire(timeout=PATIENCE_S)
        eventually(lambda: served.server.connections == 0 and segments() == mapped)
    other = served.connect("blocking", "shared")
    assert other.call("echo", {"a": 1}, [bytes(500_000)])[0] == {"a": 1}
    other.close()
    served.close()
    loop.close()
    assert not served.path.exists()


@pytest.mark.parametrize("face", FACES)
def test_a_forked_child_neither_uses_nor_holds_its_parents_connection(
    face: str, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    loop = Loop()
    served = Served("blocking", loop, Handlers(), tmp_path / "s", None)
    parent = start("forking", face, served.path, word="")
    assert parent.stdout is not None
    said = sorted(parent.stdout.readline().strip() for _ in range(4 if face == "blocking" else 2))
    child = next(int(words.removeprefix("child pid ")) for words in said if words.startswith("child pid "))
    try:
        assert "parent: b'xxx'" in said
        if face == "blocking":
            assert "child again: {'a': 1}" in said
            refusal = next(words for words in said if words.startswith("child: "))
            assert "made before a fork" in refusal
            assert refusal.endswith("may repeat b'xxx'")
        parent.kill()
        parent.wait()
        # The child lives, but the connection is gone.
        eventually(lambda: served.server.connections == 0)
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        served.close()
        loop.close()
