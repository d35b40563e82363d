"""Training over direct channels whose functions cannot all talk to each other, for some time or ever."""

import dataclasses

import pytest
from training_runs import WORLD, configuration, make_job, synthetic

from ephemeron.errors import JobError
from ephemeron.events import FaultFired, Invoked
from ephemeron.functions.base import Limits
from ephemeron.prices import load_prices
from ephemeron.training.driver.launching.prepare import prepare
from ephemeron.training.job import parse_fault

DIRECT = {"channel": "direct", "workers": 4, "batch_size": 64, "checkpoint_every": 5, "samples": 2560}
UNDISTURBED = synthetic(**{**DIRECT, "channel": "memory"}).sha
CUTS = {
    "reset": ["cut:rank=0,to=2,iteration=3,seconds=3"],
    "silent, and noticed": ["cut:rank=0,to=2,iteration=3,seconds=30,silent=1"],
    "silent, and over before it is noticed": ["cut:rank=3,to=1,iteration=3,seconds=2,silent=1"],
    "rank 1 is alone": [f"cut:rank=1,to={r},iteration=6,seconds=8" for r in (0, 2, 3)],
    "no rank reaches rank 0, silently": [f"cut:rank=0,to={r},iteration=6,seconds=15,silent=1" for r in (1, 2, 3)],
    "two halves": [f"cut:rank={a},to={b},iteration=4,seconds=10" for a in (0, 1) for b in (2, 3)],
    "and a death": ["cut:rank=0,to=1,iteration=3,seconds=20", "kill:rank=2,iteration=4,phase=upload"],
}


@pytest.mark.parametrize("sync", ["bsp", "hap"])
@pytest.mark.parametrize("case", CUTS)
def test_partitions_change_no_weight(case: str, sync: str) -> None:
    run = synthetic(**DIRECT, sync=sync, faults=CUTS[case])
    assert len(run.of(FaultFired)) == len(CUTS[case])
    assert run.sha == (UNDISTURBED if sync == "bsp" else synthetic(**{**DIRECT, "channel": "memory"}, sync=sync).sha)
    assert run.left == {"run/spec", "run/result"}


@pytest.mark.parametrize("sync", ["bsp", "hap"])
def test_a_partition_costs_no_function(sync: str) -> None:
    for case in ("reset", "silent, and over before it is noticed"):
        assert len(synthetic(**DIRECT, sync=sync, faults=CUTS[case]).of(Invoked)) == 4
    for pairs in ([(1, r) for r in (0, 2, 3)], [(a, b) for a in (0, 1) for b in (2, 3)], [(0, 2)]):
        cuts = [f"cut:rank={a},to={b},iteration=4,seconds=90" for a, b in pairs]
        assert len(synthetic(**DIRECT, sync=sync, faults=cuts).of(Invoked)) == 4, "they hear of each other through the store"


@pytest.mark.parametrize("share", [0.3, 0.7, 1.0])
def test_pairs_that_never_connect_change_no_weight(share: float) -> None:
    world = dataclasses.replace(WORLD, direct_failure=share)
    run = synthetic(**DIRECT, world=world)
    assert run.sha == UNDISTURBED
    assert len(run.of(Invoked)) == 4
    assert run.left == {"run/spec", "run/result"}


def test_slow_links_change_no_weight_and_take_longer() -> None:
    slow = dataclasses.replace(WORLD, direct_latency_s=0.05, direct_setup_s=0.5, direct_bandwidth_mb_s=1.0)
    runs = [synthetic(**DIRECT, elements=50_000, world=world) for world in (WORLD, slow)]
    assert runs[0].sha == runs[1].sha
    assert runs[1].events[-1].t > runs[0].events[-1].t


@pytest.mark.parametrize(
    ("channel", "fault", "says"),
    [
        ("memory", "cut:rank=0,to=1,iteration=2,seconds=3", "use --channel direct"),
        ("direct", "cut:rank=0,to=4,iteration=2,seconds=3", "there is no rank 4"),
    ],
)
def test_cuts_that_make_no_sense_are_refused(channel: str, fault: str, says: str) -> None:
    with pytest.raises(JobError, match=says):
        prepare(
            make_job(),
            configuration(workers=4, channel=channel),
            run_id="run",
            limits=Limits(),
            prices=load_prices("objects"),
            faults=[parse_fault(fault)],
        )
