"""Plans: what they promise as JSON, their reasons, and what is said when nothing fits."""

from __future__ import annotations

import dataclasses
import datetime
import json
from importlib.resources import files

import pytest
from worlds import platform, workload

from ephemeron.errors import PlanInfeasible
from ephemeron.training.job import Target
from ephemeron.training.job.convergence import HAP_EPOCHS_FACTOR
from ephemeron.training.planner import PlanLimits, PlanRequest, load_plan, make_plan, overrides, vm_baseline
from ephemeron.training.planner.model.builtin import BUILTIN, builtin_platform
from ephemeron.training.planner.model.profile import Profile
from ephemeron.training.planner.model.provenance import Provenance, StepProvenance
from ephemeron.training.planner.plan import HapEpochs
from ephemeron.training.planner.uncertainty import sentences
from ephemeron.training.planner.vm_baseline import uncounted_words

PROFILE = Profile(workload=workload(), platform=platform())
TODAY = datetime.date(2026, 6, 1)


def wish(**values):
    limits = {k: values.pop(k) for k in ("deadline_s", "budget_usd", "max_global_batch") if k in values}
    return PlanRequest(epochs=10, limits=PlanLimits(**{"max_global_batch": 512, **limits}), **values)


def test_a_plan_says_what_its_contract_promises(tmp_path):
    plan = make_plan(PROFILE, wish(), today=TODAY)
    plan.save(tmp_path / "plan.json")
    value = json.loads((tmp_path / "plan.json").read_text())
    assert {
        "workers",
        "memory_mb",
        "aggregators",
        "batch_size_aggregator",
        "batch_size_nonaggregator",
        "pattern",
        "channel",
        "compression",
        "predicted",
        "search",
        "binding",
        "alternatives",
    } <= value.keys()
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
    times = [c.predicted.seconds for c in plan.front]
    costs = [c.predicted.cost_usd for c in plan.front]
    assert times == sorted(times)
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == pytest.approx(plan.choice.predicted.cost_usd)


@pytest.mark.slow
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
        (Profile(workload=workload(memory_base_mb=20_000), platform=platform()), {}, "memory", "do not fit one .*split it: --stages 2"),
        (PROFILE, {"lifetime_s": 0.5}, "lifetime", "lifetime"),
        (Profile(workload=workload(test_samples=10**10), platform=platform()), {}, "lifetime", "an evaluation takes .*test_fraction"),
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
    alone = [make_plan(PROFILE, wish(workers=4), platforms=[p], front=False).choice.predicted.cost_usd for p in platforms]
    assert plan.choice.predicted.cost_usd == pytest.approx(min(alone))


def test_functions_that_are_the_wrong_tool_are_called_so():
    plan = make_plan(PROFILE, wish(), today=TODAY, front=False)
    assert plan.machines
    cheapest = plan.machines[0]
    said = any("not the cheapest tool" in text for text in plan.advice)
    assert said == (cheapest.cost_usd < plan.choice.predicted.cost_usd)


def test_machines_are_not_shown_as_slow_as_their_smallest_sibling(tmp_path):
    """Where one vCPU was measured, 32 of them would look no faster than two, and functions better than they are."""
    narrow = Profile(workload=workload(vcpus=1.0), platform=platform())
    plan = make_plan(narrow, wish(), today=TODAY, front=False)
    names = [m.name for m in plan.machines]
    assert "c7i.large" in names
    assert "c7i.8xlarge" not in names
    assert all(m.counted_vcpus == 1 for m in plan.machines)
    assert "At most 1 vCPU counted" in uncounted_words(plan.machines)
    built_in = files("ephemeron.prices").joinpath("aws-us-east-1.toml").read_text()
    (tmp_path / "prices.toml").write_text(
        built_in.split("# boot_s is an assumption, as for")[0] + "[[machine]]" + built_in.split("[[machine]]")[1]
    )
    alone = make_plan(narrow, wish(), today=TODAY, front=False, prices_file=tmp_path / "prices.toml")
    assert {m.name for m in alone.machines} == {"m5.large", "m5.large spot"}
    assert any("1 of its 2 vCPUs counted" in text for text in alone.advice)
    wide = make_plan(PROFILE, wish(), today=TODAY, front=False)
    assert "c7i.8xlarge" in [m.name for m in wide.machines]


