"""Functions that change during a run: weights are a function of the changes alone, whatever dies before, during or after one."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest
from training_runs import CODE, WORLD, Run, configuration, make_job, real, simulate, synthetic

from ephemeron.data import Sampler, assign
from ephemeron.data.iteration_samples import GlobalSampler
from ephemeron.errors import JobError, PlanInfeasible
from ephemeron.events import PHASES, Continued, Ended, FaultFired, GenerationStarted, Invoked, Loaded, Note
from ephemeron.functions.base import Limits
from ephemeron.prices import load_prices
from ephemeron.training.driver.launching.prepare import prepare
from ephemeron.training.driver.run_driver import RunDriver
from ephemeron.training.job import DataSpec, JobLimits, Target, parse_job
from ephemeron.training.job.generation import Resize, ScheduledResize
from ephemeron.training.worker.control import ResizeRequest, encode_control
from ephemeron.training.worker.spec import RunSpec

WORKERS, EACH = 3, 4
"""Functions at first, and iterations of an epoch then."""
CHANGES: dict[str, dict[str, Any]] = {
    "grow": {"workers": 5},
    "shrink": {"workers": 1},
    "aggregators": {"aggregators": 1},
    "batch": {"batch_size": 24},
    "memory": {"memory_mb": 3008},
    "grow with more memory": {"workers": 4, "memory_mb": 3008},
}


def elastic(change: dict[str, Any], *, back: bool = False, **how: Any) -> Run:
    """Three epochs whose second begins with a change; `back`: and whose third begins with the change undone."""
    entries = [ScheduledResize(from_epoch=1, **change)]
    if back:
        entries.append(ScheduledResize(from_epoch=2, workers=WORKERS, memory_mb=1769, aggregators=2, batch_size=16))
    values = {"workers": WORKERS, "aggregators": 2, "checkpoint_every": 3, "resize": {"schedule": tuple(entries)}, **how}
    return synthetic(samples=16 * WORKERS * EACH, epochs=3, **values)


@pytest.fixture(scope="module")
def undisturbed():
    cache: dict[Any, str] = {}

    def sha(name: str, **how: Any) -> str:
        key = (name, *sorted(how.items()))
        if key not in cache:
            run = elastic(CHANGES[name], **how)
            check_over(run)
            cache[key] = run.sha
        return cache[key]

    return sha


def check_over(run: Run) -> None:
    assert run.ending.status == "finished", run.ending.causes
    assert run.left == {"run/spec", "run/result"}
    assert not run.trigger.supervisor.running


@pytest.mark.parametrize(
    ("change", "sync"),
    [*((c, s) for c in CHANGES for s in ("bsp", "hap")), *((c, s) for c in ("grow", "shrink") for s in ("ssp:1", "hsp", "asp"))],
)
def test_a_run_changes_and_changes_back(change, sync):
    run = elastic(CHANGES[change], back=True, sync=sync)
    check_over(run)
    begun = {e.generation: e for e in run.of(GenerationStarted)}
    assert list(begun) == [1, 2]
    assert (begun[1].from_epoch, begun[2].from_epoch) == (1, 2)
    assert begun[1].from_iteration == EACH
    assert (begun[2].workers, begun[2].memory_mb, begun[2].aggregators) == (WORKERS, 1769, 2)
    assert begun[2].iterations == run.ending.final.iterations
    if sync in ("bsp", "hap"):
        assert elastic(CHANGES[change], back=True, sync=sync).sha == run.sha


@pytest.mark.parametrize("change", CHANGES)
def test_who_stays_goes_on_in_the_same_function(change):
    run = elastic(CHANGES[change])
    entry = CHANGES[change]
    now, quota = entry.get("workers", WORKERS), entry.get("memory_mb", 1769)
    stay = min(now, WORKERS) if quota == 1769 else 0
    assert len(run.of(Continued)) == stay
    assert len(run.of(Invoked)) == WORKERS + now - stay
    assert [e.outcome for e in run.of(Ended)].count("left") == WORKERS - stay
    assert {e.memory_mb for e in run.of(Ended)} == {1769, quota}


def test_who_stays_reads_all_that_it_lacks_at_once():
    """While a function that stays loads, all others wait for it: requests one after another would cost each of them."""
    latency_s = 0.2
    job = dataclasses.replace(make_job(epochs=2), simulation=dataclasses.replace(WORLD, latency_s=latency_s))
    run = real(job, workers=3, resize={"schedule": (ScheduledResize(from_epoch=1, workers=2),)})
    (begun,) = run.of(GenerationStarted)
    stay = {(e.rank, e.attempt) for e in run.of(Continued)}
    loaded = [e.t - begun.t for e in run.of(Loaded) if (e.rank, e.attempt) in stay]
    assert len(loaded) == 2
    assert max(loaded) < 2 * latency_s


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("change", ["grow", "shrink", "aggregators", "memory"])
@pytest.mark.parametrize("sync", ["bsp", "hap"])
def test_a_function_is_killed_before_during_or_after_a_change(sync, change, phase, undisturbed):
    fired = 0
    for rank in range(WORKERS):  # the iteration before the change, its own, or the next; another one in each phase
        iteration = EACH - 1 + (rank + PHASES.index(phase)) % 3
        run = elastic(CHANGES[change], sync=sync, faults=[f"kill:rank={rank},iteration={iteration},phase={phase}"])
        check_over(run)
        assert run.sha == undisturbed(change, sync=sync)
        fired += len(run.of(FaultFired))
    assert fired or phase == "wait"  # no rank has to wait in a balanced run


@pytest.mark.parametrize("sync", ["bsp", "hap"])
@pytest.mark.parametrize("change", ["grow", "shrink", "memory"])
def test_several_die_at_a_change_and_replacements_die_too(sync, change, undisturbed):
    faults = [
        f"kill:rank=0,iteration={EACH - 1},phase=download",
        f"kill:rank=1,iteration={EACH - 1},phase=aggregate",
        f"kill:rank=0,iteration={EACH},phase=compute,attempt=0",
        f"kill:rank=0,iteration={EACH - 1},phase=upload,attempt=1",
        "duplicate:rank=1",
        f"drop-put:rank=1,iteration={EACH - 1}",
    ]
    run = elastic(CHANGES[change], sync=sync, faults=faults)
    check_over(run)
    assert len(run.of(FaultFired)) >= 3
    assert run.sha == undisturbed(change, sync=sync)


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("sync", ["bsp", "hap"])
def test_lifetimes_end_around_a_change(sync, change, undisturbed):
    each_s = 50 * 20 / 1769
    relays = 0
    for lifetimes in (2.3, 4.7, 8.0):
        run = elastic(CHANGES[change], sync=sync, function_timeout_s=4.0 + lifetimes * each_s)
        check_over(run)
        relays += sum(e.reason == "relay" for e in run.of(Invoked))
        assert run.sha == undisturbed(change, sync=sync)
    assert relays


@pytest.mark.parametrize("sync", ["bsp", "hap"])
def test_nobody_supervises(sync, undisturbed):
    """The functions find out by themselves who is missing."""

    def blind(trigger: RunDriver) -> None:
        read = trigger._read
        trigger._read = lambda event: [] if isinstance(event, Ended) and event.status == "lost" else read(event)

    for iteration in (EACH - 1, EACH):
        faults = [f"kill:rank={rank},iteration={iteration},phase=compute" for rank in (0, 2)]
        run = elastic(CHANGES["grow"], sync=sync, faults=faults, until=blind)
        assert run.sha == undisturbed("grow", sync=sync)
        assert len(run.of(FaultFired)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["bsp", "hap"])
def test_a_run_that_grows_and_shrinks_equals_the_fixed_one(sync):
    """Global sampling, equal global batches, float64: the sums differ in their order alone."""
    job = make_job(
        epochs=4, dtype="float64", data=DataSpec(sampling="global"), optimizer=Target(target="SGD", options={"lr": 0.05, "momentum": 0.9})
    )
    schedule = tuple(
        ScheduledResize(from_epoch=epoch, workers=w, batch_size=48 // w, aggregators=min(2, w)) for epoch, w in ((1, 6), (2, 2), (3, 3))
    )
    fixed = real(job, workers=4, batch_size=12, sync="bsp")
    changed = real(job, workers=4, batch_size=12, sync=sync, resize={"schedule": schedule})
    assert len(changed.of(GenerationStarted)) == 3
    if sync == "bsp":
        for name, array in fixed.ending.arrays.items():
            np.testing.assert_allclose(changed.ending.arrays[name], array, rtol=1e-10, atol=1e-12)
    assert changed.ending.final.iterations == fixed.ending.final.iterations


def asked(at: list[tuple[int, Resize]]) -> Any:
    """Puts each request when rank 0 has finished so many iterations."""

    def until(trigger: RunDriver) -> None:
        read, left, tasks = trigger._read, list(at), list[asyncio.Task[None]]()

        def watching(event: Any) -> Any:
            actions = read(event)
            while left and trigger.ledger.done.get(0, 0) >= left[0][0]:
                iteration, wanted = left.pop(0)
                request = ResizeRequest(name=f"r{iteration}", resize=wanted)
                put = trigger.channel.put(trigger.keys.control, [encode_control(request)])
                tasks.append(asyncio.get_running_loop().create_task(put))
            return actions

        trigger._read = watching

    return until


@pytest.mark.slow
@pytest.mark.parametrize(
    ("globally", "sync"),
    [
        (True, "bsp"),
        pytest.param(False, "hap", marks=pytest.mark.slow),
        pytest.param(True, "hap", marks=pytest.mark.slow),
        pytest.param(False, "bsp", marks=pytest.mark.slow),
    ],
)
def test_functions_change_on_request(sync, globally):
    job = make_job(epochs=6, data=DataSpec(sampling="global" if globally else "shares"))
    prepared = prepare(
        job, configuration(workers=3, batch_size=16, sync=sync), run_id="run", limits=Limits(), prices=load_prices("objects")
    )
    until = asked([(10, Resize(workers=5)), (60, Resize(workers=2, memory_mb=3008))])
    run = simulate(prepared, until=until)
    check_over(run)
    first, second = run.of(GenerationStarted)
    assert (first.workers, second.workers, second.memory_mb) == (5, 2, 3008)
    assert (first.request, second.request) == ("r10", "r60")
    timeline = prepared.spec.timeline
    assert globally or timeline.starts_epoch(first.from_iteration)
    if globally:
        return
    # The same changes as a schedule give the same weights.
    schedule = tuple(ScheduledResize(from_epoch=e.from_epoch, workers=e.workers, memory_mb=e.memory_mb) for e in (first, second))
    again = real(job, workers=3, batch_size=16, sync=sync, resize={"schedule": schedule})
    assert again.sha == run.sha


def test_a_request_that_comes_too_late_is_left_out():
    job = make_job(epochs=2)
    prepared = prepare(job, configuration(workers=3, batch_size=16), run_id="run", limits=Limits(), prices=load_prices("objects"))
    run = simulate(prepared, until=asked([(prepared.spec.split.iterations + 2, Resize(workers=5))]))
    check_over(run)
    assert not run.of(GenerationStarted)
    assert any("left out: the run ends before" in e.text for e in run.of(Note))


@pytest.mark.parametrize("globally", [False, True])
def test_every_sample_is_used_once_per_epoch(globally):
    """Whatever the generations: the positions of all ranks in an epoch are all positions."""
    job = make_job(epochs=4, data=DataSpec(sampling="global" if globally else "shares"))
    spec: RunSpec = prepare(job, configuration(workers=3, batch_size=16), run_id="run", limits=Limits(), prices=load_prices("objects")).spec
    used: dict[int, list[int]] = {}
    at, changes = (0, [(17 if globally else None, Resize(workers=5)), (40 if globally else None, Resize(workers=2, batch_size=40))])
    while True:
        wanted = changes.pop(0) if changes else None
        timeline = spec.timeline
        end = spec.iterations
        if wanted is not None:
            end = wanted[0] or timeline.start_of(timeline.epoch_of(at) + 1)
        sampler = GlobalSampler if globally else Sampler
        owned = assign(spec.samples, spec.split, spec.seed)
        whole = np.concatenate(owned)
        for rank in range(spec.configuration.workers):
            mine = sampler(timeline, rank, spec.seed)
            for t in range(at, end):
                used.setdefault(timeline.epoch_of(t), []).extend((whole if globally else owned[rank])[mine.batch(t)])
        at = end
        if wanted is None:
            break
        spec = spec.in_generation(spec.resized(wanted[1], at))
    assert sorted(used) == [0, 1, 2, 3]
    assert all(sorted(indices) == list(range(spec.samples)) for indices in used.values())


def test_parts_of_the_data_hold_what_a_rank_owns():
    base = prepare(
        make_job(epochs=4), configuration(workers=4, batch_size=16), run_id="run", limits=Limits(), prices=load_prices("objects")
    ).spec
    stored = assign(base.samples, base.split, base.seed)
    for workers in (1, 2, 3, 7, 11):
        spec = base.in_generation(base.resized(Resize(workers=workers), base.timeline.start_of(1)))
        owned = assign(spec.samples, spec.split, spec.seed)
        tests = np.array_split(np.arange(base.test_samples), workers)
        tested = np.array_split(np.arange(base.test_samples), 4)
        for rank in range(workers):
            pieces = [stored[p.number][p.start : p.stop] for p in spec.train_parts(rank)]
            assert np.array_equal(np.concatenate(pieces), owned[rank])
            pieces = [tested[p.number][p.start : p.stop] for p in spec.test_parts(rank)]
            assert np.array_equal(np.concatenate(pieces), tests[rank])


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        ([{"from_epoch": 0, "workers": 2}], "from_epoch = 0 should be at least 1"),
        ([{"from_epoch": 1}], "changes nothing"),
        ([{"from_epoch": 9, "workers": 2}], "is not among the epochs"),
        ([{"from_epoch": 2, "workers": 2}, {"from_epoch": 1, "workers": 3}], "is not after epoch 2"),
        ([{"from_epoch": 1, "worker": 2}], "unknown key worker"),
        ([{"from_epoch": 1, "workers": 2, "aggregators": 3}], "aggregators = 3 is more than workers = 2"),
        ([{"from_epoch": 1, "workers": 2000}], "fewer than 2000 functions"),
        ([{"from_epoch": 1, "memory_mb": 20000}], "20000 MB"),
    ],
)
def test_a_schedule_that_cannot_be_carried_out_is_refused(told, problem):
    def refused() -> None:
        values = parse_job({"name": "x", "model": "tiny:mlp", "run": {"resize": {"schedule": told}}}, where="job", folder=CODE).run
        real(make_job(epochs=4), **values)

    with pytest.raises((JobError, PlanInfeasible), match=problem):
        refused()


@pytest.mark.parametrize(
    ("how", "problem"),
    [({"pattern": "parameter-server"}, "pattern 'parameter-server'"), ({"stages": {"count": 2}, "workers": 4}, "several functions")],
)
def test_what_cannot_change_is_refused(how, problem):
    with pytest.raises(JobError, match=problem):
        real(make_job(epochs=3), resize={"schedule": (ScheduledResize(from_epoch=1, workers=2),)}, **how)


@pytest.mark.slow
def test_code_decides_after_each_epoch():
    job = make_job(epochs=6)
    policy = Target(target="tiny_policies:Growing", options={"most": 4})
    run = real(job, workers=2, batch_size=16, resize={"policy": policy})
    check_over(run)
    begun = run.of(GenerationStarted)
    assert [e.workers for e in begun] == [3, 4]
    assert [e.request for e in begun] == ["epoch 1", f"epoch {begun[0].from_epoch}"]
    once = Target(target="tiny_policies:once", options={"workers": 1})
    assert [e.workers for e in real(job, workers=2, batch_size=16, resize={"policy": once}).of(GenerationStarted)] == [1]


def test_a_wrong_decision_is_named():
    run = real(make_job(epochs=3), workers=2, batch_size=16, resize={"policy": Target(target="tiny_policies:wrong")})
    assert run.ending.status == "failed"
    assert "tiny_policies:wrong returned a int" in run.ending.causes[0]


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ({"resize": {"policy": Target(target="tiny_policies:once"), "adapt": True}}, "both resize.policy and resize.adapt"),
        ({"resize": {"adapt": True}}, "deadline_s or limits.budget_usd"),
    ],
)
def test_what_decides_is_checked(how, problem):
    with pytest.raises(JobError, match=problem):
        real(make_job(epochs=3), **how)


def adapting(**limits: Any) -> Run:
    job = make_job(epochs=8, limits=JobLimits(**limits))
    return real(job, workers=2, batch_size=16, resize={"adapt": True})


@pytest.mark.slow
def test_a_run_that_would_miss_its_deadline_gets_more_functions():
    fixed = real(make_job(epochs=8), workers=2, batch_size=16)
    took_s = fixed.trigger.ledger.ended_at
    run = adapting(deadline_s=0.85 * took_s)
    check_over(run)
    assert next(e.workers > 2 for e in run.of(GenerationStarted))
    assert run.trigger.ledger.ended_at < 0.87 * took_s
    assert any("about to be missed" in e.text for e in run.of(Note))
    assert not adapting(deadline_s=1.5 * took_s).of(GenerationStarted)


@pytest.mark.slow
def test_a_run_that_would_exceed_its_budget_gets_cheaper_functions():
    job = make_job(epochs=8)
    prices = load_prices("objects")
    fixed = real(job, workers=6, batch_size=16)
    cost_usd = fixed.trigger.ledger.cost_usd(fixed.trigger.ledger.ended_at)
    assert cost_usd > prices.functions_usd(0, 1)
    limited = make_job(epochs=8, limits=JobLimits(budget_usd=0.85 * cost_usd))
    run = real(limited, workers=6, batch_size=16, resize={"adapt": True})
    changed = run.of(GenerationStarted)
    assert changed
    assert changed[0].workers < 6
