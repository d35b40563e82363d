"""Plans: what they promise as JSON, their reasons, and what is said when nothing fits."""

from __future__ import annotations

import dataclasses
import datetime
import json

import pytest
from worlds import platform, workload

from ephemeron.errors import PlanInfeasible
from ephemeron.performance.builtin import BUILTIN, builtin_platform
from ephemeron.performance.profile import Profile
from ephemeron.planning import Limits, Wish, load_plan, make_plan, overrides

PROFILE = Profile(workload=workload(), platform=platform())
TODAY = datetime.date(2026, 6, 1)


def wish(**values):
    limits = {k: values.pop(k) for k in ("deadline_s", "budget_usd", "max_global_batch") if k in values}
    return Wish(epochs=10, limits=Limits(**{"max_global_batch": 512, **limits}), **values)


def test_a_plan_says_what_its_contract_promises(tmp_path):
    plan = make_plan(PROFILE, wish(), today=TODAY)
    plan.save(tmp_path / "plan.json")
    value = json.loads((tmp_path / "plan.json").read_text())
    assert {
        "workers", "memory_mb", "aggregators", "batch_size_aggregator", "batch_size_nonaggregator", "pattern", "channel",
        "compression", "predicted", "search", "binding", "alternatives",
    } <= value.keys()  # fmt: skip
    assert {"seconds", "cost_usd", "memory_mb", "iterations", "phases_s", "cost"} <= value["predicted"].keys()
    assert value["predicted"]["cost"].keys() == {"functions", "storage", "requests"}
    assert {"method", "seconds", "evaluated", "optimal", "gap"} <= value["search"].keys()
    assert sum(value["predicted"]["cost"].values()) == pytest.approx(value["predicted"]["cost_usd"])
    assert sum(value["predicted"]["phases_s"].values()) == pytest.approx(value["predicted"]["seconds"], rel=0.02)
    assert load_plan(tmp_path / "plan.json") == plan


def test_a_tight_deadline_costs_more_and_is_named():
    free = make_plan(PROFILE, wish(), front=False)
    tight = make_plan(PROFILE, wish(deadline_s=free.choice.predicted.seconds * 0.95), front=False)
    assert tight.choice.predicted.seconds <= free.choice.predicted.seconds * 0.95
    assert tight.choice.predicted.cost_usd > free.choice.predicted.cost_usd
    assert tight.binding == "deadline"


def test_least_time_under_a_budget():
    cheapest = make_plan(PROFILE, wish(), front=False).choice.predicted
    budget = 3 * cheapest.cost_usd
    quick = make_plan(PROFILE, wish(minimise="time", budget_usd=budget), front=False).choice.predicted
    assert quick.cost_usd <= budget
    assert quick.seconds <= cheapest.seconds


def test_the_front_starts_fast_and_ends_cheap():
    plan = make_plan(PROFILE, wish())
    times = [c["predicted"]["seconds"] for c in plan.front]
    costs = [c["predicted"]["cost_usd"] for c in plan.front]
    assert times == sorted(times)
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == pytest.approx(plan.choice.predicted.cost_usd)


def test_heuristics_say_how_far_they_are_off():
    plan = make_plan(PROFILE, wish(search="two-stage", pattern="k-reduce"), front=False)
    assert not plan.search.optimal
    assert plan.search.gap is not None
    assert plan.search.gap >= 0


@pytest.mark.parametrize(
    ("profile", "asked", "binding", "words"),
    [
        (PROFILE, {"deadline_s": 10.0}, "deadline", "cannot be met"),
        (PROFILE, {"budget_usd": 0.0001}, "budget", "the cheapest is"),
        (
            Profile(workload=workload(memory_base_mb=20_000), platform=platform()),
            {},
            "memory",
            "do not fit one .*split it: --stages 2",
        ),
        (PROFILE, {"lifetime_s": 0.5}, "lifetime", "lifetime"),
        (PROFILE, {"pattern": "parameter-server"}, "channel", "no profile has the channel"),
    ],
)
def test_what_cannot_be_is_refused_with_the_nearest_that_can(profile, asked, binding, words):
    with pytest.raises(PlanInfeasible, match=words) as refused:
        make_plan(profile, wish(**asked))
    assert refused.value.binding == binding


def test_old_prices_are_warned_of():
    old = Profile(workload=workload(), platform=dataclasses.replace(platform(), as_of="2016-01-01"))
    advice = make_plan(old, wish(), today=TODAY, front=False).advice
    assert any("years old" in text for text in advice)


def test_channels_are_compared_where_they_are_left_open():
    platforms = [builtin_platform(name) for name in BUILTIN]
    plan = make_plan(PROFILE, wish(pattern=None, workers=4), platforms=platforms, today=TODAY, front=False)
    alone = [
        make_plan(PROFILE, wish(workers=4), platforms=[p], front=False).choice.predicted.cost_usd for p in platforms
    ]
    assert plan.choice.predicted.cost_usd == pytest.approx(min(alone))


def test_functions_that_are_the_wrong_tool_are_called_so():
    plan = make_plan(PROFILE, wish(), today=TODAY, front=False)
    assert plan.machines
    cheapest = plan.machines[0]
    said = any("not the cheapest tool" in text for text in plan.advice)
    assert said == (cheapest["cost_usd"] < plan.choice.predicted.cost_usd)


def test_a_machine_s_cores_are_not_promised_twice():
    small = Profile(workload=workload(), platform=platform(total_memory_mb=4000.0))
    c = make_plan(small, wish(minimise="time"), front=False).choice
    assert c.workers * c.memory_mb <= 4000


def test_a_choice_becomes_a_configuration():
    from ephemeron.job import Configuration

    plan = make_plan(PROFILE, wish(workers=4, pattern="k-reduce"), front=False)
    c = Configuration(**overrides(plan.choice)).resolved()
    assert (c.workers, c.aggregators, c.memory_mb) == (4, plan.choice.aggregators, plan.choice.memory_mb)
    assert c.global_batch <= 512
