"""One case of `benchmarks.collectives`: W workers that only reduce, round after round, in one or more processes.

A round lasts from the release of all workers until the last one has the merged vector. It
includes packing and checksums. Objects that are no longer needed are deleted between rounds, as in training
while a worker computes.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import queue
import resource
import traceback
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.common import SEED, condensed
from ephemeron.communication.channels import open_channel
from ephemeron.communication.channels.base import Channel
from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.communication.channels.run_channel import RunChannel
from ephemeron.communication.channels.wrappers import Throttled
from ephemeron.communication.keys import Keys
from ephemeron.events import Traffic
from ephemeron.training.collectives import CHUNK_BYTES, Collective, Group, NoTrace, collective_for
from ephemeron.training.collectives.sync_policy import policy_for
from ephemeron.training.planner.model import round_bound_s
from ephemeron.units import MB

BANDWIDTH_MB_S = 70.0
LATENCY_S = 0.010
WARM_UP, POLLED_WARM_UP = 1, 3
"""Rounds not counted: connections are made, and workers learn the poll schedule of stores that are polled."""
LEAST_ROUNDS, MOST_ROUNDS = 3, 25
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Case to measure."""

    channel: str
    workers: int
    aggregators: int
    size_mb: float
    form: str
    """`plain` or `pipelined`."""
    throttled: bool

    @property
    def elements(self) -> int:
        return int(self.size_mb * MB) // 4

    @property
    def warm_up(self) -> int:
        return POLLED_WARM_UP if self.channel in ("folder", "s3") else WARM_UP

    @property
    def bound_s(self) -> float:
        """Of the throttled form."""
        return round_bound_s(
            self.workers,
            self.aggregators,
            model_bytes=4 * self.elements,
            latency_s=LATENCY_S,
            bandwidth_mb_s=BANDWIDTH_MB_S,
            pipelined=self.form == "pipelined",
        )


class CaseFailed(Exception):
    """A process of the case failed or did not end."""


def measure(case: Case, address: str, *, processes: int, budget_s: float, limit_s: float = 300.0) -> dict[str, Any]:
    """Seconds, requests and bytes per round.

    Args:
        case: to measure.
        address: of the store.
        processes: number of processes of the workers.
        budget_s: approximate time of the measurement; short rounds are repeated more often.
        limit_s: seconds after which to give up.

    Raises:
        CaseFailed: with the first failure.
    """
    processes = min(processes, case.workers)
    barrier, rounds = _FORK.Barrier(processes), _FORK.Value("i", 0)
    answers: Any = _FORK.Queue()
    todo = [
        _FORK.Process(target=_work, args=(case, address, share, processes, barrier, rounds, budget_s, answers))
        for share in range(processes)
    ]
    for process in todo:
        process.start()
    try:
        parts = [answers.get(timeout=limit_s) for _ in todo]
    except queue.Empty:
        raise CaseFailed(f"no answer within {limit_s:.0f} s") from None
    finally:
        for process in todo:
            process.join(2)
            process.kill()
    failures = [part for part in parts if isinstance(part, str)]
    if failures:
        raise CaseFailed(failures[0])
    return _condense(case, parts, processes)


def _condense(case: Case, parts: list[dict[str, Any]], processes: int) -> dict[str, Any]:
    seconds = [max(e for _, e in ends) - min(s for s, _ in ends) for ends in zip(*(p["times"] for p in parts), strict=True)]
    total = sum((Traffic(**p["traffic"]) for p in parts), Traffic())
    n = len(seconds)
    row: dict[str, Any] = {
        **asdict(case),
        "processes": processes,
        "seconds": condensed(seconds),
        "per_round": {name: round(value / n, 2) for name, value in asdict(total).items()},
        "polls_per_get": round(total.polls / total.gets, 4) if total.gets else None,
        "peak_rss_mb": round(sum(p["peak_rss_mb"] for p in parts), 1),
    }
    if case.throttled:
        row["bound_s"] = round(case.bound_s, 5)
        row["ratio_to_bound"] = round(row["seconds"]["median"] / case.bound_s, 4)
    return row


# -- inside a process -----------------------------------------------------------------------------------------


