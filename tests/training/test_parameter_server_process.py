"""The parameter server process of a run ends with it, and no other process does."""

import os
import signal
import subprocess
import sys

import pytest

from ephemeron.training.driver import parameter_server
from ephemeron.training.driver.parameter_server import ServerProcess


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("frozen", [False, True])
def test_a_server_ends_even_when_it_does_not_answer(tmp_path, frozen):
    server = parameter_server.start(tmp_path)
    if frozen:
        os.kill(server.pid, signal.SIGSTOP)
    server.stop(grace_s=0.2 if frozen else 20.0)
    assert not _runs(server.pid)
    server.stop()  # again: harmless


def test_the_number_of_a_server_that_has_ended_may_be_another_process_s():
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        ServerProcess("ps://127.0.0.1:1", "token", other.pid).stop()
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
