"""What the samplers draw in common."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from jobs import orders

from ephemeron.data.sampling import Coupled
from ephemeron.data.sampling.baselines import CoorDL, DynaGCS, Independent, Joader

SAME = {"rates": (1.0, 1.0, 1.0, 1.0), "starts_s": (0.0, 0.0, 0.0, 0.0)}


@pytest.mark.parametrize(
    "sampler",
    [CoorDL(seed=1), Joader(seed=1), DynaGCS(seed=1), Coupled(seed=1, window=20), Coupled(seed=1, window=20, free_epochs=0)],
    ids=["coordl", "joader", "dynagcs", "coupled", "coupled-from-the-first-epoch"],
)
def test_jobs_in_step_use_the_same_samples_in_the_same_batches(sampler) -> None:
    found = orders(sampler, [range(64)] * 4, epochs=1, batch=8, **SAME)
    for at in range(0, 64, 8):
        assert len({frozenset(of_job[0][at : at + 8]) for of_job in found if of_job}) == 1


def test_independent_orders_are_everybodys_own() -> None:
    found = orders(Independent(seed=1), [range(64)] * 4, epochs=2, batch=8, **SAME)
    assert len({order for of_job in found for order in of_job}) == sum(map(len, found))


def test_coordl_is_one_order_for_all_also_later_and_also_filtered() -> None:
    sampler = CoorDL(seed=4)
    sampler.add_job("a", range(20), batch=20)
    first = sampler.take("a", now_s=0.0).indices.tolist()
    sampler.take("a", now_s=1.0)
    sampler.add_job("b", range(10, 30), batch=20)
    late = sampler.take("b", now_s=5.0).indices.tolist()
    assert [i for i in late if i < 20] == [i for i in first if i >= 10]


def test_a_drawn_epoch_ahead_is_certain() -> None:
    sampler = Independent(seed=4, ahead=1)
    sampler.add_job("a", range(20), batch=20, epochs=2)
    certain = sampler.future("a").certain.tolist()
    assert sampler.take("a", now_s=0.0).indices.tolist() + sampler.take("a", now_s=1.0).indices.tolist() == certain


def common_in_a_round(make, left: int, right: int, common: int, *, batch: int = 2, rounds: int = 1500) -> tuple[float, ...]:
    """Means over rounds in which R asks for one sample: how many R draws, S draws, and both, with |R ∩ S| = common."""
    counted = np.zeros(3)
    for seed in range(rounds):
        sampler = make(seed)
        sampler.add_job("r", range(left), batch=batch)
        sampler.add_job("s", range(left - common, left - common + right), batch=batch)
        sampler.draw(sampler.jobs["r"], 1)
        r, s = (set(sampler.future(job).certain.tolist()) for job in "rs")
        counted += [len(r), len(s), len(r & s)]
    return tuple(counted / rounds)


@pytest.mark.parametrize("sizes", [(12, 12, 6), (16, 8, 8), (8, 16, 4), (6, 6, 6)])
def test_joader_ties_two_draws_as_tightly_as_uniformity_allows(sizes) -> None:
    left, right, common = sizes
    found = common_in_a_round(lambda seed: Joader(seed=seed), *sizes)
    assert found == pytest.approx((1, 1, common / max(left, right)), abs=0.05)


@pytest.mark.parametrize("sizes", [(12, 12, 6), (16, 8, 8), (8, 16, 4), (6, 6, 6)])
def test_fair_draws_tie_groups_as_tightly_as_uniformity_allows(sizes) -> None:
    left, right, common = sizes
    found = common_in_a_round(lambda seed: Coupled(seed=seed, window=8, free_epochs=0), *sizes)
    drawn = 1 / (1 - (1 - 1 / left) ** left)  # rounds are repeated until R has drawn something
    assert found[:2] == pytest.approx((drawn, found[1]), abs=0.08)
    assert found[2] / min(found[0] / left, found[1] / right) == pytest.approx(common, rel=0.12)


@pytest.mark.parametrize(("asks", "ratio"), [("fast", 0.25), ("slow", 4.0)])
def test_others_draw_in_proportion_to_their_speeds(asks, ratio) -> None:
    """One job is four times as fast; both have most of an epoch left, and empty buffers."""
    drawn = Counter()
    for seed in range(300):
        sampler = Coupled(seed=seed, window=400, free_epochs=0)
        for job, step_s in (("fast", 1.0), ("slow", 4.0)):
            sampler.add_job(job, range(500), batch=16)
            for n in range(2):
                sampler.take(job, 1 + len(sampler.future(job).certain), now_s=n * step_s)
        for member in sampler.jobs:
            if member.queue:
                sampler.take(member.job, len(member.queue), now_s=member.rate_estimator.last_s)
        before = {m.job: m.drawn for m in sampler.jobs}
        sampler.draw(sampler.jobs[asks], 8)
        for member in sampler.jobs:
            drawn[member.job] += member.drawn - before[member.job]
    other = "slow" if asks == "fast" else "fast"
    assert drawn[other] / drawn[asks] == pytest.approx(ratio, rel=0.15)


def test_a_slow_job_is_not_flooded() -> None:
    """What is drawn for it would have left the cache before it is used."""
    sampler = Coupled(seed=2, window=8, free_epochs=0)
    for job in ("fast", "slow"):
        sampler.add_job(job, range(400), batch=8)
    most, taken = 0, {"fast": set(), "slow": set()}
    for n in range(40):
        for job in ("fast", "slow")[: 1 + (n % 4 == 0)]:
            taken[job].update(sampler.take(job, now_s=float(n)).indices.tolist())
            most = max(most, len(sampler.future("slow").certain))
    assert most <= 16
    assert len(taken["fast"] & taken["slow"]) > 0.8 * len(taken["slow"])


def test_free_draws_begin_with_what_others_loaded_lately() -> None:
    sampler = Coupled(seed=2, window=8)
    for job, indices in {"a": range(100), "b": range(50, 150)}.items():
        sampler.add_job(job, indices, batch=30)
    first = sampler.take("a", 12, now_s=0.0).indices.tolist()
    usable = {i for i in first if i >= 50}
    assert 0 < len(usable) <= 8
    assert sampler.future("b").likely == dict.fromkeys(usable, 1.0)
    # Half of its dataset is shared, so about half of a batch may come from there.
    assert usable <= set(sampler.take("b", now_s=1.0).indices.tolist())


def test_dynagcs_hands_on_what_is_left_by_level() -> None:
    sampler = DynaGCS(seed=3)
    sampler.add_job("a", range(10), batch=4)
    sampler.add_job("b", range(5, 15), batch=6)
    assert sampler.group_size(sampler.jobs["a"]) == 2
    batch = sampler.take("a", now_s=0.0).indices.tolist()
    assert set(batch) < set(range(5, 10)), "the largest set comes first"
    assert sampler.future("b").certain.tolist() == batch
    left = set(range(5, 10)) - set(batch)
    assert sampler.future("a").likely == {**dict.fromkeys(range(5), 1.0), **dict.fromkeys(left, 2.0)}
    more = sampler.take("a", 3, now_s=1.0).indices.tolist()
    assert left < set(more), "and only what is missing comes from smaller ones"
    np.testing.assert_array_equal(sampler.future("b").certain, batch + [i for i in more if i in left])
