"""Faults of regions that exchange over TCP: how soon a region is back, and what others notice. A part of `benchmarks.geo`.

Regions are communicators in one process, through an emulated wide-area network in user space; an update is sent each round, and each round waits for all
regions that are not cut off. Deaths are those of local functions in a training run, by SIGKILL. Times include the load of this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import condensed
from benchmarks.geo_worlds import workplace
from ephemeron.communication.channels.address import open_channel
from ephemeron.events import FaultFired, RegionExchanged
from ephemeron.regions.communicator.base import Communicator, Update
from ephemeron.regions.communicator.network import RegionNetwork
from ephemeron.regions.communicator.tcp import TcpCommunicator
from ephemeron.runs.folders import events_of
from ephemeron.testing.wan import EmulatedWan, WanLink
from ephemeron.training.driver import configure, train
from ephemeron.training.job import Fault, RunRegion, load_job
from ephemeron.training.worker.spec import GroupNetwork

JOB = Path(__file__).parents[1] / "examples" / "digits" / "job.toml"
LINK = WanLink(bandwidth_mbit_s=100, latency_s=0.05, jitter_s=0.01, loss=0.0005)
NAMES = ("east", "north", "west")
PAYLOAD = 100_000
SNAPSHOT = 8_000_000


class _Regions:
    """Regions in this process; each reaches the others through the emulated network, by its access."""

    def __init__(self, wan: EmulatedWan, folder: Path) -> None:
        self._wan, self._folder = wan, folder

    async def open(self, stack: contextlib.AsyncExitStack, region: str, *, since: int = 0) -> Communicator:
        channel = await stack.enter_async_context(open_channel((self._folder / "store").as_uri()))
        made = TcpCommunicator(
            channel, _Routed(region, self._wan), run="run", token="token", region=region, identity=region, fence=1, names=NAMES, leave_s=1.0
        )
        await stack.enter_async_context(made)
        await made.join(since=since)
        return made


class _Routed(RegionNetwork):
    """A region whose connections outwards pass the emulated network."""

    def __init__(self, region: str, wan: EmulatedWan) -> None:
        super().__init__(GroupNetwork(listen="127.0.0.1:0"), token="token")
        self._region, self._wan, self._ports = region, wan, dict[str, int]()

    async def dial(self, endpoint: str, *, region: str) -> Any:
        if endpoint not in self._ports:
            host, _, port = endpoint.partition(":")
            self._ports[endpoint] = await asyncio.to_thread(self._wan.route, self._region, region, (host, int(port)))
        return await super().dial(f"127.0.0.1:{self._ports[endpoint]}", region=region)


async def _round(regions: Sequence[Communicator], number: int, among: Sequence[str]) -> float:
    """One round; returns its seconds."""
    began, payload = time.perf_counter(), os.urandom(PAYLOAD)
    for each in regions:
        await each.publish(Update(region=each.region, fence=1, fragment=0, round=number, samples=1, norm=1.0, payload=payload))
    deadline = asyncio.get_running_loop().time() + 120
    for each in regions:
        for name in among:
            if name != each.region:
                await each.get(name, 0, number, deadline=deadline)
                await each.acknowledge(name, 0, number)
    return time.perf_counter() - began


async def _blackout(seconds: float) -> dict[str, Any]:
    """One of three regions is cut off: rounds of the others meanwhile, and how soon its updates arrive afterwards."""
    with tempfile.TemporaryDirectory() as folder, EmulatedWan(LINK) as wan:
        async with contextlib.AsyncExitStack() as stack:
            world = _Regions(wan, Path(folder))
            regions = [await world.open(stack, name) for name in NAMES]
            others, number = regions[:2], 0
            before, meanwhile = [], []
            for _ in range(20):
                number += 1
                before.append(await _round(regions, number, NAMES))
            dark = wan.blackout("west")
            await asyncio.to_thread(dark.__enter__)
            began, first = time.perf_counter(), number + 1
            while time.perf_counter() - began < seconds:
                number += 1
                meanwhile.append(await _round(others, number, NAMES[:2]))
            await asyncio.to_thread(dark.__exit__, None, None, None)
            back = time.perf_counter()
            await regions[2].publish(
                Update(region="west", fence=1, fragment=0, round=first, samples=1, norm=1.0, payload=os.urandom(PAYLOAD))
            )
            deadline = asyncio.get_running_loop().time() + 120
            await others[0].get("west", 0, first, deadline=deadline)
            heard = time.perf_counter() - back
            await regions[2].get("east", 0, number, deadline=deadline)
            return {
                "blackout_s": seconds,
                "round_before_s": condensed(before[5:]),
                "round_of_others_meanwhile_s": condensed(meanwhile),
                "heard_again_s": round(heard, 3),
                "has_all_missed_rounds_s": round(time.perf_counter() - back, 3),
                "missed_rounds": number - first + 1,
            }


async def _join(rounds: int) -> dict[str, Any]:
    """A region joins from a snapshot while two others go on."""
    with tempfile.TemporaryDirectory() as folder, EmulatedWan(LINK) as wan:
        async with contextlib.AsyncExitStack() as stack:
            world = _Regions(wan, Path(folder))
            others = [await world.open(stack, name) for name in NAMES[:2]]
            number, before, meanwhile = 0, list[float](), list[float]()
            for _ in range(rounds):
                number += 1
                before.append(await _round(others, number, NAMES[:2]))
            await others[0].put_snapshot(number, os.urandom(SNAPSHOT))
            began, since = time.perf_counter(), number

            async def join() -> float:
                late = await world.open(stack, "west", since=since)
                found = await late.latest_snapshot()
                assert found is not None
                await late.get("east", 0, since + 1, deadline=asyncio.get_running_loop().time() + 60)
                return time.perf_counter() - began

            joining = asyncio.create_task(join())
            while not joining.done():
                number += 1
                meanwhile.append(await _round(others, number, NAMES[:2]))
            after = []
            for _ in range(rounds):
                number += 1
                after.append(await _round(others, number, NAMES[:2]))
            found: dict[str, Any] = {"snapshot_bytes": SNAPSHOT, "joined_after_s": round(await joining, 3)}
            for when, seconds in (("before", before), ("meanwhile", meanwhile), ("after", after)):
                found[f"others_{when}"] = {"rounds": len(seconds), "p50_s": round(statistics.median(seconds), 4), "p99_s": _p99(seconds)}
            return found


def _p99(values: Sequence[float]) -> float:
    return round(statistics.quantiles(values, n=100, method="inclusive")[98], 4)


def _killed(iteration: int) -> dict[str, Any]:
    """SIGKILL of rank 0 of a region in a training run of local functions over TCP."""
    groups = (RunRegion(name="near", workers=1, batch_size=24, listen="127.0.0.1:0"), RunRegion(name="far", workers=1, batch_size=24))
    job = dataclasses.replace(load_job(JOB), epochs=3, run={})
    how = configure(
        job, regions={"region": groups, "communicator": "tcp", "sync": "diloco", "exchange_every": 3}, platform="local", checkpoint_every=4
    )
    fault = Fault(kind="kill", rank=1, iteration=iteration, phase="compute")
    result = train(job, how, faults=[fault])
    events = list(events_of(result.folder))
    died = next(e.t for e in events if isinstance(e, FaultFired))
    rounds = [e for e in events if isinstance(e, RegionExchanged) and e.rank == 1]
    again = next(e for e in rounds if e.t > died and e.attempt > 0)
    lost = sum(e.attempt == 0 and e.iteration >= again.iteration for e in rounds)
    clean = train(job, how)
    return {
        "killed_in_iteration": iteration,
        "next_exchange_after_s": round(again.t - died, 2),
        "rounds_lost": lost,
        "same_weights": result.summary.weights_sha256 == clean.summary.weights_sha256,
    }


def measure(*, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Plain values of this part."""
    found: dict[str, Any] = {
        "link": {"mbit_s": LINK.bandwidth_mbit_s, "latency_s": LINK.latency_s, "jitter_s": LINK.jitter_s, "loss": LINK.loss},
        "payload_bytes": PAYLOAD,
    }
    found["blackout"] = asyncio.run(_blackout(5.0 if quick else 30.0))
    say(f"blackout: {found['blackout']}")
    found["join"] = asyncio.run(_join(30 if quick else 150))
    say(f"join: {found['join']}")
    with workplace():
        found["killed"] = [_killed(iteration) for iteration in ((9,) if quick else (8, 9, 10))]
    say(f"killed: {found['killed']}")
    return found
