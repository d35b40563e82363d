"""Staleness: the table of the module's docstring, and random schedules that never leave it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ephemeron.errors import JobError
from ephemeron.training.collectives.sync_policy import UNBOUNDED, policy_for


@pytest.mark.parametrize(
    ("name", "aggregator", "must", "may"),
    [
        # versions that have to be applied before iteration 5, and whether version 4 may be
        ("bsp", True, 5, True),
        ("bsp", False, 5, True),
        ("hap", True, 5, True),
        ("hap", False, 4, False),
        ("ssp:0", False, 5, True),
        ("ssp:2", True, 3, True),
        ("ssp:2", False, 3, True),
        ("ssp:9", False, 0, True),
        ("asp", True, 0, True),
        ("asp", False, 0, True),
        ("hsp", True, 4, True),
        ("hsp", False, 4, True),
    ],
)
def test_the_table(name, aggregator, must, may):
    policy = policy_for(name, epoch_length=4)
    assert policy.must_have_applied(5, aggregator=aggregator) == must
    assert policy.may_apply(4, 5, aggregator=aggregator) is may


@pytest.mark.parametrize(
    ("name", "waits_for_all", "deterministic"),
    [
        ("bsp", True, True),
        ("hap", True, True),
        ("ssp:0", True, False),
        ("ssp:3", True, False),
        ("asp", False, False),
        ("hsp", False, False),
    ],
)
def test_what_a_version_holds_and_whether_bits_repeat(name, waits_for_all, deterministic):
    assert policy_for(name).waits_for_all is waits_for_all
    assert policy_for(name).deterministic is deterministic


def test_nobody_needs_a_version_before_the_first_iteration():
    for name in ("bsp", "hap", "ssp:3", "asp", "hsp"):
        for aggregator in (True, False):
            policy = policy_for(name, epoch_length=4)
            assert policy.must_have_applied(0, aggregator=aggregator) == 0
            assert not policy.may_apply(0, 0, aggregator=aggregator)


def test_no_policy():
    with pytest.raises(JobError, match="sync = 'ssp:x'"):
        policy_for("ssp:x")


# -- schedules --------------------------------------------------------------------------------------------


LENGTH = 3
"""Iterations of an epoch."""


class Group:
    """W workers that follow a policy. Versions are published as soon as the policy allows it."""

    def __init__(self, name: str, world: int, aggregators: int, iterations: int) -> None:
        self.policy = policy_for(name, epoch_length=LENGTH)
        self.world, self.aggregators, self.iterations = world, aggregators, iterations
        self.t = [0] * world
        self.applied = [0] * world
        self.seen: list[tuple[int, int, int]] = []  # rank, iteration, versions applied when it was computed

    def is_aggregator(self, rank: int) -> bool:
        return rank < self.aggregators

    def published(self, version: int) -> bool:
        last = version + 1 == self.policy.barrier_after(version, self.iterations)
        contributors = range(self.world) if self.policy.waits_for_all or last else range(self.aggregators)
        return all(self.t[r] > version for r in contributors)

    def step(self, rank: int) -> bool:
        """One worker goes as far as computing one iteration; False if it has to wait or is done."""
        t, aggregator = self.t[rank], self.is_aggregator(rank)
        if t == self.iterations:
            return False
        while self.applied[rank] < self.policy.must_have_applied(t, aggregator=aggregator):
            if not self.published(self.applied[rank]):
                return False
            self.applied[rank] += 1
        while self.policy.may_apply(self.applied[rank], t, aggregator=aggregator) and self.published(self.applied[rank]):
            self.applied[rank] += 1
        self.seen.append((rank, t, self.applied[rank]))
        self.t[rank] += 1
        return True


@given(
    st.sampled_from(["bsp", "hap", "ssp:0", "ssp:1", "ssp:3", "asp", "hsp"]),
    st.integers(1, 5).flatmap(lambda w: st.tuples(st.just(w), st.integers(1, w))),
    st.lists(st.integers(0, 4), max_size=60),
)
@settings(deadline=None)
def test_no_schedule_leaves_the_bounds_or_stands_still(name, shape, schedule):
    world, aggregators = shape
    group = Group(name, world, aggregators, iterations=8)
    allowed = {"bsp": 0, "hap": 1, "asp": UNBOUNDED, "hsp": LENGTH - 1}.get(name, int(name[4:] or 0) if name.startswith("ssp") else 0)
    for rank in schedule:
        if rank < world and group.step(rank) and name != "asp":
            leader = group.t[rank] - 1  # the iteration just computed
            assert leader - min(group.t) <= allowed, "the fastest is too far ahead"
    while any(t < group.iterations for t in group.t):
        assert any(group.step(rank) for rank in range(world)), "everybody waits for everybody"
    for rank, t, applied in group.seen:
        staleness = t - applied
        assert 0 <= staleness <= allowed
        if name == "bsp" or (name == "hsp" and t % LENGTH == 0):
            assert staleness == 0
        if name == "hap":
            assert staleness == (0 if group.is_aggregator(rank) else min(1, t))
    for rank in range(world):
        applied = [a for r, _, a in group.seen if r == rank]
        assert applied == sorted(applied)


def test_under_ssp_the_bound_is_reached():
    group = Group("ssp:2", world=2, aggregators=1, iterations=9)
    while group.step(1):
        pass
    assert group.t == [0, 3], "iterations 0, 1 and 2 may be computed with nothing applied"


def test_under_hsp_nobody_waits_before_the_barrier_and_everybody_at_it():
    group = Group("hsp", world=3, aggregators=1, iterations=9)
    while group.step(0):
        pass
    assert group.t == [LENGTH, 0, 0]
    assert [group.policy.is_barrier(t) for t in range(5)] == [False, False, False, True, False]
    assert [group.policy.barrier_after(v, 8) for v in (0, 2, 3, 7)] == [3, 3, 6, 8]


def test_under_asp_nobody_waits_for_a_slow_worker():
    group = Group("asp", world=3, aggregators=1, iterations=9)
    while group.step(0):
        pass
    assert group.t == [9, 0, 0]
