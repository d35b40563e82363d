"""Machines that are network namespaces of this one, joined by links of a given bandwidth; needs root, `ip` and `tc`."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_CLONE_NEWNET = 0x40000000
_BURST_KB = 64


def unavailable() -> str:
    """Why this machine cannot have such networks; empty: it can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"there is no command {missing[0]}; apt-get install iproute2" if missing else ""


@contextmanager
def machines(count: int, mbit_s: float) -> Iterator[list[str]]:
    """Namespaces on one bridge, each with a link of this bandwidth in both directions.

    Yields:
        Their names.
    """
    tag = f"eph{os.getpid() % 10_000}"
    names, bridge = [f"{tag}m{i}" for i in range(count)], f"{tag}b"
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for i, name in enumerate(names):
            outer = f"{tag}v{i}"
            _ip("netns", "add", name)
            _ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", outer, "master", bridge, "up")
            inside = ("ip", "netns", "exec", name)
            for command in (
                (*inside, "ip", "link", "set", "lo", "up"),
                (*inside, "ip", "addr", "add", f"10.77.0.{i + 1}/24", "dev", "eth0"),
                (*inside, "ip", "link", "set", "eth0", "up"),
                (*inside, *_limited("eth0", mbit_s)),
                _limited(outer, mbit_s),
            ):
                subprocess.run(command, check=True, capture_output=True)
        yield names
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)
        with suppress(subprocess.CalledProcessError):
            _ip("link", "del", bridge)


def enter(name: str) -> None:
    """Moves this thread, and those that it starts, into a namespace.

    Raises:
        OSError: there is none of this name, or no right to enter it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{name}") as handle:
        if libc.setns(handle.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {name}")


def address(index: int) -> str:
    """IPv4 address of a machine."""
    return f"10.77.0.{index + 1}"


def _limited(device: str, mbit_s: float) -> tuple[str, ...]:
    rate, burst = f"{mbit_s}mbit", f"{_BURST_KB}kb"
    return ("tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, "burst", burst, "latency", "100ms")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
