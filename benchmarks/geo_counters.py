"""Bytes to equal accuracy by the kernel's counters: real functions of two regions in network namespaces. A part of `benchmarks.geo`.

The same job, policies and seeds as in part `traffic`, trained by `train` with local functions: the daemon of each region, and with it all of its functions, is in
a network namespace of its own, limited by `tc tbf` in both directions, and leader connects to leader over TCP. Counters are those of the network device between
a region and the other one, read 50 times a second, so headers, acknowledgements and retransmissions count. Objects of a region's own channel do not pass this device.
Functions compute as fast as the machine allows: bytes are what this part compares. Needs root.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.geo_traffic import AMA, MARGIN, PER_STEP, SEEDS, WORKLOAD
from benchmarks.geo_worlds import Wan, job_of, workplace
from ephemeron.events import Evaluated, RegionExchanged, RunStarted
from ephemeron.functions import local_daemon_client
from ephemeron.runs.folders import events_of
from ephemeron.testing import wan_namespaces
from ephemeron.testing.wan_namespaces import RegionNamespaces
from ephemeron.training.driver import configure, train
from ephemeron.training.driver.result import Result
from ephemeron.training.job import RunRegion

NAMES = ("shanghai", "chongqing")
MBIT_S = 100.0
SIDES = {"per step": PER_STEP, "ama 8": AMA, "diloco top 5 %, two bits": ("diloco:lr=1,momentum=0.3,delay=23,mixing=0.5", 24, "topk2:0.05")}
"""Policy, H and compression: those of part `traffic` at 10 Mbit/s, where `mixing` is 0.48."""
PORT = 29_530
EVERY_S = 0.02
_CLONE_NEWNET = 0x40000000


def measure(*, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Bytes at the target by seed and side, and medians of the ratios."""
    if why := wan_namespaces.unavailable():
        return {"skipped": why}
    seeds = [_seed(seed, say) for seed in (SEEDS[:1] if quick else SEEDS)]
    names = dict.fromkeys(name for run in seeds for name in run["ratios"])
    ratios = {name: [run["ratios"][name] for run in seeds if name in run["ratios"]] for name in names}
    found = {
        "simulated": False,
        "mbit_s": MBIT_S,
        "model": WORKLOAD.model,
        "skewed": True,
        "policies": {name: list(side) for name, side in SIDES.items()},
        "seeds": seeds,
        "ratios": {name: {"median": statistics.median(v), "by_seed": v} for name, v in ratios.items()},
    }
    say(f"kernel counters: {found['ratios']}")
    return found


def _seed(seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    sides = {}
    for name, (sync, every, compression) in SIDES.items():
        sides[name] = run_side(seed, sync, every, compression)
        last = sides[name][-1]
        say(f"seed {seed}, {name}: {[round(p['accuracy'], 4) for p in sides[name]]}; {last}")
    target = min(max(point["accuracy"] for point in points) for points in sides.values()) - MARGIN
    reached = {name: next(p for p in points if p["accuracy"] >= target) for name, points in sides.items()}
    ours = reached["diloco top 5 %, two bits"]["kernel_bytes"]
    return {
        "seed": seed,
        "target": round(target, 4),
        "at_target": reached,
        "by_epoch": sides,
        "ratios": {f"bytes, {n} / diloco": round(p["kernel_bytes"] / ours, 1) for n, p in reached.items() if p["kernel_bytes"] != ours},
    }


def run_side(seed: int, sync: str, every: int, compression: str) -> list[dict[str, float]]:
    """A point for each epoch: accuracy, and bytes that have left a region, by the kernel and as metered; of the region with more of them."""
    with RegionNamespaces(dict.fromkeys(NAMES, MBIT_S), routed=True) as namespaces, workplace() as folder:
        groups = tuple(
            RunRegion(
                name=name, workers=1, memory_mb=2048, share=1.0, listen=f"0.0.0.0:{PORT}", endpoint=f"{namespaces[name].address}:{PORT}"
            )
            for name in NAMES
        )
        job = job_of(folder, WORKLOAD, seed, Wan(), skewed=True)
        configuration = configure(
            job,
            platform="local",
            regions={"region": groups, "sync": sync, "exchange_every": every, "compression": compression, "communicator": "tcp"},
            batch_size=WORKLOAD.batch_size,
            checkpoint_every=200,
        )
        counted = _Counters(namespaces)
        with counted, _daemons_in({name: namespaces[name].name for name in NAMES}):
            result = train(job, configuration).raise_if_failed()
        return _points(result, counted)


def _points(result: Result, counted: _Counters) -> list[dict[str, float]]:
    events = list(events_of(result.folder))
    origin = next(e.wall_time for e in events if isinstance(e, RunStarted))
    evaluated: dict[int, list[Evaluated]] = {}
    for event in events:
        if isinstance(event, Evaluated) and event.sums.get("accuracy"):
            evaluated.setdefault(event.iteration, []).append(event)
    points = []
    for iteration, ranks in sorted(evaluated.items()):
        sums = [pair for e in ranks if (pair := e.sums["accuracy"]) is not None]
        metered: dict[int, int] = {}
        for event in events:
            if isinstance(event, RegionExchanged) and event.iteration <= iteration:
                metered[event.rank] = metered.get(event.rank, 0) + event.bytes_sent
        points.append(
            {
                "accuracy": sum(s for s, _ in sums) / sum(n for _, n in sums),
                "kernel_bytes": counted.at(origin + max(e.t for e in ranks)),
                "metered_bytes": max(metered.values(), default=0),
            }
        )
    return points


class _Counters:
    """Bytes that have left each region, over time: read by a thread in the namespace between them."""

    def __init__(self, namespaces: RegionNamespaces) -> None:
        between = namespaces[NAMES[0]].between
        self._path = Path("/var/run/netns") / between
        self._devices = [namespaces[name].device for name in NAMES]
        self._rows: list[tuple[float, int]] = []
        self._first: list[int] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> _Counters:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def at(self, unix_s: float) -> int:
        """Bytes that the region with more of them has sent, at the first reading after a time."""
        place = bisect_left(self._rows, (unix_s, 0))
        return self._rows[min(place, len(self._rows) - 1)][1]

    def _read(self) -> None:
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):  # of this thread alone
                raise OSError(ctypes.get_errno(), f"cannot enter {self._path}")
        finally:
            os.close(descriptor)
        while True:
            sent = self._sent()
            self._first = self._first or sent
            self._rows.append((time.time(), max(now - then for now, then in zip(sent, self._first, strict=True))))
            if self._ended.wait(EVERY_S):
                return

    def _sent(self) -> list[int]:
        lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
        received = {name.strip(): int(values.split()[0]) for name, _, values in (line.partition(":") for line in lines) if values}
        return [received[device] for device in self._devices]


@contextmanager
def _daemons_in(namespaces: Mapping[str, str]) -> Iterator[None]:
    """Local functions of a group run in a network namespace: the daemon that owns them is started there.

    Args:
        namespaces: by name of a group, that of its namespace.
    """
    known = local_daemon_client.subprocess

    def started(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        settings = command[-1]
        (name,) = [group for group in namespaces if f"-{group}" in settings]
        return subprocess.Popen(["nsenter", f"--net=/var/run/netns/{namespaces[name]}", *command], **options)

    local_daemon_client.subprocess = SimpleNamespace(**{**vars(known), "Popen": started})  # type: ignore[assignment]
    try:
        yield
    finally:
        local_daemon_client.subprocess = known
