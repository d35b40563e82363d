"""The model of a sparse run's time and cost, its profile file, and plans: pure, on costs that are given."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
from sparse_jobs import sparse_job

from ephemeron.errors import JobError, PlanInfeasible
from ephemeron.events import Traffic
from ephemeron.prices import load_prices
from ephemeron.sparse.job.prediction import SparseConfiguration, SparseWork, load_sparse_profile, predict, steps_per_second
from ephemeron.sparse.job.predictor import SparsePredictor, make_sparse_plan, sparse_predictor
from ephemeron.sparse.job.profiling import batches
from ephemeron.training.driver import api
from ephemeron.training.job import load_job
from ephemeron.training.planner import PlanLimits
from sparse_profiles import COSTS, RUN, profile_of

pytest.importorskip("scipy", reason="costs are fitted with SciPy: pip install 'ephemeron[sparse]'")

PRICES = load_prices("objects", servers=True)
WORK = SparseWork(rows=(1000, 1000), test_rows=0, epochs=4)
ONE = SparseConfiguration(workers=1, shards=1, batch_size=100, memory_mb=1769, lifetime_s=900.0, servers=1)
SCALING = Path(__file__).parents[3] / "benchmarks" / "results" / "scaling.json"


def test_functions_take_turns_at_the_shards():
    assert steps_per_second(1, 0.004, 0.001) == pytest.approx(200)
    rates = [steps_per_second(workers, 0.004, 0.001) for workers in (1, 2, 5, 10, 100)]
    assert rates == sorted(rates)
    assert rates[1] < 400  # they wait for each other
    assert 990 < rates[-1] <= 1000  # never more than a shard does


def test_it_agrees_with_the_simulation_of_real_clients_and_shards():
    """`benchmarks.scaling` simulates the store's code in virtual time, with CPU times that it has measured; nothing is loaded ahead."""
    found = json.loads(SCALING.read_text())
    errors = []
    for row in found["store"]:
        costs = dict(row_costs(found, row["minibatch"]))
        own_s, rows = costs["own_s"] + found["modelled"]["network_latency_s"] * 2, costs["rows"]
        shard_s = costs["request_s"] + costs["row_s"] * rows / row["shards"]
        modelled = steps_per_second(row["functions"], own_s, shard_s)
        errors.append((row["functions"], abs(modelled / row["steps_per_s"] - 1)))
    assert max(error for functions, error in errors if functions >= 100) < 0.02
    assert max(error for _, error in errors) < 0.4  # one function: the simulation also has bandwidth


def row_costs(found, size):
    measured = found["measured"]
    (minibatch,) = (m for m in measured["minibatches"] if m["size"] == size)
    client = measured["client_step"]
    yield "rows", minibatch["rows"]
    yield (
        "own_s",
        minibatch["load_cpu_s"]
        + minibatch["compute_cpu_s"]
        + 1e-6 * (client["call_us"] + client["fixed_us"] + client["entry_us"] * minibatch["rows"]),
    )
    yield "request_s", 1e-6 * (measured["shard_get"]["fixed_us"] + measured["shard_push"]["fixed_us"])
    yield "row_s", 1e-6 * (measured["shard_get"]["entry_us"] + measured["shard_push"]["entry_us"])


def test_a_run_takes_its_starts_its_steps_and_its_end():
    p = predict(COSTS, RUN, WORK, ONE, PRICES)
    load_s, own_s = COSTS.load.at(100), COSTS.compute.at(100) + COSTS.exchange_s(100, 1)
    assert p.bottleneck == "functions"
    assert p.steps_per_s == pytest.approx(1 / (load_s + own_s))
    assert p.epoch_s == pytest.approx(20 / p.steps_per_s)
    started_s = RUN.start_s + 2000 * RUN.partition_row_s  # two partitions stay in memory
    assert p.seconds == pytest.approx(RUN.launch_s + started_s + 4 * p.epoch_s + RUN.exit_s)
    function_s = started_s + 4 * p.epoch_s + RUN.exit_s
    assert p.functions_usd == pytest.approx(PRICES.functions_usd(function_s * 1769 / 1024, 1))
    logged = round(4 * p.epoch_s * 20)
    log = Traffic(puts=logged, gets=logged, polls=logged)
    assert PRICES.storage_usd(log) > 0
    assert p.servers_usd == pytest.approx(PRICES.server_hour_usd * p.seconds / 3600 + PRICES.storage_usd(log))
    assert p.cost_usd == pytest.approx(p.functions_usd + p.servers_usd)

    assert p.cpu_s == pytest.approx(RUN.start_cpu_s + 2000 * RUN.partition_row_s + 80 * (load_s + own_s))

    half = predict(COSTS, RUN, WORK, dataclasses.replace(ONE, memory_mb=885), PRICES)
    assert half.epoch_s == pytest.approx(p.epoch_s * 1769 / 885)
    given = predict(COSTS, RUN, WORK, dataclasses.replace(ONE, servers=0), PRICES)
    assert given.servers_usd == 0
    slow = predict(dataclasses.replace(COSTS, pace=2.0), RUN, WORK, ONE, PRICES)
    assert slow.epoch_s == pytest.approx(2 * p.epoch_s)
    tested = predict(COSTS, RUN, dataclasses.replace(WORK, test_rows=10_000), ONE, PRICES)
    assert tested.seconds - p.seconds == pytest.approx(RUN.read_s + 10_000 * RUN.evaluation_row_s + 0.2 - RUN.exit_s)
    short = predict(COSTS, RUN, dataclasses.replace(WORK, epochs=4000), dataclasses.replace(ONE, lifetime_s=20.0), PRICES)
    assert short.invocations == 8  # 95.6 s of steps, 13.5 s in each: 20 s less 5 s before the limit and the start
    assert short.seconds > 95 + 8 * RUN.start_s


