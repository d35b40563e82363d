"""Order of passes: for any order of arrivals, every pass runs once, within limits, and without deadlock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ephemeron.partition import Device, Graph, Node, Schedule, Tensor, connected, replay

pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")

from ephemeron.partition.runtime import Dispatcher, Operation, in_flight, sequences
from ephemeron.partition.runtime.dispatcher import following, waits_of


@st.composite
def worlds(draw):
    """A chain of stages with skips, on devices of their own or on fewer; and a schedule."""
    size = draw(st.integers(1, 6))
    feeds = [(i, i + 1) for i in range(size - 1)]
    feeds += draw(st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)), max_size=5))
    feeds = sorted({(u, v) for u, v in feeds if u < v})
    pipeline = draw(st.booleans())
    devices = [f"d{i}" if pipeline else f"d{draw(st.integers(0, 2))}" for i in range(size)]
    kind = draw(st.sampled_from(["plain", "gpipe", "1f1b"]))
    schedule = Schedule(kind=kind, micro_batches=1 if kind == "plain" else draw(st.integers(1, 9)), overlap=draw(st.booleans()))
    return feeds, devices, schedule


def played(world, choose):
    """All devices together; which of those that can go on does, and which message comes next, is for `choose` to say."""
    feeds, devices, schedule = world
    limits = in_flight(schedule, devices)
    turns = {d: Dispatcher([s for s, at in enumerate(devices) if at == d], schedule=schedule, in_flight=k) for d, k in limits.items()}
    missing = waits_of(feeds, len(devices), schedule.micro_batches)
    for o, n in missing.items():
        if n == 0:
            turns[devices[o.stage]].arrived(o)
    done = {d: [] for d in turns}
    in_transit, buffered = [], {}
    while not all(t.done for t in turns.values()):
        ready = [(d, None) for d in turns] + [(None, i) for i in range(len(in_transit))]
        while ready:
            device, message = ready.pop(choose(len(ready)))
            if device is None:
                o = in_transit.pop(message)
                missing[o] -= 1
                if missing[o] == 0:
                    turns[devices[o.stage]].arrived(o)
                break
            o = turns[device].next()
            if o is not None:
                done[device].append(o)
                turns[device].ended(o)
                in_transit += following(o, feeds)
                for u, v in feeds if o.direction == "forward" else ():
                    if u == o.stage:
                        buffered[u, v] = buffered.get((u, v), 0) + 1
                        assert devices[u] == devices[v] or buffered[u, v] <= limits[devices[u]], "a reader is flooded"
                for u, v in feeds if o.direction == "backward" else ():
                    if v == o.stage:
                        buffered[u, v] -= 1
                break
        else:
            raise AssertionError("deadlock")
    return done, limits


@given(worlds(), st.randoms(use_true_random=False))
def test_every_pass_runs_once_for_any_order_of_arrivals(world, rng):
    _feeds, devices, schedule = world
    done, limits = played(world, rng.randrange)
    every = [o for own in done.values() for o in own]
    assert len(every) == len(set(every)) == 2 * len(devices) * schedule.micro_batches
    for device, own in done.items():
        assert {devices[o.stage] for o in own} == {device}
        begun, over = set(), []
        for o in own:
            if o.direction == "forward":
                begun.add(o.micro_batch)
            else:
                over.append(o.micro_batch)
                assert Operation(stage=o.stage, direction="forward", micro_batch=o.micro_batch) in own[: own.index(o)]
            stages = devices.count(device)
            finished = {m for m in begun if over.count(m) == stages}
            assert len(begun - finished) <= limits[device]
        if schedule.kind == "gpipe":
            directions = [o.direction for o in own]
            assert directions == sorted(directions, reverse=True), "backward passes after all forward passes"


@given(worlds(), st.randoms(use_true_random=False))
def test_each_stage_goes_through_its_micro_batches_in_order(world, rng):
    """So sums of gradients and running statistics do not depend on what arrives when."""
    done, _ = played(world, rng.randrange)
    for own in done.values():
        for stage in {o.stage for o in own}:
            for direction in ("forward", "backward"):
                numbers = [o.micro_batch for o in own if (o.stage, o.direction) == (stage, direction)]
                assert numbers == sorted(numbers)


@given(st.integers(1, 6), st.integers(1, 12), st.booleans())
def test_the_last_stage_alternates(stages, micro_batches, overlap):
    schedule = Schedule(kind="1f1b", micro_batches=micro_batches, overlap=overlap)
    devices = [f"d{s}" for s in range(stages)]
    made = sequences([(s, s + 1) for s in range(stages - 1)], devices, schedule)
    assert [o.direction for o in made[devices[-1]]] == ["forward", "backward"] * micro_batches


@given(worlds())
def test_limits_are_those_of_the_simulator(world):
    feeds, devices, schedule = world
    nodes = tuple(Node(name=f"s{i}", forward_s={"k": 1.0}, backward_s={"k": 2.0}) for i in range(len(devices)))
    tensors = tuple(Tensor(name=f"t{u}-{v}", producer=f"s{u}", consumers=(f"s{v}",), nbytes=4, gradient_nbytes=4) for u, v in feeds)
    topology = connected([Device(name=d, kind="k", memory_bytes=1 << 40) for d in dict.fromkeys(devices)], lambda a, b: (0.0, 1e12))
    replayed = replay(Graph(nodes=nodes, tensors=tensors), topology, {f"s{i}": d for i, d in enumerate(devices)}, schedule=schedule)
    ours = in_flight(schedule, devices)
    if len(set(devices)) == len(devices) or not replayed.stages:
        assert ours == dict(replayed.in_flight)
    else:  # two consecutive stages of one device: the simulator sees a pipeline of devices, and allows no more
        assert all(replayed.in_flight[d] <= k for d, k in ours.items())


def test_a_textbook_picture():
    """1F1B without overlap, two stages, three micro-batches: one forward pass ahead at the first stage."""
    made = sequences([(0, 1)], ["a", "b"], Schedule(kind="1f1b", micro_batches=3, overlap=False))
    assert [(o.direction[0], o.micro_batch) for o in made["a"]] == [("f", 0), ("f", 1), ("b", 0), ("f", 2), ("b", 1), ("b", 2)]
    assert [(o.direction[0], o.micro_batch) for o in made["b"]] == [("f", 0), ("b", 0), ("f", 1), ("b", 1), ("f", 2), ("b", 2)]
