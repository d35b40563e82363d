from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from jobs import SAMPLERS, Script, steps

from ephemeron.data.cache import Accessed, Announced, Cache, Joined, Knowledge, Left, Likely, NextUse
from ephemeron.data.cache.baselines import replay
from ephemeron.data.sampling import Coupled, SharedBatch
from ephemeron.data.sampling.baselines import Forecast, Independent


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
@given(steps=steps)
@settings(max_examples=25)
def test_a_cache_knows_every_access_beforehand_and_in_its_place(make, steps) -> None:
    sampler = make(2)
    forecast, policy, script = Forecast(sampler), NextUse(), Script(sampler)
    for step in steps:
        before = script.run([step])
        batch = None
        if before:
            job, epoch, indices = before[0]
            batch = SharedBatch(job=job, epoch=epoch, indices=np.array(indices))
        for event in forecast.news(batch):
            policy.observe(event)
        for index in batch.indices.tolist() if batch else []:
            job = policy.jobs[batch.job]
            assert job.knows(index) is Knowledge.CERTAIN
            assert job.position(index) == job.accessed
            policy.observe(Accessed(job=batch.job, key=index, now_s=script.now_s))
    assert set(policy.jobs) == set(script.datasets)
    for job, future in policy.jobs.items():
        assert future.certain == len(sampler.future(job).certain)


def test_each_fact_is_told_once() -> None:
    sampler = Independent(seed=1)
    forecast = Forecast(sampler)
    sampler.add_job("a", range(6), batch=3, epochs=2)
    batch, news = forecast.take("a", now_s=0.0)
    assert [type(e) for e in news] == [Joined, Announced]
    assert news[1].keys[:3] == batch.indices.tolist()
    assert len(news[1].keys) == 6
    _, news = forecast.take("a", now_s=1.0)
    # The next epoch begins with the last sample of this one.
    assert [(type(e), len(e.keys)) for e in news] == [(Announced, 6)]
    sampler.remove_job("a")
    sampler.add_job("a", range(3), batch=1)
    assert [type(e) for e in forecast.news()] == [Left, Joined, Announced]
    assert list(forecast.news()) == []


def test_likely_futures_are_renewed_now_and_then() -> None:
    sampler = Coupled(seed=1, window=8)
    forecast = Forecast(sampler, likely_every=0.25)
    for job in "ab":
        sampler.add_job(job, range(40), batch=5)
    told = [[e for e in forecast.take("a", now_s=float(n))[1] if isinstance(e, Likely)] for n in range(6)]
    assert [[e.job for e in events] for events in told] == [[], ["b"], [], ["b"], [], ["b"]]
    assert told[5][0].weights == sampler.future("b").likely


def test_forecasts_are_worth_hits() -> None:
    """The same draws in the same cache, with and without being told of."""
    sampler = Independent(seed=1)
    forecast = Forecast(sampler)
    events, blind = [], []
    for job in "abc":
        sampler.add_job(job, range(200), batch=5, epochs=1)
    for n in range(40):
        for job in "abc":
            batch, news = forecast.take(job, now_s=float(n))
            accesses = [Accessed(job=job, key=i, now_s=float(n)) for i in batch.indices.tolist()]
            events += [*news, *accesses]
            blind += [e for e in news if isinstance(e, Joined)] + accesses
    assert sum(replay(Cache(50, NextUse()), events)) > 1.3 * sum(replay(Cache(50, NextUse()), blind))