@pytest.mark.parametrize("most", [256, 2000])
def test_more_functions_than_may_run_at_once_are_refused_by_that_name(most):
    with pytest.raises(PlanInfeasible, match=r"1,500 functions are more than the 1,000 that may run at once") as refused:
        make_plan(PROFILE, wish(workers=1500, most_workers=most), front=False)
    assert refused.value.binding == "concurrency"


def test_a_number_of_functions_that_is_asked_for_is_not_cut_by_what_is_searched():
    assert make_plan(PROFILE, wish(workers=300, pattern="k-reduce", memory_mb=2048), front=False).choice.workers == 300


def test_functions_beyond_the_burst_begin_later_and_the_plan_says_so():
    asked = wish(workers=1500, pattern="k-reduce", memory_mb=2048, max_global_batch=4096)
    at_once = Profile(workload=workload(), platform=platform(concurrency=3000))
    limited = Profile(workload=workload(), platform=platform(concurrency=3000, burst=1000, burst_s=10.0))
    free, late = (make_plan(p, asked, front=False) for p in (at_once, limited))
    waited = late.choice.predicted.phases_s["start"] - free.choice.predicted.phases_s["start"]
    assert waited == pytest.approx(5.0)
    assert late.choice.predicted.cost_usd > free.choice.predicted.cost_usd
    assert any("burst limit of 1,000" in text for text in late.advice)
    assert not any("burst" in text for text in free.advice)
    assert builtin_platform("aws-lambda-s3").burst == 1000


def test_the_comparison_has_every_kind_and_few_lines():
    plan = make_plan(PROFILE, wish(), today=TODAY, front=False)
    kinds = {(m.kind, m.arm64) for m in plan.machines}
    assert {kind for kind, _ in kinds} == {"on demand", "spot", "fargate"}
    assert ("on demand", True) in kinds
    assert len(plan.machines) <= 6
    costs = [m.cost_usd for m in plan.machines]
    assert costs == sorted(costs)
    assert not any(m.verified for m in plan.machines if m.kind == "spot")


def test_arm64_functions_cost_less_by_the_gb_seconds_alone():
    plan = make_plan(PROFILE, wish(), today=TODAY, front=False)
    p = plan.choice.predicted
    assert plan.beyond["arm64_usd"] == pytest.approx(0.8 * p.cost["functions"] + p.cost["storage"] + p.cost["requests"], rel=1e-4)
    assert plan.beyond["egress_usd"] == pytest.approx(97.49e6 / 1e9 * 0.09)
    own = Profile(workload=workload(), platform=platform(price_gb_s=1e-6))
    assert "arm64_usd" not in make_plan(own, wish(), today=TODAY, front=False).beyond


def test_a_gpu_at_its_break_even_costs_what_the_plan_costs(tmp_path):
    built_in = files("ephemeron.prices").joinpath("aws-us-east-1.toml").read_text()
    slow = dataclasses.replace(PROFILE, workload=workload(a=600.0))
    asked = wish(pattern="k-reduce", workers=8)
    free = make_plan(slow, asked, today=TODAY, front=False)
    for g in free.gpus:
        assert (g.seconds, g.cost_usd) == (None, None)
        assert g.break_even is not None
        assert g.break_even > 1
    factor = free.gpus[-1].break_even
    path = tmp_path / "prices.toml"
    path.write_text(built_in.replace("hour_usd = 1.006", f"hour_usd = 1.006\nspeedup = {factor!r}"))
    known = make_plan(slow, asked, today=TODAY, front=False, prices_file=path)
    assert known.gpus[-1].cost_usd == pytest.approx(known.choice.predicted.cost_usd)
    told = " ".join(vm_baseline.sentences(free.gpus, free.beyond, free.choice.predicted.cost_usd))
    assert "how fast it is on this job is not known" in told
    assert "the same time assumed" in told
    dear = tmp_path / "dear.toml"
    dear.write_text(built_in.replace("hour_usd = 1.006", "hour_usd = 1e6"))
    never = make_plan(slow, asked, today=TODAY, front=False, prices_file=dear)
    assert never.gpus[-1].break_even is None
    assert "at no speed (g5.xlarge" in vm_baseline.sentences(never.gpus, {}, 1.0)[0]


