"""Configurations: defaults filled in, contradictions refused, and the arithmetic of FasDL equation 3-14."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ephemeron.errors import JobError, PlanInfeasible
from ephemeron.training.job import (
    COMPRESSIONS,
    EXCHANGES,
    PATTERNS,
    Configuration,
    ExchangeOptions,
    Job,
    JobLimits,
    Target,
    check_limits,
    sync_name,
)


@pytest.mark.parametrize(
    ("pattern", "workers", "given_k", "k"),
    [
        ("k-reduce", 5, 0, 2),
        ("k-reduce", 1, 0, 1),
        ("k-reduce", 5, 3, 3),
        ("k-reduce", 5, 5, 5),
        ("all-reduce", 5, 0, 1),
        ("all-reduce", 5, 1, 1),
        ("scatter-reduce", 5, 0, 5),
        ("scatter-reduce", 5, 5, 5),
        ("pipelined", 5, 0, 5),
        ("pipelined", 5, 2, 2),
        ("standalone", 1, 0, 1),
    ],
)
def test_what_a_pattern_says_of_its_aggregators(pattern, workers, given_k, k):
    assert Configuration(pattern=pattern, workers=workers, aggregators=given_k).resolved().aggregators == k


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"pattern": "all-reduce", "aggregators": 2}, ["aggregators = 2", "'all-reduce'", "leave aggregators out"]),
        ({"pattern": "scatter-reduce", "aggregators": 2}, ["aggregators = 2", "which has 4", "leave aggregators out"]),
        ({"aggregators": 5}, ["aggregators = 5", "workers = 4", "1 ≤ aggregators ≤ workers"]),
        ({"pattern": "standalone"}, ["'standalone'", "workers = 4", "use workers = 1"]),
        ({"workers": 0}, ["workers = 0", "at least 1"]),
        ({"workers": -3}, ["workers = -3", "at least 1"]),
        ({"batch_size": 0}, ["batch_size = 0"]),
        ({"checkpoint_every": 0}, ["checkpoint_every = 0"]),
        ({"aggregators": -1}, ["aggregators = -1"]),
        ({"nonaggregator_batch_size": -1}, ["nonaggregator_batch_size = -1"]),
        ({"memory_mb": -1}, ["memory_mb = -1"]),
        ({"function_timeout_s": -0.5}, ["function_timeout_s = -0.5"]),
        ({"platform": "moon"}, ["platform = 'moon'", "local, simulated"]),
        ({"pattern": "ring"}, ["pattern = 'ring'", "k-reduce"]),
        ({"exchange": {"quantity": "weights"}}, ["exchange.quantity = 'weights'", "parameters"]),
        ({"exchange": {"compression": "zip"}}, ["exchange.compression = 'zip'", "bf16"]),
        ({"sync": "bps"}, ["sync = 'bps'", "bsp, hap, hsp, asp or ssp:N"]),
    ],
    ids=str,
)
def test_contradictions_and_bad_values_are_refused(values, says):
    with pytest.raises(JobError) as caught:
        Configuration(**values).resolved()
    for part in says:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [("bsp", ("bsp", 0)), ("hap", ("hap", 0)), ("asp", ("asp", 0)), ("hsp", ("hsp", 0)), ("ssp:0", ("ssp", 0)), ("ssp:12", ("ssp", 12))],
)
def test_protocols(text, parsed):
    assert sync_name(text) == parsed


@pytest.mark.parametrize("text", ["", "ssp", "ssp:", "ssp:-1", "ssp:1.5", "ssp:²", "ssp:1:2", "bsp:0", "asp:", "BSP", " bsp"])
def test_no_protocols(text):
    with pytest.raises(JobError, match=r"sync = .* is not known; use bsp, hap, hsp, asp or ssp:N"):
        sync_name(text)


configurations = st.builds(
    Configuration,
    pattern=st.sampled_from(PATTERNS),
    exchange=st.builds(ExchangeOptions, quantity=st.sampled_from(EXCHANGES), compression=st.sampled_from(COMPRESSIONS)),
    sync=st.sampled_from(["bsp", "hap", "hsp", "asp", "ssp:2"]),
    workers=st.integers(1, 9),
    aggregators=st.integers(0, 9),
    batch_size=st.integers(1, 50),
    nonaggregator_batch_size=st.integers(0, 50),
)


@given(configurations)
@settings(deadline=None)
def test_resolving_is_final_and_changes_only_what_was_left_open(c):
    try:
        r = c.resolved()
    except JobError:
        return
    assert r.resolved() == r
    assert 1 <= r.aggregators <= r.workers
    assert r.aggregators == (c.aggregators or r.aggregators)
    assert r.nonaggregator_batch_size == (c.nonaggregator_batch_size or c.batch_size)
    same = {"aggregators": c.aggregators, "nonaggregator_batch_size": c.nonaggregator_batch_size}
    assert dataclasses.replace(r, **same) == c


@given(configurations)
@settings(deadline=None)
def test_the_global_batch_is_the_sum_over_ranks(c):
    try:
        r = c.resolved()
    except JobError:
        return
    assert r.global_batch == sum(r.batch_of(rank) for rank in range(r.workers))


def test_ranks_below_k_have_the_aggregators_batch():
    c = Configuration(workers=4, aggregators=2, batch_size=8, nonaggregator_batch_size=20).resolved()
    assert [c.batch_of(rank) for rank in range(4)] == [8, 8, 20, 20]
    assert c.global_batch == 56


def test_the_users_own_limit_on_the_global_batch():
    c = Configuration(workers=4, batch_size=16).resolved()
    check_limits(job_with(JobLimits()), c)
    check_limits(job_with(JobLimits(max_global_batch=64)), c)
    with pytest.raises(PlanInfeasible, match=r"global batch 64 .* max_global_batch = 63") as caught:
        check_limits(job_with(JobLimits(max_global_batch=63)), c)
    assert caught.value.binding == "max_global_batch"


def job_with(limits):
    return Job(name="x", model=Target(target="m:f"), limits=limits)


def test_configurations_are_keys():
    outer = Target(target="SGD", options={"lr": 0.7})
    a, b = (Configuration(exchange=ExchangeOptions(local_steps=4, outer_optimizer=outer)).resolved() for _ in range(2))
    assert {a: 1}[b] == 1
    assert a != Configuration(exchange=ExchangeOptions(local_steps=4)).resolved()
