"""Reductions side by side in one run: ours, bare transfers of the same bytes, and public peers, in turns.

One process per worker, as with functions. Each process has its worker of every side. In every turn each side does a few
rounds, in rotating order, so that other load of the machine affects all of them alike. The first round of a turn does
not count: it comes after a pause that training does not have. A round lasts from the
release of all workers until the last one has its vector. Deleting the objects of a round is not timed.

Bare transfers are the part that no implementation over this store can avoid: each phase of the reduction (put
contributions, get them, put merged shards, get them) as concurrent `obstore` calls of the same sizes, with a barrier
between phases and no checksum, sum, poll or copy.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import queue
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import obstore

from benchmarks.collective_peers import Peer, buckets
from benchmarks.common import SEED, condensed
from benchmarks.rounds import Case, CaseFailed, Member, opened
from ephemeron.communication.channels import open_channel
from ephemeron.communication.channels.stores import cloud_store
from ephemeron.training.collectives import CHUNK_BYTES
from ephemeron.training.collectives.chunking import RequestCost, measure_requests
from ephemeron.training.tensors import bounds

_FORK = multiprocessing.get_context("fork")
WARM_UP = 2
"""Turns not counted: connections are made, and workers learn the poll schedule."""
LARGE_MB = 20.0
POLL_WORTH_S = 0.008
"""Worth of a poll in a run of four functions of 704 MB (`worker.loop.poll_worth_s` at AWS's prices)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Sides to run in turns on one W, K and size."""

    workers: int
    aggregators: int
    size_mb: float
    forms: tuple[str, ...]
    """Ours: `plain`, `pipelined`."""
    peers: tuple[tuple[Peer, Path], ...] = ()
    chunk_bytes: int = CHUNK_BYTES
    """Chunk size of our pipelined form, as a run would choose it; 0: it falls back to the plain one."""

    @property
    def elements(self) -> int:
        return int(self.size_mb * 1e6) // 4

    @property
    def rounds(self) -> int:
        """Counted rounds of a turn."""
        return 2 if self.size_mb >= LARGE_MB else 5


class _Side(Protocol):
    def round(self, t: int, barrier: Callable[[], None]) -> None:
        """One timed round."""

    def clean(self, t: int) -> None:
        """Deletes the objects of rounds before `t`."""


def compare(comparison: Comparison, address: str, *, turns: int, limit_s: float = 400.0) -> dict[str, Any]:
    """Seconds per round of every side, and ratios within turns.

    Args:
        comparison: to run.
        address: an S3 address, whose endpoint and credentials are in the environment.
        turns: counted turns of every side, each of `Comparison.rounds` rounds.
        limit_s: seconds after which to give up.

    Raises:
        CaseFailed: with the first failure.
    """
    world = comparison.workers
    barrier, answers = _FORK.Barrier(world), _FORK.Queue()
    workers = [_FORK.Process(target=_work, args=(comparison, address, rank, turns, barrier, answers)) for rank in range(world)]
    for process in workers:
        process.start()
    try:
        parts: list[Any] = []
        while len(parts) < world:
            parts.append(answers.get(timeout=limit_s))
            if isinstance(parts[-1], str):
                raise CaseFailed(parts[-1])
    except queue.Empty:
        raise CaseFailed(f"no answer within {limit_s:.0f} s") from None
    finally:
        for process in workers:
            process.join(0.5)
            process.kill()
    return _condense(comparison, parts)


def request_cost(address: str) -> RequestCost:
    """Request times of a store, measured in a process of its own, because obstore's threads do not survive a fork."""
    answers: Any = _FORK.SimpleQueue()
    process = _FORK.Process(target=lambda: answers.put(asyncio.run(_request_cost(address))))
    process.start()
    process.join(60)
    if process.exitcode != 0:
        process.kill()
        raise CaseFailed("the store could not be measured")
    cost: RequestCost = answers.get()
    return cost


async def _request_cost(address: str) -> RequestCost:
    channel = open_channel(address)
    try:
        return await measure_requests(channel, "benchmark/probe")
    finally:
        await channel.close()


def _condense(comparison: Comparison, parts: list[dict[str, list[tuple[float, float]]]]) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {}
    for name in parts[0]:
        rounds = [
            max(end for _, end in ends) - min(start for start, _ in ends) for ends in zip(*(part[name] for part in parts), strict=True)
        ]
        n = comparison.rounds
        by_turn = [rounds[at : at + n] for at in range(WARM_UP * n, len(rounds), n)]
        seconds[name] = [statistics.median(turn) for turn in by_turn]
    row: dict[str, Any] = {
        "workers": comparison.workers,
        "aggregators": comparison.aggregators,
        "size_mb": comparison.size_mb,
        "chunk_bytes": comparison.chunk_bytes,
        "notes": {p.name: p.note for p, _ in comparison.peers},
        "sides": {},
    }
    for name, values in seconds.items():
        ratios = [v / b for v, b in zip(values, seconds["bare"], strict=True)]
        row["sides"][name] = {**condensed(values), "ratio_to_bare": round(statistics.median(ratios), 3)}
        if name not in ("bare", "ours plain", "ours pipelined"):
            theirs = [v / o for v, o in zip(values, seconds["ours plain"], strict=True)]
            row["sides"][name]["ratio_to_ours"] = round(statistics.median(theirs), 3)
    return row


# -- inside a worker ------------------------------------------------------------------------------------------


def _work(comparison: Comparison, address: str, rank: int, turns: int, barrier: Any, answers: Any) -> None:
    try:
        answers.put(_turns(comparison, address, rank, turns, barrier))
    except Exception:  # noqa: BLE001 (every failure is reported to the measuring process)
        barrier.abort()
        answers.put(traceback.format_exc(limit=-3))


def _turns(comparison: Comparison, address: str, rank: int, turns: int, barrier: Any) -> dict[str, Any]:
    loop = asyncio.new_event_loop()
    sides: dict[str, _Side] = {"bare": _Bare(comparison, address, rank, loop)}
    sides |= {f"ours {form}": _Ours(comparison, form, address, rank, loop) for form in comparison.forms}
    sides |= {peer.name: _Peer(comparison, peer, checkout, f"peer{n}", rank) for n, (peer, checkout) in enumerate(comparison.peers)}
    names = list(sides)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    t = dict.fromkeys(names, 0)
    for turn in range(WARM_UP + turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            for counted in (False, *[True] * comparison.rounds):
                barrier.wait()
                began = time.monotonic()
                sides[name].round(t[name], barrier.wait)
                if counted:
                    times[name].append((began, time.monotonic()))
                barrier.wait()
                sides[name].clean(t[name])
                t[name] += 1
    barrier.wait()
    return times


class _Ours:
    def __init__(self, comparison: Comparison, form: str, address: str, rank: int, loop: asyncio.AbstractEventLoop) -> None:
        case = Case(
            channel="s3",
            workers=comparison.workers,
            aggregators=comparison.aggregators,
            size_mb=comparison.size_mb,
            form=form,
            throttled=False,
        )
        self.loop = loop
        self.member = Member(
            case, rank, opened(case, rank, open_channel(f"{address}/{form}")), chunk_bytes=comparison.chunk_bytes, poll_worth_s=POLL_WORTH_S
        )

    def round(self, t: int, barrier: Callable[[], None]) -> None:
        self.loop.run_until_complete(self.member.round(t))

    def clean(self, t: int) -> None:
        self.loop.run_until_complete(self.member.collective.collect_garbage())


class _Bare:
    """Bare transfers of the objects of a reduction."""

    def __init__(self, comparison: Comparison, address: str, rank: int, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self.rank, self.c = loop, rank, comparison
        self.store: Any = cloud_store(f"{address}/bare")
        vector = np.random.default_rng(SEED + rank).standard_normal(comparison.elements, dtype=np.float32)
        self.shards = [vector[a:b].tobytes() for a, b in bounds(comparison.elements, comparison.aggregators)]

    def round(self, t: int, barrier: Callable[[], None]) -> None:
        w, k, rank = self.c.workers, self.c.aggregators, self.rank
        others, owners = [r for r in range(w) if r != rank], [j for j in range(k) if j != rank]
        self._puts({f"{t}.c.{rank}.{j}": self.shards[j] for j in owners})
        barrier()
        if rank < k:
            self._gets([f"{t}.c.{r}.{rank}" for r in others])
            self._puts({f"{t}.m.{rank}": self.shards[rank]})
        barrier()
        self._gets([f"{t}.m.{j}" for j in owners])

    def clean(self, t: int) -> None:
        if self.rank == 0:
            k, w = self.c.aggregators, self.c.workers
            keys = [f"{t}.c.{r}.{j}" for r in range(w) for j in range(k) if r != j] + [f"{t}.m.{j}" for j in range(k)]
            self.loop.run_until_complete(_delete(self.store, keys))

    def _puts(self, objects: dict[str, bytes]) -> None:
        async def put(key: str, data: bytes) -> None:
            await obstore.put_async(self.store, key, data, use_multipart=False)

        async def puts() -> None:
            await asyncio.gather(*(put(key, data) for key, data in objects.items()))

        self.loop.run_until_complete(puts())

    def _gets(self, keys: list[str]) -> None:
        async def get(key: str) -> None:
            await (await obstore.get_async(self.store, key)).bytes_async()

        async def gets() -> None:
            await asyncio.gather(*(get(key) for key in keys))

        self.loop.run_until_complete(gets())


async def _delete(store: Any, keys: list[str]) -> None:
    await obstore.delete_async(store, keys)


class _Peer:
    def __init__(self, comparison: Comparison, peer: Peer, checkout: Path, prefix: str, rank: int) -> None:
        import boto3

        self.rank, self.prefix = rank, prefix
        self.client = boto3.client("s3")
        if rank == 0:
            for bucket in buckets(prefix):
                self.client.create_bucket(Bucket=bucket)
        self.reduce = peer.build(checkout, prefix, rank, comparison.workers, comparison.aggregators)
        self.vector = np.random.default_rng(SEED + rank).standard_normal(comparison.elements, dtype=np.float32)

    def round(self, t: int, barrier: Callable[[], None]) -> None:
        self.reduce(self.vector, t)

    def clean(self, t: int) -> None:
        # The previous round stays, because FasDL's non-aggregators read it in the next one.
        if self.rank == 0:
            for bucket in buckets(self.prefix):
                listed = self.client.list_objects_v2(Bucket=bucket).get("Contents", [])
                old = [o["Key"] for o in listed if not _of_round(o["Key"], t)]
                if old:
                    self.client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": key} for key in old]})


def _of_round(key: str, t: int) -> bool:
    """True if a peer's key names round t: LambdaML counts from 0 at its end, FasDL from 1 at either end."""
    parts = key.split("_")
    return parts[-1] == str(t) or str(t + 1) in (parts[0], parts[-1])
