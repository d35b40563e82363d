"""The end of a run: metrics over all slices, and an empty channel but for the result."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from ephemeron.channels.keys import Keys
from ephemeron.channels.memory import MemoryChannel
from ephemeron.worker.finish import clear, metrics
from ephemeron.worker.trainer import Evaluation


def test_metrics_weigh_slices_by_their_samples():
    got = metrics([Evaluation(6.0, 1, 2), Evaluation(4.0, 7, 8), Evaluation(0.0, 0, 0)])
    assert got == {"loss": pytest.approx(1.0), "accuracy": pytest.approx(0.8)}


@pytest.mark.parametrize("slices", [[], [Evaluation(0.0, 0, 0)]])
def test_no_test_set_no_metrics(slices):
    assert metrics(slices) == {"loss": None, "accuracy": None}


def test_the_result_and_the_specification_stay_and_so_do_other_runs():
    async def go():
        channel, keys, other = MemoryChannel(), Keys("run"), Keys("run-2")
        kept = {keys.result, keys.spec, other.spec, other.merged(1, 0)}
        for key in (*kept, keys.code, keys.init, keys.data(0), keys.merged(3, 0), keys.state(1, 5), keys.done(1)):
            await channel.put(key, [b"x"])
        await clear(SimpleNamespace(channel=channel, keys=keys))
        assert set(channel.objects) == kept

    asyncio.run(go())
