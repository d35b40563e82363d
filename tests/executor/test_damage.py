"""Every kind of key of an executor damaged, cut short, replaced or removed once, in virtual time: the map ends, right or with the key."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ephemeron.communication.channels.parameter_server import MemoryParameterServer
from ephemeron.errors import EphemeronError
from ephemeron.executor import FunctionExecutor
from ephemeron.functions import simulated
from ephemeron.testing.damage import DAMAGES, Damage, damage_first, removed

KINDS = ("code", "work", "lease", "log", "edge", "lost", "counter", "data", "in", "out", "live", "closed")


def is_of(kind: str, key: str) -> bool:
    """Whether a key is of a kind of `object_keys`."""
    of, _, name = key.partition(".")[2].partition("/")
    if of == "work":
        dots = name.split(".")
        found = "closed" if name == "closed" else "work" if len(dots) == 1 else {"l": "lease"}.get(dots[1][0], "beat")
    else:
        found = "counter" if of.startswith("m") and len(of) == 3 else of
    return kind == found


def refuse(x: float) -> float:
    raise ValueError(f"no {x}")


def mapped(monkeypatch: pytest.MonkeyPatch, kind: str, damage: Damage, *, late: bool = False) -> tuple[list[str], list[Any], list[str]]:
    """A map with large and small arguments and results, and trees: the damaged key, results, and errors of those that have none."""
    happened: list[str] = []

    class Damaged(MemoryParameterServer):
        def __init__(self) -> None:
            super().__init__()
            damage_first(self, lambda key: is_of(kind, key), damage, happened, late=late)

    monkeypatch.setattr(simulated, "MemoryParameterServer", Damaged)
    values, errors = list[Any](), list[str]()
    with FunctionExecutor(platform="simulated", max_workers=2, retries=1) as pool:
        futures = [
            pool.submit(lambda a: a.sum(), np.arange(20_000.0)),
            pool.submit(np.zeros, 20_000),
            *(pool.submit(abs, -n) for n in range(8)),
            pool.map_reduce(abs, range(20), max, chunksize=4, fan_in=3),
            pool.map_reduce(refuse, range(9), max, chunksize=3, fan_in=2),
        ]
        for future in futures:
            try:
                values.append(future.result(timeout=120))
            except EphemeronError as e:
                values.append(None)
                errors.append(str(e))
    return happened, values, errors


def check(happened: list[str], values: list[Any], errors: list[str], damage: Damage) -> None:
    """Results are those of an undisturbed map; where there are none, but for those of the failing tree, an error names the key."""
    wanted: list[Any] = [np.arange(20_000.0).sum(), np.zeros(20_000), *range(8), 19, None]
    assert all(got is None or np.array_equal(got, want) for got, want in zip(values, wanted, strict=True))
    assert len(errors) == sum(value is None for value in values)
    for error in errors:
        queue = happened[0].partition(".")[0]  # of a lost edge or counter only the queue can be named
        assert happened[0] in error or "ValueError: no" in error or (damage is removed and queue in error), (happened, error)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_map_ends(kind: str, damage: Damage, late: bool, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    happened, values, errors = mapped(monkeypatch, kind, damage, late=late)
    if not happened:
        assert late, "every kind is put"
        pytest.skip("nobody reads an object of this kind: its name says all")
    check(happened, values, errors, damage)
