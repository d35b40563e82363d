"""How random the orders are: exactly, for datasets so small that all orders can be counted. Seeds are fixed."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from jobs import chi_square_z, orders

from ephemeron.data.sampling import Coupled
from ephemeron.data.sampling.baselines import DynaGCS, Independent, Joader

SHIFTED = {"rates": (1.0, 1.0, 1.0), "starts_s": (0.0, 1.3, 2.6)}
SPEEDS = {"rates": (1.0, 0.55, 1.7), "starts_s": (0.0, 1.3, 2.6)}
IN_STEP = {"rates": (1.0, 1.0, 1.0), "starts_s": (0.0, 0.0, 0.0)}
FOUR = [range(4)] * 3
OVERLAPPING = [range(4), range(2, 6), range(1, 5)]
HONEST = {
    "Independent": lambda: Independent(seed=11),
    "Joader": lambda: Joader(seed=11),
    "Coupled": lambda: Coupled(seed=11, window=2),
    "Coupled fair": lambda: Coupled(seed=11, window=2, free_epochs=0),
}
LIMIT = 4.5


def order_z(found: list[tuple[int, ...]]) -> float:
    return chi_square_z(Counter(found), math.factorial(len(found[0])))


def successor_z(found: list[tuple[int, ...]]) -> float:
    """Of the order of an epoch relative to the one before it, which is uniform if they are independent."""
    relative = [tuple(map(before.index, after)) for before, after in itertools.pairwise(found)]
    return order_z(relative)


@pytest.mark.parametrize("make", HONEST.values(), ids=HONEST)
@pytest.mark.parametrize("datasets", [FOUR, OVERLAPPING], ids=["same", "overlapping"])
@pytest.mark.parametrize("scene", [IN_STEP, SHIFTED, SPEEDS], ids=["in step", "shifted", "speeds"])
def test_orders_are_uniform_and_independent_of_the_epoch_before(make, datasets, scene) -> None:
    for of_job in orders(make(), datasets, epochs=500, **scene):
        assert order_z(of_job) < LIMIT
        assert successor_z(of_job) < LIMIT


@pytest.mark.parametrize("batch", [2, 3])
def test_so_they_are_in_batches(batch) -> None:
    for of_job in orders(HONEST["Coupled"](), OVERLAPPING, epochs=500, batch=batch, **SPEEDS):
        assert order_z(of_job) < LIMIT
        assert successor_z(of_job) < LIMIT


@pytest.mark.parametrize("datasets", [FOUR, OVERLAPPING], ids=["same", "overlapping"])
def test_first_epochs_are_uniform_although_they_are_drawn_freely(datasets) -> None:
    found: list[list[tuple[int, ...]]] = [[], [], []]
    for seed in range(600):
        for job, of_job in enumerate(orders(Coupled(seed=seed, window=2), datasets, epochs=2, **SHIFTED)):
            found[job] += of_job[:1]
    for of_job in found:
        assert order_z(of_job) < LIMIT


def test_what_a_job_that_has_left_was_loading_is_not_preferred() -> None:
    """Its samples lie in the cache, and are half of those of the job that stays."""
    found = []
    for seed in range(800):
        sampler = Coupled(seed=seed, window=4)
        sampler.add_job("stays", range(4), batch=1)
        sampler.add_job("leaves", [2, 3], batch=1)
        order = sampler.take("stays", now_s=0.0).indices.tolist()
        sampler.take("leaves", now_s=0.5)
        sampler.remove_job("leaves")
        order += sampler.take("stays", 3, now_s=1.0).indices.tolist()
        found.append(tuple(order))
    assert order_z(found) < LIMIT


def test_dynagcs_as_published_puts_common_samples_first() -> None:
    for of_job in orders(DynaGCS(seed=11), OVERLAPPING, epochs=300, **IN_STEP):
        assert order_z(of_job) > 10


def test_drawn_freely_for_ever_epochs_out_of_phase_repeat_themselves() -> None:
    """Why free draws end with the first epoch: with the published algorithm it is the same."""
    for sampler in (Coupled(seed=11, window=2, free_epochs=None), DynaGCS(seed=11)):
        assert max(map(successor_z, orders(sampler, FOUR, epochs=300, **SHIFTED))) > 10
