"""Real processes over direct channels whose connections are cut during a run."""

from __future__ import annotations

from typing import Any

import pytest
from training_runs import make_job

from ephemeron.events import FaultFired
from ephemeron.training.driver import configure, train
from ephemeron.training.job import Target, parse_fault

JOB = make_job(model=Target(target="tiny:mlp"), epochs=2)


def go(*faults: str, channel: str = "direct") -> str:
    events: list[Any] = []
    c = configure(JOB, platform="local", channel=channel, workers=3, aggregators=2, batch_size=48)
    result = train(JOB, c, faults=[parse_fault(f) for f in faults], on_event=events.append, check=False)
    assert result.summary.status == "finished", result.causes
    assert sum(isinstance(e, FaultFired) for e in events) == len(faults)
    return result.summary.weights_sha256


@pytest.mark.slow
def test_partitions_change_no_weight() -> None:
    undisturbed = go(channel="folder")
    assert go("cut:rank=0,to=2,iteration=5,seconds=3") == undisturbed
    assert go(*(f"cut:rank=0,to={r},iteration=5,seconds=4" for r in (1, 2))) == undisturbed
