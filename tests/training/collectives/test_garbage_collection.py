"""Nothing is deleted that anybody may still need, everything else is, and each key once."""

from __future__ import annotations

import json
from dataclasses import asdict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ephemeron.config.typed import build
from ephemeron.training.collectives.garbage_collection import ObjectGC
from ephemeron.training.collectives.group import GarbageState


def contribution(version: int, rank: int) -> str:
    return f"{version}.c.{rank}"


class Run(RuleBasedStateMachine):
    """Ranks that contribute, apply, checkpoint and die; one aggregator that keeps the objects of all."""

    @initialize(world=st.integers(1, 4))
    def start(self, world: int) -> None:
        self.world = world
        self.garbage = ObjectGC(world)
        self.sent = [0] * world  # contributions of each rank
        self.applied = [0] * world
        self.most_applied = [0] * world
        self.checkpoints = [[0, 0] for _ in range(world)]  # versions applied at the second newest and newest
        self.versions = 0
        self.waiting: dict[int, dict[int, tuple[int, int]]] = {}  # version: rank: (applied, durable) as it was sent
        self.stored: set[str] = set()
        self.deleted: set[str] = set()

    ranks = st.integers(0, 3)

    @rule(rank=ranks)
    def contribute(self, rank: int) -> None:
        if rank >= self.world or self.sent[rank] > self.applied[rank]:
            return  # BSP: the next iteration needs every version before it
        version = self.sent[rank]
        self.sent[rank] += 1
        if version >= self.versions:
            said = self.waiting.setdefault(version, {})
            said[rank] = (self.applied[rank], self.checkpoints[rank][0])
            self.stored.add(contribution(version, rank))

    @precondition(lambda self: len(self.waiting.get(self.versions, ())) == self.world)
    @rule()
    def fold(self) -> None:
        for rank, (applied, durable) in self.waiting.pop(self.versions).items():
            self.garbage.update(rank, applied=applied, durable=durable)
        merged = f"{self.versions}.m"
        self.stored.add(merged)
        self.garbage.record(self.versions, [contribution(self.versions, r) for r in range(self.world)], [merged])
        self.versions += 1

    @rule(rank=ranks)
    def apply(self, rank: int) -> None:
        if rank < self.world and self.applied[rank] < min(self.versions, self.sent[rank]):
            assert f"{self.applied[rank]}.m" in self.stored, "a version that somebody waits for is gone"
            self.applied[rank] += 1
            self.most_applied[rank] = max(self.most_applied[rank], self.applied[rank])

    @rule(rank=ranks)
    def checkpoint(self, rank: int) -> None:
        if rank < self.world and self.applied[rank] > self.checkpoints[rank][1]:
            self.checkpoints[rank] = [self.checkpoints[rank][1], self.applied[rank]]

    @rule(rank=ranks, newest_lost=st.booleans())
    def die(self, rank: int, newest_lost: bool) -> None:
        if rank < self.world:
            self.applied[rank] = self.sent[rank] = self.checkpoints[rank][0 if newest_lost else 1]

    @rule()
    def hand_over(self) -> None:
        """The aggregator itself is relayed: its successor goes on with what it knew."""
        known = build(GarbageState, json.loads(json.dumps(asdict(self.garbage.state()))), where="state")
        self.garbage = ObjectGC(self.world)
        self.garbage.load(known)

    @rule()
    def collect_garbage(self) -> None:
        keys = self.garbage.expired()
        assert len(keys) == len(set(keys))
        assert not self.deleted & set(keys), "each key is named once"
        assert set(keys) <= self.stored
        self.deleted |= set(keys)
        self.stored -= set(keys)

    @invariant()
    def what_a_replacement_needs_is_there(self) -> None:
        for rank in range(self.world):
            for version in range(self.checkpoints[rank][0], self.versions):
                assert f"{version}.m" in self.stored

    @invariant()
    def what_a_lost_version_is_made_of_is_there_until_all_have_applied_it(self) -> None:
        for version in range(min(self.most_applied), self.versions):
            assert all(contribution(version, r) in self.stored for r in range(self.world))

    def teardown(self) -> None:
        """Once everybody has said all, nothing is left but what is needed: storage is bounded."""
        for rank in range(self.world):
            self.garbage.update(rank, applied=self.most_applied[rank], durable=self.checkpoints[rank][0])
        self.collect_garbage()
        read, safe = min(self.most_applied), min(c[0] for c in self.checkpoints)
        left = {contribution(v, r) for v in range(read, self.versions) for r in range(self.world)}
        left |= {f"{v}.m" for v in range(safe, self.versions)}
        left |= {contribution(v, r) for v, said in self.waiting.items() for r in said}
        assert self.stored == left


Run.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestRetention = Run.TestCase


def test_nothing_goes_before_every_rank_was_heard_of():
    garbage = ObjectGC(3)
    garbage.record(0, ["c"], ["m"])
    garbage.update(0, applied=9, durable=9)
    garbage.update(1, applied=9, durable=9)
    assert garbage.expired() == []
    garbage.update(2, applied=9, durable=9)
    assert sorted(garbage.expired()) == ["c", "m"]
    assert garbage.expired() == []


def test_contributions_go_when_applied_and_versions_when_durable():
    garbage = ObjectGC(2)
    garbage.record(0, ["c0"], ["m0"])
    garbage.record(1, ["c1"], ["m1"])
    garbage.update(0, applied=2, durable=1)
    garbage.update(1, applied=1, durable=0)
    assert garbage.expired() == ["c0"]
    garbage.update(1, applied=2, durable=1)
    assert sorted(garbage.expired()) == ["c1", "m0"]


def test_a_rank_that_was_replaced_takes_nothing_back():
    garbage = ObjectGC(1)
    garbage.record(0, ["c0"], ["m0"])
    garbage.update(0, applied=1, durable=1)
    garbage.update(0, applied=0, durable=0)
    assert sorted(garbage.expired()) == ["c0", "m0"]


def test_shards_of_a_version_are_kept_together():
    garbage = ObjectGC(1)
    garbage.record(0, ["c0"], ["m0"])
    garbage.record(0, ["c1"], ["m1"])
    garbage.update(0, applied=1, durable=0)
    assert garbage.expired() == ["c0", "c1"]
