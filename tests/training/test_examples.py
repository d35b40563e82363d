"""The jobs in `examples/` train."""

import dataclasses
from pathlib import Path

import pytest

import ephemeron

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def job():
    loaded = ephemeron.load_job(EXAMPLES / "superresolution" / "job.toml")
    return dataclasses.replace(
        loaded, epochs=2, model=dataclasses.replace(loaded.model, options={"width": 4, "blocks": 1}),
        data=dataclasses.replace(loaded.data, options={"count": 40, "size": 16}),
    )  # fmt: skip


def test_superresolution_learns_and_reports_no_accuracy(job, home):
    configuration = ephemeron.configure(job, platform="simulated", workers=2, batch_size=4)
    seen = []
    result = ephemeron.train(job, configuration, on_event=seen.append)
    losses = [e.sums["loss"][0] / e.samples for e in seen if e.kind == "evaluated"]
    assert result.summary.metrics.get("accuracy") is None
    assert losses[-1] < losses[0]
