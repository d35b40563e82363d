"""Promise 2: kill any function at any point, deliver twice, lose puts, run out of lifetime: the same weights."""

from __future__ import annotations

import dataclasses

import pytest
from training_runs import WORLD, make_job, real, synthetic

from ephemeron.events import PHASES, Ended, FaultFired, Invoked
from ephemeron.training.driver.supervisor import Replace
from ephemeron.training.job import Target, parse_fault

SETTINGS = {"checkpoint_every": 4, "workers": 4, "aggregators": 2}
AT = (0, 9, 19)
"""First, middle and last iteration of 20."""


@pytest.fixture(scope="module")
def undisturbed():
    cache = {}

    def sha(**how):
        key = tuple(sorted(how.items()))
        if key not in cache:
            cache[key] = synthetic(**SETTINGS, **how).sha
        return cache[key]

    return sha


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("how", [{"sync": "bsp"}, {"sync": "hap"}, {"sync": "bsp", "pattern": "pipelined"}], ids=str)
def test_a_function_is_killed(how, rank, phase, undisturbed):
    """Each rank in each phase; over the phases each rank is killed in the first, a middle and the last iteration."""
    iteration = AT[(rank + PHASES.index(phase)) % len(AT)]
    run = synthetic(faults=[f"kill:rank={rank},iteration={iteration},phase={phase}"], **SETTINGS, **how)
    assert run.sha == undisturbed(**how)
    assert run.left == {"run/spec", "run/result"}
    assert not run.trigger.supervisor.running
    fired = len(run.of(FaultFired))
    assert len(run.of(Invoked)) == 4 + fired
    # nobody has to wait in a balanced run; others do not aggregate; under HAP they first download in iteration 1
    may_miss = phase == "wait" or (phase == "aggregate" and rank >= 2)
    later = how["sync"] == "hap" and phase == "download" and rank >= 2 and iteration == 0
    assert fired == (0 if later else 1) or may_miss


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["k-reduce", "parameter-server"])
@pytest.mark.parametrize("phase", ["compute", "upload", "download"])
def test_a_function_with_a_real_model_is_killed(pattern, phase):
    job = make_job(model=Target(target="tiny:mlp", options={"dropout": 0.3}), optimizer=Target(target="Adam"))
    expected = real(job, pattern=pattern, checkpoint_every=5).sha
    run = real(job, pattern=pattern, checkpoint_every=5, faults=[parse_fault(f"kill:rank=1,iteration=13,phase={phase}")])
    assert run.of(FaultFired)
    assert run.sha == expected


@pytest.mark.parametrize("compression", ["bf16", "int8", "sparse"])
def test_compressed_messages_survive_a_kill_bit_for_bit(compression):
    expected = synthetic(exchange={"compression": compression}, elements=3000, **SETTINGS).sha
    if compression == "sparse":
        assert expected == synthetic(elements=3000, **SETTINGS).sha
    for rank in (0, 3):
        run = synthetic(
            exchange={"compression": compression},
            elements=3000,
            faults=[f"kill:rank={rank},iteration=10,phase=aggregate", f"kill:rank={rank},iteration=10,phase=upload"],
            **SETTINGS,
        )
        assert run.of(FaultFired)
        assert run.sha == expected


def test_two_die_at_once_and_a_replacement_dies_too(undisturbed):
    faults = [
        "kill:rank=0,iteration=9,phase=aggregate",
        "kill:rank=1,iteration=9,phase=aggregate",
        "kill:rank=0,iteration=9,phase=upload,attempt=1",
        "kill:rank=3,iteration=10",
    ]
    run = synthetic(faults=faults, **SETTINGS)
    assert len(run.of(FaultFired)) == 4
    assert run.sha == undisturbed()


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("sync", ["bsp", "hap", "ssp:2", "asp", "hsp"])
def test_a_call_is_delivered_twice(sync, rank, undisturbed):
    run = synthetic(faults=[f"duplicate:rank={rank}"], sync=sync, **SETTINGS)
    assert [e.outcome for e in run.of(Ended)].count("duplicate") == 1
    assert run.ending.status == "finished"
    if sync in ("bsp", "hap"):
        assert run.sha == undisturbed(sync=sync)


@pytest.mark.parametrize("iteration", AT)
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("sync", ["bsp", "hap"])
def test_a_put_is_lost(sync, rank, iteration, undisturbed):
    run = synthetic(faults=[f"drop-put:rank={rank},iteration={iteration}"], sync=sync, **SETTINGS)
    assert len(run.of(FaultFired)) == 1
    assert run.sha == undisturbed(sync=sync)


def test_a_lost_put_and_a_kill(undisturbed):
    run = synthetic(faults=["drop-put:rank=1,iteration=8", "kill:rank=0,iteration=8,phase=aggregate"], **SETTINGS)
    assert run.sha == undisturbed()


def test_a_slow_function_changes_nothing(undisturbed):
    run = synthetic(faults=["delay:rank=1,factor=10"], **SETTINGS)
    assert run.sha == undisturbed()
    assert len(run.of(Invoked)) == 4  # slow is not dead
    assert run.trigger.ledger.ended_at > synthetic(**SETTINGS).trigger.ledger.ended_at


