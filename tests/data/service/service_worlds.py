"""A real service on loopback, flows without PyTorch, and a count of everything that runs."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import warm_processes
from ephemeron.data.flow import Flow, FlowView, LocalReader
from ephemeron.data.service import RemoteReader, Service, ServiceSettings
from ephemeron.data.service.daemon import ManagedProcess
from ephemeron.data.service.messages import Nothing, RouterStatus, ShardStatus
from ephemeron.data.service.protocol import LIST_FLOWS
from ephemeron.data.service.settings import ServiceTimeouts
from running import command_of

LIMIT_S = 180.0
TIMEOUTS = ServiceTimeouts(orphan_s=10.0, loaders_idle_s=30.0)
HASTY = replace(TIMEOUTS, loader_lease_s=2.5, shard_s=2.5, router_s=4.0)
"""Where processes are stopped: on a busy machine one that was not may seem so, too, and is replaced."""


def settings(**changed: Any) -> ServiceSettings:
    """For tests: what nobody needs ends soon, and no PyTorch in loaders."""
    return ServiceSettings(**{"preload": "", "idle_s": 120.0, "ends_when_idle": True, "timeouts": TIMEOUTS, **changed})


def until(holds: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
    """Waits for a condition, and returns what it says."""
    end = time.monotonic() + limit_s
    while True:
        began = time.monotonic()
        if found := holds():
            return found
        asked = time.monotonic()
        assert asked < end, f"not within {limit_s:g} s: {what}"
        time.sleep(max(0.02, 4 * (asked - began)))  # looking through all processes takes long


class Numbered:
    """Sample i is (an array of i, i); some are larger than others."""

    def __init__(self, samples: int, *, giants: Sequence[int] = (), floats: int = 200) -> None:
        self.samples, self.giants, self.floats = samples, frozenset(giants), floats

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> tuple[Any, int]:
        if not 0 <= i < self.samples:
            raise IndexError(i)
        return np.full(1000 * self.floats if i in self.giants else self.floats, i, dtype=np.float32), i


def drawn(data: Any) -> Any:
    """Draws from the global generators."""
    return data + np.float32(random.random() + np.random.random())


def mixed(samples: int = 31, name: str = "test/mixed", **options: Any) -> Flow:
    """A random step that may be cached, and one that may not."""
    flow = Flow(name).dataset(Numbered(samples, **options))
    return flow.map_data("crop once", drawn, cache_control="can-cache").map_data("noise", drawn)


def plain(samples: list[Any]) -> list[tuple[int, bytes]]:
    """Instead of PyTorch's way to collate: what was delivered, to be compared."""
    return [(int(target), np.asarray(data).tobytes()) for data, target in samples]


def local(flow: Flow) -> FlowView:
    return flow.prepare_read(LocalReader(0))


def epochs_of(read: FlowView, count: int = 1, **options: Any) -> list[list[Any]]:
    """Whole epochs, batch by batch."""
    options = {"batch_size": 4, "collate_fn": plain, **options}
    with read.to_shuffled(**options) as batches:
        return [list(batches) for _ in range(count)]


class World:
    """One service of this machine, with all its processes."""

    def __init__(self, folder: Path, own: ServiceSettings) -> None:
        self.folder, self.settings = folder, own
        self.service = Service(folder=folder, settings=own)

    def reader(self, **options: Any) -> RemoteReader:
        return RemoteReader(folder=self.folder, settings=self.settings, **options)

    def read(self, flow: Flow, **options: Any) -> FlowView:
        return flow.prepare_read(self.reader(**options))

    def address(self) -> str:
        return str(self.coordinator.ensure(self.settings))

    def status(self, flow: str) -> tuple[ShardStatus, ...]:
        """Counters of its shards."""
        return self.service.call(LIST_FLOWS, Nothing()).routers.get(flow, RouterStatus()).shards

    @property
    def coordinator(self) -> ManagedProcess:
        return ManagedProcess("coordinator", self.folder, self.service.token)

    def router(self, flow: str) -> ManagedProcess:
        return ManagedProcess("router", self.folder / "flows" / flow.replace("/", "--"), self.service.token)

    def shard(self, flow: str, number: int = 0) -> ManagedProcess:
        return ManagedProcess("shard", self.router(flow).folder / f"shard-{number}", self.service.token)

    def loaders(self, flow: str) -> list[psutil.Process]:
        """Processes in which loader functions run or have run."""
        place = str(self.router(flow).folder)
        hosts = [p for p in self._named(place) if "daemon_process" in command_of(p)]
        found = []
        for host in hosts:
            with suppress(psutil.NoSuchProcess):
                found += host.children(recursive=True)
        return found

    def kill_loaders(self, flow: str) -> None:
        """Kills processes of its loaders; one may end with another."""
        for process in until(lambda: self.loaders(flow), "loaders"):
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def processes(self) -> list[psutil.Process]:
        """Everything that runs for this service."""
        mine = self._named(str(self.folder))
        try:
            found = {*mine, *(child for p in mine for child in p.children(recursive=True))}
            return [p for p in found if not command_of(p).startswith(warm_processes.NAME)]
        except psutil.NoSuchProcess:
            return self.processes()

    @staticmethod
    def _named(place: str) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter(["cmdline"]):
            if place in " ".join(process.info["cmdline"] or ()):  # those that have ended have none
                found.append(process)
        return [p for p in found if p.pid != os.getpid()]

    def close(self) -> None:
        """Ends everything, and sees that it has ended."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
        end = time.monotonic() + 60
        while (left := self.processes()) and time.monotonic() < end:
            if not self.coordinator.alive:
                if not psutil.wait_procs(left, timeout=3)[1]:  # they were ending
                    continue
                self.coordinator.ensure(self.settings)  # one that was killed has ended nobody
            self.coordinator.kill(gently=True, wait_s=30)
            time.sleep(0.05)
        names = list(filter(None, (command_of(p)[:200] for p in left)))
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        assert not names, f"left behind: {names}"


def signalled(part: ManagedProcess, number: signal.Signals) -> int:
    """Sends a signal to a part that lives, and returns whom. It may just have ended, and another one begun."""

    def sent() -> int | None:
        pid = pid_of(part)
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return None
        return pid

    return int(until(sent, f"a living {part.kind}"))


def pid_of(part: ManagedProcess) -> int:
    """Of a part that lives."""
    return int(until(lambda: part.alive and part._pid(), f"a living {part.kind}"))
