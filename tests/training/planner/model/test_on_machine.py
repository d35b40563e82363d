"""One machine instead of functions: the formula, term by term."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ephemeron.prices import Machine
from ephemeron.training.planner.model.profile import Workload
from ephemeron.training.planner.plan import MachineEstimate
from ephemeron.training.planner.vm_baseline import on_machine, without_uncounted

WORK = Workload(model_mb=10, a=1000.0, b=8.0, m=-200.0, memory_slope_mb=2.0, memory_base_mb=500.0, dataset_mb=100, samples=1000)
BOX = Machine(name="box", vcpus=4, memory_mb=8192, hour_usd=3.6, boot_s=40, source="a list", as_of="2025-06-01")


def on(work: Workload = WORK, machine: Machine = BOX, **how: Any) -> MachineEstimate:
    how = {"epochs": 2, "batch": 100, "mb_per_vcpu": 1000.0, "download_s": 5.0} | how
    return on_machine(work, machine, **how)


def test_boot_download_and_compute() -> None:
    step = 1000 * (100 + 8) / (4000 - 200)
    told = on()
    assert told.seconds == pytest.approx(40 + 5 + 2 * 10 * step)
    assert told.cost_usd == pytest.approx(told.seconds * 0.001)
    assert (told.name, told.fits) == ("box", True)


def test_the_last_batch_may_be_smaller() -> None:
    full, rest = 1000 * (300 + 8) / 3800, 1000 * (100 + 8) / 3800
    assert on(batch=300).seconds == pytest.approx(45 + 2 * (3 * full + rest))
    assert on(batch=5000) == on(batch=1000)


def test_more_threads_than_the_work_has_bring_nothing() -> None:
    one = dataclasses.replace(WORK, vcpus=1.0)
    large = on(one, dataclasses.replace(BOX, vcpus=64))
    assert dataclasses.replace(on(one), vcpus=64) == large
    assert (large.vcpus, large.counted_vcpus) == (64, 1)
    assert on(one).seconds == pytest.approx(45 + 2 * 10 * 1000 * 108 / 800)
    assert on(dataclasses.replace(WORK, vcpus=99.0)) == on()


def test_the_first_minute_is_billed_whole() -> None:
    quick = dataclasses.replace(WORK, a=0.001)
    assert on(quick).seconds == pytest.approx(45, abs=0.01)
    assert on(quick).cost_usd == pytest.approx(0.06)


def test_evaluation_step_and_optimiser_are_counted() -> None:
    more = dataclasses.replace(WORK, test_samples=300, step_s=0.5, apply_s=0.25)
    assert on(more).seconds - on().seconds == pytest.approx(2 * (10 * (0.5 + 0.25 / 4) + 1000 * (300 / 3 + 8) / 3800))


@pytest.mark.parametrize(("memory_mb", "fits"), [(700, True), (699, False)])
def test_memory_by_equation_4_1(memory_mb: float, fits: bool) -> None:
    told = on(machine=dataclasses.replace(BOX, memory_mb=memory_mb))
    assert told.fits is fits


def test_a_machine_that_differs_only_in_unmeasured_vcpus_is_left_out() -> None:
    one = dataclasses.replace(WORK, vcpus=1.0)
    small, large = on(one), on(one, dataclasses.replace(BOX, name="large", vcpus=64, hour_usd=57.6))
    assert large.seconds == small.seconds
    assert without_uncounted([large, small]) == [small]
    assert without_uncounted([large]) == [large]
    all_count = [on(), on(machine=dataclasses.replace(BOX, name="dear", hour_usd=57.6))]
    assert without_uncounted(all_count) == all_count
