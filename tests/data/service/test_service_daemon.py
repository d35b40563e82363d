"""Processes that are found again, started when they are not there, and told from what the dead have left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from ephemeron.data.service.daemon import ManagedProcess, ProcessLock, write_json
from ephemeron.data.service.messages import Nothing
from ephemeron.data.service.protocol import PING
from ephemeron.data.service.settings import ServiceSettings
from ephemeron.errors import ServiceUnreachable

pytestmark = pytest.mark.slow

TOKEN = "token of the tests"
SETTINGS = asdict(ServiceSettings(idle_s=600))


@pytest.fixture
def part(tmp_path: Path) -> Iterator[ManagedProcess]:
    part = ManagedProcess("coordinator", tmp_path / "service", TOKEN)
    yield part
    part.kill()
    assert not part.alive


def pid_of(part: ManagedProcess) -> int:
    return int(json.loads((part.folder / "ready.json").read_text())["pid"])


@pytest.mark.slow
def test_what_does_not_run_is_started_and_what_lives_is_adopted(part: ManagedProcess) -> None:
    assert not part.alive
    with pytest.raises(ServiceUnreachable, match="does not run"):
        part.address()
    with pytest.raises(ServiceUnreachable):
        part.call(PING, Nothing(), timeout_s=1)
    address = part.ensure(SETTINGS)
    assert part.alive
    other = ManagedProcess("coordinator", part.folder, TOKEN)
    assert other.ensure({"not": "used"}) == address
    assert other.settings() == json.loads(json.dumps(SETTINGS))
    assert other.call(PING, Nothing(), timeout_s=60).settings["idle_s"] == 600
    other.kill(gently=True)
    assert not part.alive
    assert other.settings() is None


def test_the_killed_one_leaves_nothing_that_misleads(part: ManagedProcess) -> None:
    first = part.ensure(SETTINGS)
    dead = pid_of(part)
    os.kill(dead, signal.SIGKILL)
    part._process.wait()  # type: ignore[union-attr]
    assert (part.folder / "ready.json").exists(), "it could not clear up"
    assert not part.alive
    with pytest.raises(ServiceUnreachable):
        part.address()
    second = part.ensure(SETTINGS)
    assert pid_of(part) != dead
    assert second.unix != first.unix
    assert part.call(PING, Nothing(), timeout_s=60)
    assert not Path(first.unix).parent.exists(), "its socket is gone as well"


def test_several_who_start_it_at_once_find_the_same(part: ManagedProcess) -> None:
    found: list[object] = []

    def start() -> None:
        try:
            found.append(ManagedProcess("coordinator", part.folder, TOKEN).ensure(SETTINGS))
        except Exception as e:  # noqa: BLE001 - it is looked at below
            found.append(e)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [part.address()] * 4
    assert part.call(PING, Nothing(), timeout_s=60)


def test_an_address_of_somebody_else_is_not_believed(part: ManagedProcess) -> None:
    """As when the dead one's announcement is still there while the next one is starting."""
    part.ensure(SETTINGS)
    said = json.loads((part.folder / "ready.json").read_text())
    write_json(part.folder / "ready.json", {**said, "pid": said["pid"] + 1})
    with pytest.raises(ServiceUnreachable):
        part.address()
    write_json(part.folder / "ready.json", said)
    assert str(part.address())


def test_one_that_has_not_announced_itself_can_be_ended(tmp_path: Path) -> None:
    code = "import sys, time; from pathlib import Path; from ephemeron.data.service.daemon import ProcessLock\n"
    code += "p = ProcessLock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        part = ManagedProcess("router", tmp_path, TOKEN)
        assert part.alive
        with pytest.raises(BlockingIOError):
            ProcessLock(tmp_path)
        part.kill()
        assert process.wait(timeout=30) == -signal.SIGKILL
        assert not part.alive
    finally:
        process.kill()
        process.communicate()


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    part = ManagedProcess("router", tmp_path, TOKEN)
    with pytest.raises(ServiceUnreachable, match=r"the router does not start: .*JobError: .*settings\.json: missing key samples"):
        part.ensure({})
    assert not part.alive


def test_files_are_whole_and_private(tmp_path: Path) -> None:
    place = tmp_path / "a.json"
    threads = [threading.Thread(target=write_json, args=(place, [n] * 1000)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(json.loads(place.read_text()))) == 1
    assert place.stat().st_mode & 0o077 == 0
    assert list(tmp_path.iterdir()) == [place], "nothing is left over"