def test_a_machine_s_cores_are_not_promised_twice():
    small = Profile(workload=workload(), platform=platform(total_memory_mb=4000.0))
    c = make_plan(small, wish(minimise="time"), front=False).choice
    assert c.workers * c.memory_mb <= 4000


def test_a_choice_becomes_a_configuration():
    from ephemeron.training.job import Configuration

    plan = make_plan(PROFILE, wish(workers=4, pattern="k-reduce"), front=False)
    c = Configuration(**overrides(plan.choice)).resolved()
    assert (c.workers, c.aggregators, c.memory_mb) == (4, plan.choice.aggregators, plan.choice.memory_mb)
    assert c.global_batch <= 512


def test_what_a_person_would_choose_between_is_shown_with_its_ratios():
    """A deadline that only many functions meet: what one function would take belongs beside it."""
    slow = dataclasses.replace(PROFILE, workload=workload(a=600.0))
    alone = make_plan(slow, wish(workers=1, minimise="time"), front=False).choice.predicted
    plan = make_plan(slow, wish(deadline_s=0.7 * alone.seconds), front=False)
    named = {c.why: c for c in plan.compared}
    assert {"chosen", "fastest"} <= named.keys()
    assert any(c.workers == 1 for c in plan.compared)
    for c in plan.compared:
        assert c.time_ratio == pytest.approx(c.predicted.seconds / plan.choice.predicted.seconds)
        assert c.cost_ratio == pytest.approx(c.predicted.cost_usd / plan.choice.predicted.cost_usd)
    cheap = named.get("cheapest") or named["one function"]
    assert not cheap.within_limits
    assert any("one function of" in text and "of its cost" in text for text in plan.advice)


@pytest.mark.parametrize(
    ("asked", "words"),
    [({"deadline_s": 10.0}, r"the nearest is .* too slow; the cheapest is"), ({"budget_usd": 0.0001}, r"times too dear")],
)
def test_where_nothing_fits_the_nearest_says_by_how_much(asked, words):
    with pytest.raises(PlanInfeasible, match=words):
        make_plan(PROFILE, wish(**asked))


def test_limits_that_exclude_each_other_get_the_nearest_to_both():
    free = make_plan(PROFILE, wish())
    cheapest, fastest = free.front[-1].predicted, free.front[0].predicted
    deadline = (cheapest.seconds * fastest.seconds) ** 0.5
    needed = make_plan(PROFILE, wish(deadline_s=deadline), front=False).choice.predicted.cost_usd
    with pytest.raises(PlanInfeasible, match="exclude each other: the nearest to both") as refused:
        make_plan(PROFILE, wish(deadline_s=deadline, budget_usd=(needed + cheapest.cost_usd) / 2))
    assert "too slow" in str(refused.value) or "too dear" in str(refused.value)


def test_a_plan_says_how_sure_its_profile_is():
    """The wider the interval of the steps, the wider those of time and cost, and the more often the choice changes."""
    found = []
    for half in (0.05, 2.74):
        profile = dataclasses.replace(PROFILE, fit=Provenance(steps=StepProvenance(half_width=half)))
        plan = make_plan(profile, wish())
        u = plan.uncertainty
        assert u is not None
        assert u.sources["compute"] == half
        low, high = u.time_s
        assert low < plan.choice.predicted.seconds < high
        found.append((high / low, u.same_choice, u.cost_usd[1] / u.cost_usd[0]))
        assert any(f"± {half:.0%}" in text for text in sentences(u))
    assert found[1][0] > 3 * found[0][0]
    assert found[1][2] > 3 * found[0][2]
    assert found[1][1] <= found[0][1]


