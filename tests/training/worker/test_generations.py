"""Agreement on a generation: what one attempt of rank 0 has stored, no other attempt overwrites."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from ephemeron.communication.channels.base import Buffer
from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.communication.keys import Keys
from ephemeron.config.typed import plain
from ephemeron.functions.simulation import run
from ephemeron.training.job.generation import Generation
from ephemeron.training.worker.recovery.generations import GenerationChange, decode_members

NOW = Generation(
    number=0, from_iteration=0, from_epoch=0, workers=2, memory_mb=1769, aggregators=1, batch_size=4, nonaggregator_batch_size=4
)
WANTED = dataclasses.replace(NOW, number=1, from_iteration=20, from_epoch=2, workers=3)
OTHERS = dataclasses.replace(WANTED, workers=4)
KEYS = Keys("run")


class Raced(MemoryChannel):
    """Another attempt stores its generation between this one's look and its put."""

    def __init__(self, theirs: Generation) -> None:
        super().__init__()
        self.theirs: Generation | None = theirs

    async def put(self, key: str, buffers: Sequence[Buffer], *, create: bool = False) -> None:
        theirs, self.theirs = self.theirs, None
        if theirs is not None:
            await super().put(key, [json.dumps(plain(theirs)).encode()], create=True)
        await super().put(key, buffers, create=create)


def change(channel: MemoryChannel) -> GenerationChange:
    async def check_fence() -> None: ...

    spec = SimpleNamespace(scheduled=WANTED, current_generation=NOW, timeline=None, iterations=100, cold_start_s=0.0)
    lifecycle: Any = SimpleNamespace(
        spec=spec,
        channel=channel,
        keys=KEYS,
        rank=0,
        staleness=0,
        resizes=False,
        resize_request=None,
        check_fence=check_fence,
        run_now=lambda: 0.0,
        timeouts=SimpleNamespace(typical_s=0.0),
        invocation=SimpleNamespace(emit=lambda event: None),
        handoff=SimpleNamespace(load_s=0.0),
    )
    return GenerationChange(lifecycle, None)


@pytest.mark.parametrize("iteration", [16, 17])
def test_a_generation_that_another_attempt_stores_meanwhile_is_the_one_that_counts(iteration: int) -> None:
    channel = Raced(OTHERS)
    one = change(channel)
    run(one.prepare(iteration))
    stored = decode_members(channel.objects[KEYS.members(1)], key="members")
    assert one.agreed == stored == OTHERS


def test_the_first_attempt_stores_what_is_wanted_and_the_next_one_finds_it() -> None:
    channel = MemoryChannel()
    for _ in range(2):
        one = change(channel)
        run(one.prepare(17))
        assert one.agreed == WANTED == decode_members(channel.objects[KEYS.members(1)], key="members")
