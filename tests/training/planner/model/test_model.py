"""The model against the simulator, whose worker code is the real one, and the published equations against arithmetic."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from ephemeron.errors import JobError
from ephemeron.functions import simulation  # noqa: F401 - the simulator is what this file is about
from ephemeron.training.driver import configure, train
from ephemeron.training.job import DataSpec, Job, Simulation, Target
from ephemeron.training.planner.baselines import published
from ephemeron.training.planner.model.builtin import builtin_platform
from ephemeron.training.planner.model.exchange import ExecutionOptions
from ephemeron.training.planner.model.prediction import largest_nonaggregator_batch, predict
from ephemeron.training.planner.model.profile import PlatformProfile, Workload
from ephemeron.training.planner.model.rates import Affine, Saturating, Transfer
from ephemeron.training.profiling import profile_job

PRICES = {"price_gb_s": 1.66667e-5, "price_invocation": 2e-7, "price_put": 5e-6, "price_get": 4e-7}
FLAT = PlatformProfile(
    name="flat", transfer=(Transfer(memory_mb=1024, up=Affine(latency_s=0.0, mb_s=50), down=Affine(latency_s=0.0, mb_s=100)),), **PRICES
)
RESNET = Workload(model_mb=100, a=40, b=12, m=-100, memory_slope_mb=5, memory_base_mb=500, dataset_mb=200, samples=50_000)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A small network in a simulated world, and its profile."""
    patch = pytest.MonkeyPatch()
    patch.setenv("EPHEMERON_HOME", str(tmp_path_factory.mktemp("home")))
    from pathlib import Path

    code = Path(__file__).parents[3] / "training" / "code"
    job = Job(
        name="test",
        model=Target(target="tiny:mlp"),
        data=DataSpec(),
        epochs=2,
        code=(code,),
        simulation=Simulation(compute={"a": 60.0, "b": 4.0, "m": 0.0}),
    )
    yield job, profile_job(job, platform="simulated")
    patch.undo()


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [
        {"workers": 1, "pattern": "standalone", "batch_size": 64},
        {"workers": 2, "batch_size": 32},
        {"workers": 4, "aggregators": 1, "batch_size": 16, "memory_mb": 1024},
        {"workers": 4, "aggregators": 2, "batch_size": 32},
        {"workers": 4, "aggregators": 4, "batch_size": 16, "exchange": {"compression": "bf16"}},
        {"workers": 8, "aggregators": 3, "batch_size": 16, "memory_mb": 3008},
        {"workers": 4, "aggregators": 2, "batch_size": 16, "nonaggregator_batch_size": 24, "sync": "hap"},
        {"workers": 4, "pattern": "pipelined", "batch_size": 32},
        {"workers": 4, "aggregators": 2, "batch_size": 16, "function_timeout_s": 12.0},
        {"workers": 4, "aggregators": 2, "batch_size": 8, "exchange": {"local_steps": 4}},
        {"workers": 4, "batch_size": 8, "nonaggregator_batch_size": 12, "sync": "hap", "exchange": {"local_steps": 3}},
    ],
    ids=str,
)
def test_predictions_hold_in_the_simulator(digits, values):
    job, profile = digits
    c = configure(job, platform="simulated", **values)
    terms = ExecutionOptions(
        pattern=c.pattern, sync=c.sync, compression=c.exchange.compression, epochs=job.epochs, lifetime_s=c.function_timeout_s
    )
    p = predict(
        profile.workload.with_local_steps(c.exchange.local_steps),
        profile.platform,
        terms,
        workers=c.workers,
        memory_mb=c.memory_mb,
        aggregators=c.aggregators,
        batch=c.batch_size,
        other_batch=c.nonaggregator_batch_size,
    )
    s = train(job, c).raise_if_failed().summary
    relayed = "function_timeout_s" in values
    assert float(p.seconds) == pytest.approx(s.seconds, rel=0.01)
    assert float(p.cost_usd) == pytest.approx(s.cost_usd, rel=0.06 if relayed else 0.01)
    assert int(p.iterations) == s.iterations
    if not relayed:
        assert int(p.invocations) == s.invocations
        assert int(p.puts) == s.traffic.puts
        assert int(p.gets) == pytest.approx(s.traffic.gets, abs=1)