@pytest.mark.parametrize("sync", ["bsp", "hap", "ssp:2", "asp", "hsp"])
def test_five_lifetimes_in_a_row(sync, undisturbed):
    world = dataclasses.replace(WORLD, cold_start_s=0.05)
    run = synthetic(function_timeout_s=3.0, sync=sync, world=world, **SETTINGS)
    assert max(e.attempt for e in run.of(Invoked)) >= 5
    assert run.ending.status == "finished"
    assert run.left == {"run/spec", "run/result"}
    if sync in ("bsp", "hap"):
        assert run.sha == undisturbed(sync=sync)


def test_a_successor_s_predecessor_dies_before_it_hands_over(undisturbed):
    """Killed after the successor was invoked: it gives up waiting and recovers from a checkpoint."""
    world = dataclasses.replace(WORLD, cold_start_s=0.05)
    run = synthetic(
        function_timeout_s=3.0,
        world=world,
        faults=["kill:rank=2,iteration=3", "kill:rank=2,iteration=4", "kill:rank=2,iteration=5"],
        **SETTINGS,
    )
    assert run.sha == undisturbed()


@pytest.mark.parametrize("sync", ["ssp:0", "ssp:3", "asp", "hsp"])
@pytest.mark.parametrize("phase", ["compute", "upload", "aggregate"])
def test_asynchronous_runs_end_too(sync, phase):
    for rank in (0, 3):  # one that aggregates and one that does not
        run = synthetic(sync=sync, faults=[f"kill:rank={rank},iteration=10,phase={phase}"], **SETTINGS)
        assert run.ending.status == "finished"
        assert run.left == {"run/spec", "run/result"}


def test_ssp_0_is_bsp(undisturbed):
    assert synthetic(sync="ssp:0", **SETTINGS).sha == undisturbed(sync="bsp")


def blind(trigger):
    """The client does not see who dies."""
    original = trigger._read
    trigger._read = lambda event: [a for a in original(event) if not isinstance(a, Replace)]


def test_workers_carry_the_run_without_a_supervisor(undisturbed):
    """The client is blind: the peers find out who is dead and replace it."""

    for fault in (
        "kill:rank=0,iteration=9,phase=aggregate",
        "kill:rank=3,iteration=9,phase=upload",
        "kill:rank=0,iteration=19,phase=download",
    ):
        run = synthetic(faults=[fault], until=blind, **SETTINGS)
        assert len(run.of(FaultFired)) == 1
        assert run.sha == undisturbed()


@pytest.mark.parametrize("supervised", [True, False])
@pytest.mark.parametrize("sync", ["bsp", "hap"])
def test_a_kill_close_to_everybody_s_lifetime(sync, supervised, undisturbed):
    """The others come to the end of their own lives while they wait for the dead one: they hand over too."""
    world = dataclasses.replace(WORLD, cold_start_s=2.0)
    calm = len(synthetic(function_timeout_s=8.0, sync=sync, world=world, **SETTINGS).of(Invoked))
    for rank, iteration in ((0, 5), (2, 6), (3, 7)):
        for phase in ("upload", "compute"):
            run = synthetic(
                function_timeout_s=8.0,
                sync=sync,
                world=world,
                until=None if supervised else blind,
                faults=[f"kill:rank={rank},iteration={iteration},phase={phase}"],
                **SETTINGS,
            )
            assert len(run.of(FaultFired)) == 1
            assert run.sha == undisturbed(sync=sync)
            assert len(run.of(Invoked)) <= 3 * calm  # a few replaced too early, and no storm


@pytest.mark.parametrize("function_timeout_s", [900.0, 8.0])
@pytest.mark.parametrize(("rank", "iteration"), [(0, 6), (1, 6), (1, 13), (0, 13)])
def test_a_put_lost_just_before_a_checkpoint(rank, iteration, function_timeout_s):
    """The checkpoint says that the put was made: a replacement has to start before it."""
    shape = {"workers": 2, "aggregators": 1, "checkpoint_every": 7, "batch_size": 16, "samples": 640}
    whole = synthetic(**shape)
    run = synthetic(**shape, function_timeout_s=function_timeout_s, faults=[f"drop-put:rank={rank},iteration={iteration}"])
    assert run.sha == whole.sha


@pytest.mark.parametrize("function_timeout_s", [12.0, 5.0])
@pytest.mark.parametrize("iteration", [11, 24, 37])
def test_a_replacement_that_needs_longer_than_its_peers_are_patient(iteration, function_timeout_s):
    """It repeats up to two checkpoint intervals, hardly less than a life: nobody may replace it meanwhile for ever."""
    shape = {"workers": 4, "aggregators": 2, "checkpoint_every": 25, "batch_size": 16, "samples": 1280}
    whole = synthetic(**shape)
    run = synthetic(**shape, function_timeout_s=function_timeout_s, faults=[f"kill:rank=2,iteration={iteration},phase=compute"])
    assert run.sha == whole.sha
    assert len(run.of(Invoked)) < 120
