"""Regions of local functions that exchange over TCP: the weights of an exchange through a store, whichever functions are killed."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from training_runs import combined, make_job

from ephemeron.events import FaultFired
from ephemeron.runs.folders import events_of
from ephemeron.training.driver import configure, train
from ephemeron.training.driver.result import Result
from ephemeron.training.job import Fault, RunRegion

pytestmark = [pytest.mark.usefixtures("home"), pytest.mark.slow]


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


def trained(platform: str, *, faults: Any = (), **overrides: Any) -> Result:
    job = make_job(epochs=2)
    listen = "127.0.0.1:0" if overrides.get("regions", {}).get("communicator") == "tcp" else ""
    groups = (
        RunRegion(name="near", workers=1, batch_size=24, share=2, listen=listen),
        RunRegion(name="far", workers=1, batch_size=12, share=1),
    )
    values = {
        "platform": platform,
        "regions": {"region": groups, "exchange_every": 5, "sync": "diloco:fragments=2,delay=2"},
        "checkpoint_every": 4,
    }
    return train(job, configure(job, **combined(values, overrides)), faults=faults)


def test_weights_over_tcp_are_those_of_the_store_though_leaders_are_killed() -> None:
    faults = [Fault(kind="kill", rank=0, iteration=12, phase="wait"), Fault(kind="kill", rank=1, iteration=7, phase="compute")]
    killed = trained("local", regions={"communicator": "tcp"}, faults=faults)
    assert killed.finished
    events = events_of(killed.folder)
    assert sum(isinstance(event, FaultFired) for event in events) == 2
    assert killed.summary.weights_sha256 == trained("simulated").summary.weights_sha256
    near, far = killed.summary.regions
    assert min(near.wan_bytes_sent, near.wan_bytes_received, far.wan_bytes_sent, far.wan_bytes_received) > 0
    for region in (near, far):  # what was on its way when an exchange was told differs
        assert 0.5 * region.wan_bytes_sent < region.wan_kernel_bytes_sent < 2 * region.wan_bytes_sent
        assert 0.5 * region.wan_bytes_received < region.wan_kernel_bytes_received < 2 * region.wan_bytes_received
