"""Is this random? Asked of datasets and steps of every kind."""

from __future__ import annotations

import itertools
import os
import random
import time
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from random_worlds import Cropped, jitter

from ephemeron.data.flow import Flow
from ephemeron.data.flow.determinism import Findings, cacheable_stages, digest, examine, in_child, trial_indices
from ephemeron.data.flow.sample_loader import SampleLoader


class Still:
    """Sample i is (an array of i, i)."""

    def __init__(self, samples: int = 40) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> tuple[Any, int]:
        return np.full(3, i, dtype=np.float32), i


class Entropy(Still):
    """Draws from the operating system."""

    def __getitem__(self, i: int) -> tuple[Any, int]:
        return np.random.default_rng().random(3), i


class Lazy(Still):
    """Draws once, when it is first asked: for a permutation that it keeps."""

    order: list[int] | None = None

    def __getitem__(self, i: int) -> tuple[Any, int]:
        if self.order is None:
            self.order = random.sample(range(self.samples), self.samples)
        return super().__getitem__(self.order[i])


class Deadly(Still):
    def __getitem__(self, i: int) -> tuple[Any, int]:
        os._exit(3)


class Broken(Still):
    def __getitem__(self, i: int) -> tuple[Any, int]:
        raise OSError("gone")


def doubled(data: Any) -> Any:
    data *= 2  # in place: what was compared before must not change with it
    return data


def failing(data: Any) -> Any:
    raise ValueError("always")


def rarely(data: Any) -> Any:
    return -data if random.random() < 1e-9 else data


def noisy(data: Any) -> Any:
    return data + random.random()


def unseeded(data: Any) -> Any:
    return data + int.from_bytes(os.urandom(4), "little")


def loading(dataset: Any, *steps: Any, cached: int = 0) -> SampleLoader:
    flow = Flow("test/asked").dataset(dataset)
    for number, step in enumerate(steps):
        control: Any = "can-cache" if number < cached else "no-cache"
        flow = flow.map_data(f"{number} {step.__name__}", step, cache_control=control)
    return SampleLoader(flow, dataset)


@pytest.mark.parametrize(
    ("asked", "fixed", "first", "of_the_system"),
    [
        (loading(Still(), doubled), 1, "", ""),
        (loading(Lazy(), doubled), 1, "", ""),
        (loading(Still(), doubled, noisy, doubled), 1, "1 noisy", ""),
        (loading(Still(), doubled, rarely), 1, "1 rarely", ""),
        (loading(Still(), doubled, jitter), 1, "1 jitter", ""),
        (loading(Still(), doubled, unseeded), 1, "1 unseeded", "1 unseeded"),
        (loading(Still(), noisy, unseeded), 0, "0 noisy", "1 unseeded"),
        (loading(Entropy(), doubled), -1, "read", "read"),
        (loading(Broken(), doubled), -1, "read", ""),
        (loading(Still(), doubled, failing, doubled), 1, "1 failing", ""),
        (loading(Still(0), doubled), -1, "read", ""),
        *((loading(Cropped(kind=kind), doubled), -1, "read", "") for kind in ("numpy", "random", "torch", "own")),
    ],
)
def test_what_is_random(asked: SampleLoader, fixed: int, first: str, of_the_system: str) -> None:
    pytest.importorskip("torch")
    found = examine(asked)
    assert (found.fixed, found.random, found.unseeded, found.frozen) == (fixed, first, of_the_system, ())


def test_what_is_marked_can_cache_is_fixed_and_said() -> None:
    found = examine(loading(Still(), noisy, doubled, noisy, cached=2))
    assert (found.fixed, found.random, found.frozen) == (2, "2 noisy", ("0 noisy",))
    found = examine(loading(Still(), doubled, unseeded, doubled, cached=3))
    assert (found.fixed, found.unseeded, found.frozen) == (1, "1 unseeded", ())


def test_what_is_kept_is_said_once() -> None:
    with pytest.warns(UserWarning, match="flow test/asked: 'read' is random: a service keeps nothing between epochs"):
        assert cacheable_stages(loading(Cropped())).fixed == -1
    with pytest.warns(UserWarning, match="'read' cannot be seeded: a service keeps nothing"):
        cacheable_stages(loading(Entropy()))
    with pytest.warns(UserWarning, match="'1 unseeded' cannot be seeded: a service keeps what 1 steps give"):
        cacheable_stages(loading(Still(), doubled, unseeded, cached=2))
    with pytest.warns(UserWarning, match="no sample could be tried"):
        assert cacheable_stages(loading(Broken())).fixed == -1
    with pytest.warns(UserWarning, match="'0 noisy' draws random numbers and is marked can-cache"):
        assert cacheable_stages(loading(Still(), noisy, cached=1)).fixed == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cacheable_stages(loading(Still(), doubled, noisy, cached=1)).fixed == 1
        assert cacheable_stages(loading(Still(), noisy)).fixed == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_user_code_that_kills_its_process_kills_no_other() -> None:
    with pytest.warns(UserWarning, match="could not be tried"):
        assert cacheable_stages(loading(Deadly())) == Findings(fixed=-1, random="read")
    assert in_child(lambda: time.sleep(60), limit_s=0.05) is None
    assert in_child(lambda: 1 / 0, limit_s=20) is None
    assert in_child(lambda: {"a": 1}, limit_s=20) == {"a": 1}


def test_a_slow_flow_is_judged_by_what_was_tried() -> None:
    ticks = itertools.count()
    found = examine(loading(Still(), noisy), limit_s=2.5, clock=lambda: float(next(ticks)))
    assert (found.tried, found.fixed) == (2, 0)
    assert trial_indices(40) == [0, 7, 15, 23, 31, 39]
    assert trial_indices(2) == [0, 1]


def test_nothing_of_the_caller_changes() -> None:
    def states() -> Any:
        return random.getstate(), repr(np.random.get_state())

    dataset = Cropped(kind="own")
    before, own = states(), repr(dataset.own.bit_generator.state)
    examine(loading(dataset, noisy))
    assert states() == before
    assert repr(dataset.own.bit_generator.state) == own


@dataclass
class Pair:
    a: Any
    b: Any


class Opaque:
    def __reduce__(self) -> Any:
        raise TypeError("no")


def test_samples_of_every_kind_are_compared_by_content() -> None:
    torch = pytest.importorskip("torch")
    pairs: list[tuple[Any, Any]] = [
        (np.arange(3), np.arange(3)),
        (np.arange(4)[::2], np.array([0, 2])),
        (torch.arange(3), torch.arange(3)),
        ({"a": [1, "x"]}, {"a": [1, "x"]}),
        (Pair(1, np.zeros(2)), Pair(1, np.zeros(2))),
        (b"ab", b"ab"),
        (np.float32("nan"), np.float32("nan")),
    ]
    for one, other in pairs:
        assert digest(one) == digest(other) is not None
    different = [
        np.arange(3),
        np.arange(3.0),
        np.arange(3).reshape(3, 1),
        torch.arange(3),
        [0, 1, 2],
        (0, 1, 2),
        {"a": 1},
        {"a": 2},
        Pair(1, 2),
        Pair(1, 3),
        b"a",
        "a",
        1,
        1.0,
        True,
        None,
        [[1], 2],
        [1, [2]],
        "1",
    ]
    assert len({digest(thing) for thing in different}) == len(different)
    assert digest([Opaque()]) is None
    knot: list[Any] = []
    knot.append(knot)
    assert digest(knot) is None
