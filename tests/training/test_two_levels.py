"""Runs whose gradients are added up per machine first: whatever dies, the weights are those of the undisturbed run."""

import re

import pytest
from training_runs import Run, real, synthetic

from ephemeron.errors import JobError
from ephemeron.events import FaultFired
from ephemeron.training.driver.launching.prepare import refuse_contradictions
from ephemeron.training.job import Configuration, Fault

TWO_LEVELS = {"channel": "direct", "workers": 5, "batch_size": 16, "checkpoint_every": 5, "exchange": {"ranks_per_machine": 2}}
ELEMENTS = 60_000
"""Vectors of this size are not sent whole."""


@pytest.fixture(scope="module")
def undisturbed() -> Run:
    return synthetic(**TWO_LEVELS, elements=ELEMENTS)


def test_the_order_of_summation_is_that_of_the_blocks(undisturbed: Run) -> None:
    flat = synthetic(**{**TWO_LEVELS, "exchange": {"ranks_per_machine": 1}}, elements=ELEMENTS)
    assert flat.sha != undisturbed.sha  # else nothing here was added up in two levels
    assert synthetic(**{**TWO_LEVELS, "exchange": {"ranks_per_machine": 5}}, elements=ELEMENTS).sha == flat.sha


@pytest.mark.parametrize("phase", ["load", "compute", "upload", "wait", "aggregate", "download"])
@pytest.mark.parametrize("rank", [0, 1, 3, 4])
def test_a_killed_function_changes_no_weight(rank: int, phase: str, undisturbed: Run) -> None:
    fault = f"kill:rank={rank},iteration={0 if phase == 'load' else 7},phase={phase}"
    run = synthetic(**TWO_LEVELS, elements=ELEMENTS, faults=[fault])
    assert run.of(FaultFired) or phase == "aggregate"
    assert run.sha == undisturbed.sha
    assert run.left == undisturbed.left


def test_a_block_that_dies_whole_changes_no_weight(undisturbed: Run) -> None:
    faults = [f"kill:rank={rank},iteration=7,phase=upload" for rank in (2, 3)]
    assert synthetic(**TWO_LEVELS, elements=ELEMENTS, faults=faults).sha == undisturbed.sha


def test_hand_offs_change_no_weight() -> None:
    run = synthetic(**TWO_LEVELS, elements=ELEMENTS, epochs=6, function_timeout_s=12.0)
    assert run.sha == synthetic(**TWO_LEVELS, elements=ELEMENTS, epochs=6).sha
    assert any(e.reason == "relay" for e in run.events if e.kind == "invoked")


def test_pairs_that_cannot_connect_change_no_weight(undisturbed: Run) -> None:
    cuts = ["cut:rank=0,to=3,iteration=2,seconds=300", "cut:rank=1,to=2,iteration=4,seconds=300"]
    assert synthetic(**TWO_LEVELS, elements=ELEMENTS, faults=cuts).sha == undisturbed.sha


@pytest.mark.slow
def test_real_gradients_with_rounding() -> None:
    how = {**TWO_LEVELS, "exchange": {"ranks_per_machine": 2, "compression": "int8"}}
    killed = real(**how, faults=[Fault(kind="kill", rank=2, iteration=3, phase="upload")])
    assert killed.sha == real(**how).sha


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"channel": "memory"}, "channel is 'memory'"),
        ({"sync": "hap"}, "sync is 'hap'"),
        ({"workers": 4, "stages": {"count": 2}}, "stages.count = 2"),
    ],
)
def test_what_has_no_two_levels_is_refused(options: dict[str, object], said: str) -> None:
    c = Configuration(**{**TWO_LEVELS, **options}).resolved()  # type: ignore[arg-type]
    with pytest.raises(JobError, match=re.escape(said)):
        refuse_contradictions(c)
