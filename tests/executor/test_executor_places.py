"""How many functions an executor takes, unless told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ephemeron.errors import PlanInfeasible
from ephemeron.executor import places
from ephemeron.functions.base import Limits


class Account:
    """A cloud in which so many functions may run at once."""

    def __init__(self, concurrency: int) -> None:
        self.concurrency = concurrency

    def settings(self) -> Any:
        return self

    def located(self) -> Any:
        return self

    def recorded(self, settings: Any, limits: Limits) -> Any:
        return settings

    def admit(self, wanted: Any, settings: Any, secrets: Any) -> tuple[Any, Limits]:
        if wanted.workers > self.concurrency:
            raise PlanInfeasible(f"{wanted.workers} functions are more than {self.concurrency}", binding="concurrency")
        return replace(wanted, memory_mb=1769, lifetime_s=900.0), Limits(concurrency=self.concurrency)


@pytest.mark.parametrize(("concurrency", "workers"), [(10, 10), (1000, 100), (1, 1)])
def test_the_default_is_no_more_than_may_run(monkeypatch: pytest.MonkeyPatch, concurrency: int, workers: int) -> None:
    """A new account may run ten functions: the default of 100 was refused."""
    monkeypatch.setattr(places, "cloud", lambda name: Account(concurrency))
    options, _, _ = places.admitted(places.PlaceOptions(platform="aws", channel="s3://bucket/prefix"))
    assert options.max_workers == workers


def test_more_than_may_run_are_refused_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "cloud", lambda name: Account(10))
    asked = places.PlaceOptions(platform="aws", channel="s3://bucket/prefix", max_workers=11)
    with pytest.raises(PlanInfeasible, match="11 functions are more than 10"):
        places.admitted(asked)
