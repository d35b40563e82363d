"""Real processes over direct channels whose connections are cut during a run."""

from __future__ import annotations

from typing import Any

import pytest
from training_runs import make_job, real

from ephemeron.events import FaultFired
from ephemeron.training.driver import configure, train
from ephemeron.training.job import Target, parse_fault

JOB = make_job(model=Target(target="tiny:mlp"), epochs=2)
SHAPE = {"workers": 3, "aggregators": 2, "batch_size": 48}


@pytest.mark.slow
@pytest.mark.usefixtures("home")
def test_partitions_change_no_weight() -> None:
    """One pair, and later rank 0 from all others."""
    faults = ["cut:rank=0,to=2,iteration=3,seconds=3", *(f"cut:rank=0,to={r},iteration=12,seconds=4" for r in (1, 2))]
    events: list[Any] = []
    c = configure(JOB, platform="local", channel="direct", **SHAPE)
    result = train(JOB, c, faults=[parse_fault(f) for f in faults], on_event=events.append, check=False)
    assert result.summary.status == "finished", result.causes
    assert sum(isinstance(e, FaultFired) for e in events) == len(faults)
    assert result.summary.weights_sha256 == real(JOB, **SHAPE).sha
