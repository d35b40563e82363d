"""What is refused before anything starts: by the right limit, and nothing that could work."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ephemeron.errors import PlanInfeasible
from ephemeron.functions.base import Call, Limits
from ephemeron.training.driver.launching.admission import check_call, check_memory, check_time
from ephemeron.training.job import ComputeModel, Configuration, Job, JobLimits, Target
from ephemeron.training.planner.model.bounds import RUNTIME_MB
from ephemeron.units import MB, MIB

LIMITS = Limits(memory_min_mb=128, memory_max_mb=1024, memory_step_mb=64, lifetime_s=60.0, payload_bytes=400, concurrency=4)


def call(**overrides):
    values = {"run": "r", "rank": 0, "attempt": 0, "memory_mb": 256, "lifetime_s": 60.0, "channel": "folder"}
    return Call(**{**values, **overrides})


@pytest.mark.parametrize(
    ("overrides", "workers", "binding", "says"),
    [
        ({"memory_mb": 64}, 4, "memory", "64 MB"),
        ({"memory_mb": 2048}, 4, "memory", "2048 MB"),
        ({"memory_mb": 200}, 4, "memory", "200 MB"),
        ({"lifetime_s": 60.5}, 4, "lifetime", "60.5 s"),
        ({"lifetime_s": 0.0}, 4, "lifetime", "0 s"),
        ({"lifetime_s": float("nan")}, 4, "lifetime", "nan s"),
        ({"channel": "x" * 400}, 4, "payload", "400 bytes"),
        ({}, 5, "concurrency", "5 workers"),
    ],
)
def test_the_platforms_own_limits(overrides, workers, binding, says):
    with pytest.raises(PlanInfeasible) as caught:
        check_call(call(**overrides), workers=workers, limits=LIMITS)
    assert caught.value.binding == binding
    assert says in str(caught.value)
    assert f"binding limit: {binding}" in str(caught.value)


@pytest.mark.parametrize("overrides", [{}, {"memory_mb": 128}, {"memory_mb": 1024}, {"lifetime_s": 0.5}])
def test_what_is_just_within_them_passes(overrides):
    check_call(call(**overrides), workers=4, limits=LIMITS)


@given(st.integers(0, 10**9), st.integers(0, 3), st.integers(0, 10**9))
@settings(deadline=None)
def test_memory_is_refused_below_runtime_model_optimizer_and_data_and_not_above(model, copies, data):
    needed = RUNTIME_MB + (model * (3 + copies) + data) / MIB
    sizes = {"model_bytes": model, "optimizer_copies": copies, "data_bytes": data}
    check_memory(int(needed) + 1, **sizes)
    with pytest.raises(PlanInfeasible) as caught:
        check_memory(int(needed) - 1, **sizes)
    assert caught.value.binding == "memory"


def test_the_refusal_says_how_much_and_the_remedy():
    with pytest.raises(PlanInfeasible, match=r"at least 280 MB, its quota is 256 MB; use a larger --memory-mb"):
        check_memory(256, model_bytes=10 * MIB, optimizer_copies=1, data_bytes=10 * MIB)


def check(*, deadline_s=None, lifetime_s=900.0, iterations=10, compute=None, model_bytes=0, workers=1, tested=0):
    job = Job(name="j", model=Target(target="m:f"), limits=JobLimits(deadline_s=deadline_s))
    c = Configuration(workers=workers, batch_size=6, memory_mb=1000, function_timeout_s=lifetime_s).resolved()
    check_time(job, c, iterations=iterations, model_bytes=model_bytes, latency_s=0.0, bandwidth_mb_s=100.0, compute=compute, tested=tested)


TWO_SECONDS = ComputeModel(a=200.0, b=4.0, m=0.0)
"""For a batch of 6 in 1,000 MB."""


def test_a_deadline_that_computing_alone_misses():
    check(deadline_s=20.0, compute=TWO_SECONDS)
    with pytest.raises(PlanInfeasible, match="10 iterations of at least 2 s need 20 s, the deadline is 19 s") as caught:
        check(deadline_s=19.0, compute=TWO_SECONDS)
    assert caught.value.binding == "deadline"


def test_a_deadline_that_the_network_alone_misses():
    check(deadline_s=10.0, model_bytes=100 * MB, workers=4)
    with pytest.raises(PlanInfeasible) as caught:
        check(deadline_s=9.9, model_bytes=100 * MB, workers=4)
    assert caught.value.binding == "deadline"


def test_a_lifetime_into_which_not_one_iteration_fits():
    check(lifetime_s=2.0, compute=TWO_SECONDS)
    with pytest.raises(PlanInfeasible, match=r"one iteration needs at least 2 s, the function timeout is 1.5 s") as caught:
        check(lifetime_s=1.5, compute=TWO_SECONDS)
    assert caught.value.binding == "lifetime"


def test_a_lifetime_into_which_an_evaluation_does_not_fit():
    check(lifetime_s=20.9, compute=TWO_SECONDS, tested=300)  # 0.2 s for each of 100 samples' steps, and 0.8 s for a batch
    with pytest.raises(PlanInfeasible, match=r"evaluation of 300 samples need at least 20.8 s.*test_fraction") as caught:
        check(lifetime_s=20.7, compute=TWO_SECONDS, tested=300)
    assert caught.value.binding == "lifetime"


def test_what_is_not_known_refuses_nothing():
    check(deadline_s=1e-9, lifetime_s=1e-9, model_bytes=100 * MB)  # one worker, no model of its computing


def test_no_deadline_is_never_missed():
    check(iterations=10**9, compute=TWO_SECONDS)
