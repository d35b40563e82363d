"""An epoch that has ended before a hand-off is decided on as it was measured."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from ephemeron.training.worker.recovery.checkpoint import EndedEpoch
from ephemeron.training.worker.recovery.next_generation import EpochDecision


def lifecycle():
    spec = SimpleNamespace(timeline=SimpleNamespace(starts_epoch=lambda iteration: False))
    return SimpleNamespace(spec=spec, now=lambda: 0.0, invocation=SimpleNamespace(trace=SimpleNamespace(totals={"compute": 0.0})))


def test_an_epoch_that_was_handed_over_is_handed_on():
    measured = EndedEpoch(seconds=7.0, loss=0.5, phases={"compute": 6.0})
    deciding = EpochDecision(lifecycle(), lambda epoch: None, measured)
    assert deciding.ended({}) == measured
    assert deciding.ended({"accuracy": 1.0}) == EndedEpoch(seconds=7.0, loss=0.5, phases={"compute": 6.0}, metrics={"accuracy": 1.0})


def test_iterations_after_it_are_of_another_epoch():
    deciding = EpochDecision(lifecycle(), lambda epoch: None, EndedEpoch(seconds=7.0, loss=0.5))
    asyncio.run(deciding.after(3, {}))
    deciding.record(2.0, 4)
    assert deciding.ended({}).loss == 2.0
