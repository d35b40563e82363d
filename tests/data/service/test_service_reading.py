"""A remote read is the local read, bit for bit."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from service_worlds import Numbered, World, drawn, epochs_of, local, mixed, plain

from ephemeron.data.flow import Flow, FlowView
from ephemeron.data.service.remote_pool import AHEAD
from ephemeron.errors import JobError

SAMPLES = 31


@pytest.fixture(params=["one_shard", pytest.param("three_shards", marks=pytest.mark.slow)])
def world(request: pytest.FixtureRequest) -> World:
    found: World = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def remote(world: World) -> FlowView:
    return world.read(mixed())


def doubled(sample: tuple[Any, int]) -> tuple[Any, int]:
    return sample[0] * 2, sample[1]


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 1},
        {"seed": 2, "shuffle": False},
        {"batch_size": 40},
        {"batch_size": SAMPLES},
        {"batch_size": 1, "prefetch": 9},
        {"prefetch": 1},
        {"rank": 0, "world_size": 2},
        {"rank": 1, "world_size": 2},
        {"rank": 2, "world_size": 3, "remainder": "drop"},
        {"rank": 2, "world_size": 3, "remainder": "pad"},
        {"prefetch_mb": 0.001},
    ],
    ids=str,
)
def test_equal_to_local(remote: FlowView, options: dict[str, Any]) -> None:
    assert epochs_of(remote, 2, **options) == epochs_of(local(mixed()), 2, **options)


def test_views(remote: FlowView) -> None:
    here = local(mixed())
    for view in (
        lambda read: read.subset([30, 3, 3, 8, 1]),
        lambda read: read.subset(range(30, -1, -1)),
        lambda read: read.local_map(doubled),
        lambda read: read.local_map(doubled).subset(range(5, 25)).local_map(doubled),
        lambda read: read.subset([]),
    ):
        assert epochs_of(view(remote), 2, seed=5, batch_size=6) == epochs_of(view(here), 2, seed=5, batch_size=6)


def test_stacked_as_pytorch_would(remote: FlowView) -> None:
    pytest.importorskip("torch")
    for read in (remote, remote.local_map(doubled)):
        here = local(mixed()) if read is remote else local(mixed()).local_map(doubled)
        theirs, ours = (epochs_of(each, collate_fn=None, batch_size=8)[0] for each in (read, here))
        assert len(theirs) == len(ours)
        for (data, target), (data_here, target_here) in zip(theirs, ours, strict=True):
            assert type(data) is type(data_here)
            assert data.dtype == data_here.dtype
            np.testing.assert_array_equal(data.numpy(), data_here.numpy())
            assert target.tolist() == target_here.tolist()
            data += 1  # it is ours


@pytest.mark.slow
def test_steps_that_may_be_cached_draw_as_they_do_here(world: World) -> None:
    """Nothing differs between epochs and jobs, so samples are shared; but not with another outcome than here."""
    flow = Flow("test/steady").dataset(Numbered(13)).map_data("crop once", drawn, cache_control="can-cache")
    here = epochs_of(local(flow), 2, seed=3)
    assert epochs_of(world.read(flow), 2, seed=3) == here
    assert epochs_of(world.read(flow), 2, seed=3) == here, "from the cache"
    first, second = (sorted(sample for batch in epoch for sample in batch) for epoch in here)
    assert first == second


@pytest.mark.slow
def test_nothing_and_little(world: World) -> None:
    for samples in (0, 2):
        flow = mixed(samples, f"test/of-{samples}")
        assert epochs_of(world.read(flow), 2) == epochs_of(local(flow), 2)
        assert len(world.read(flow)) == samples


def test_by_index(remote: FlowView) -> None:
    here, there = local(mixed()).to_mapped(seed=4, epoch=2), remote.to_mapped(seed=4, epoch=2)
    asked = [30, 0, 7, 7, 29]
    assert plain(there.__getitems__(asked)) == plain(here.__getitems__(asked))
    assert plain([there[11]]) == plain([here[11]])
    there.set_epoch(3)
    assert plain([there[11]]) != plain([here[11]])
    unseeded = remote.to_mapped()
    assert plain([unseeded[5]]) != plain([unseeded[5]]), "drawn anew each time"
    with pytest.raises(IndexError):
        there[31]


def test_in_the_workers_of_a_data_loader(remote: FlowView) -> None:
    data = pytest.importorskip("torch.utils.data")
    dataset = remote.to_mapped(seed=4)
    dataset[0]  # connections that the children must not use
    loader = data.DataLoader(dataset, batch_size=5, num_workers=2, collate_fn=plain, multiprocessing_context="fork", timeout=60)
    got = [sample for batch in loader for sample in batch]
    assert got == plain(local(mixed()).to_mapped(seed=4).__getitems__(range(SAMPLES)))
    assert plain([dataset[3]]) == got[3:4], "and the parent reads on"


def test_resumed_here_there_and_with_other_ranks(remote: FlowView) -> None:
    here = local(mixed())
    whole = [sample for batch in epochs_of(here, seed=6)[0] for sample in batch]
    got: list[Any] = []
    state: Any = None
    for read, world_size, batch, steps in ((here, 1, 4, 2), (remote, 2, 3, 1), (here, 1, 2, 1), (remote, 1, 5, 99)):
        ranks = [read.to_shuffled(batch, plain, seed=6, rank=r, world_size=world_size) for r in range(world_size)]
        for each in ranks:
            if state is not None:
                each.load_state_dict(state)
        rows = [[b for _, b in zip(range(steps), each, strict=False)] for each in ranks]
        got += [sample for step in zip(*rows, strict=True) for batch_of in step for sample in batch_of]
        states = [each.state_dict() for each in ranks]
        assert all(each == states[0] for each in states)
        state = states[0]
        for each in ranks:
            each.close()
    assert got == whole, "exactly once, in the order of the epoch"


def test_two_jobs_draw_together(world: World) -> None:
    """Each sample once per epoch for each of them; and they do have something in common."""
    flow = mixed()
    reads = [world.read(flow, job=f"job-{n}") for n in range(2)]
    shuffled = [read.to_shuffled(1, plain, seed=1, sampling="shared") for read in reads]
    assert [each.state_dict()["count"] for each in shuffled] == [0, 0], "both are known before either draws"
    for epoch in range(3):
        rows = list(zip(*shuffled, strict=True))
        for job in range(2):
            numbers = [i for row in rows for i, _ in row[job]]
            assert sorted(numbers) == list(range(SAMPLES)), f"job {job}, epoch {epoch}"
        if epoch == 0:  # drawn freely: the second takes what the first has just been given
            one, other = ({i for row in rows[:AHEAD] for i, _ in row[job]} for job in range(2))
            assert one == other
    for each in shuffled:
        each.close()


def test_drawn_together_and_resumed_twice_with_other_counts(world: World) -> None:
    view = world.read(mixed(), job="resumed").subset(range(29, 2, -1))
    counted: Counter[int] = Counter()
    state: Any = None
    for world_size, batch, steps in ((1, 4, 2), (2, 3, 1), (2, 2, 2), (1, 5, 99)):
        ranks = [view.to_shuffled(batch, plain, rank=r, world_size=world_size, sampling="shared") for r in range(world_size)]
        for each in ranks:
            if state is not None:
                each.load_state_dict(state)
        for each in ranks:
            counted.update(i for _, b in zip(range(steps), each, strict=False) for i, _ in b)
        state = ranks[0].state_dict()
        assert all(each.state_dict() == state for each in ranks)
        if steps == 99:
            following = [i for b in ranks[0] for i, _ in b]
        for each in ranks:
            each.close()
    assert counted == Counter(range(3, 30)), "exactly once in the epoch that was cut three times"
    assert sorted(following) == list(range(3, 30))


def test_drawn_together_each_iteration_is_an_epoch_of_its_own(world: World) -> None:
    """Also after one that was left, after a state, and after an epoch that was set."""
    with world.read(mixed(), job="left").to_shuffled(4, plain, sampling="shared") as shuffled:

        def numbers(batches: Any) -> list[int]:
            return [i for batch in batches for i, _ in batch]

        assert len(shuffled) == 8
        begun = numbers(itertools.islice(shuffled, 2))
        state = shuffled.state_dict()
        assert (len(begun), state["count"], shuffled.epoch, shuffled.batches_left) == (8, 8, 0, 6)
        assert sorted(numbers(shuffled)) == list(range(SAMPLES))
        assert sorted(numbers(b for _, b in zip(range(8), shuffled, strict=False))) == list(range(SAMPLES))
        assert sorted(numbers(shuffled)) == list(range(SAMPLES))
        shuffled.set_epoch(9)
        assert (shuffled.epoch, sorted(numbers(shuffled))) == (9, list(range(SAMPLES)))
        shuffled.load_state_dict(state)
        shuffled.set_epoch(0)
        assert sorted(begun + numbers(shuffled)) == list(range(SAMPLES)), "the rest"
        shuffled.load_state_dict(state)
        shuffled.set_epoch(1)
        assert sorted(numbers(shuffled)) == list(range(SAMPLES)), "another epoch, from its beginning"
        assert len(shuffled) == 8


def test_a_view_that_repeats_cannot_be_shared(world: World) -> None:
    shuffled = world.read(mixed()).subset([1, 1, 2]).to_shuffled(2, plain, sampling="shared")
    with pytest.raises(JobError, match="a sample twice"):
        list(shuffled)
    assert epochs_of(world.read(mixed()), sampling="shared"), "the router is none the worse"


def test_an_abandoned_iteration(remote: FlowView) -> None:
    with remote.to_shuffled(4, plain, seed=8) as there, local(mixed()).to_shuffled(4, plain, seed=8) as here:
        for each in (there, here):
            for number, _ in enumerate(each):
                if number == 2:
                    break
        assert list(there) == list(here), "the next epoch"
        assert list(there) == list(here)