def test_the_fixed_cost_of_a_request_bounds_what_shards_bring():
    """Every shard has a part of every request (`benchmarks.scaling`: 256 µs)."""
    many = dataclasses.replace(ONE, workers=60, servers=0)
    rates = {
        shards: predict(COSTS, RUN, dataclasses.replace(WORK, rows=(100_000,) * 4), dataclasses.replace(many, shards=shards), PRICES)
        for shards in (1, 2, 4, 8)
    }
    assert {p.bottleneck for p in rates.values()} == {"shards"}
    assert rates[1].steps_per_s < rates[2].steps_per_s < rates[4].steps_per_s < rates[8].steps_per_s
    assert rates[8].steps_per_s < 1 / COSTS.shard.fixed
    shared = predict(COSTS, RUN, WORK, dataclasses.replace(many, workers=8, cores=2.0), PRICES)
    assert shared.bottleneck == "cores"
    assert shared.epoch_s == pytest.approx(24 / shared.steps_per_s)  # 20 steps of 8 functions: the largest share has 3


def test_a_profile_gives_back_the_costs_it_was_made_of(tmp_path):
    profile = profile_of(COSTS)
    path = tmp_path / "profile.json"
    profile.save(path)
    assert load_sparse_profile(path) == profile
    found = load_sparse_profile(path).costs()
    for size in (100, 1000, 5000):
        assert found.rows(size) == pytest.approx(COSTS.rows(size))
        assert found.load.at(size) == pytest.approx(COSTS.load.at(size))
        assert found.exchange_s(size, 2) == pytest.approx(COSTS.exchange_s(size, 2))
        assert found.shard_s(size, 4) == pytest.approx(COSTS.shard_s(size, 4))
    assert found.pace == pytest.approx(1.0)
    slower = dataclasses.replace(
        profile, cells=tuple(dataclasses.replace(c, step_us={k: 3 * v for k, v in c.step_us.items()}) for c in profile.cells)
    )
    assert slower.costs().pace == pytest.approx(3.0)
    assert "3.0 times their CPU time" in SparsePredictor(slower).notes(1000)[0]
    assert "batch_size = 9 is outside of what was measured, 250 to 4000" in SparsePredictor(profile).notes(9)[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "profile.json cannot be read: No such file"),
        ("{", "is no JSON"),
        ('{"workload": {}}', "is no profile of a sparse job; make one with: ephemeron profile JOB"),
        ('{"format": "ephemeron sparse profile 1"}', "missing key"),
        (dataclasses.replace(profile_of(COSTS), cells=()).to_json(), "profile.json has no cells; make one with"),
        (profile_of(COSTS).to_json().replace('"shards": 1', '"shards": 0'), "cells[0].shards"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_in_one_line(tmp_path, text, said):
    path = tmp_path / "profile.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(JobError) as refused:
        load_sparse_profile(path)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_batches_to_measure_are_around_that_of_the_job():
    assert batches(1_000_000, 1000) == (250, 1000, 4000)
    assert batches(800, 1000) == (6, 25, 100)
    with pytest.raises(JobError, match="9 rows are too few to measure a sparse job; prepare 16 or more"):
        batches(9, 1000)


def test_a_plan_takes_the_cheapest_within_its_limits(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    job = load_job(sparse_job(tmp_path, run={"batch_size": 20}))
    predictor = SparsePredictor(profile_of(COSTS))
    free = make_sparse_plan(predictor, job, PlanLimits(), configured=api.configure)
    costs = {(c.workers, c.shards): c.predicted.cost_usd for c in free.candidates}
    times = {(c.workers, c.shards): c.predicted.seconds for c in free.candidates}
    assert costs[free.choice.workers, free.choice.shards] == min(costs.values())
    fast = make_sparse_plan(predictor, job, PlanLimits(), objective="time", configured=api.configure)
    assert times[fast.choice.workers, fast.choice.shards] == min(times.values())
    limits = PlanLimits(deadline_s=(min(times.values()) + free.choice.predicted.seconds) / 2)
    within = make_sparse_plan(predictor, job, limits, configured=api.configure)
    assert within.choice.predicted.cost_usd == min(cost for at, cost in costs.items() if times[at] <= limits.seconds)
    assert json.loads(within.to_json())["workers"] == within.choice.workers
    for limits, said in (
        (PlanLimits(budget_usd=1e-9), "the budget of $1e-09 is too small: the cheapest is 1 function"),
        (PlanLimits(deadline_s=0.1), "the deadline of 0.1 s cannot be met: the nearest is"),
        (PlanLimits(deadline_s=min(times.values()) * 1.0001, budget_usd=min(costs.values()) * 1.0001), "exclude each other"),
    ):
        with pytest.raises(PlanInfeasible) as refused:
            make_sparse_plan(predictor, job, limits, configured=api.configure)
        assert said in str(refused.value)
    with pytest.raises(JobError, match="cannot be profiled or predicted on platform aws; use --platform local"):
        sparse_predictor(job, platform="aws")
