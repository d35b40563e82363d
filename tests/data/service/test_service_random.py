"""Random datasets and collate functions through a service: the same as without one, and nothing of it kept for ever."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from random_worlds import Batched, Cropped, jitter, mixup, mixup_rng, plain, trainer_state
from service_worlds import Numbered, World, drawn, local

from ephemeron.data.flow import Flow, FlowView
from ephemeron.data.service.shard_state import LoadResult, SerializedSample, ShardState

TINY = {"batch_size": 8, "seed": 3}


def flow(name: str, dataset: Any) -> Flow:
    return Flow(f"test/{name}").dataset(dataset)


def epochs(read: FlowView, collate: Any = plain, count: int = 2, **options: Any) -> list[list[Any]]:
    with read.to_shuffled(**{**TINY, "collate_fn": collate, **options}) as batches:
        return [list(batches) for _ in range(count)]


def crops(batches: list[Any]) -> set[Any]:
    return {data for batch in batches for _, data in batch}


@pytest.mark.slow
def test_a_random_dataset_is_new_in_every_epoch(one_shard: World) -> None:
    """A flow without steps is the same for all, unless reading it is random."""
    for name, dataset in (("cropped", Cropped(32)), ("batched", Batched(32)), ("own", Cropped(32, kind="own"))):
        asked = flow(name, dataset)
        with pytest.warns(UserWarning, match="'read' is random: a service keeps nothing"):
            read = one_shard.read(asked)
        there = epochs(read, count=3)
        assert len(set().union(*map(crops, there))) == 96, "all of them distinct"
        assert there == epochs(local(asked), count=3)


@pytest.mark.slow
def test_a_random_dataset_before_steps_that_may_be_kept(one_shard: World) -> None:
    asked = flow("stepped", Cropped(16)).map_data("steady", np.sort, cache_control="can-cache").map_data("jitter", jitter)
    with pytest.warns(UserWarning, match="a service keeps nothing"):
        read, other = one_shard.read(asked), one_shard.read(asked)
    there = epochs(read)
    assert there == epochs(local(asked))
    assert epochs(other, seed=4) == epochs(local(asked), seed=4), "another job, other crops"
    assert not crops(there[0]) & crops(there[1])


@pytest.mark.slow
def test_steps_are_handed_a_generator(one_shard: World) -> None:
    asked = flow("handed", Numbered(16, floats=2)).map_data("jitter", jitter)
    assert epochs(one_shard.read(asked)) == epochs(local(asked))


@pytest.mark.slow
@pytest.mark.parametrize("collate", [mixup, mixup_rng])
def test_a_random_collate_function(one_shard: World, collate: Any) -> None:
    """Mixed as without a service, and the trainer's own generators stay as they were."""
    pytest.importorskip("torch")
    asked = flow("mixed-up", Numbered(24, floats=4)).map_data("noise", drawn)
    read, here = one_shard.read(asked), local(asked)
    with read.to_shuffled(8, collate, seed=3) as batches:
        before, there = trainer_state(), []
        for _ in range(2):
            for batch in batches:
                there.append(batch)
                assert trainer_state() == before
    assert there == [batch for epoch in epochs(here, collate) for batch in epoch]
    assert len({batch[1] for batch in there}) == 6


@pytest.mark.slow
def test_one_reader_finds_randomness_that_another_missed(one_shard: World) -> None:
    """The first says that nothing is random; from the second one on nothing is kept, and the first gets new samples, too."""
    from dataclasses import replace

    from ephemeron.data.service.client import FlowClient
    from ephemeron.data.service.flow_definition import define

    asked = flow("missed", Cropped(16))
    FlowClient(one_shard.reader().service, replace(define(asked, 16), fixed=0, random=False))
    with pytest.warns(UserWarning, match="is random"):
        read = one_shard.read(asked)
    assert epochs(read) == epochs(local(asked))
    FlowClient(one_shard.reader().service, replace(define(asked, 16), fixed=0, random=False))
    assert epochs(read) == epochs(local(asked)), "it stays so"


def test_a_shard_keeps_no_half_of_what_is_random() -> None:
    core = ShardState(
        random=True,
        halves=False,
        buffer_nbytes=1000,
        cache_nbytes=1000,
        failed_sample=lambda name, why: SerializedSample(buffers=(), nbytes=1),
    )
    assert not core.wants_half
    name = core.key(1, 0, 7)
    core.announce("job", 0, 7, [1, 2])
    core.add_loader("loader", now=0.0)
    core.request("reader", "job", 0, [name], now=0.0)
    thing = SerializedSample(buffers=(b"x",), nbytes=10, cost_s=1.0)
    core._store_result(name, LoadResult(sample=thing, half=thing))
    assert core.fetch("reader", 0, now=0.0) == [thing]
    core.acknowledge("reader", 0)
    assert core.cache is not None
    assert core.cache.used_bytes == 0
