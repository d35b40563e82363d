"""What runs while it is needed, and only then; and what one job may do to another."""

from __future__ import annotations

import gc
import signal
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from service_worlds import TIMEOUTS, World, epochs_of, local, mixed, pid_of, plain, signalled, until

from ephemeron.data.flow import Flow
from ephemeron.data.service.messages import FlowRequest, Nothing, ReaderRequest
from ephemeron.data.service.protocol import ACCESS, DELETE_FLOW, HEARTBEAT_READER, LIST_FLOWS
from ephemeron.errors import JobError
from ephemeron.units import MB
from gates import Gate
from running import command_of

LARGE = 200
"""Floats of an ordinary sample; a giant has a thousand times as many."""


def state_of(world: World, flow: str) -> str:
    (found,) = [each for each in world.service.call(LIST_FLOWS, Nothing()).flows if each.name == flow]
    return found.state


@pytest.mark.slow
def test_a_service_comes_and_goes_and_ends_without_its_folder(own_world: Callable[..., World]) -> None:
    """At last as when a temporary folder is cleared away at once: nobody can find it any more, so it must not stay."""
    world = own_world(idle_s=1.0, timeouts=replace(TIMEOUTS, orphan_s=2.0))
    here = epochs_of(local(mixed()), seed=3)
    assert epochs_of(world.read(mixed()), seed=3) == here
    until(lambda: not world.processes(), "nothing runs that nobody needs")
    assert not list((world.folder / "payloads").glob("*.part"))
    with world.read(mixed()).to_shuffled(4, plain, seed=3) as shuffled:  # while somebody reads, all of it runs
        assert [list(shuffled)] == here, "it comes again"
        assert world.processes()
        world.folder.rename(world.folder.with_name("elsewhere"))
    until(lambda: not world.processes(), "all have ended, whose folder is gone")


@pytest.mark.slow
def test_a_flow_that_cannot_be_served_any_more_is_given_up(own_world: Callable[..., World]) -> None:
    """Its router does not come back, so nobody says that nobody reads it."""
    world = own_world(idle_s=1.0)
    with world.read(mixed()).to_shuffled(4, plain) as shuffled:
        iterator = iter(shuffled)
        next(iterator)
        until(lambda: state_of(world, "test/mixed") == "accessed", "accessed")
        [payload] = (world.folder / "payloads").iterdir()
        payload.unlink()
        for part in (world.router("test/mixed"), world.shard("test/mixed")):
            signalled(part, signal.SIGKILL)
    until(lambda: not world.processes(), "all have ended")
    kept = weakref.ref(shuffled)
    del shuffled, iterator
    gc.collect()  # of the error that closing has met, with its frames
    assert kept() is None, "nothing holds a reader that was closed, nor its connections"


@pytest.mark.slow
def test_a_router_that_is_left_alone_forgets_silent_readers(own_world: Callable[..., World]) -> None:
    """The coordinator and a reader die at once: neither says that the reader has gone."""
    world = own_world(timeouts=replace(TIMEOUTS, reader_lease_s=1.0, orphan_s=1.0))
    with world.read(mixed()).to_shuffled(4, plain) as shuffled:  # while somebody reads, the router stays
        next(iter(shuffled))
        router = world.router("test/mixed")
        router.call(HEARTBEAT_READER, ReaderRequest(reader="somebody/else"), timeout_s=60.0)
        killed = signalled(world.coordinator, signal.SIGKILL)
    router.forget()
    until(lambda: not world.processes(), "all have ended")
    world.coordinator._clear(killed)  # its socket, as its successor would


@pytest.mark.slow
def test_the_states_of_a_flow_whose_loaders_scale_to_zero_and_back(own_world: Callable[..., World]) -> None:
    world = own_world(idle_s=600.0, ends_when_idle=False, timeouts=replace(TIMEOUTS, loaders_idle_s=0.5, reader_lease_s=60.0))
    read = world.read(mixed())
    assert state_of(world, "test/mixed") == "created"
    with read.to_shuffled(4, plain, seed=2) as shuffled:
        first = list(shuffled)
        until(lambda: state_of(world, "test/mixed") == "accessed", "accessed")
        until(lambda: [(s.loaded > 0, s.loaders, s.readers) for s in world.status("test/mixed")] == [(True, 0, 1)], "no loader is left")
        assert [first, list(shuffled)] == epochs_of(local(mixed()), 2, seed=2)
    until(lambda: state_of(world, "test/mixed") == "ready", "ready: its reader has said goodbye")
    world.coordinator.kill()  # its successor waits for less long: nobody who looks could miss that it is ready
    world = World(world.folder, replace(world.settings, idle_s=1.0))
    until(lambda: state_of(world, "test/mixed") == "idle", "idle")
    until(lambda: all("coordinator" in command_of(p) for p in world.processes()), "only the coordinator is left")
    assert world.coordinator.alive
    world.service.call(DELETE_FLOW, FlowRequest(flow="test/mixed"))
    assert list((world.folder / "payloads").iterdir()) == []
    assert list((world.folder / "flows").iterdir()) == []
    with pytest.raises(JobError, match="no flow 'test/mixed'"):
        world.service.call(ACCESS, FlowRequest(flow="test/mixed"))
    assert epochs_of(read, seed=1) == epochs_of(local(mixed()), seed=1), "who still has it registers it again"


