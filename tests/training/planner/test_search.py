"""The exact search against plain loops, on worlds of every kind; the published one is never better."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import TERMS, platform, profiles, short_lives, workload

from ephemeron.training.planner.baselines import brute_force, published, two_stage
from ephemeron.training.planner.model.exchange import ExecutionOptions, exchange
from ephemeron.training.planner.model.profile import Profile, QuotaRange
from ephemeron.training.planner.model.rates import Power, Saturating, Transfer
from ephemeron.training.planner.plan import PlanLimits
from ephemeron.training.planner.search.bounds import Blocks, Ranges, bound, pace, ranges
from ephemeron.training.planner.search.branch_and_bound import exact
from ephemeron.training.planner.search.space import Space, make_space
from ephemeron.training.planner.search.tables import families, tabulate
from random_schedules import examples


def small(profile: Profile, limits: PlanLimits, model: str = "honest", epochs: int = 2) -> Space:
    terms = [ExecutionOptions(pattern="k-reduce", sync="hap")] if model == "published" else TERMS
    terms = [dataclasses.replace(t, epochs=epochs) for t in terms]
    direct = None if model == "published" else profile.platform.over_links()
    return make_space(
        profile,
        terms,
        limits=limits,
        platforms=[profile.platform, *([] if direct is None else [direct])],
        memory_step_mb=700,
        most_workers=6,
        published=published if model == "published" else None,
    )


def best_of(everything: list[np.ndarray], limits: PlanLimits, minimise: str) -> float | None:
    """The least cost, or time, within limits."""
    seconds, usd = everything[-2:]
    mine = (usd if minimise == "cost" else seconds)[(seconds <= limits.seconds) & (usd <= limits.usd)]
    return float(mine.min()) if len(mine) else None


@settings(max_examples=examples(60), deadline=None)
@given(
    st.one_of(profiles(), profiles(), short_lives()),
    st.sampled_from(["honest", "honest", "honest", "published"]),
    st.sampled_from(["cost", "time"]),
    st.sampled_from([7, 16, 25, 40]),
    st.sampled_from([None, 0.5, 0.9, 1.5]),
)
def test_exact_finds_what_plain_enumeration_finds(profile, model, minimise, largest, tightness):
    limits = PlanLimits(max_global_batch=largest)
    space = small(profile, limits, model)
    everything = enumerated(space)
    free = best_of(everything, limits, minimise)
    if free is not None and tightness is not None:  # a limit near the free optimum, which may or may not bind
        mine, other = everything[-1], everything[-2]
        if minimise == "time":
            mine, other = other, mine
        limit = float(other[mine.argmin()]) * tightness
        limits = dataclasses.replace(limits, **{"deadline_s" if minimise == "cost" else "budget_usd": limit})
    wanted = best_of(everything, limits, minimise)
    found = exact(space, limits, minimise=minimise)
    assert (found.best is None) == (wanted is None)
    if found.best is not None:
        assert found.best.key(minimise)[0] == pytest.approx(wanted, rel=1e-12)
        assert found.best.seconds <= limits.seconds
        assert found.best.cost_usd <= limits.usd


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(profiles(), st.sampled_from(["cost", "time"]))
def test_other_searches_agree_or_do_worse(profile, minimise):
    limits = PlanLimits(max_global_batch=24)
    space = small(profile, limits)
    found, all_of = exact(space, limits, minimise=minimise), brute_force(space, limits, minimise=minimise)
    assert all_of.evaluated == space.size() == found.evaluated + found.pruned
    assert (found.best is None) == (all_of.best is None)
    if found.best is not None:
        assert found.best.key(minimise)[0] == pytest.approx(all_of.best.key(minimise)[0], rel=1e-12)
        heuristic = two_stage(space, limits, minimise=minimise).best
        if heuristic is not None:
            assert heuristic.key(minimise)[0] >= found.best.key(minimise)[0] * (1 - 1e-12)


@settings(max_examples=examples(40), deadline=None)
@given(st.one_of(profiles(), short_lives()), st.sampled_from(["honest", "published"]), st.data())
def test_bounds_are_below_everything_they_bound(profile, model, data):
    """Blocks of every shape: of one quota or of all, of any W and K, with and without bounds on the batches."""
    largest = 40
    space = small(profile, PlanLimits(max_global_batch=largest), model)
    everything = np.array(enumerated(space))
    option, w, _, k, *_ = everything
    last = len(space.quotas) - 1
    of = {(i, tied): everything[:, (option == i) & ((k == w) == tied)] for i in range(len(space.options)) for tied in (False, True)}
    for fine in tabulate(space, families(space), 0, last, 6):
        n = len(fine.families)
        for t in (fine, fine.merged(np.arange(n) * (last + 1))):
            rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
            column, level = rng.integers(0, len(t.family), 60), rng.integers(0, 3, 60)
            tied = np.array([f.tied for f in t.families])[t.family[column]]
            w_index, k_index = rng.integers(0, 7, 60) >> level, rng.integers(0, 7, 60) >> level
            x0 = np.where(rng.random(60) < 0.5, 0, rng.integers(1, 8, 60))
            x1 = np.where(x0 > 0, x0 + rng.integers(0, 8, 60), 0)
            k_index = np.where(tied, w_index, np.minimum(k_index, (4 >> level)))
            b = Blocks.of(column, level, w_index, level, k_index).having(x0=x0, x1=x1)
            r = ranges(t, b, largest, 6)
            b, r = b.take(r.some), Ranges(*(getattr(r, name)[r.some] for name in Ranges.__slots__))
            seconds, usd = bound(space, t, b, r, largest)
            for i in range(len(b)):
                f = t.families[t.family[b.column[i]]]
                _, w, m, k, ba, _, s, c = of[f.option, bool(f.tied)]
                inside = (w >= r.w0[i]) & (w <= r.w1[i]) & (k >= r.k0[i]) & (k <= r.k1[i]) & (ba >= r.x0[i])
                inside &= (ba <= r.x1[i]) & (m >= t.first[b.column[i]]) & (m <= t.last[b.column[i]])
                assert (seconds[i] <= s[inside] * (1 + 1e-11)).all()
                assert (usd[i] <= c[inside] * (1 + 1e-11)).all()


def test_few_functions_are_bounded_by_their_own_pace_where_more_of_them_take_no_longer():
    """Pipelined and bound by uplinks: from W = 4 on every W takes the same, W = 2 and W = 3 take less."""
    up, down = Saturating(p_mb_s=1.0, t_per_mb=1.0), Power(latency_s=0.0, s_per_mb=0.5, exponent=1.0)
    where = platform(transfer=(Transfer(memory_mb=128, up=up, down=down),), poll_s=0.0, parallel=1, memory_mb=QuotaRange(max=2048))
    what = workload(model_mb=1.0, a=1.0, b=0.0, m=0.0, memory_slope_mb=0.0, memory_base_mb=0.0, dataset_mb=0.0, samples=18)
    space = small(Profile(workload=what, platform=where), PlanLimits(max_global_batch=40))
    (t,) = tabulate(space, [f for f in families(space) if space.options[f.option].terms.pattern == "pipelined"], 0, 0, 6)
    w = np.array([1, 2, 3])  # W - 1
    level = np.zeros(3, dtype=int)
    column = np.full(3, int(np.flatnonzero(~t.tied)[0]))
    b = Blocks.of(column, level, w, level, level)
    seconds, _ = pace(t, b, ranges(t, b, 40, 6))
    terms = ExecutionOptions(pattern="pipelined", epochs=2)
    wanted = exchange(what, where, terms, workers=w + 1, aggregators=1, memory_mb=space.quotas[0]).seconds
    assert wanted[0] < wanted[1] < wanted[2]
    assert (seconds <= wanted * (1 + 1e-12)).all()


def enumerated(space: Space) -> list[np.ndarray]:
    """Option, W, index of M, K, B^a, B^n, time and cost of everything that is allowed and ends."""
    parts = []
    for i, o in enumerate(space.options):
        for w, k, ba, bn in space.candidates(o):
            for j, quota in enumerate(space.quotas):
                m = np.full_like(w, quota)
                p = space.predict(o, w, m, k, ba, bn)
                ok = space.fits(o, w, m, k, ba, bn) & np.isfinite(p.seconds)
                rows = (np.full_like(w, i), w, np.full_like(w, j), k, ba, bn, p.seconds, p.cost_usd)
                parts.append(np.array([x[ok] for x in rows]))
    return list(np.concatenate(parts, axis=1))


@pytest.mark.slow
@settings(max_examples=examples(50), deadline=None)
@given(st.one_of(profiles(), short_lives()))
def test_the_front_is_what_nothing_beats(profile):
    limits = PlanLimits(max_global_batch=30)
    space = small(profile, limits)
    *_, seconds, usd = enumerated(space)
    wanted = []
    for s, c in sorted(zip(seconds, usd, strict=True)):
        if not wanted or c < wanted[-1][1]:
            wanted.append((s, c))
    found = [(c.seconds, c.cost_usd) for c in exact(space, limits, front=True).front]
    for s, c in wanted:  # each is there, or one that differs by rounding
        assert any(a <= s * (1 + 1e-8) and b <= c * (1 + 1e-8) for a, b in found)
    for (s, c), (later, cheaper) in itertools.pairwise(found):
        assert later > s * (1 + 1e-10)
        assert cheaper < c * (1 - 1e-10)
    assert all(((seconds >= s * (1 - 1e-12)) | (usd >= c * (1 - 1e-12))).all() for s, c in found)


def test_a_mebibyte_at_a_time_costs_no_more_evaluations_than_it_must():
    profile = Profile(workload=workload(), platform=platform())
    limits = PlanLimits(deadline_s=8000, max_global_batch=1024)
    terms = [ExecutionOptions(pattern="k-reduce", sync="hap", epochs=10), ExecutionOptions(pattern="k-reduce", sync="bsp", epochs=10)]
    space = make_space(profile, terms, limits=limits, memory_step_mb=1, memory_max_mb=3008)
    found = exact(space, limits)
    assert space.size() > 50_000_000
    assert found.evaluated < 0.01 * space.size()
    coarse = exact(make_space(profile, terms, limits=limits, memory_step_mb=128, memory_max_mb=3008), limits)
    assert found.best.cost_usd <= coarse.best.cost_usd


def test_nothing_feasible_is_said_so():
    profile = Profile(workload=workload(memory_base_mb=20_000), platform=platform())
    limits = PlanLimits(max_global_batch=64)
    assert exact(small(profile, limits), limits).best is None


@pytest.mark.slow
def test_no_integer_batch_is_left_out():
    """Tight limits: the best batches are no multiples of anything, and under HAP not the largest B^n either."""
    profile = Profile(workload=workload(samples=5000), platform=platform())
    limits = PlanLimits(deadline_s=290, max_global_batch=301)
    terms = [ExecutionOptions(pattern="k-reduce", sync="hap", epochs=2), ExecutionOptions(pattern="pipelined", epochs=2)]
    space = make_space(profile, terms, limits=limits, memory_step_mb=512, most_workers=12)
    best = exact(space, limits).best
    assert best.cost_usd == pytest.approx(best_of(enumerated(space), limits, "cost"), rel=1e-12)
    lattice = set(space.batches)
    assert {best.batch, best.other_batch} - lattice
