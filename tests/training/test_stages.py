"""A model divided among functions trains as the whole one does, whoever dies."""

from __future__ import annotations

import dataclasses
import json
from functools import cache

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from training_runs import WORLD, configuration, make_job, real, simulate

from ephemeron.communication.keys import Keys
from ephemeron.errors import JobError, PlanInfeasible
from ephemeron.events import Ended, FaultFired, Invoked, Progress
from ephemeron.functions.base import Limits
from ephemeron.partition import Graph, Node, PlacementPlan, Schedule
from ephemeron.partition.serialization.documents import plan_to_json
from ephemeron.partition.tracing import operators, trace
from ephemeron.prices import load_prices
from ephemeron.runs.verbs import attach
from ephemeron.testing.training_world import PEER_TIMEOUT_S
from ephemeron.training.driver import configure, train
from ephemeron.training.driver.launching.prepare import prepare
from ephemeron.training.driver.run_driver import RunDriver
from ephemeron.training.driver.supervisor import Replace
from ephemeron.training.job import ExchangeOptions, StageOptions, Target, parse_fault

SHAPE = {"batch_size": 120, "checkpoint_every": 3}
"""12 iterations; 6 with two replicas."""


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small tensors on a shared machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def prepared(
    stages=2, replicas=1, micro_batches=1, schedule=None, recompute=False, model="tiny:mlp", options=(), function_timeout_s=900.0, **more
):
    job = make_job(dtype="float64", model=Target(target=model, options=dict(options)))
    c = configuration(
        **{**SHAPE, **more},
        stages=StageOptions(count=stages, micro_batches=micro_batches, schedule=schedule, recompute=recompute),
        workers=stages * replicas,
        aggregators=min(2, replicas),
        function_timeout_s=function_timeout_s,
    )
    return prepare(job, c, run_id="run", limits=Limits(), prices=load_prices("objects"), cold_start_s=WORLD.cold_start_s)


def staged(faults=(), *, world=WORLD, until=None, budget_usd=None, **how):
    ready = prepared(**how)
    spec = dataclasses.replace(ready.spec, faults=tuple(faults), budget_usd=budget_usd)
    objects = {**ready.objects, Keys("run").spec: [spec.to_bytes()]}
    return simulate(dataclasses.replace(ready, spec=spec, objects=objects), world=world, until=until)


@cache
def undisturbed(**how):
    return staged(**how).sha


def left(stages):
    return {"run/spec", "run/result", *(f"run/part/{s}" for s in range(stages))}


@cache
def whole(model="tiny:mlp", **how):
    job = make_job(dtype="float64", model=Target(target=model))
    return real(job, workers=how.pop("workers", 1), aggregators=1, batch_size=120, **how).ending


@pytest.mark.parametrize(
    "how",
    [
        {"stages": 2},
        {"stages": 2, "micro_batches": 4},
        {"stages": 2, "micro_batches": 4, "schedule": "gpipe"},
        {"stages": 3, "micro_batches": 2},
        {"stages": 2, "micro_batches": 4, "recompute": True},
    ],
    ids=str,
)
def test_stages_equal_the_whole_model(how):
    run, expected = staged(**how), whole()
    assert run.sha
    assert set(run.ending.arrays) == set(expected.arrays)
    for name, value in expected.arrays.items():
        np.testing.assert_allclose(run.ending.arrays[name], value, rtol=0, atol=1e-10)
    for name, value in expected.final.metrics.items():
        assert run.ending.final.metrics[name] == pytest.approx(value, abs=1e-12)
    assert run.left == left(how["stages"])
    if "micro_batches" not in how:
        assert run.sha == expected.final.weights_sha256  # to the last bit


@pytest.mark.parametrize("stages", [2, 3])
def test_complex_activations_train_every_stage(stages):
    run, expected = staged(stages=stages, model="tiny:spectral"), whole("tiny:spectral")
    for name, value in expected.arrays.items():
        np.testing.assert_allclose(run.ending.arrays[name], value, rtol=0, atol=1e-10)


