"""Plans with direct links between functions: equations, limits, prices, and the reasons that are given."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from worlds import platform, workload

from ephemeron.errors import JobError
from ephemeron.training import planning_workflow
from ephemeron.training.planner import PlanLimits, PlanRequest, make_plan
from ephemeron.training.planner.model.direct_links import DirectLinks
from ephemeron.training.planner.model.exchange import ExecutionOptions, exchange
from ephemeron.training.planner.model.prediction import predict
from ephemeron.training.planner.model.profile import PlatformProfile, Profile, QuotaRange, parse_profile
from ephemeron.training.planner.search.branch_and_bound import exact
from ephemeron.training.planner.search.space import make_space

BSP = ExecutionOptions(pattern="k-reduce", sync="bsp", epochs=2)
LINKS = DirectLinks(latency_s=0.001, mb_s=70.0, setup_s=0.2, setup_each_s=0.05)
STORE = platform(poll_s=0.03, price_list=5e-6, memory_mb=QuotaRange(min=1024, max=3072, step=1024))


def linked(**values: object) -> PlatformProfile:
    """The platform over direct links."""
    found = dataclasses.replace(STORE, links=dataclasses.replace(LINKS, **values)).over_links()
    assert found is not None
    return found


def one(where: PlatformProfile, w: int, what=None, k: int | None = None):
    """One exchange, and a run, of W functions that all aggregate."""
    what = what or workload(model_mb=8.0, samples=640)
    asked = {"workers": np.array([w]), "memory_mb": np.array([1024.0]), "aggregators": np.array([k or w])}
    batch = np.array([16.0])
    return exchange(what, where, BSP, **asked), predict(what, where, BSP, batch=batch, other_batch=batch, **asked)


@pytest.mark.parametrize("w", [2, 3, 8])
def test_two_phases_take_twice_the_latency_and_the_share_of_the_others(w):
    e, _ = one(linked(), w)
    assert e.seconds[0] == pytest.approx(2 * 0.001 + 2 * (w - 1) / w * 8.0 / 70.0)
    assert (e.puts[0], e.gets[0], e.moved_mb[0]) == (0, 0, 0)
    assert e.direct_mb[0] == pytest.approx(2 * (w - 1) * 8.0)


def test_a_small_vector_takes_one_latency():
    e, _ = one(linked(one_phase_mb=3 * 8.0), 4)
    assert e.seconds[0] == pytest.approx(0.001 + 3 * 8.0 / 70.0)
    assert e.direct_mb[0] == pytest.approx(4 * 3 * 8.0)
    more, _ = one(linked(one_phase_mb=3 * 8.0), 5)
    assert more.seconds[0] == pytest.approx(2 * 0.001 + 2 * 4 / 5 * 8.0 / 70.0), "5 functions would send too much"


def test_sending_takes_cpu_time_of_the_function_s_share():
    slow, _ = one(linked(cpu_s_per_mb=0.1), 4)
    share = 1024 / STORE.mb_per_vcpu
    assert slow.seconds[0] == pytest.approx(2 * 0.001 + 2 * 3 / 4 * 8.0 * 0.1 / share)


def test_a_run_pays_for_its_endpoints_and_no_request_of_an_iteration():
    what = workload(model_mb=8.0, samples=640)
    _, over = one(linked(price_mb=2e-5), 4, what)
    _, store = one(STORE, 4, what)
    e, _ = one(STORE, 4, what)
    iterations = over.iterations[0]
    assert store.puts[0] - iterations * e.puts[0] == pytest.approx(over.puts[0] - 4)  # an endpoint each
    assert store.gets[0] - iterations * e.gets[0] == pytest.approx(over.gets[0] - 4 * 3)
    assert over.load_s[0] == pytest.approx(store.load_s[0] + 0.2 + 3 * 0.05)
    expected = iterations * 2 * 3 * 8.0 * 2e-5 + 4 * 5e-6
    assert over.storage_usd[0] - store.storage_usd[0] == pytest.approx(expected)


def test_pairs_without_a_link_exchange_through_the_store():
    w, p = 4, 0.25
    e, _ = one(linked(failure=p), w)
    assert e.puts[0] == e.gets[0] == pytest.approx(4 * p * w * (w - 1) / 2)
    whole, _ = one(linked(), w)
    assert e.direct_mb[0] == pytest.approx((1 - p) * whole.direct_mb[0])
    assert e.moved_mb[0] == pytest.approx(2 * p * whole.direct_mb[0])
    all_fail, _ = one(linked(failure=1.0), w)
    some = 1 - (1 - p) ** 6
    assert e.seconds[0] > whole.seconds[0]
    assert e.seconds[0] <= whole.seconds[0] + some * (all_fail.seconds[0] - whole.seconds[0]) * (1 + 1e-12)
    assert all_fail.direct_mb[0] == 0


def test_one_function_has_no_links():
    e, p = one(linked(), 1)
    _, store = one(STORE, 1)
    assert e.seconds[0] == 0
    assert p.seconds[0] == store.seconds[0]
    assert p.cost_usd[0] == store.cost_usd[0]


def test_members_keep_three_versions_for_others():
    what = workload(model_mb=100.0, samples=640)
    _, over = one(linked(), 4, what)
    _, store = one(STORE, 4, what)
    assert over.memory_needed_mb[0] == pytest.approx(store.memory_needed_mb[0] + 3 * (100 + 100))
    tight = dataclasses.replace(what, memory_base_mb=500.0, memory_slope_mb=6.0)
    space = make_space(Profile(workload=tight, platform=STORE), [BSP], limits=PlanLimits(max_global_batch=64), platforms=[linked()])
    found = exact(space, PlanLimits(), minimise="cost").best
    assert found is not None
    assert found.memory_mb >= 500 + 600 + 6 * found.batch


def plan(limits: PlanLimits, *where: PlatformProfile, minimise: str = "time", **values: object):
    what = workload(model_mb=47.0, a=300.0, m=0.0, samples=2_000, test_samples=0, memory_slope_mb=1.0, **values)
    wish = PlanRequest(limits=limits, minimise=minimise, most_workers=8)
    return make_plan(Profile(workload=what, platform=where[0]), wish, platforms=where)


def test_the_planner_chooses_among_store_and_links_and_says_why():
    limits = PlanLimits(max_global_batch=256)
    found = plan(limits, STORE, linked(mb_s=300.0))
    assert found.choice.channel == "direct"
    assert found.choice.aggregators == found.choice.workers > 1
    assert found.search.optimal
    (why,) = [text for text in found.advice if text.startswith("channel: ")]
    assert "direct links" in why
    assert "objects" in why
    store = plan(limits, STORE)
    assert store.choice.predicted.seconds > found.choice.predicted.seconds
    slow = plan(limits, STORE, linked(mb_s=20.0))
    assert slow.choice.channel == "objects"
    (why,) = [text for text in slow.advice if text.startswith("channel: ")]
    assert "direct links" in why


def test_errors_of_the_store_are_not_said_of_links():
    measured = dataclasses.replace(linked(mb_s=300.0), measured_mb=1.0, error_up=0.1, error_down=0.1)
    found = plan(PlanLimits(max_global_batch=256), measured)
    assert found.choice.channel == "direct"
    assert found.uncertainty is not None
    assert found.uncertainty.sources["links"] is None
    assert "upload" not in found.uncertainty.sources
    assert not [text for text in found.extrapolated if text.startswith("shards")]
    assert any(text.startswith("the model of 47 MB") for text in found.extrapolated)


def test_a_plan_says_what_pairs_without_a_link_cost():
    found = plan(PlanLimits(max_global_batch=256), linked(failure=0.05))
    (why,) = [text for text in found.advice if "without a link" in text]
    assert "5 %" in why


def test_a_profile_of_links_needs_them():
    raw = {
        "workload": {"model_mb": 1, "a": 1, "b": 0, "m": 0, "memory_slope_mb": 0, "memory_base_mb": 0, "dataset_mb": 0, "samples": 8},
        "platform": {
            "name": "x",
            "channel": "direct",
            "lifetime_s": 9,
            "cold_start_s": 0,
            "price_gb_s": 0,
            "price_invocation": 0,
            "price_put": 0,
            "price_get": 0,
            "poll_s": 0,
            "memory_mb": {},
            "transfer": [{"memory_mb": 1, "up": {"latency_s": 0, "mb_s": 1}, "down": {"latency_s": 0, "mb_s": 1}}],
        },
    }
    with pytest.raises(JobError, match="links"):
        parse_profile(raw)
    raw["platform"]["links"] = {"latency_s": 0.001, "mb_s": 70, "failure": 0.1}  # type: ignore[index]
    profile = parse_profile(raw)
    assert parse_profile(json.loads(profile.to_json())) == profile


def test_a_channel_that_is_given_says_which_links_are_planned_for():
    measured = dataclasses.replace(STORE, name="local", links=LINKS)
    for channel, kinds in ((None, ["objects", "direct"]), ("folder", ["objects"]), ("direct+s3://b/p", ["direct"])):
        found = planning_workflow.platforms_for("local", measured, channel=channel)
        assert [p.channel for p in found] == kinds
    without = planning_workflow.platforms_for("local", STORE, channel="direct")
    assert [p.channel for p in without] == ["objects"], "no links were measured"


@pytest.mark.parametrize(("given", "address"), [(None, "direct"), ("folder", "direct"), ("s3://b/p", "direct+s3://b/p"), ("direct", None)])
def test_a_run_by_a_plan_with_links_has_a_direct_channel(given, address):
    choice = plan(PlanLimits(max_global_batch=256), linked(mb_s=300.0)).choice
    assert planning_workflow.addressed(choice, given).get("channel") == address
    assert planning_workflow.addressed(dataclasses.replace(choice, channel="cache"), given) == {}
