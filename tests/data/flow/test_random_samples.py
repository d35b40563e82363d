"""Randomness outside steps: in a dataset's `__getitem__` and in a collate function, for any number of loaders."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from random_worlds import Batched, Cropped, jitter, mixup, mixup_rng, plain, trainer_state

from ephemeron.data.flow import Flow, FlowView, LocalReader

pytestmark = pytest.mark.slow


def read(dataset: Any, workers: int = 0, **steps: Any) -> FlowView:
    flow = Flow("test/random").dataset(dataset)
    for name, step in steps.items():
        flow = flow.map_data(name, step)
    return flow.prepare_read(LocalReader(workers))


def epochs(flow: FlowView, count: int = 2, **options: Any) -> list[list[Any]]:
    """The batches of each epoch."""
    with flow.to_shuffled(**{"batch_size": 8, "collate_fn": plain, "seed": 3, **options}) as batches:
        return [list(batches) for _ in range(count)]


def samples(batches: list[Any]) -> dict[int, Any]:
    return {target: data for batch in batches for target, data in batch}


@pytest.mark.parametrize("kind", ["numpy", "random", "torch", "own"])
def test_every_crop_is_another_one_whoever_loads(kind: str) -> None:
    """Four loaders, forked from one process, draw no crop twice, and the same crops as one or none."""
    pytest.importorskip("torch")
    first, second = epochs(read(Cropped(kind=kind), 4))
    assert len(set(samples(first).values())) == 96
    assert not set(samples(first).values()) & set(samples(second).values()), "another epoch, other crops"
    assert [first, second] == epochs(read(Cropped(kind=kind), 0))
    other = epochs(read(Cropped(kind=kind), 0), 1, seed=4)[0]
    assert not set(samples(first).values()) & set(samples(other).values()), "another seed, other crops"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_dataset_that_fetches_many_at_once(workers: int) -> None:
    """Which samples are fetched together depends on batch size and loaders; what they are does not."""
    expected = samples(epochs(read(Cropped()), 1)[0])
    assert samples(epochs(read(Batched(), workers), 1)[0]) == expected
    assert samples(epochs(read(Batched(), workers), 1, batch_size=5)[0]) == expected
    mapped = read(Batched()).to_mapped(seed=3)
    assert samples([plain(mapped.__getitems__([5, 9, 2]))]) == {i: expected[i] for i in (5, 9, 2)}
    assert samples([plain([mapped[9]])]) == {9: expected[9]}


def test_a_dataset_that_is_not_random_still_fetches_many_at_once() -> None:
    asked: list[list[int]] = []

    class Even:
        def __len__(self) -> int:
            return 20

        def __getitem__(self, i: int) -> tuple[Any, int]:
            return np.array([i]), i

        def __getitems__(self, indices: list[int]) -> list[tuple[Any, int]]:
            asked.append(list(indices))
            return [self[i] for i in indices]

    epochs(read(Even()), 1, batch_size=5)
    assert [len(each) for each in asked] == [5] * 4


def test_steps_are_handed_a_generator() -> None:
    here = epochs(read(Cropped(), 0, jitter=jitter))
    assert here == epochs(read(Cropped(), 2, jitter=jitter))
    drawn = {data[-1] for batches in here for data in samples(batches).values()}
    assert len(drawn) > 180, "two epochs of 96 samples draw from ten thousand"


@cache
def mixed(workers: int, collate: Any) -> list[list[Any]]:
    return epochs(read(Cropped(24), workers), collate_fn=collate)


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("collate", [mixup, mixup_rng])
def test_a_random_collate_function_does_not_depend_on_loaders(workers: int, collate: Any) -> None:
    pytest.importorskip("torch")
    assert mixed(workers, collate) == mixed(0, collate)
    first, second = mixed(workers, collate)
    assert len({batch[1] for batch in first + second}) == len(first) + len(second), "each batch is mixed in its own way"


@pytest.mark.parametrize("workers", [0, 2])
def test_the_trainers_generators_stay_as_they_were(workers: int) -> None:
    pytest.importorskip("torch")
    flow = read(Cropped(24), workers, jitter=jitter)
    with flow.to_shuffled(8, mixup, seed=1) as batches:
        before = trainer_state()
        for _ in batches:
            assert trainer_state() == before
    assert trainer_state() == before


def test_a_sample_that_is_loaded_again_is_the_same() -> None:
    """Where a batch holds a sample that failed once, loading it again draws as the first time."""

    class Failing(Cropped):
        failed = False

        def __getitem__(self, i: int) -> tuple[Any, int]:
            sample = super().__getitem__(i)
            if i == 5 and not self.failed:
                self.failed = True
                raise OSError("once")
            return sample

    assert epochs(read(Failing()), 1, on_error="retry:1") == epochs(read(Cropped()), 1)
