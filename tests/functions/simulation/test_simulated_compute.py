"""Simulated seconds of measured steps are CPU seconds of one thread, however busy the machine is."""

import asyncio
import time

import pytest
import torch

import ephemeron
from ephemeron.errors import PlanInfeasible
from ephemeron.functions import simulation
from ephemeron.functions.base import Call
from ephemeron.functions.simulated import SimulatedCompute, SimulatedPlatform, simulated_limits
from ephemeron.training.job import DataSpec, Job, Simulation


def compute(world=None):
    world = world or Simulation()
    call = Call(run="r", rank=0, attempt=0, memory_mb=1769, lifetime_s=10, channel="memory")
    return SimulatedCompute(world, call, simulated_limits(world), seed="0")


def test_waiting_takes_no_simulated_time():
    """Whoever shares the processor makes a step wait, and not compute."""

    async def main():
        loop = asyncio.get_running_loop()
        began = loop.time()
        await compute()(lambda: time.sleep(0.2), samples=1)
        return loop.time() - began

    assert simulation.run(main()) < 0.1


def test_steps_have_one_thread_and_give_it_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert simulation.run(compute()(torch.get_num_threads, samples=1)) == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_run_says_what_its_seconds_are():
    measured = SimulatedPlatform(Simulation())
    given = SimulatedPlatform(Simulation(compute={"a": 1.0, "b": 1.0, "m": 0.0}))
    assert any("CPU seconds of one thread" in note for note in measured.unenforced)
    assert not any("CPU seconds" in note for note in given.unenforced)


def test_concurrency_is_a_setting_that_the_refusal_names():
    job = Job(name="j", model="m:b", data=DataSpec(source="digits"), run={"platform": "simulated", "workers": 1001, "batch_size": 1})
    with pytest.raises(PlanInfeasible, match=r"1001 workers are more than the platform's 1000: set \[simulation\] concurrency"):
        ephemeron.train(job)
    assert simulated_limits(Simulation(concurrency=5000)).concurrency == 5000