def test_published_equations_by_hand():
    """FasDL 3-1 to 3-26 with bandwidths of 50 and 100 MB/s and no latency."""
    w, k, ba, bn, m = 4, 2, 128, 200, 1100
    p = published(RESNET, FLAT, ExecutionOptions(sync="hap", epochs=3), workers=w, memory_mb=m, aggregators=k, batch=ba, other_batch=bn)
    compute = 40 * (128 + 12) / (1100 - 100)  # 3-12
    upload, aggregate, download = 100 / 50, 3 * 50 / 100 + 50 / 50, 100 / 100  # 3-2 to 3-4
    global_batch = 128 * 2 + 200 * 2  # 3-14
    iterations = 3 * 50_000 / global_batch  # 3-17
    load = (100 + 200 * 200 / global_batch) / 100  # 3-13, 3-15
    seconds = 3 * load + iterations * (compute + upload + aggregate + download)  # 3-18, 3-20
    assert float(p.seconds) == pytest.approx(seconds)
    functions = 1.66667e-5 * seconds * 1100 / 1024 * 4  # 3-23
    requests = iterations * (5e-6 * k * w + 4e-7 * 2 * k * (w - 1))  # 3-24 to 3-26
    assert float(p.cost_usd) == pytest.approx(functions + requests)


def test_other_batches_fill_what_aggregating_takes():
    """Equation 3-22: one sample more, and the others would be waited for."""
    terms = ExecutionOptions(pattern="k-reduce", sync="hap")
    kwargs = {"workers": 6, "aggregators": 2, "memory_mb": 2048}
    bn = float(largest_nonaggregator_batch(RESNET, FLAT, terms, batch=64, **kwargs))
    assert bn > 64
    paces = [float(predict(RESNET, FLAT, terms, batch=64, other_batch=b, **kwargs).iteration_s) for b in (64, bn, bn + 1)]
    assert paces[0] == pytest.approx(paces[1])
    assert paces[2] > paces[1]


def test_what_the_thesis_leaves_out_is_counted():
    terms = ExecutionOptions(pattern="k-reduce", sync="bsp", epochs=10)
    kwargs = {"workers": 4, "aggregators": 2, "memory_mb": 2048, "batch": 64, "other_batch": 64}
    p = predict(RESNET, FLAT, terms, **kwargs)
    assert float(p.iterations) == 10 * math.ceil(50_000 / 256)
    lives = predict(RESNET, FLAT, dataclasses.replace(terms, lifetime_s=300.0), **kwargs)
    assert lives.invocations > p.invocations
    assert lives.seconds > p.seconds
    polled = dataclasses.replace(FLAT, poll_s=0.02)
    assert predict(RESNET, polled, terms, **kwargs).polls > 1000


def test_lockstep_costs_those_who_wait_for_others():
    slow = dataclasses.replace(RESNET, lockstep_cpu_s=0.1)
    share = 1024 / FLAT.mb_per_vcpu

    def more(terms: ExecutionOptions, workers: int, aggregators: int) -> float:
        kwargs = {"workers": workers, "aggregators": aggregators, "memory_mb": 1024, "batch": 64, "other_batch": 64}
        seconds = [float(predict(w, FLAT, terms, **kwargs).iteration_s) for w in (RESNET, slow)]
        return seconds[1] - seconds[0]

    assert more(ExecutionOptions(), 4, 2) == pytest.approx(0.1 / share)
    assert more(ExecutionOptions(sync="hap"), 4, 2) == pytest.approx(0.1 / share)
    assert more(ExecutionOptions(sync="hap"), 4, 1) == 0
    assert more(ExecutionOptions(pattern="standalone"), 1, 1) == 0


