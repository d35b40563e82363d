"""The end of a run: metrics over all slices, and an empty channel but for the result."""

from __future__ import annotations

import asyncio
import math

import pytest

from ephemeron.channels.keys import Keys
from ephemeron.channels.memory import MemoryChannel
from ephemeron.metrics import means
from ephemeron.worker.finish import clear
from ephemeron.worker.trainer import Evaluation


def test_metrics_weigh_slices_by_their_samples():
    got = means([Evaluation(6.0, 1, 2), Evaluation(4.0, 7, 8), Evaluation(0.0, 0, 0)])
    assert got == {"loss": pytest.approx(1.0), "accuracy": pytest.approx(0.8)}


def test_positions_are_counted_and_one_slice_without_answers_is_enough_for_no_accuracy():
    assert means([Evaluation(1.0, 6, 2, 8), Evaluation(1.0, 2, 2, 8)])["accuracy"] == pytest.approx(0.5)
    assert means([Evaluation(1.0, 6, 2, 8), Evaluation(1.0, None, 2, 0)]) == {"loss": 0.5, "accuracy": None}


def test_a_loss_that_is_not_finite_is_none():
    assert means([Evaluation(math.nan, 1, 2)]) == {"loss": None, "accuracy": 0.5}


@pytest.mark.parametrize("slices", [[], [Evaluation(0.0, 0, 0)]])
def test_no_test_set_no_means(slices):
    assert means(slices) == {"loss": None, "accuracy": None}


def test_the_result_and_the_specification_stay_and_so_do_other_runs():
    async def go():
        channel, keys, other = MemoryChannel(), Keys("run"), Keys("run-2")
        kept = {keys.result, keys.spec, other.spec, other.merged(1, 0)}
        for key in (*kept, keys.code, keys.init, keys.data(0), keys.merged(3, 0), keys.state(1, 5), keys.done(1)):
            await channel.put(key, [b"x"])
        await clear(channel, keys)
        assert set(channel.objects) == kept

    asyncio.run(go())
