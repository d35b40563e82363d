"""Clocks of other functions may be hours ahead: claims and waits that they wrote still expire."""

from __future__ import annotations

import asyncio

from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.communication.keys import Keys
from ephemeron.functions import simulation
from ephemeron.training.collectives import StalledPeers
from ephemeron.training.worker.recovery import fencing
from ephemeron.training.worker.recovery.failure_detector import FailureDetector
from ephemeron.training.worker.recovery.fencing import Claim
from ephemeron.training.worker.recovery.replacement import PeerReplacement
from ephemeron.training.worker.recovery.wait_for_graph import WaitForGraph
from ephemeron.training.worker.timeouts import Timeouts

TIMEOUT_S = 20.0
AHEAD_S = 7200.0
KEYS = Keys("run")


def test_a_claim_from_the_future_protects_a_dead_attempt_no_longer_than_any_other():
    async def main() -> None:
        channel, loop = MemoryChannel(), asyncio.get_running_loop()
        invoked: list[tuple[int, int]] = []

        async def invoke(rank: int, attempt: int, claim: Claim) -> None:
            invoked.append((rank, attempt))

        detector = FailureDetector(Timeouts(least_s=TIMEOUT_S), lifetime_s=900.0, cold_start_s=3.0, checkpoint_every=2)
        replacing = PeerReplacement(
            channel, KEYS, detector, rank=0, most=10, now=loop.time, run_now=loop.time, invoke=invoke, warn=lambda text: None
        )
        assert await fencing.claim(channel, KEYS, 1, 1, Claim(at_s=AHEAD_S, not_after=5, tries=1))
        while not invoked:
            assert loop.time() < 20 * TIMEOUT_S
            await replacing.replace(1, 5)
            await asyncio.sleep(TIMEOUT_S)
        assert invoked == [(1, 2)]
        assert loop.time() > TIMEOUT_S  # it had its time, too

    simulation.run(main())


def test_a_wait_published_by_a_clock_ahead_expires():
    async def main() -> None:
        channel, loop = MemoryChannel(), asyncio.get_running_loop()

        def of(rank: int, ahead_s: float = 0.0) -> WaitForGraph:
            return WaitForGraph(channel, KEYS, rank=rank, now=lambda: loop.time() + ahead_s, timeout_s=lambda times: times * TIMEOUT_S)

        await of(2, AHEAD_S).suspects(StalledPeers(7, [1]))  # and then it dies
        me = of(0)
        assert await me.suspects(StalledPeers(7, [2])) == [(1, 7)]
        await asyncio.sleep(2 * TIMEOUT_S)
        assert await me.suspects(StalledPeers(7, [2])) == [(2, 7)]

    simulation.run(main())