def test_a_model_whose_stages_do_not_train_alike_is_refused_before_anything_starts(monkeypatch):
    def lossy(value, needs_gradient):
        return value.detach() if isinstance(value, torch.Tensor) else value

    monkeypatch.setattr("ephemeron.partition.runtime.execution.leaf", lossy)
    with pytest.raises(JobError, match=r"gradient of first\.\w+ is there only in the original model"):
        prepared(stages=2, model="tiny:spectral", micro_batches=2)


def test_replicas_equal_as_many_whole_models():
    run, expected = staged(replicas=2, micro_batches=2), whole(workers=2)
    for name, value in expected.arrays.items():
        np.testing.assert_allclose(run.ending.arrays[name], value, rtol=0, atol=1e-10)
    losses = {}
    for e in run.of(Progress):
        losses.setdefault((e.iteration, e.rank % 2), set()).add(e.loss)
    assert all(len(found) == 1 and found != {0.0} for found in losses.values())  # every stage hears of the loss


KILLS = [
    (rank, iteration, phase)
    for k, (rank, phase) in enumerate([(r, p) for r in range(4) for p in ("load", "compute", "upload", "download", "aggregate")])
    for iteration in [(0, 4, 5)[k % 3]]
]


@pytest.mark.parametrize(("rank", "iteration", "phase"), KILLS)
def test_a_function_is_killed(rank, iteration, phase):
    how = {"replicas": 2, "micro_batches": 2, "model": "tiny:mlp", "options": (("dropout", 0.3),)}
    run = staged([f"kill:rank={rank},iteration={iteration},phase={phase}"], **how)
    assert len(run.of(FaultFired)) == 1
    assert run.sha == undisturbed(**how)
    assert run.left == left(2)
    assert len(run.of(Invoked)) == 5


def blind(trigger):
    """The client does not see who dies."""
    original = trigger._read
    trigger._read = lambda event: [a for a in original(event) if not isinstance(a, Replace)]


QUICK = {"stages": 3, "micro_batches": 2, "options": (("dropout", 0.3),)}


@pytest.mark.parametrize("rank", range(3))
def test_stages_find_out_by_themselves_who_is_dead(rank):
    run = staged([f"kill:rank={rank},iteration=6,phase=compute"], until=blind, **QUICK)
    assert len(run.of(FaultFired)) == 1
    assert run.sha == undisturbed(**QUICK)
    assert len(run.of(Invoked)) == 4  # nobody who only waited was replaced
    assert {e.rank for e in run.of(Invoked) if e.attempt} == {rank}


@pytest.mark.parametrize(("rank", "phase"), [(0, "aggregate"), (3, "aggregate"), (1, "download"), (2, "load")])
def test_replicas_and_stages_find_out_together(rank, phase):
    how = {"replicas": 2, "micro_batches": 2, "options": (("dropout", 0.3),)}
    run = staged([f"kill:rank={rank},iteration=4,phase={phase}"], until=blind, **how)
    assert len(run.of(FaultFired)) == 1
    assert run.sha == undisturbed(**how)
    assert [e.rank for e in run.of(Invoked) if e.attempt] == [rank]


@pytest.mark.parametrize("iteration", [0, 7, 8, 11])
@pytest.mark.parametrize("rank", range(3))
def test_a_message_is_lost(rank, iteration):
    run = staged([f"drop-put:rank={rank},iteration={iteration}"], **QUICK)
    assert len(run.of(FaultFired)) == 1
    assert run.sha == undisturbed(**QUICK)


def test_a_call_is_delivered_twice():
    run = staged(["duplicate:rank=1"], **QUICK)
    assert [e.outcome for e in run.of(Ended)].count("duplicate") == 1
    assert run.sha == undisturbed(**QUICK)


def test_lifetimes_in_a_row_and_a_kill_among_them():
    world = dataclasses.replace(WORLD, cold_start_s=0.05)
    run = staged(["kill:rank=1,iteration=8,phase=download"], world=world, function_timeout_s=12.0, **QUICK)
    assert max(e.attempt for e in run.of(Invoked)) >= 3
    assert run.sha == undisturbed(**QUICK)
    assert not [key for key in run.left if "/x/" in key or "/g" in key or "/state/" in key]


