"""Every kind of object of regions damaged, cut short, replaced or removed once: the weights of an undisturbed run, or the key."""

from __future__ import annotations

import asyncio
import sys
from functools import cache
from typing import Any

import pytest
from test_region_faults import SLOW_WORLD
from training_runs import make_job

from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.errors import EphemeronError
from ephemeron.testing.damage import DAMAGES, Damage, damage_first, kind_of
from ephemeron.training.driver import configure, train
from ephemeron.training.job import RunRegion
from random_schedules import seeds

pytestmark = [pytest.mark.usefixtures("home"), pytest.mark.slow]
TWO = (RunRegion(name="near", workers=2, batch_size=24), RunRegion(name="far", workers=1, batch_size=24))
ENDLESS_S = 100_000.0


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


def trained(monkeypatch: pytest.MonkeyPatch, policy: str, kind: str, damage: Damage, *, late: bool) -> tuple[list[str], set[str], str, str]:
    """A run of two regions: the damaged key, the kinds of all keys, the weights, and why there are none."""
    happened, kinds = list[str](), set[str]()
    made = MemoryChannel.__init__

    def make(self: MemoryChannel) -> None:
        made(self)
        damage_first(self, lambda key: kind_of(_name(key)) == kind, damage, happened, late=late)
        publish = self.publish

        def published(key: str, data: bytes) -> None:
            if asyncio.get_running_loop().time() > ENDLESS_S:
                raise KeyboardInterrupt("endless")
            kinds.add(kind_of(_name(key)))
            publish(key, data)

        self.publish = published  # type: ignore[method-assign]

    monkeypatch.setattr(MemoryChannel, "__init__", make)
    job = make_job(epochs=1, simulation=SLOW_WORLD)
    values: dict[str, Any] = {
        "platform": "simulated",
        "regions": {"region": TWO, "exchange_every": 3, "sync": policy},
        "checkpoint_every": 4,
    }
    try:
        result = train(job, configure(job, **values))
    except EphemeronError as e:
        return happened, kinds, "", str(e)
    if not result.finished:
        return happened, kinds, "", str(result)
    return happened, kinds, result.summary.weights_sha256, ""


def _name(key: str) -> str:
    """A key without the name of its run."""
    return key.partition("/")[2]


@cache
def undisturbed(policy: str) -> tuple[set[str], str]:
    """The kinds of all keys, and the weights, where nothing is damaged."""
    with pytest.MonkeyPatch.context() as m:
        _, kinds, whole, _ = trained(m, policy, "", DAMAGES[0], late=False)
    assert whole
    return kinds, whole


EACH = [(damage, late) for late in (False, True) for damage in DAMAGES]


@pytest.mark.parametrize("policy", ["diloco", "ama:staleness=2"])
@pytest.mark.parametrize("kind", ["groups/far/#.#", "region/#", "region/out/#.#", "groups/members/near.#"])
def test_regions_end(policy: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the lanes each damage comes to each kind under one of the policies."""
    kinds, whole = undisturbed(policy)
    assert kind in kinds
    for damage, late in seeds(EACH if policy == "diloco" else EACH[1:], 2):
        with monkeypatch.context() as m:
            happened, _, sha, why = trained(m, policy, kind, damage, late=late)
        assert happened or late
        assert sha == whole or (sha and policy != "diloco") or happened[0] in why, (happened, damage, late, why)