def test_functions_that_start_together_on_one_machine_start_slowly():
    shared = dataclasses.replace(FLAT, cold_start_s=2.0, start_each_s=1.5)
    kwargs = {"aggregators": 1, "memory_mb": 1024, "batch": 64, "other_batch": 64}
    starts = [float(predict(RESNET, shared, ExecutionOptions(), workers=w, **kwargs).start_s) for w in (1, 2, 4)]
    assert starts == [2.0, 3.0, 6.0]


def test_a_life_too_short_for_an_iteration_takes_for_ever():
    terms = ExecutionOptions(pattern="k-reduce", sync="bsp", lifetime_s=5.0)
    p = predict(RESNET, FLAT, terms, workers=2, aggregators=1, memory_mb=512, batch=128, other_batch=128)
    assert math.isinf(float(p.seconds))
    assert math.isinf(float(p.cost_usd))


def test_quotas_between_measured_ones_are_interpolated():
    rows = [(512, 20.0), (1024, 40.0)]
    transfer = tuple(Transfer(memory_mb=m, up=Affine(latency_s=0, mb_s=r), down=Saturating(p_mb_s=r, t_per_mb=1.0)) for m, r in rows)
    p = dataclasses.replace(FLAT, transfer=transfer)
    seconds = p.seconds("up", 40.0, np.array([256.0, 512.0, 768.0, 1024.0, 4096.0]))
    assert seconds == pytest.approx([2.0, 2.0, 1.5, 1.0, 1.0])
    one = [float(p.seconds("up", 40.0, m)) for m in (256.0, 512.0, 768.0, 1024.0, 4096.0)]
    assert one == pytest.approx(list(seconds))


@pytest.mark.parametrize("sync", ["asp", "hsp", "ssp:0", "ssp:3"])
def test_protocols_without_a_model_are_not_taken_for_bsp(sync):
    """How long iterations of ASP and SSP take depends on which contributions happen to arrive in time."""
    with pytest.raises(JobError, match="cannot be predicted") as refused:
        ExecutionOptions(pattern="k-reduce", sync=sync)
    assert "bsp or hap" in str(refused.value)


def test_what_a_cache_keeps_is_charged_by_the_hour():
    kwargs = {"workers": 4, "aggregators": 2, "memory_mb": 2048, "batch": 64, "other_batch": 64}
    terms = ExecutionOptions(pattern="k-reduce", sync="bsp", epochs=3)
    free = predict(RESNET, FLAT, terms, **kwargs)
    billed = predict(RESNET, dataclasses.replace(FLAT, price_gb_hour=0.084, least_kept_gb=0.1), terms, **kwargs)
    kept_gb = (200 + 100 + 2 * 4 * 100 + 2 * (4 + 1) * 100) / 1000  # data, weights, checkpoints, two iterations
    assert float(billed.storage_usd - free.storage_usd) == pytest.approx(0.084 * kept_gb * float(free.seconds) / 3600)
    assert float(billed.cost_usd - free.cost_usd) == pytest.approx(float(billed.storage_usd - free.storage_usd))
    assert builtin_platform("aws-lambda-cache").price_gb_hour > 0


@pytest.mark.parametrize("pattern", ["k-reduce", "pipelined"])
def test_bytes_through_a_cache_are_counted_once_however_they_are_cut(pattern):
    terms = ExecutionOptions(pattern=pattern)
    kwargs = {"workers": 4, "aggregators": 2, "memory_mb": 2048, "batch": 50_000, "other_batch": 50_000}
    priced, free = (predict(RESNET, dataclasses.replace(FLAT, price_mb=p, lifetime_s=1e9), terms, **kwargs).storage_usd for p in (1.0, 0.0))
    exchanged, loaded = (3 * 4 - 2) * 100, 200 + 4 * 2 * 100
    assert float(priced - free) == pytest.approx(exchanged + loaded)