@pytest.mark.slow
def test_nobody_waits_for_a_slow_job(one_shard: World) -> None:
    """One never takes its second batch; the other reads three epochs meanwhile."""
    slow, fast = one_shard.read(mixed(), job="slow"), one_shard.read(mixed(), job="fast")
    with slow.to_shuffled(4, plain, seed=11) as waiting:
        batches = iter(waiting)
        got = [next(batches)]
        assert epochs_of(fast, 3, seed=12) == epochs_of(local(mixed()), 3, seed=12)
        got += batches
    assert [got] == epochs_of(local(mixed()), seed=11)


@pytest.mark.slow
def test_a_giant_is_no_more_than_one_sample(own_world: Callable[..., World]) -> None:
    """Buffers hold a few dozen ordinary samples; one is a thousand times as large, and both jobs go on."""
    limit_mb = 40 * LARGE * 4 / MB
    world = own_world(shards=2, buffer_mb=limit_mb, cache_mb=2 * limit_mb)
    flow = mixed(60, "test/giant", giants=[17])
    here = [epochs_of(local(flow), 2, seed=seed, batch_size=5) for seed in (1, 2)]
    got: list[list[Any]] = [[[], []], [[], []]]
    most = 0.0
    both = [world.read(flow).to_shuffled(5, plain, seed=seed) for seed in (1, 2)]
    for epoch in range(2):
        for row in zip(*both, strict=True):
            for job, batch in enumerate(row):
                got[job][epoch].append(batch)
            most = max([most, *(s.buffered_bytes for s in world.status("test/giant"))])
    for each in both:
        each.close()
    assert got == here
    giant = 1000 * LARGE * 4
    assert most <= limit_mb * MB + 2 * (giant + 100_000), "each job's next batch, and no more"
    assert all(s.cached_bytes <= 2 * limit_mb * MB for s in world.status("test/giant"))


@pytest.mark.slow
def test_a_service_of_other_settings_takes_over(own_world: Callable[..., World], tmp_path: Path) -> None:
    """A coordinator dies, and its successor has other settings: what still runs is not of its kind, and goes."""
    world = own_world(shards=1)
    with world.read(mixed()).to_shuffled(4, plain, seed=4) as shuffled:
        batches = iter(shuffled)
        got = [next(batches)]
        before = pid_of(world.router("test/mixed"))
        world.coordinator.kill()
        world.settings = replace(world.settings, cache_mb=3.0)
        other = World(world.folder, world.settings)
        assert epochs_of(other.read(mixed()), seed=5) == epochs_of(local(mixed()), seed=5)
        assert pid_of(world.router("test/mixed")) != before
        got += batches
    assert [got] == epochs_of(local(mixed()), seed=4)


@pytest.mark.slow
def test_shards_of_an_older_version_are_not_adopted(own_world: Callable[..., World]) -> None:
    """The router is killed and cannot take its shards along; then the flow is raised to the next version."""
    world = own_world(shards=1)
    old = mixed(20, "test/raised")
    with world.read(old).to_shuffled(4, plain) as shuffled:
        iterator = iter(shuffled)
        next(iterator)
        world.coordinator.kill()
        world.router("test/raised").kill()
        assert world.shard("test/raised").alive
    new = Flow("test/raised", 2).dataset(mixed(20, "test/raised", floats=7).source.dataset)  # type: ignore[union-attr]
    assert epochs_of(world.read(new)) == epochs_of(local(new))


@pytest.mark.slow
def test_a_slow_step_stops_only_its_own_flow(one_shard: World, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "open")
    flow = Flow("test/gated").dataset(mixed(8).source.dataset).map("gate", gate)  # type: ignore[union-attr]
    with one_shard.read(flow).to_shuffled(4, plain, shuffle=False) as shuffled:
        batches = iter(shuffled)
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.extend(batches))
        thread.start()
        assert epochs_of(one_shard.read(mixed()), seed=21) == epochs_of(local(mixed()), seed=21)
        assert not found
        gate.open()
        thread.join(240)
    assert [i for batch in found for i, _ in batch] == list(range(8))
