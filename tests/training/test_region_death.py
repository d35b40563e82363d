"""A whole region dies at once: its leader with the communicator, its other functions and the daemon that starts them, by SIGKILL."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from test_daemon_death import processes_of
from training_runs import combined, make_job

from ephemeron.events import Event, Loaded, Progress, RunStarted
from ephemeron.regions.driver.region_events import members_of
from ephemeron.runs.folders import GROUPS, events_of, runs_folder
from ephemeron.training.driver import configure, train
from ephemeron.training.driver.records import read_result
from ephemeron.training.driver.result import Result
from ephemeron.training.job import RunRegion
from gates import Gate

pytestmark = [pytest.mark.usefixtures("home"), pytest.mark.slow]
EVERY = 4
FAR = (1, 2)
"""Ranks of the region that dies."""


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


class RegionKiller:
    """Kills every process of region `far` at once, when its leader has finished one of these iterations; the run waits for the first kill,
    and goes on slowly until the last one.

    Args:
        file: gate of the model.
        iterations: ascending.
    """

    def __init__(self, file: Path, *iterations: int) -> None:
        self._gate, self._left, self._run = Gate(file), list(iterations), ""
        self.model = self._gate.model(iterations[0] + 4)
        self.killed: list[tuple[int, int]] = []
        """By kill: iterations that the leader had finished, and number of processes."""
        self.back: list[int] = []
        """By kill: the iteration with which its next leader goes on."""

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._run = event.run_id
        if isinstance(event, Loaded) and event.rank == FAR[0] and len(self.back) < len(self.killed):
            self.back.append(event.iteration)
        due = isinstance(event, Progress) and event.rank == FAR[0] and len(self.back) == len(self.killed)
        if due and self._left and event.iteration >= self._left[0]:  # type: ignore[union-attr]
            del self._left[0]
            found = processes_of(runs_folder() / self._run / GROUPS / f"{self._run}-far")
            for pid in found:
                os.kill(pid, signal.SIGKILL)
            self.killed.append((event.iteration + 1, len(found)))  # type: ignore[union-attr]
            self._gate.open(0.3 if self._left else 0.0)


def trained(platform: str, kill: RegionKiller | None = None, **overrides: Any) -> Result:
    job = make_job(epochs=2, **({} if kill is None else {"model": kill.model}))
    listen = "127.0.0.1:0" if overrides.get("regions", {}).get("communicator") == "tcp" else ""
    groups = (
        RunRegion(name="near", workers=1, batch_size=24, share=1, listen=listen),
        RunRegion(name="far", workers=2, batch_size=12, share=1),
    )
    values = {"platform": platform, "regions": {"region": groups, "exchange_every": EVERY}, "checkpoint_every": EVERY}
    return train(job, configure(job, **combined(values, overrides)), on_event=kill)


def test_a_region_that_dies_twice_leaves_the_weights_as_they_are(tmp_path: Path) -> None:
    values = {"regions": {"sync": "diloco", "compression": "int4"}}
    kill = RegionKiller(tmp_path / "gate", 6, 14)
    result = trained("local", kill, **combined(values, {"regions": {"communicator": "tcp"}}))
    assert result.finished
    assert result.summary.weights_sha256 == trained("simulated", **values).summary.weights_sha256
    assert [count >= 3 for _, count in kill.killed] == [True, True], "both functions and the daemon"
    lost = [before - after for (before, _), after in zip(kill.killed, kill.back, strict=True)]
    assert max(lost) <= 2 * EVERY, "rounds that are repeated"


def test_regions_under_an_asynchronous_policy_agree_though_one_dies(tmp_path: Path) -> None:
    kill = RegionKiller(tmp_path / "gate", 7)
    result = trained("local", kill, regions={"sync": "asgd-ga:staleness=1"})
    assert result.finished
    assert len(kill.back) == 1
    assert kill.killed[0][0] - kill.back[0] <= 2 * EVERY
    hashes = {summary.weights_sha256 for place in members_of(result.folder) if (summary := read_result(place))}
    assert hashes == {result.summary.weights_sha256}
    done = {e.iteration for e in events_of(result.folder) if isinstance(e, Progress) and e.rank == FAR[0]}
    assert done == set(range(max(done) + 1))
