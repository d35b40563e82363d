"""Promises 4 and 5: storage stays bounded, relays cost little, and what cannot work is refused first."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from training_runs import WORLD, configuration, make_job, synthetic

from ephemeron.errors import JobError, PlanInfeasible
from ephemeron.events import Ended, LimitReached, Progress, RunEnded
from ephemeron.functions.base import Limits
from ephemeron.prices import load_prices
from ephemeron.training.driver.launching.prepare import prepare
from ephemeron.training.job import JobLimits, Simulation, Target, parse_fault

QUICK = Simulation(compute={"a": 10.0, "b": 4.0, "m": 0.0}, latency_s=0.001)


@pytest.mark.parametrize("how", [{}, {"sync": "hap"}, {"pattern": "pipelined"}, {"pattern": "parameter-server"}], ids=str)
def test_storage_does_not_grow(how):
    few = synthetic(samples=640, epochs=3, world=QUICK, checkpoint_every=10, **how)
    many = synthetic(samples=640, epochs=8, world=QUICK, checkpoint_every=10, **how)
    assert many.most_objects <= 1.1 * few.most_objects
    assert many.left == {"run/spec", "run/result"}


@pytest.mark.slow
def test_1000_iterations():
    run = synthetic(samples=6400, epochs=10, world=QUICK, workers=4, aggregators=2, batch_size=16)
    assert run.ending.final.iterations == 1000
    assert run.most_objects < 200
    assert run.left == {"run/spec", "run/result"}


def test_requests_are_those_of_the_equations():
    """FasDL, 3-24 and 3-25: K·W puts and 2K(W−1) gets per iteration; the rest is bookkeeping, once per function."""
    for w, k in ((2, 1), (4, 2), (4, 4), (5, 3)):
        long = synthetic(workers=w, aggregators=k, samples=w * 16 * 30, epochs=1, checkpoint_every=1000)
        short = synthetic(workers=w, aggregators=k, samples=w * 16 * 10, epochs=1, checkpoint_every=1000)
        a, b = long.trigger.ledger.traffic, short.trigger.ledger.traffic
        assert a.puts - b.puts == 20 * k * w
        assert a.gets - b.gets == 20 * 2 * k * (w - 1)


def test_relays_cost_little():
    world = dataclasses.replace(WORLD, cold_start_s=0.05)  # warm starts
    whole = synthetic(samples=3200, epochs=2, world=world)
    length = whole.trigger.ledger.ended_at
    relayed = synthetic(samples=3200, epochs=2, world=world, function_timeout_s=length / 10)
    assert relayed.sha == whole.sha
    assert relayed.trigger.ledger.ended_at < 1.05 * length  # virtual seconds


def hap_configuration() -> dict:
    """Batches that follow equation 3-22 in this world: T_train(B^n) = T_train(B^a) + T_agg."""
    size, w, k, m = 250_000 * 4, 6, 2, 1769
    world = Simulation(latency_s=0.01, bandwidth_mb_s=70.0)
    aggregation = 0.01 + (w - 1) * size / k / 70e6 + 0.01 + size / k / 70e6
    a = aggregation * m / 16  # 16 samples more take as long as aggregating
    return {
        "world": dataclasses.replace(world, compute={"a": a, "b": 8.0, "m": 0.0}),
        "elements": size // 4,
        "workers": w,
        "aggregators": k,
        "batch_size": 16,
        "nonaggregator_batch_size": 32,
        "samples": 160 * 12,
        "epochs": 1,
    }


def test_hap_non_aggregators_hardly_wait():
    run = synthetic(sync="hap", checkpoint_every=1000, **hap_configuration())
    waits: list[float] = []
    ends: dict[int, float] = {}
    for e in run.of(Progress):
        if e.rank >= 2 and e.iteration in range(2, 11):
            waits.append(sum(b - a for p, a, b in e.spans if p == "wait") / (e.t - ends[e.rank]))
        ends[e.rank] = e.t
    assert max(waits) < 0.05
    staleness = {e.iteration - e.version for e in run.of(Progress) if e.rank >= 2 and e.iteration >= 1}
    assert staleness == {1}
    assert {e.iteration - e.version for e in run.of(Progress) if e.rank < 2} == {0}


def test_hap_is_faster_than_bsp_on_the_same_world():
    how = hap_configuration()
    hap, bsp = synthetic(sync="hap", **how), synthetic(sync="bsp", **how)
    assert hap.trigger.ledger.ended_at < bsp.trigger.ledger.ended_at


def test_ssp_keeps_its_bound():
    run = synthetic(sync="ssp:2", faults=["delay:rank=3,factor=4"])
    assert max(e.iteration - e.version for e in run.of(Progress)) <= 2
    assert any(e.iteration - e.version > 0 for e in run.of(Progress))


def refusal(job=None, limits=None, faults=(), **how):
    job = job or make_job()
    with pytest.raises((PlanInfeasible, JobError)) as caught:
        prepare(
            job,
            configuration(**how),
            run_id="r",
            limits=limits or Limits(),
            prices=load_prices("objects"),
            faults=faults,
            network=(job.simulation.latency_s, job.simulation.bandwidth_mb_s),
        )
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("binding", "arguments"),
    [
        ("memory", {"memory_mb": 200}),
        ("memory", {"memory_mb": 64}),
        ("memory", {"memory_mb": 20480}),
        ("lifetime", {"function_timeout_s": 1000.0}),
        ("lifetime", {"function_timeout_s": 0.01}),
        ("deadline", {"job": make_job(limits=JobLimits(deadline_s=1.0))}),
        ("concurrency", {"limits": Limits(concurrency=3)}),
        ("payload", {"limits": Limits(payload_bytes=100)}),
        ("max_global_batch", {"job": make_job(limits=JobLimits(max_global_batch=32))}),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_by_name(binding, arguments):
    error = refusal(**arguments)
    assert isinstance(error, PlanInfeasible)
    assert error.binding == binding


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("does not accept the data", {"job": make_job(model=Target(target="tiny:wide_input"))}),
        ("trains, but cannot be evaluated: a batch of shape [2, 1, 8, 8]", {"job": make_job(model=Target(target="tiny:train_only"))}),
        ("tiny:nothing", {"job": make_job(model=Target(target="tiny:nothing"))}),
        ("raised TypeError", {"job": make_job(model=Target(target="tiny:mlp", options={"width": 3}))}),
        ("not in torch.optim", {"job": make_job(optimizer=Target(target="SDG"))}),
        ("refuses its options", {"job": make_job(optimizer=Target(target="SGD", options={"learning_rate": 1}))}),
        ("not in torch.nn.functional", {"job": make_job(loss=Target(target="crossentropy"))}),
        ("does not accept the data", {"job": make_job(loss=Target(target="mse_loss"))}),
        ("no rank 4", {"faults": [parse_fault("kill:rank=4,iteration=1")]}),
        ("needs aggregating workers", {"pattern": "parameter-server", "sync": "hap"}),
        ("lose their small values", {"exchange": {"compression": "int8", "quantity": "parameters"}}),
        ("does not wait", {"pattern": "pipelined", "sync": "asp"}),
        ("are fewer than 2000 functions to share them: rank", {"workers": 2000, "limits": Limits(concurrency=3000)}),
    ],
    ids=str,
)
def test_mistakes_are_one_clear_line(words, arguments):
    assert words in str(refusal(**arguments))


def test_a_budget_stops_a_run_at_a_checkpoint():
    run = synthetic(budget_usd=0.004, samples=6400)
    assert run.ending.status == "stopped"
    ledger = run.trigger.ledger
    assert 0.003 < ledger.cost_usd(ledger.ended_at) < 0.006
    stopped_at = {max(int(k.split("/")[-1]) for k in run.left if k.startswith(f"run/state/{r}/")) for r in range(4)}
    assert len(stopped_at) == 1  # everybody stopped at the same iteration


BUDGETS = {
    "one aggregator": {"aggregators": 1},
    "hap": {"aggregators": 1, "sync": "hap"},
    "three": {"aggregators": 3},
    "scatter-reduce": {"pattern": "scatter-reduce"},
    "pipelined": {"pattern": "pipelined"},
    "parameter-server": {"pattern": "parameter-server", "aggregators": 2},
    "direct": {"channel": "direct"},
    "two levels": {"channel": "direct", "exchange": {"ranks_per_machine": 4}},
    "ssp": {"sync": "ssp:2"},
    "hand-offs": {"function_timeout_s": 30.0},
}


@pytest.mark.parametrize(
    "how", [pytest.param(how, id=name, marks=[] if name == "one aggregator" else pytest.mark.slow) for name, how in BUDGETS.items()]
)
def test_a_budget_is_used_and_not_exceeded(how):
    """An aggregator reads what all others send: as if all cost as much, a run of eight ended at half of its budget."""
    run = {"samples": 8 * 16 * (60 if how == BUDGETS["one aggregator"] else 100), "epochs": 1, "workers": 8, "world": QUICK, **how}
    whole = synthetic(**run).trigger.ledger
    limit = 0.6 * whole.cost_usd(whole.ended_at)
    run = synthetic(budget_usd=limit, **run)
    ledger = run.trigger.ledger
    assert run.ending.status == "stopped"
    assert ledger.cost_usd(ledger.ended_at) == pytest.approx(limit, rel=0.09)
    (cause,) = run.ending.causes
    assert "the budget of" in cause
    assert [e.text for e in run.of(LimitReached)] == [cause]
    assert run.of(RunEnded)[-1].causes == [cause]


@pytest.mark.parametrize("kind", ["budget", "time limit"])
def test_limits_stop_a_run_whose_ranks_hear_nothing_of_each_other(kind):
    """Updates of an asynchronous parameter server have no flags: such a run went on to its end."""
    how = {"samples": 4 * 16 * 60, "epochs": 1, "workers": 4, "world": QUICK, "pattern": "parameter-server", "sync": "asp"}
    whole = synthetic(**how).trigger.ledger
    budget, seconds = 0.5 * whole.cost_usd(whole.ended_at), 0.5 * whole.ended_at
    run = synthetic(**({"budget_usd": budget} if kind == "budget" else {"time_limit_s": seconds}), **how)
    assert run.ending.status == "stopped"
    assert f"the {kind} of" in run.ending.causes[0]
    assert run.trigger.ledger.ended_at < 0.9 * whole.ended_at


def test_a_time_limit_is_the_reason_of_a_stop():
    run = synthetic(samples=6400, time_limit_s=20.0)
    assert run.ending.status == "stopped"
    assert run.ending.causes == ["the time limit of 20.0 s is reached"]


@pytest.mark.parametrize("sync", ["hap", "ssp:2", pytest.param("ssp:5", marks=pytest.mark.slow)])
def test_a_stop_waits_for_no_rank_that_has_stopped_before(sync):
    """Where ranks run ahead, those that learned of it first left the others waiting until their timeouts."""

    def until(driver):
        asyncio.get_running_loop().call_later(12.0, driver.stop_requested.set)

    run = synthetic(samples=8 * 16 * 200, epochs=1, workers=8, world=QUICK, sync=sync, until=until)
    assert run.ending.status == "stopped"
    assert run.trigger.ledger.ended_at < 16.0
    assert {e.outcome for e in run.of(Ended)} == {"stopped"}


def test_a_stop_is_the_same_iteration_for_all():
    run = synthetic(samples=6400, until=lambda trigger: trigger.stop_requested.set())
    assert run.ending.status == "stopped"
    assert not run.trigger.supervisor.running


def test_the_bill_is_what_was_done():
    """Promise 6: GB-seconds of every invocation, every request; independently added up."""
    run = synthetic(faults=["kill:rank=2,iteration=5"], checkpoint_every=4)
    prices, ledger = load_prices("objects"), run.trigger.ledger
    from ephemeron.events import Ended

    ends = run.of(Ended)
    assert ledger.gb_seconds == pytest.approx(sum(e.billed_s * 1769 / 1024 for e in ends))
    traffic = ledger.traffic
    by_hand = traffic.puts * 5e-6 + (traffic.gets + traffic.polls) * 4e-7 + traffic.lists * 5e-6
    total = by_hand + ledger.gb_seconds * 0.0000166667 + len(ends) * 2e-7
    assert ledger.cost_usd(ledger.ended_at) == pytest.approx(total)
    assert prices.storage_usd(traffic) == pytest.approx(by_hand)