def _work(case: Case, address: str, share: int, of: int, barrier: Any, rounds: Any, budget_s: float, answers: Any) -> None:
    try:
        answers.put(asyncio.run(_rounds(case, address, share, of, barrier, rounds, budget_s)))
    except Exception:  # noqa: BLE001 (every failure is reported to the measuring process)
        barrier.abort()
        answers.put(traceback.format_exc(limit=-3))


async def _rounds(case: Case, address: str, share: int, of: int, barrier: Any, rounds: Any, budget_s: float) -> dict[str, Any]:
    ranks = range(share, case.workers, of)
    shared = MemoryChannel() if case.channel == "memory" else None
    members = [Member(case, rank, opened(case, rank, shared or open_channel(address))) for rank in ranks]
    loop = asyncio.get_running_loop()
    times: list[tuple[float, float]] = []
    before = Traffic()
    t = 0
    while t < case.warm_up or t < case.warm_up + rounds.value:
        await loop.run_in_executor(None, barrier.wait)
        began = loop.time()
        await asyncio.gather(*(member.round(t) for member in members))
        times.append((began, loop.time()))
        await asyncio.gather(*(member.collective.collect_garbage() for member in members))
        t += 1
        if t == case.warm_up:
            before = sum((member.channel.traffic for member in members), Traffic())
            if share == 0:
                last = times[-1][1] - times[-1][0]
                rounds.value = max(LEAST_ROUNDS, min(MOST_ROUNDS, int(budget_s / last)))
            await loop.run_in_executor(None, barrier.wait)
    after = sum((member.channel.traffic for member in members), Traffic())
    await loop.run_in_executor(None, barrier.wait)
    if share == 0:
        await members[0].clean()
    for member in members:
        await member.channel.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    return {"times": times[case.warm_up :], "traffic": _minus(after, before), "peak_rss_mb": peak}


def opened(case: Case, rank: int, channel: Channel) -> RunChannel:
    if case.throttled:
        channel = Throttled(channel, latency_s=LATENCY_S, bandwidth_mb_s=BANDWIDTH_MB_S)
    return RunChannel(channel, owner=f"rank {rank}")


def _minus(after: Traffic, before: Traffic) -> dict[str, int]:
    return {name: value - getattr(before, name) for name, value in asdict(after).items()}


class _Clock(NoTrace):
    """Clock of the time stamps in messages, as in a run."""

    def run_time(self) -> float:
        return asyncio.get_running_loop().time()


class Member:
    """One worker without a model.

    Args:
        case: to measure.
        rank: of the worker.
        channel: its own.
        chunk_bytes: of the pipelined form.
        poll_worth_s: seconds of waiting that a poll is worth; the default polls rarely.
    """

    def __init__(self, case: Case, rank: int, channel: RunChannel, *, chunk_bytes: int = CHUNK_BYTES, poll_worth_s: float = 0.1) -> None:
        self.channel = channel
        self.keys = Keys("benchmark")
        self.vector = np.random.default_rng(SEED + rank).standard_normal(case.elements, dtype=np.float32)
        self.group = Group(
            keys=self.keys,
            rank=rank,
            world=case.workers,
            aggregators=case.aggregators,
            channel=channel,
            policy=policy_for("bsp"),
            size=case.elements,
            dtype=np.dtype(np.float32),
            trace=_Clock(),
            poll_worth_s=poll_worth_s,
        )
        pattern = "pipelined" if case.form == "pipelined" else "k-reduce"
        self.collective: Collective = collective_for(pattern, self.group, chunk_bytes=chunk_bytes)

    async def round(self, t: int) -> None:
        """Work of the worker's loop between two computations."""
        collective = self.collective
        self.group.status.applied = self.group.status.durable = t
        collective.submit(t, self.vector, 1.0)
        if collective.overlaps:
            await asyncio.gather(collective.upload(t), collective.reduce(t), collective.wait(t))
        else:
            await collective.upload(t)
            await asyncio.gather(collective.reduce(t), collective.wait(t))

    async def clean(self) -> None:
        await self.channel.delete(await self.channel.list(f"{self.keys.run}/"))
