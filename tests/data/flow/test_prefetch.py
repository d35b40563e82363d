"""Batches that somebody else chooses, loaded ahead: the same bytes on every way, and no more of them than allowed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flows import Numbers, Once, flow, noisy
from hypothesis import given
from hypothesis import strategies as st
from obstore.store import MemoryStore

from ephemeron.data.batch_source import TrainingBatch
from ephemeron.data.catalog import DatasetReader, DatasetStore
from ephemeron.data.catalog.importers import import_dataset
from ephemeron.data.catalog.objects import ObjectFiles
from ephemeron.data.flow import Flow
from ephemeron.data.flow.collate import Stacking
from ephemeron.data.flow.fork_pool import ChunkDone
from ephemeron.data.flow.prefetch import Forked, Inline, LoadStrategy, Prefetcher, Threaded, load_strategy
from ephemeron.data.flow.sample_loader import SampleLoader, SampleRequest, StageTimings
from ephemeron.errors import LoadersLost, SampleFailed

SAMPLES = 40


def loading_of(made: Flow) -> SampleLoader:
    assert made.source is not None
    return SampleLoader(made, made.source.dataset)


def wanted(iteration: int) -> list[SampleRequest] | None:
    """Batches of four, ten of them; each sees some samples of another epoch."""
    if not 0 <= iteration < 10:
        return None
    return [SampleRequest(index=(7 * iteration + i) % SAMPLES, epoch=iteration // 5, seed=3) for i in range(4)]


def way(name: str, loading: SampleLoader) -> LoadStrategy:
    if name == "here":
        return Inline(loading)
    return Threaded(loading) if name == "thread" else Forked(loading, int(name), Stacking())


def data(batch: TrainingBatch) -> tuple[bytes, list[int]]:
    return np.asarray(batch.data[0]).tobytes(), [int(t) for t in batch.data[1]]


@pytest.mark.parametrize("name", ["thread", "1", "3"])
def test_every_way_gives_the_same_bytes_in_any_order(name):
    loading = loading_of(flow())
    here = Prefetcher(loading=loading, strategy=Inline(loading))
    expected = [data(here.get(i, wanted)) for i in range(10)]
    there = Prefetcher(loading=loading, strategy=way(name, loading))
    order = [0, 1, 2, 3, 2, 8, 9, 0, 5, 5, 6, 7]
    assert [data(there.get(i, wanted)) for i in order] == [expected[i] for i in order]
    there.close()


def test_other_batches_for_the_same_iterations():
    """A profiler changes the batch size in the middle: what was loaded ahead for the old one is not taken."""
    loading = loading_of(flow())
    ahead = Prefetcher(loading=loading, strategy=way("1", loading))
    ahead.get(0, wanted)
    larger = ahead.get(1, lambda i: [SampleRequest(index=j, seed=3) for j in range(i, i + 9)])
    assert [int(t) for t in larger.data[1]] == list(range(1, 10))
    ahead.close()


class Scripted(LoadStrategy):
    """Loads nothing: each batch is as large as it is told."""

    def __init__(self, nbytes: int, ahead: int) -> None:
        self.nbytes, self.ahead = nbytes, ahead
        self.todo: list[tuple[int, Sequence[SampleRequest]]] = []
        self.most = 0

    def submit(self, number: int, items: Sequence[SampleRequest]) -> None:
        self.todo.append((number, items))
        self.most = max(self.most, len(self.todo))

    def result(self) -> ChunkDone:
        number, items = self.todo.pop(0)
        return ChunkDone(number, [(np.zeros(1), item.index) for item in items], StageTimings(), self.nbytes)


@given(nbytes=st.integers(1, 100), limit=st.integers(1, 400), depth=st.integers(0, 5), steps=st.lists(st.integers(0, 3), max_size=9))
def test_no_more_is_held_than_allowed_but_for_the_next_batch(nbytes, limit, depth, steps):
    loading = loading_of(flow())
    scripted = Scripted(nbytes, depth)
    ahead = Prefetcher(loading=loading, strategy=scripted, prefetch_bytes=limit)
    for iteration in [i for i in np.cumsum([0, *steps]) if i < 10]:
        batch = ahead.get(iteration, wanted)
        assert [int(t) for t in batch.data[1]] == [item.index for item in wanted(iteration) or []]
        later = [c for i, c in ahead._coming.items() if i != iteration]
        assert len(later) <= depth
        assert len(later) <= max(1, limit // nbytes)


def test_the_next_batch_is_loaded_while_the_present_one_is_used():
    loading = loading_of(flow())
    scripted = Scripted(10, 1)
    ahead = Prefetcher(loading=loading, strategy=scripted)
    ahead.get(4, wanted)
    assert [items for _, items in scripted.todo] == [wanted(5)]
    ahead.get(9, wanted)
    assert wanted(10) not in [items for _, items in scripted.todo]  # behind the end is nothing


def test_an_empty_batch_loads_nothing():
    loading = loading_of(flow())
    batch = Prefetcher(loading=loading, strategy=Scripted(1, 0)).get(0, lambda i: [])
    assert (batch.samples, batch.data) == (0, None)


class Twice:
    """A step that fails for sample 3, as often as it is told."""

    def __init__(self, times: int) -> None:
        self.left = times

    def __call__(self, sample: Any) -> Any:
        if sample[1] == 3 and self.left:
            self.left -= 1
            raise ValueError("three")
        return sample


@pytest.mark.parametrize(
    ("policy", "times", "left"), [("fail", 1, None), ("skip", 9, 3), ("retry:1", 1, 4), ("retry:2", 2, 4), ("retry:1", 2, None)]
)
def test_the_policy_for_samples_that_fail(policy, times, left):
    loading = loading_of(Flow("a/b").dataset(Numbers(SAMPLES)).map("twice", Twice(times)))
    ahead = Prefetcher(loading=loading, strategy=Inline(loading), on_error=policy)
    if left is None:
        with pytest.raises(SampleFailed, match="flow a/b@1, dataset Numbers, sample 3, step 'twice': ValueError: three"):
            ahead.get(0, wanted)
        return
    batch = ahead.get(0, wanted)
    assert (batch.samples, batch.skipped) == (left, 4 - left)
    assert ("step 'twice'" in batch.failure) == (left < 4)


def test_all_samples_of_a_batch_may_fail():
    def broken(sample: Any) -> Any:
        raise ValueError("never")

    loading = loading_of(Flow("a/b").dataset(Numbers(4)).map("broken", broken))
    batch = Prefetcher(loading=loading, strategy=Inline(loading), on_error="skip").get(0, lambda i: [SampleRequest(index=1)])
    assert (batch.samples, batch.skipped, batch.data) == (0, 1, None)


def test_samples_that_do_not_fit_together_are_named():
    def grow(array: Any) -> Any:
        return np.zeros(int(array[0]) + 1)

    loading = loading_of(Flow("a/b").dataset(Numbers(SAMPLES)).map_data("grow", grow))
    for name in ("here", "1"):
        ahead = Prefetcher(loading=loading, strategy=way(name, loading))
        with pytest.raises(SampleFailed, match="step 'collate': 4 samples from this one on cannot be put together"):
            ahead.get(1, wanted)
        ahead.close()


def test_a_loader_that_dies_costs_nothing_but_time(tmp_path: Path):
    plain = loading_of(flow())
    here = Prefetcher(loading=plain, strategy=Inline(plain))
    noise = Flow("test/numbers").dataset(Numbers(SAMPLES)).map_data("noisy", noisy)
    harmed = loading_of(noise.map("once", Once(tmp_path, 8)))
    ahead = Prefetcher(loading=harmed, strategy=Forked(harmed, 1, Stacking()))
    assert [data(ahead.get(i, wanted)) for i in range(5)] == [data(here.get(i, wanted)) for i in range(5)]
    assert len(list(tmp_path.iterdir())) == 1
    ahead.close()


def test_whoever_waits_while_the_loaders_are_closed_hears_of_it():
    """A function that ends in the middle of an iteration leaves no thread behind."""

    def forever(array: Any) -> Any:
        threading.Event().wait()

    loading = loading_of(Flow("a/b").dataset(Numbers(SAMPLES)).map_data("forever", forever))
    ahead = Prefetcher(loading=loading, strategy=Forked(loading, 1, Stacking()))
    heard: list[BaseException] = []

    def ask() -> None:
        try:
            ahead.get(0, wanted)
        except LoadersLost as e:
            heard.append(e)

    thread = threading.Thread(target=ask)
    thread.start()
    ahead.close()
    thread.join(30)
    assert not thread.is_alive()
    assert len(heard) == 1


@pytest.mark.slow
def test_object_stores_are_read_in_a_thread_and_folders_in_processes(tmp_path: Path):
    np.savez(tmp_path / "x.npz", x=np.arange(SAMPLES * 3, dtype=np.float32).reshape(SAMPLES, 3), y=np.arange(SAMPLES))
    folder = DatasetStore.open(str(tmp_path / "store"))
    import_dataset("npz", str(tmp_path / "x.npz"), "a/b", folder, copy=True)
    bucket = DatasetStore(ObjectFiles(MemoryStore(), url="memory://bucket"))
    for file in (tmp_path / "store").rglob("*"):
        if file.is_file():
            asyncio.run(bucket.files.create(str(file.relative_to(tmp_path / "store")), file.read_bytes()))
    batches = []
    for place, kind in ((folder, Forked), (bucket, Threaded)):
        reader = DatasetReader.open("a/b", "train", store=place)
        loading = SampleLoader(Flow("a/b").dataset(reader).map_data("noisy", noisy), reader)
        chosen = load_strategy(loading, loaders=1, own_process=True, collate=Stacking())
        assert type(chosen) is kind
        ahead = Prefetcher(loading=loading, strategy=chosen)
        batches.append([data(ahead.get(i, wanted)) for i in range(6)])
        ahead.close()
        assert type(load_strategy(loading, loaders=1, own_process=False, collate=Stacking())) is Inline
        assert type(load_strategy(loading, loaders=0, own_process=True, collate=Stacking())) is Inline
    assert batches[0] == batches[1]
    own = DatasetReader.open("a/b", "train", store=bucket, decoders={"mine": noisy})
    chosen = load_strategy(loading_of(Flow("a/b").dataset(own)), loaders=1, own_process=True, collate=Stacking())
    assert type(chosen) is Forked, "a decoder may draw, which it must not do in a thread beside the model"
    chosen.close()
