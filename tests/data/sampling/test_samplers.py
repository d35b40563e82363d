"""What every sampler promises, whatever it draws."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import SAMPLERS, Script, steps

from ephemeron.data.sampling import Coupled
from ephemeron.data.sampling.baselines import Independent
from ephemeron.errors import JobError

every = pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)


@every
@given(steps=steps, seed=st.integers(-(2**70), 2**70))
def test_each_sample_once_per_epoch_whoever_joins_leaves_or_hurries(make, steps, seed) -> None:
    script = Script(make(seed))
    script.run(steps)
    for job in list(script.datasets):  # whoever is in the middle of an epoch can end it, alone
        while not script.ended(job) and script.given[job][-1]:
            script.take(job, None)


@every
@given(steps=steps, seed=st.integers(0, 2**64))
def test_same_seed_and_same_calls_give_the_same_samples(make, steps, seed) -> None:
    assert Script(make(seed)).run(steps) == Script(make(seed)).run(steps)


@every
@given(before=steps, after=steps, seed=st.integers(0, 2**64))
@settings(max_examples=25)
def test_state_is_plain_and_everything(make, before, after, seed) -> None:
    script = Script(make(seed))
    script.run(before)
    other = make(seed + 1)
    other.add_job("forgotten", range(99), batch=3)
    other.load_state_dict(json.loads(json.dumps(script.sampler.state_dict())))
    assert other.state_dict() == script.sampler.state_dict()
    copy = Script(other)
    copy.now_s = script.now_s
    copy.datasets, copy.epochs, copy.batches = dict(script.datasets), dict(script.epochs), dict(script.batches)
    copy.given = {job: [list(order) for order in orders] for job, orders in script.given.items()}
    assert copy.run(after) == script.run(after)


@every
@given(steps=steps)
@settings(max_examples=15)
def test_the_certain_future_comes_true(make, steps) -> None:
    script = Script(make(3))
    script.run(steps)
    for job in list(script.datasets):
        if script.ended(job):
            continue
        certain = script.sampler.future(job).certain.tolist()
        came: list[int] = []
        while len(came) < len(certain) and not script.ended(job):
            came += script.take(job, 1)[2]
        assert came == certain[: len(came)]


@every
def test_seeds_and_epochs_differ(make) -> None:
    def orders(seed: int) -> list[tuple[int, ...]]:
        sampler = make(seed)
        sampler.add_job("a", range(30), batch=10)
        return [tuple(sampler.take("a", 30, now_s=0.0).indices) for _ in range(3)]

    assert len({*orders(1), *orders(2)}) == 6


def test_a_fast_job_does_not_take_from_a_slow_one() -> None:
    """One takes a thousand times as often; the other still gets a full batch whenever it asks."""
    for make in SAMPLERS.values():
        sampler = make(0)
        for job in ("fast", "slow"):
            sampler.add_job(job, range(50), batch=8)
        for n in range(1000):
            sampler.take("fast", now_s=n)
            if n % 500 == 250:
                assert len(sampler.take("slow", now_s=n).indices) == 8


def test_golden() -> None:
    """If this changes, a resumed run sees other samples than it would have."""
    sampler = Coupled(seed=7, window=4)
    sampler.add_job("a", range(8), batch=4, epochs=2)
    sampler.add_job("b", range(4, 12), batch=2, epochs=2)
    taken = [sampler.take(job, now_s=float(n)).indices.tolist() for n, job in enumerate("abbaabba")]
    assert taken == [[3, 5, 1, 4], [9, 5], [4, 7], [6, 2, 7, 0], [7, 1, 6, 0], [8, 10], [11, 6], [5, 2, 4, 3]]
    independent = Independent(seed=7)
    independent.add_job("a", range(8), batch=8)
    assert independent.take("a", now_s=0.0).indices.tolist() == [3, 7, 4, 2, 1, 6, 0, 5]


def test_mistakes_are_named() -> None:
    sampler = Independent(seed=0)
    sampler.add_job("a", [3, 1, 2], batch=2, epochs=1)
    with pytest.raises(JobError, match="job 'a' joined sampling twice; remove it first"):
        sampler.add_job("a", [1], batch=1)
    with pytest.raises(JobError, match="job 'b' has an empty dataset"):
        sampler.add_job("b", [], batch=1)
    with pytest.raises(JobError, match="dataset of job 'b' names a sample below 0 or twice"):
        sampler.add_job("b", [1, 1], batch=1)
    with pytest.raises(JobError, match="dataset of job 'b' names a sample below 0 or twice"):
        sampler.add_job("b", np.array([-1, 1]), batch=1)
    with pytest.raises(JobError, match="batch = 0, epochs = None of job 'b'; use at least 1"):
        sampler.add_job("b", [1], batch=0)
    with pytest.raises(JobError, match="no job 'b' takes part"):
        sampler.take("b", now_s=0.0)
    with pytest.raises(JobError, match="no job 'b' takes part"):
        sampler.remove_job("b")
    with pytest.raises(JobError, match="count = 0 samples for job 'a'"):
        sampler.take("a", 0, now_s=0.0)
    sampler.take("a", 5, now_s=0.0)
    with pytest.raises(JobError, match="job 'a' has gone through its 1 epochs"):
        sampler.take("a", now_s=0.0)
    with pytest.raises(JobError, match="state of sampler 'Independent' cannot be loaded by Coupled"):
        Coupled(seed=0, window=1).load_state_dict(sampler.state_dict())
    with pytest.raises(JobError, match="window = 0"):
        Coupled(seed=0, window=0)
    with pytest.raises(JobError, match="free_epochs = -1"):
        Coupled(seed=0, window=1, free_epochs=-1)
    with pytest.raises(JobError, match="ahead = -1"):
        Independent(seed=0, ahead=-1)