def test_messages_between_stages_do_not_accumulate():
    run = staged(**QUICK)
    each = 2 * 2 * 2  # borders, directions, micro-batches
    assert run.most_objects < 3 * SHAPE["checkpoint_every"] * each + 40
    assert run.trigger.ledger.traffic.puts > 12 * each


def test_all_stop_after_the_same_iteration():
    run = staged(budget_usd=5e-4, **QUICK)
    assert run.ending.status == "stopped"
    assert {e.outcome for e in run.of(Ended)} == {"stopped"}
    done = {r: max(e.iteration for e in run.of(Progress) if e.rank == r) for r in range(3)}
    assert len(set(done.values())) == 1


def test_a_layer_on_two_stages_has_the_sum_of_its_gradients():
    run, expected = staged(stages=2, model="tiny:tied"), whole("tiny:tied")
    for name, value in expected.arrays.items():
        np.testing.assert_allclose(run.ending.arrays[name], value, rtol=0, atol=1e-10)
    again = staged(["kill:rank=0,iteration=8,phase=upload"], stages=2, model="tiny:tied")
    assert again.sha == run.sha


def test_running_statistics_survive_a_kill():
    how = {"stages": 2, "replicas": 2, "micro_batches": 2, "model": "tiny:with_batch_norm"}
    run = staged(["kill:rank=2,iteration=4,phase=compute", "kill:rank=0,iteration=5,phase=upload"], **how)
    assert len(run.of(FaultFired)) == 2
    assert run.sha == undisturbed(**how)
    assert run.ending.arrays["2.num_batches_tracked"] == 12


# -- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"sync": "hap"}, "sync 'hap' is not for a model on several functions"),
        ({"exchange": ExchangeOptions(quantity="parameters")}, "exchange 'parameters' is not for a model on several"),
        ({"model": "tiny:spectral", "options": (("filtered", True),)}, r"parameter filter\.0 .* is torch.complex64"),
        ({"stages": 9}, "has [0-9]+ pieces, and stages.count = 9"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(how, message):
    with pytest.raises(JobError, match=message):
        prepared(**{"stages": 2, **how})


def test_a_stage_that_does_not_fit_is_refused_with_what_would():
    how = {"model": "tiny:bulky", "options": (("width", 512), ("layers", 8)), "memory_mb": 250}
    with pytest.raises(PlanInfeasible, match=r"a stage needs at least \d+ MB .* split it further: --stages [3-9]") as e:
        prepared(stages=2, **how)
    assert e.value.binding == "memory"
    assert len(prepared(stages=int(str(e.value).rpartition("--stages ")[2].split()[0]), **how).spec.stages.fed) > 2


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"stages": {"count": 2}, "workers": 3}, "workers = 3 are not stages.count × replicas"),
        ({"stages": {"count": 2, "replicas": 2}, "workers": 2}, "workers = 2 are not stages.count × replicas = 2 × 2"),
        ({"stages": {"micro_batches": 2}}, "stages.count = 1"),
        ({"stages": {"count": 2, "micro_batches": 2, "schedule": "plain"}}, "'plain' takes the batch whole"),
        ({"stages": {"count": 2, "replicas": 2}, "aggregators": 3}, "aggregators = 3 is more than replicas = 2"),
    ],
    ids=str,
)
def test_numbers_that_contradict_each_other_are_refused(how, message):
    with pytest.raises(JobError, match=message):
        configure(make_job(), platform="simulated", **how)


