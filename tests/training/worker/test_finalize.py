"""End of a run: metrics over all slices, and a channel that holds only the result."""

from __future__ import annotations

import asyncio
import math
import sys

import pytest

from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.communication.channels.run_channel import RunChannel
from ephemeron.communication.keys import Keys
from ephemeron.communication.signing import SigningKey
from ephemeron.functions import simulation
from ephemeron.functions.base import Call
from ephemeron.functions.context import Context
from ephemeron.prices import load_prices
from ephemeron.runs.metrics import EvaluationSums, means
from ephemeron.training.job import Configuration, StageOptions, Target
from ephemeron.training.worker.finalize import clear
from ephemeron.training.worker.loop import run_worker
from ephemeron.training.worker.request import WorkerRequest
from ephemeron.training.worker.spec import RunSpec, Stages


def evaluation(loss, correct, samples, counted=None):
    accuracy = None if correct is None else (correct, samples if counted is None else counted)
    return EvaluationSums(samples, {"loss": (loss, samples), "accuracy": accuracy})


def test_metrics_weigh_slices_by_their_samples():
    got = means([evaluation(6.0, 1, 2), evaluation(4.0, 7, 8), EvaluationSums()])
    assert got == {"loss": pytest.approx(1.0), "accuracy": pytest.approx(0.8)}


def test_positions_are_counted_and_one_slice_without_answers_is_enough_for_no_accuracy():
    assert means([evaluation(1.0, 6, 2, 8), evaluation(1.0, 2, 2, 8)])["accuracy"] == pytest.approx(0.5)
    assert means([evaluation(1.0, 6, 2, 8), evaluation(1.0, None, 2, 0)]) == {"loss": 0.5, "accuracy": None}


def test_a_loss_that_is_not_finite_is_none():
    assert means([evaluation(math.nan, 1, 2)]) == {"loss": None, "accuracy": 0.5}


@pytest.mark.parametrize("slices", [[], [EvaluationSums()]])
def test_no_test_set_no_means(slices):
    assert means(slices) == {"loss": None}


def test_the_result_and_the_specification_stay_and_so_do_other_runs():
    async def go():
        channel, keys, other = MemoryChannel(), Keys("run"), Keys("run-2")
        kept = {keys.result, keys.spec, other.spec, other.merged(1, 0)}
        for key in (*kept, keys.code, keys.init, keys.data(0), keys.merged(3, 0), keys.state(1, 5), keys.done(1)):
            await channel.put(key, [b"x"])
        await clear(channel, keys)
        assert set(channel.objects) == kept

    asyncio.run(go())


async def _unused(*_):
    raise AssertionError("a late duplicate neither computes nor invokes")


def test_a_late_duplicate_leaves_the_weights_of_a_pipeline():
    """It ends before it has read the specification, which says in how many parts the weights are."""
    stages = Stages(
        replicas=1,
        micro_batches=1,
        schedule="gpipe",
        recompute=False,
        fed=(True, True),
        shares=(0.5, 0.5),
        test_samples=(0,),
        evaluates=False,
    )
    target = Target(target="m:f")
    spec = RunSpec(
        run_id="run",
        model=target,
        loss=target,
        optimizer=target,
        epochs=1,
        seed=0,
        dtype="float32",
        samples=8,
        configuration=Configuration(workers=2, stages=StageOptions(count=2), batch_size=4).resolved(),
        prices=load_prices("objects"),
        stages=stages,
    )

    async def go():
        channel, keys = MemoryChannel(), Keys("run")
        framed = RunChannel(channel, owner="test", signing=SigningKey.from_text(""))
        kept = {keys.result, keys.spec, keys.part(0), keys.part(1)}
        for key in kept:
            await framed.put(key, [spec.to_bytes() if key == keys.spec else b"x"])
        loop = asyncio.get_running_loop()
        ctx = Context(
            call=Call(run="run", rank=1, attempt=0, memory_mb=512, lifetime_s=900.0, channel=""),
            invocation="late",
            channel=channel,
            emit=lambda event: None,
            invoke=_unused,
            compute=_unused,
            origin=loop.time(),
            deadline=loop.time() + 900.0,
            die=lambda: sys.exit(),
        )
        assert (await run_worker(ctx, WorkerRequest())).outcome == "duplicate"
        assert set(channel.objects) == kept

    simulation.run(go())
