"""Promise: a fault of the store that passes costs time and requests, never the run, its weights or a function."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from training_runs import Run, synthetic

from ephemeron.events import Invoked, Note
from ephemeron.testing.flaky import seeded

SETTINGS: dict[str, Any] = {"checkpoint_every": 4, "workers": 4, "samples": 64 * 10, "epochs": 1}
WAYS: dict[str, dict[str, Any]] = {
    "bsp": {"aggregators": 2, "sync": "bsp"},
    "hap": {"aggregators": 2, "sync": "hap", "pattern": "pipelined"},
    "asp": {"aggregators": 2, "sync": "asp"},
    "hsp": {"aggregators": 2, "sync": "hsp", "epochs": 2, "samples": 64 * 5},
    "server": {"pattern": "parameter-server"},
    "server-asp": {"pattern": "parameter-server", "sync": "asp"},
}


def notes(run: Run) -> list[str]:
    return [e.text for e in run.of(Note)]


@pytest.fixture(scope="module")
def undisturbed() -> Callable[[str], Run]:
    made: dict[str, Run] = {}

    def of(way: str) -> Run:
        if way not in made:
            made[way] = synthetic(**{**SETTINGS, **WAYS[way]})
        return made[way]

    return of


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(2))
def test_a_tenth_of_all_requests_fail(way, seed, undisturbed):
    decide = seeded(seed, rate=0.1)
    run = synthetic(decide=lambda now, operation, key: decide(operation, key), **{**SETTINGS, **WAYS[way]})
    assert run.ending.status == "finished", run.ending.causes
    assert len(run.of(Invoked)) == 4
    assert run.left == {"run/spec", "run/result"}
    if "asp" not in way and way != "hsp":
        assert run.sha == undisturbed(way).sha
    requests = [sum(getattr(r.trigger.ledger.traffic, n) for n in ("puts", "gets", "polls")) for r in (run, undisturbed(way))]
    assert requests[0] > requests[1]  # they are paid for


@pytest.mark.parametrize("way", ["bsp", "hap", "server"])
@pytest.mark.parametrize("how", ["throttled", "unavailable"])
def test_minutes_without_the_store_cost_minutes(way, how, undisturbed):
    whole = undisturbed(way)
    for start in (0.0, 2.0, 4.0):
        run = synthetic(
            decide=lambda now, operation, key, start=start: how if start <= now < start + 200 else None, **SETTINGS, **WAYS[way]
        )
        assert run.sha == whole.sha
        assert len(run.of(Invoked)) == 4  # nobody is suspected of the store's silence
        assert 200 < run.trigger.ledger.ended_at < 200 + 30 + whole.trigger.ledger.ended_at
        assert any("has not answered" in text for text in notes(run))
        assert any("answers again" in text for text in notes(run))


def test_a_store_that_refuses_fails_the_run_at_once():
    run = synthetic(decide=lambda now, operation, key: "refused" if now > 3 else None, **SETTINGS, **WAYS["bsp"])
    assert run.ending.status == "failed"
    assert any("permission denied" in cause for cause in run.ending.causes)
    assert run.trigger.ledger.ended_at < 6


def test_the_time_is_an_option():
    run = synthetic(decide=lambda now, operation, key: "unavailable" if now > 3 else None, channel_retry_s=20.0, **SETTINGS, **WAYS["bsp"])
    assert run.ending.status == "failed"
    assert any("requests in 20 s" in cause for cause in run.ending.causes)
    assert 20 < run.trigger.ledger.ended_at < 30


@pytest.mark.parametrize("way", ["bsp", "asp", "server"])
def test_a_store_that_forgets_everything_ends_the_run_and_is_named(way):
    """A cache without persistence that is started again: nobody is replaced for it."""
    whole = synthetic(**{**SETTINGS, **WAYS[way]})
    failed = 0
    for n in range(12):

        def forgets(trigger: Any, at: float = 2.0 + 0.07 * n) -> None:
            asyncio.get_running_loop().call_at(at, trigger.platform.store.inner.objects.clear)

        run = synthetic(until=forgets, decide=lambda now, operation, key: None, **{**SETTINGS, **WAYS[way]})
        assert len(run.of(Invoked)) == 4
        if run.ending.status == "finished":  # at that moment nothing was on its way
            assert run.sha == whole.sha or way == "asp"
            continue
        failed += 1
        assert any("has lost the run's objects" in cause and "run/spec" in cause for cause in run.ending.causes)
    assert failed
