"""Faults fire once, at their coordinates and in their attempt."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from ephemeron.communication.keys import Keys
from ephemeron.events import PHASES
from ephemeron.functions.simulation import run
from ephemeron.training.job import parse_fault
from ephemeron.training.worker.faults import Delayed, FaultInjector


class Dead(Exception):
    pass


def injector(*texts, rank=0, attempt=0):
    fired = []

    def die():
        raise Dead

    made = FaultInjector(rank=rank, attempt=attempt, die=die, fired=lambda fault, iteration: fired.append((str(fault), iteration)))
    made.arm([parse_fault(t) for t in texts])
    return made, fired


@pytest.mark.parametrize("phase", [p for p in PHASES if p != "load"])
def test_a_kill_hits_its_phase_of_its_iteration(phase):
    faults, fired = injector(f"kill:rank=0,iteration=3,phase={phase}")
    for iteration in (0, 2, 4):
        faults.iteration = iteration
        for other in PHASES:
            faults.ended(other)
    faults.iteration = 3
    for other in PHASES:
        if other != phase:
            faults.ended(other)
    assert fired == []
    with pytest.raises(Dead):
        faults.ended(phase)
    assert fired == [(f"kill:rank=0,iteration=3,phase={phase}", 3)]


def test_a_kill_happens_once():
    faults, fired = injector("kill:rank=0,iteration=3")
    faults.iteration = 3
    with pytest.raises(Dead):
        faults.ended("compute")
    faults.ended("compute")
    assert len(fired) == 1


def test_a_kill_while_loading_needs_no_iteration():
    faults, fired = injector("kill:rank=0,iteration=3,phase=load")
    with pytest.raises(Dead):
        faults.ended("load")
    assert fired == [("kill:rank=0,iteration=3,phase=load", -1)]


@pytest.mark.parametrize(("rank", "attempt"), [(1, 0), (0, 1), (1, 1)])
def test_other_ranks_and_other_attempts_are_spared(rank, attempt):
    faults, fired = injector("kill:rank=0,iteration=3", "drop-put:rank=0,iteration=3", rank=rank, attempt=attempt)
    faults.iteration = 3
    for phase in PHASES:
        faults.ended(phase)
    assert not faults.drops(Keys("run").contribution(3, rank, 0))
    assert fired == []


def test_a_replacement_can_be_hit_by_a_fault_of_its_own():
    faults, _ = injector("kill:rank=0,iteration=3,attempt=1", attempt=1)
    faults.iteration = 3
    with pytest.raises(Dead):
        faults.ended("compute")


def test_two_kills_of_one_attempt_are_two():
    faults, fired = injector("kill:rank=0,iteration=3,phase=upload", "kill:rank=0,iteration=4")
    faults.iteration = 3
    with pytest.raises(Dead):
        faults.ended("upload")
    faults.iteration = 4
    with pytest.raises(Dead):
        faults.ended("compute")
    assert [i for _, i in fired] == [3, 4]


def test_one_put_of_its_iteration_is_dropped():
    keys = Keys("run-3")
    faults, fired = injector("drop-put:rank=0,iteration=3")
    others = [keys.spec, keys.state(0, 3), keys.claim(0, 3), keys.contribution(30, 0, 3), keys.merged(13, 3)]
    assert not any(faults.drops(key) for key in others)
    assert faults.drops(keys.contribution(3, 0, 1))
    assert not faults.drops(keys.contribution(3, 0, 1))
    assert not faults.drops(keys.merged(3, 0))
    assert fired == [("drop-put:rank=0,iteration=3", 3)]


def test_merged_shards_can_be_dropped_too():
    faults, _ = injector("drop-put:rank=0,iteration=3")
    assert faults.drops(Keys("run").merged(3, "0.1"))


def test_a_delay_slows_every_attempt_of_its_rank():
    texts = ("delay:rank=1,factor=10", "delay:rank=1,factor=3,seconds=0.5", "delay:rank=2,factor=50")
    assert injector(*texts, rank=0)[0].delay == 1
    assert injector(*texts, rank=1)[0].delay == 10
    assert [injector(*texts, rank=rank)[0].longer_s for rank in range(3)] == [0, 0.5, 0]
    assert injector(*texts, rank=1, attempt=4)[0].delay == 10


def test_a_delay_multiplies_all_computing_and_lengthens_that_over_samples():
    async def inner(work, *, samples, batches=1):
        await asyncio.sleep(2.0)
        return work()

    async def took() -> list[float]:
        slow, ends = Delayed(inner, 3.0, 0.5), [0.0]
        for samples in (0, 4):
            assert await slow(lambda: "done", samples=samples) == "done"
            ends.append(asyncio.get_running_loop().time())
        return [after - before for before, after in pairwise(ends)]

    assert run(took()) == [6.0, 6.5]
