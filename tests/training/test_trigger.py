"""Calls go out as often as they should, and a replacement is started as soon as the platform has a place for it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from training_runs import synthetic

from ephemeron.errors import InvocationRefused
from ephemeron.events import Invoked
from ephemeron.training.driver import run_driver


class Full:
    """A platform that refuses the first calls."""

    def __init__(self, refusals: int, binding: str) -> None:
        self.refusals, self.binding, self.started = refusals, binding, 0

    async def invoke(self, call: object) -> None:
        if self.refusals:
            self.refusals -= 1
            raise InvocationRefused("5 functions run already", binding=self.binding)
        self.started += 1


def replace(platform: Full) -> None:
    watching = run_driver.RunDriver.__new__(run_driver.RunDriver)
    watching.platform = platform
    watching._quotas_mb = {0: 512}
    watching.call = lambda *told, **more: SimpleNamespace()
    asyncio.run(watching._replace(0, 1))


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_driver, "AGAIN_S", 0.0)


def test_where_all_places_are_taken_it_waits_for_one() -> None:
    platform = Full(7, "concurrency")
    replace(platform)
    assert (platform.refusals, platform.started) == (0, 1)


@pytest.mark.parametrize(("refusals", "binding"), [(1, "authorisation"), (run_driver.MOST_REFUSALS, "concurrency")])
def test_what_waiting_does_not_mend_is_raised(refusals: int, binding: str) -> None:
    platform = Full(refusals, binding)
    with pytest.raises(InvocationRefused):
        replace(platform)
    assert platform.started == 0


@pytest.mark.parametrize("rank", [1, 12])
def test_a_duplicate_concerns_the_rank_that_it_names(rank: int) -> None:
    run = synthetic(workers=13, samples=26, batch_size=1, epochs=1, faults=[f"duplicate:rank={rank}"])
    doubled = [e.rank for e in run.of(Invoked) if e.reason == "duplicate"]
    assert doubled == [rank]
