"""Messages through sockets and shared memory: the same values, writable, and nothing left behind."""

from __future__ import annotations

import gc
import os
import pickle
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from ephemeron.data.flow.collate import Stacking
from ephemeron.data.flow.pickle_socket import SHARED, Arena, PickleSocket, can_share


@pytest.fixture
def ends() -> Iterator[tuple[PickleSocket, PickleSocket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield PickleSocket(ours), PickleSocket(theirs)


def through(ends: tuple[PickleSocket, PickleSocket], value: Any, arena: Arena | None = None) -> Any:
    ours, theirs = ends
    sender = threading.Thread(target=ours.send, args=(value, arena))
    sender.start()
    got, _ = theirs.receive()
    sender.join()
    return got


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def samples(n: int, side: int) -> list[Any]:
    dice = np.random.default_rng(0)
    return [
        (
            {"image": dice.normal(size=(3, side, side)).astype(np.float32), "id": i, "mask": dice.random(side) < 0.5},
            np.int64(i),
            f"name {i}",
            torch.full((2,), float(i)),
            dice.integers(0, 9, (side, 2)),
        )
        for i in range(n)
    ]


def same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    else:
        assert a == b


@pytest.mark.parametrize("n", [0, 1, SHARED // 4 - 1, SHARED, 3 * SHARED + 7])
def test_arrays_of_any_size(ends, n):
    value = {"a": np.arange(n, dtype=np.float32), "b": [np.zeros((0, 3)), np.arange(5)[::2]], "c": "text"}
    got = through(ends, value)
    assert np.array_equal(got["a"], value["a"])
    assert got["b"][0].shape == (0, 3)
    assert got["b"][1].tolist() == [0, 2, 4]
    got["a"][:] = 1  # it belongs to whoever got it
    assert got["c"] == "text"


@pytest.mark.parametrize(("n", "side"), [(1, 8), (4, 200), (16, 80)])
def test_a_batch_is_that_of_the_default(ends, n, side):
    batch, arena = Stacking().into_arena(samples(n, side), ends[0])
    if can_share():
        assert (arena is not None) == (n * side * side * 12 > SHARED)
    same(through(ends, batch, arena), default_collate(samples(n, side)))


def test_what_does_not_stack_is_left_to_the_default(ends):
    odd = [(np.zeros((300, 1000)), 1), (np.zeros((300, 999)), 2)]
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        Stacking().into_arena(odd, ends[0])


@pytest.mark.skipif(not can_share(), reason="this system has no anonymous files")
def test_memory_lives_as_long_as_a_part_of_it_and_no_longer():
    before = open_files()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ends = PickleSocket(ours), PickleSocket(theirs)
        got = through(ends, *Stacking().into_arena(samples(16, 80), ends[0]))
        image = got[0]["image"]
        expected = image.clone()
        del got
        more = [through(ends, *Stacking().into_arena(samples(16, 80), ends[0])) for _ in range(3)]
        assert torch.equal(image, expected)
        assert len(more) == 3
        del image, more, ends
    assert open_files() == before


@pytest.mark.skipif(not can_share(), reason="this system has no anonymous files")
def test_memory_is_used_again_once_nobody_looks_at_it(ends):
    def place(batch: Any) -> int:
        return int(batch[0]["image"].data_ptr())

    kept = through(ends, *Stacking().into_arena(samples(16, 80), ends[0]))
    expected = kept[0]["image"].clone()
    places = set()
    for _ in range(5):
        got = through(ends, *Stacking().into_arena(samples(16, 80), ends[0]))
        places.add(place(got))
        del got
        gc.collect()
    assert len(places) == 1
    assert place(kept) not in places
    assert torch.equal(kept[0]["image"], expected)


def test_a_closed_connection_is_an_end():
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs, pytest.raises(EOFError):
        PickleSocket(theirs).receive()


def test_what_cannot_be_pickled_is_refused_before_anything_is_sent(ends):
    ours, theirs = ends
    with pytest.raises(pickle.PicklingError, match="AttributeError"):
        ours.send(lambda: 0)
    ours.send(7)
    assert theirs.receive()[0] == 7