def test_stages_that_a_file_says(tmp_path):
    job = make_job(dtype="float64")
    traced = trace(
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.Tanh(), torch.nn.Dropout(0.0), torch.nn.Linear(16, 10)),
        (torch.randn(4, 8, 8),),
    ).model
    nodes = [o.name for o in operators(traced, ties="apart")]
    last = max(i for i, n in enumerate(nodes) if "linear" in n or "addmm" in n)
    graph = Graph(nodes=tuple(Node(name=n, forward_s={"cpu": 1.0}, backward_s={"cpu": 1.0}) for n in nodes))
    plan = PlacementPlan(
        graph=graph.name,
        topology="two",
        objective="throughput",
        schedule=Schedule(kind="1f1b", micro_batches=4),
        placement={n: "one" if i < last else "other" for i, n in enumerate(nodes)},
        orders=None,
        method="by hand",
        value_s=1.0,
        bound_s=1.0,
        iteration_s=1.0,
        solver_s=0.0,
        reserved_bytes={},
        peak_bytes={},
    )
    file = tmp_path / "placement.json"
    file.write_text(plan_to_json(plan))
    c = configure(job, platform="simulated", stages={"placement": str(file)}, batch_size=120)
    assert (c.stages.count, c.workers, c.stages.micro_batches, c.stages.schedule) == (2, 2, 4, "1f1b")
    ready = prepare(job, c, run_id="run", limits=Limits(), prices=load_prices("objects"))
    run, expected = simulate(ready), whole()
    for name, value in expected.arrays.items():
        np.testing.assert_allclose(run.ending.arrays[name], value, rtol=0, atol=1e-10)
    assert set(json.loads(ready.spec.to_bytes())["stages"]["fed"]) == {True}


def test_stages_and_replicas_say_how_many_functions():
    c = configure(make_job(), platform="simulated", stages={"count": 3, "replicas": 2, "micro_batches": 4})
    assert (c.workers, c.stages.replicas, c.aggregators, c.stages.schedule) == (6, 2, 2, "1f1b")
    assert c.global_batch == 32


# -- real processes -----------------------------------------------------------------------------------------


def local(job, faults=(), **how):
    events = []
    c = configure(job, platform="local", **how)
    faults = [parse_fault(f) for f in faults]
    return train(job, c, faults=faults, on_event=events.append, peer_timeout_s=PEER_TIMEOUT_S), events


@pytest.mark.slow
def test_a_real_kill_gives_the_weights_of_the_simulated_run(home):
    job = make_job(dtype="float64", model=Target(target="tiny:mlp", options={"dropout": 0.3}))
    how = {"stages": {"count": 2, "micro_batches": 2}, "batch_size": 120, "checkpoint_every": 3}
    result, events = local(job, ["kill:rank=1,iteration=7,phase=upload"], memory_mb=704, **how)
    assert [e.status for e in events if isinstance(e, Ended)].count("lost") == 1
    expected = undisturbed(stages=2, micro_batches=2, options=(("dropout", 0.3),))
    assert result.summary.weights_sha256 == expected
    assert load_file(result.folder.weights).keys() == {"1.weight", "1.bias", "4.weight", "4.bias"}
    assert result.summary.stages == 2
    assert result.summary.workers == 2
    again = attach(result.folder.run_id)  # a client that comes after the end puts the parts together, too
    assert again.summary.weights_sha256 == expected


@pytest.mark.slow
def test_a_model_too_large_for_one_function_trains_on_four(home):
    job = make_job(
        model=Target(target="tiny:bulky", options={"width": 1024, "layers": 40}), optimizer=Target(target="SGD", options={"lr": 0.01})
    )
    how = {"batch_size": 480, "memory_mb": 672}
    with pytest.raises(PlanInfeasible, match=r"at least 71\d MB, its quota is 672 MB; .*split it: --stages 2"):
        local(job, workers=1, **how)
    result, events = local(job, stages={"count": 4, "micro_batches": 4}, **how)
    assert result.summary.status == "finished"
    assert result.summary.iterations == 3
    assert max(e.peak_memory_mb for e in events if isinstance(e, Ended)) < 672
    sizes = [t.nbytes for t in load_file(result.folder.weights).values()]
    assert sum(sizes) > 160e6


@pytest.mark.parametrize(
    ("stages", "entry", "said"),
    [
        (2, "worker", "this run divides its model into stages; call the entry 'stage'"),
        (1, "stage", "this run does not divide its model into stages; call the entry 'worker'"),
    ],
)
def test_a_call_of_the_other_entry_is_refused(monkeypatch, stages, entry, said):
    right = RunDriver.call
    monkeypatch.setattr(RunDriver, "call", lambda self, *a, **how: dataclasses.replace(right(self, *a, **how), entry=entry))
    run = staged(stages=stages) if stages > 1 else real(**{**SHAPE, "workers": 1, "aggregators": 1})
    assert run.ending.status == "failed"
    assert said in "".join(map(str, run.ending.causes))
