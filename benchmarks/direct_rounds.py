"""One case of `benchmarks.direct`: W processes reduce vectors over direct connections, and over gloo, in turns.

A burst is a number of rounds one after another, as fast as they go; its time is from the first start to the last end. Bursts of
the two sides alternate, so that both meet the same load of the machine. Processes are pinned to nothing, and torch has one thread.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import queue
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.common import SEED, condensed
from ephemeron.communication.channels import open_channel
from ephemeron.communication.channels.wrappers import Metered
from ephemeron.communication.direct.mesh import Mesh
from ephemeron.communication.direct.tls_socket import PinnedTls
from ephemeron.communication.direct.transport import SharedTransport, TcpTransport, Transport, UnixTransport
from ephemeron.communication.keys import Keys
from ephemeron.config.paths import cores
from ephemeron.testing.direct_world import until
from ephemeron.training.collectives import Group, collective_for
from ephemeron.training.collectives.sync_policy import policy_for
from ephemeron.units import MB

BURST_S = 0.4
"""Approximate duration of a burst."""
LEAST_ROUNDS, MOST_ROUNDS = 3, 500
_TRANSPORTS: dict[str, Any] = {
    "shared": SharedTransport,
    "unix": UnixTransport,
    "tcp": TcpTransport,
    "tls": lambda: TcpTransport(tls=PinnedTls()),
}
_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectCase:
    """Case to measure."""

    workers: int
    size_mb: float
    transport: str = "shared"
    """`unix`, `tcp` or `tls`, which is TCP encrypted."""

    @property
    def elements(self) -> int:
        return int(self.size_mb * MB) // 4


class CaseFailed(Exception):
    """A process of the case failed or did not end."""


def compare(case: DirectCase, *, turns: int = 5, limit_s: float = 180.0) -> dict[str, Any]:
    """Seconds per round of both sides, and their ratio.

    Args:
        case: to measure.
        turns: bursts of each side.
        limit_s: seconds after which to give up.

    Raises:
        CaseFailed: with the first failure.
    """
    barrier, rounds = _SPAWN.Barrier(case.workers), _SPAWN.Array("i", 2)
    answers: Any = _SPAWN.Queue()
    with tempfile.TemporaryDirectory() as folder:
        todo = [_SPAWN.Process(target=_work, args=(case, rank, folder, turns, barrier, rounds, answers)) for rank in range(case.workers)]
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
    sides = {side: _per_round([part[side] for part in parts]) for side in ("direct", "gloo")}
    ratios = [d / g for d, g in zip(sides["direct"], sides["gloo"], strict=True)]
    return {
        **asdict(case),
        "rounds_per_burst": {side: rounds[i] for i, side in enumerate(("direct", "gloo"))},
        "seconds": {side: condensed(seconds) for side, seconds in sides.items()},
        "ratio": condensed(ratios),
        "store_requests_per_round": sum(part["requests"] for part in parts),
        "bytes_sent_per_round": round(sum(part["sent"] for part in parts)),
    }


def _per_round(bursts: list[list[tuple[float, float, int]]]) -> list[float]:
    """Seconds per round of each turn, from the bursts of all ranks."""
    return [(max(e for _, e, _ in turn) - min(b for b, _, _ in turn)) / turn[0][2] for turn in zip(*bursts, strict=True)]


# -- inside a process -----------------------------------------------------------------------------------------


def _work(case: DirectCase, rank: int, folder: str, turns: int, barrier: Any, rounds: Any, answers: Any) -> None:
    try:
        answers.put(asyncio.run(_measure(case, rank, folder, turns, barrier, rounds)))
    except Exception:  # noqa: BLE001 (every failure is reported to the measuring process)
        barrier.abort()
        answers.put(traceback.format_exc(limit=-3))


async def _measure(case: DirectCase, rank: int, folder: str, turns: int, barrier: Any, rounds: Any) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=case.workers)
    vector = np.random.default_rng(SEED + rank).standard_normal(case.elements, dtype=np.float32)
    tensor = torch.from_numpy(vector.copy())
    member = await DirectMember.join(case, rank, folder)

    def gloo(n: int) -> None:
        for _ in range(n):
            dist.all_reduce(tensor)
        tensor.zero_()  # repeated sums would overflow, and be slow

    found: dict[str, Any] = {"direct": [], "gloo": []}
    loop = asyncio.get_running_loop()
    await member.rounds(vector, 3)
    await asyncio.to_thread(barrier.wait)
    gloo(3)
    for turn in range(-1, turns):  # the first burst says how many rounds a burst has
        for side, name in enumerate(("direct", "gloo")):
            await loop.run_in_executor(None, barrier.wait)
            n = rounds[side] if turn >= 0 else LEAST_ROUNDS
            sent, requests = member.mesh.sent_bytes, member.requests
            began = time.monotonic()
            if name == "direct":
                await member.rounds(vector, n)
                found["sent"] = (member.mesh.sent_bytes - sent) / n
                found["requests"] = (member.requests - requests) / n
            else:
                gloo(n)
            ended = time.monotonic()
            if turn >= 0:
                found[name].append((began, ended, n))
            elif rank == 0:
                rounds[side] = max(LEAST_ROUNDS, min(MOST_ROUNDS, int(BURST_S * n / (ended - began))))
            await loop.run_in_executor(None, barrier.wait)
    await member.mesh.close()
    dist.destroy_process_group()
    return found


class DirectMember:
    """One worker without a model."""

    def __init__(self, case: DirectCase, rank: int, mesh: Mesh, store: Metered) -> None:
        self.mesh, self.store, self.t = mesh, store, 0
        self.group = Group(
            keys=Keys("benchmark"),
            rank=rank,
            world=case.workers,
            aggregators=case.workers,
            channel=self.store,
            policy=policy_for("bsp"),
            size=case.elements,
            dtype=np.dtype(np.float32),
            mesh=mesh,
            shared_cores=cores(),
        )
        self.collective = collective_for("k-reduce", self.group)

    @classmethod
    async def join(cls, case: DirectCase, rank: int, folder: str) -> DirectMember:
        """A member that is connected to all others."""
        transport: Transport = _TRANSPORTS[case.transport]()
        store = Metered(open_channel(f"file://{folder}"))
        mesh = await Mesh.join(
            store=store, rank=rank, attempt=0, ranks=case.workers, keys=Keys("benchmark"), token="benchmark", transports=[transport]
        )
        await until(lambda: all(mesh.connected(other) for other in range(case.workers)))
        return cls(case, rank, mesh, store)

    @property
    def requests(self) -> int:
        """Requests to the store so far."""
        made = self.store.traffic
        return made.puts + made.gets + made.polls + made.lists + made.deletes

    async def rounds(self, vector: np.ndarray, n: int) -> None:
        """What the training loop does between two computations, n times."""
        collective, status = self.collective, self.group.status
        for _ in range(n):
            t, self.t = self.t, self.t + 1
            collective.submit(t, vector, 1.0)
            upload = asyncio.ensure_future(collective.upload(t))
            reduce = asyncio.ensure_future(collective.reduce(t))
            await collective.wait(t)
            await upload
            status.applied = status.durable = t + 1
            await reduce
