"""The exact search against plain loops, on worlds of every kind; the published one is never better."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import TERMS, platform, profiles, workload

from ephemeron.performance.model import Terms
from ephemeron.performance.profile import Profile
from ephemeron.planning.search import brute_force, exact, two_stage
from ephemeron.planning.space import Limits, Space, make_space


def small(profile: Profile, limits: Limits, model: str = "honest", epochs: int = 2) -> Space:
    terms = [Terms(pattern="k-reduce", sync="hap")] if model == "published" else TERMS
    terms = [dataclasses.replace(t, epochs=epochs) for t in terms]
    return make_space(profile, terms, limits=limits, memory_step_mb=700, batch_step=40, most_workers=3, model=model)


@settings(max_examples=250, deadline=None)
@given(
    profiles(),
    st.sampled_from(["honest", "published"]),
    st.sampled_from(["cost", "time"]),
    st.sampled_from([64, 100, 200]),
    st.sampled_from([None, 0.5, 0.9, 1.5]),
)
def test_exact_finds_what_plain_loops_find(profile, model, minimise, largest, tightness):
    limits = Limits(max_global_batch=largest)
    space = small(profile, limits, model)
    free = brute_force(space, limits, minimise=minimise).best
    if free is not None and tightness is not None:  # a limit near the free optimum, which may or may not bind
        other = (
            {"deadline_s": free.seconds * tightness}
            if minimise == "cost"
            else {"budget_usd": free.cost_usd * tightness}
        )
        limits = dataclasses.replace(limits, **other)
    wanted = brute_force(space, limits, minimise=minimise).best
    found = exact(space, limits, minimise=minimise)
    assert (found.best is None) == (wanted is None)
    assert found.evaluated + found.pruned == space.size()
    if wanted is not None:
        assert found.best.key(minimise)[0] == pytest.approx(wanted.key(minimise)[0], rel=1e-12)
        heuristic = two_stage(space, limits, minimise=minimise).best
        if heuristic is not None:
            assert heuristic.key(minimise)[0] >= found.best.key(minimise)[0] * (1 - 1e-12)


@settings(max_examples=100, deadline=None)
@given(profiles(), st.sampled_from(["honest", "published"]))
def test_bounds_are_below_everything_they_bound(profile, model):
    space = small(profile, Limits(max_global_batch=128), model)
    for o in space.options:
        w, k, b = space.shapes(o)
        low, high = space.quotas[0], space.quotas[-1]
        if not len(w):
            continue
        seconds, usd = space.bound(o, w, low, high, k, b)
        for quota in space.quotas:
            m = np.full_like(w, quota)
            bn = space.other_batch(o, w, m, k, b)
            ok = space.fits(w, m, k, b, bn)
            p = space.predict(o, w, m, k, b, bn)
            assert (seconds[ok] <= p.seconds[ok] * (1 + 1e-12)).all()
            assert (usd[ok] <= p.cost_usd[ok] * (1 + 1e-12)).all()


@settings(max_examples=60, deadline=None)
@given(profiles())
def test_the_front_is_what_nothing_beats(profile):
    limits = Limits(max_global_batch=96)
    space = small(profile, limits)
    points = []
    for o in space.options:
        w, k, b = space.shapes(o)
        for quota in space.quotas:
            m = np.full_like(w, quota)
            bn = space.other_batch(o, w, m, k, b)
            ok = space.fits(w, m, k, b, bn)
            p = space.predict(o, w, m, k, b, bn)
            points += [(s, c) for s, c in zip(p.seconds[ok], p.cost_usd[ok], strict=True) if np.isfinite(s)]
    wanted = []
    for s, c in sorted(points):
        if not wanted or c < wanted[-1][1]:
            wanted.append((s, c))
    found = exact(space, limits, front=True).front
    assert len(found) == len(wanted)
    assert np.allclose([(c.seconds, c.cost_usd) for c in found], wanted, rtol=1e-12)


def test_a_mebibyte_at_a_time_costs_no_more_evaluations_than_it_must():
    profile = Profile(workload=workload(), platform=platform())
    limits = Limits(deadline_s=8000, max_global_batch=1024)
    terms = [Terms(pattern="k-reduce", sync="hap", epochs=10), Terms(pattern="k-reduce", sync="bsp", epochs=10)]
    space = make_space(profile, terms, limits=limits, memory_step_mb=1)
    found = exact(space, limits)
    assert space.size() > 50_000_000
    assert found.evaluated < 0.01 * space.size()
    coarse = exact(make_space(profile, terms, limits=limits, memory_step_mb=128), limits)
    assert found.best.cost_usd <= coarse.best.cost_usd


def test_nothing_feasible_is_said_so():
    profile = Profile(workload=workload(memory_base_mb=20_000), platform=platform())
    limits = Limits(max_global_batch=64)
    assert exact(small(profile, limits), limits).best is None
