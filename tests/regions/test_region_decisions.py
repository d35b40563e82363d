"""Decisions of a region: the first attempt that stores one determines it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.errors import RegionSuperseded
from ephemeron.functions.simulation import run
from ephemeron.regions.leader import Decisions
from ephemeron.regions.policies import parse_sync
from ephemeron.regions.records import RegionKeys
from ephemeron.regions.region_state import RegionState

KEYS = RegionKeys("run")
START = np.arange(6, dtype=np.float32)


def attempt(channel: MemoryChannel, number: int) -> tuple[Decisions, RegionState]:
    lifecycle: Any = SimpleNamespace(attempt=number, channel=channel, now=lambda: 0.0, wait_timeout_s=lambda: 60.0)
    return Decisions(lifecycle, KEYS), RegionState(parse_sync("sma"), ("east", "west"), "none", START)


def test_a_decision_is_never_overwritten_and_another_one_is_refused() -> None:
    async def go() -> None:
        channel = MemoryChannel()
        first, state = attempt(channel, 1)
        await first.make(5, START + 1, state)()
        stored = bytes(channel.objects[KEYS.decision(5)])
        late, state = attempt(channel, 0)  # replaced without knowing it
        with pytest.raises(RegionSuperseded, match="attempt 1 of this region's rank 0 has decided iteration 5"):
            await late.make(5, START + 2, state)()
        assert bytes(channel.objects[KEYS.decision(5)]) == stored
        third, state = attempt(channel, 2)
        np.testing.assert_array_equal(await third.restore(5, state), START + 1)

    run(go())


def test_the_same_decision_of_another_attempt_is_taken_over_with_its_state() -> None:
    async def go() -> None:
        channel = MemoryChannel()
        first, state = attempt(channel, 1)
        await first.make(5, START + 1, state)()
        stored = bytes(channel.objects[KEYS.decision(5)])
        second, state = attempt(channel, 2)
        await second.make(5, START + 1, state)()
        assert bytes(channel.objects[KEYS.decision(5)]) == stored
        await second.make(9, START + 3, state)()
        await second.make(12, START + 4, state)()
        gone = second.forget(12)
        assert {KEYS.decision(5), KEYS.state(5, 1), KEYS.state(5, 2)} <= set(gone)

    run(go())
