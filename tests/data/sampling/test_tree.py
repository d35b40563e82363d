from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ephemeron.data.sampling.baselines import DynaGCS, IntersectionTree, contribution, speed_similarity


def joined(**datasets) -> DynaGCS:
    sampler = DynaGCS(seed=1)
    for job, indices in datasets.items():
        sampler.add_job(job, indices, batch=8)
    return sampler


def test_speed_similarity() -> None:
    assert speed_similarity([3.0, 3.0, 3.0]) == 1.0
    assert speed_similarity([1.0, 3.0]) == pytest.approx(math.exp(-0.5))
    assert speed_similarity([10.0, 30.0]) == pytest.approx(speed_similarity([1.0, 3.0]))


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_speed_similarity_is_between_0_and_1(rates) -> None:
    assert 0 < speed_similarity(rates) <= 1


def test_contribution() -> None:
    sampler = joined(a=range(8), b=range(4, 12))
    members = list(sampler.jobs)
    assert contribution(members, lambda m: 1.0) == 4 / 16
    assert contribution(members, lambda m: {"a": 1.0, "b": 3.0}[m.job]) == pytest.approx(4 / 16 * math.exp(-0.5))
    assert contribution(members[:1], lambda m: 1.0) == 1.0


def test_levels_hold_the_sets_that_share_most() -> None:
    sampler = joined(a=range(10), b=range(10), c=range(5, 15), d=range(14, 20))
    pairs = [set(node) for node in sampler.tree.levels[1]]
    assert pairs[0] == {"a", "b"}
    assert len(pairs) == 4
    assert {"a", "d"} not in pairs[:3]
    assert [len(level) for level in sampler.tree.levels] == [4, 4, 4, 1]
    assert next(level for level, _ in sampler.tree.downwards("d")) == 3


@given(st.lists(st.sampled_from("abcdefgh"), unique=True), st.data())
def test_every_level_is_bounded_and_every_job_is_a_leaf(jobs, data) -> None:
    sampler = joined(**{job: range(ord(job) - 97, ord(job) - 87) for job in jobs})
    while True:
        levels = sampler.tree.levels
        here = {m.job for m in sampler.jobs}
        assert {frozenset(job) for job in here} == set(levels[0] if levels else [])
        for size, level in enumerate(levels, start=1):
            assert len(level) <= len(here)
            assert len(set(level)) == len(level)
            assert all(len(node) == size and node <= here for node in level)
        if not here:
            break
        sampler.remove_job(data.draw(st.sampled_from(sorted(here))))


def test_a_job_that_leaves_leaves_its_sets_behind() -> None:
    tree = IntersectionTree([[["a"], ["b"], ["c"]], [["a", "b"], ["b", "c"]], [["a", "b", "c"]]])
    tree.remove("b")
    assert tree.levels == [[frozenset("a"), frozenset("c")], [frozenset("ac")]]
