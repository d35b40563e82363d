"""The end of a run: metrics over all slices, and an empty channel but for the result."""

from __future__ import annotations

import asyncio
import math

import pytest

from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.communication.keys import Keys
from ephemeron.training.metrics import means
from ephemeron.training.worker.finalize import clear
from ephemeron.training.worker.trainer import EvaluationSums


def test_metrics_weigh_slices_by_their_samples():
    got = means([EvaluationSums(6.0, 1, 2), EvaluationSums(4.0, 7, 8), EvaluationSums(0.0, 0, 0)])
    assert got == {"loss": pytest.approx(1.0), "accuracy": pytest.approx(0.8)}


def test_positions_are_counted_and_one_slice_without_answers_is_enough_for_no_accuracy():
    assert means([EvaluationSums(1.0, 6, 2, 8), EvaluationSums(1.0, 2, 2, 8)])["accuracy"] == pytest.approx(0.5)
    assert means([EvaluationSums(1.0, 6, 2, 8), EvaluationSums(1.0, None, 2, 0)]) == {"loss": 0.5, "accuracy": None}


def test_a_loss_that_is_not_finite_is_none():
    assert means([EvaluationSums(math.nan, 1, 2)]) == {"loss": None, "accuracy": 0.5}


@pytest.mark.parametrize("slices", [[], [EvaluationSums(0.0, 0, 0)]])
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
