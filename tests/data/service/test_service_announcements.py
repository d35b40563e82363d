"""What a shard's cache is told of the future, and what it keeps because of it."""

from __future__ import annotations

import pytest

from ephemeron.data.scheduler import LoaderReport
from ephemeron.data.service.shard_state import LoadResult, SampleKey, SerializedSample, ShardState


def packed(nbytes: int = 100, cost_s: float = 0.01) -> SerializedSample:
    return SerializedSample(buffers=(b"x" * nbytes,), nbytes=nbytes, cost_s=cost_s)


def made(*, random: bool = True, cache_nbytes: int = 10_000) -> ShardState:
    core = ShardState(random=random, buffer_nbytes=1 << 20, cache_nbytes=cache_nbytes, failed_sample=lambda name, why: packed(1))
    core.add_loader("loader", now=0.0)
    return core


def load_all(core: ShardState, half: bool = False) -> list[SampleKey]:
    """One loader does everything that is to be done."""
    loaded: list[SampleKey] = []
    request, done = core.scheduler.loaders["loader"].request, ()
    while True:
        request += 1
        results = {name: LoadResult(sample=packed(), half=packed(40) if half else None) for name in done}
        reply = core.report("loader", LoaderReport(request=request, done=done), results, now=1.0)
        done = tuple(name for name, _ in core.tasks("loader", reply))
        if not done:
            return loaded
        loaded += done


def read(core: ShardState, job: str, ticket: int, samples: list[int], epoch: int = 0, seed: int = 0) -> list[SampleKey]:
    """A batch, from the request to its receipt. Returns what had to be loaded for it."""
    names = [core.key(sample, epoch, seed) for sample in samples]
    core.request(job, job, ticket, names, now=1.0)
    loaded = load_all(core)
    assert core.fetch(job, ticket, now=1.0) is not None
    core.acknowledge(job, ticket)
    return loaded


@pytest.mark.parametrize("ordered", [True, False])
def test_a_finished_sample_is_kept_for_another_job_of_the_same_seed(ordered):
    core = made()
    for job in ("a", "b"):
        core.announce(job, 0, 0, range(8), ordered=ordered)
    assert len(read(core, "a", 0, [0, 1, 2, 3])) == 4
    assert read(core, "b", 0, [3, 1, 0, 2]) == []
    assert core.hits == 4


def test_a_finished_sample_that_nobody_will_use_again_is_not_kept():
    core = made()
    core.announce("a", 0, 0, range(8))
    core.announce("b", 0, 1, range(8))
    read(core, "a", 0, [0, 1])
    assert len(read(core, "b", 0, [0, 1], seed=1)) == 2
    assert core.hits == 0


def test_where_nothing_is_random_samples_are_kept_for_the_next_epoch():
    core = made(random=False)
    core.announce("a", 0, 0, range(4))
    core.announce("a", 1, 0, range(4))
    assert len(read(core, "a", 0, [0, 1, 2, 3])) == 4
    assert read(core, "a", 1, [2, 0, 3, 1], epoch=1) == []


def test_half_finished_samples_serve_the_next_epoch_and_other_seeds():
    core = made()
    core.announce("a", 0, 0, range(4))
    core.request("a", "a", 0, [core.key(sample, 0, 0) for sample in range(4)], now=1.0)
    load_all(core, half=True)
    core.request("b", "b", 0, [core.key(sample, 0, 5) for sample in range(4)], now=1.0)
    assert len(load_all(core)) == 4
    assert core.half_hits == 4


def test_orders_drawn_as_they_go_are_announced_batch_by_batch():
    core = made(cache_nbytes=2_000)
    core.announce("a", 0, 0, range(6), ordered=False)
    future = core._cache_policy.jobs["a"]
    assert future.certain == 0
    core.request("a", "a", 0, [core.key(sample, 0, 0) for sample in (5, 2)], now=1.0)
    assert [future.position(("half", sample)) for sample in (5, 2, 0)] == [0, 1, None]
    core.request("a", "a", 0, [core.key(sample, 0, 0) for sample in (5, 2)], now=1.0)  # again: nothing new
    assert future.certain == 2