def test_what_lies_beyond_the_measured_is_marked():
    aws = builtin_platform("aws-lambda-s3")
    bert = Profile(workload=workload(model_mb=417.0, memory_base_mb=4000), platform=aws)
    plan = make_plan(bert, wish(workers=4, pattern="k-reduce"), front=False)
    assert any("measured up to 50 MB" in text for text in plan.extrapolated)
    assert any("measured up to 3,008 MB" in text for text in plan.extrapolated)
    few = Profile(workload=workload(model_mb=4.0, memory_base_mb=400, vcpus=1.0), platform=aws)
    assert make_plan(few, wish(workers=4, memory_mb=1024), front=False).extrapolated == ()


def test_the_whole_plan_is_timed():
    plan = make_plan(PROFILE, wish())
    alone = make_plan(PROFILE, wish(), front=False)
    assert plan.search.seconds > 0
    assert plan.search.evaluated >= alone.search.evaluated > 0


def test_hap_is_planned_with_the_epochs_that_it_needs():
    free = make_plan(PROFILE, wish(sync="hap", pattern="k-reduce"), front=False)
    assert (free.hap_epochs.factor, free.hap_epochs.source) == (HAP_EPOCHS_FACTOR, "measured")
    more = make_plan(PROFILE, wish(sync="hap", pattern="k-reduce", hap_epochs_factor=1.5), front=False)
    assert (more.epochs, more.hap_epochs) == (15, HapEpochs(factor=1.5, source="given", bsp=10, hap=15))
    assert any("15 epochs where bsp has 10: factor 1.5 (given)" in text for text in more.advice)
    assert more.choice.predicted.cost_usd > 1.3 * free.choice.predicted.cost_usd
    assert json.loads(more.to_json())["hap_epochs"] == {"factor": 1.5, "source": "given", "bsp": 10, "hap": 15}


def test_many_additional_epochs_make_bsp_the_better_choice():
    open_protocol = wish(pattern="k-reduce", hap_epochs_factor=1.0)
    assert make_plan(PROFILE, open_protocol, front=False).choice.sync == "hap"
    dear = make_plan(PROFILE, dataclasses.replace(open_protocol, hap_epochs_factor=3.0), front=False)
    assert (dear.choice.sync, dear.epochs) == ("bsp", 10)
    alone = make_plan(PROFILE, dataclasses.replace(open_protocol, sync="bsp"), front=False)
    assert dear.choice.predicted == alone.choice.predicted
    assert not any("hap" in text for text in alone.advice)


@pytest.mark.parametrize("factor", [1.0, 1.4])
def test_the_search_with_different_epochs_by_protocol_finds_what_trying_everything_finds(factor):
    asked = wish(max_global_batch=48, hap_epochs_factor=factor, most_workers=5, memory_step_mb=512)
    exact, brute = (make_plan(PROFILE, dataclasses.replace(asked, search=s), front=False) for s in ("exact", "brute-force"))
    assert exact.choice.predicted.cost_usd == pytest.approx(brute.choice.predicted.cost_usd, rel=1e-9)


def test_a_plan_with_hap_warns_outside_of_the_tested_region():
    asked = wish(pattern="k-reduce", sync="hap", optimizer=Target(target="SGD", options={"lr": 1.0, "momentum": 0.9}))
    assert any(t.startswith("warning: sync 'hap'") for t in make_plan(PROFILE, asked, front=False).advice)
    mild = dataclasses.replace(asked, optimizer=Target(target="SGD", options={"lr": 0.05, "momentum": 0.9}))
    assert not any("warning" in t for t in make_plan(PROFILE, mild, front=False, today=TODAY).advice)
