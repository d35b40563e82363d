"""Stages in the schedule simulator: measured times, and bytes of the boundaries."""

from __future__ import annotations

import itertools
import multiprocessing
from random import Random
from statistics import fmean

import pytest

torch = pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")
if "fork" not in multiprocessing.get_all_start_methods():
    pytest.skip("this system cannot fork", allow_module_level=True)

from cutting_worlds import optimizer  # noqa: E402
from training_worlds import batches, furthest, loss, parts_of, traced  # noqa: E402

from ephemeron.errors import JobError  # noqa: E402
from ephemeron.partition import Device, Schedule, connected, replay  # noqa: E402
from ephemeron.partition.runtime import boundary_bytes  # noqa: E402
from ephemeron.partition.runtime.stage_costs import (  # noqa: E402
    StageSamples,
    StageTimes,
    measure_stages,
    stage_graph,
    stage_placement,
)

PIPELINED = Schedule(kind="1f1b", micro_batches=4)


class Ticking:
    """A clock that is read twice for each pass, and counts 1, 2, 3, … between readings of a pass."""

    def __init__(self) -> None:
        self._steps = itertools.cycle([0.0, 1.0, 0.0, 2.0, 0.0, 3.0])
        self._now = 0.0

    def __call__(self) -> float:
        self._now += next(self._steps)
        return self._now


@pytest.mark.parametrize(("together", "schedule"), [(False, None), (True, None), (True, PIPELINED)])
def test_every_stage_is_timed_in_both_passes_and_nothing_changes(together, schedule):
    parts = parts_of("u-net", 3)
    before = {n: t.clone() for n, t in parts.state().items()}
    (args, _), *_ = batches("u-net", traced("u-net")[0])
    times = measure_stages(parts, args, loss=loss, optimizer=optimizer, together=together, schedule=schedule, repeats=3, clock=Ticking())
    assert times.times(min) == times.times() == StageTimes(forward_s=(1.0,) * 3, backward_s=(2.0,) * 3, update_s=(3.0,) * 3)
    assert furthest(parts.state(), before) == 0.0
    assert all(p.grad is None for s in parts.stages for p in s.parameters())


def test_a_graph_of_stages_is_replayed_at_the_size_of_a_micro_batch():
    parts = parts_of("u-net", 3)
    times = StageTimes(forward_s=(1.0, 2.0, 3.0), backward_s=(2.0, 4.0, 6.0), update_s=(0.0, 0.0, 0.0))
    graph = stage_graph(parts, times, micro_batches=2)
    sent = boundary_bytes(parts)
    assert {(t.producer, t.consumers[0]): (t.nbytes, t.gradient_bytes) for t in graph.tensors} == {
        (f"stage {u}", f"stage {v}"): b for (u, v), b in sent.items()
    }
    devices = [Device(name=d, kind="cpu", memory_bytes=1 << 40) for d in parts.devices]
    topology = connected(devices, lambda a, b: (0.0, 1e15))
    done = replay(graph, topology, stage_placement(parts), schedule=Schedule(kind="1f1b", micro_batches=2))
    assert done.iteration_s == pytest.approx(2 * (3.0 + 6.0) + 1.0 + 2.0 + 2.0 + 4.0)


def test_passes_that_vary_make_a_pipeline_slower_than_their_mean():
    parts = parts_of("u-net", 3)
    samples = StageSamples(rows=(((1.0, 2.0, 0.0), (3.0, 6.0, 0.0)),) * 3)
    graph = stage_graph(parts, samples.times(fmean), micro_batches=4)
    devices = [Device(name=d, kind="cpu", memory_bytes=1 << 40) for d in parts.devices]
    topology = connected(devices, lambda a, b: (0.0, 1e15))
    placement, rng = stage_placement(parts), Random(0)
    drawn = [replay(graph, topology, placement, schedule=PIPELINED, takes=samples.drawn(rng)) for _ in range(50)]
    for r in drawn:
        assert {round(s.end_s - s.start_s, 6) for s in r.spans if isinstance(s.resource, str)} <= {1.0, 2.0, 3.0, 6.0}
    even = replay(graph, topology, placement, schedule=PIPELINED).iteration_s
    assert even < fmean(r.iteration_s for r in drawn) < 2 * even


def test_what_is_no_pipeline_is_refused():
    (args, _), *_ = batches("u-net", traced("u-net")[0])
    with pytest.raises(JobError, match="a device has several stages"):
        measure_stages(parts_of("u-net", 3, pipeline=False), args, loss=loss, optimizer=optimizer)
    with pytest.raises(JobError, match="repeats = 2 gives no median"):
        measure_stages(parts_of("u-net", 3), args, loss=loss, optimizer=optimizer, repeats=2)
