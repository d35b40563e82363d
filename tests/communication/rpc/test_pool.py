"""Lent memory comes back when nothing refers to it, and not before."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ephemeron.communication.rpc import BufferPool, keep_freed
from ephemeron.communication.rpc.memory import size_class

SIZE = 100_000


def test_memory_is_used_again_once_its_view_is_gone() -> None:
    pool = BufferPool()
    view = pool.lend(SIZE)
    at = np.frombuffer(view, np.uint8).ctypes.data
    assert pool.idle_bytes == 0
    del view
    assert pool.idle_bytes == size_class(SIZE)
    assert np.frombuffer(pool.lend(SIZE), np.uint8).ctypes.data == at


@pytest.mark.parametrize(
    "derive",
    [
        lambda view: view[5:50],
        lambda view: view.toreadonly()[1:],
        lambda view: view[:8_000].cast("d"),
        lambda view: np.frombuffer(view, np.uint8)[3:9],
        lambda view: np.frombuffer(view, np.float32).reshape(5, -1).T[1:],
        lambda view: memoryview(np.frombuffer(view, np.uint8)[7:]),
        lambda view: [{"deep": (view[1:2],)}],
    ],
)
def test_whatever_is_made_of_a_view_keeps_its_memory(derive: Any) -> None:
    pool = BufferPool()
    view = pool.lend(SIZE)
    view[:] = b"\x01" * SIZE
    kept = derive(view)
    before = str(kept) + repr(np.asarray(kept).tolist() if not isinstance(kept, list) else bytes(kept[0]["deep"][0]))
    del view
    gc.collect()
    assert pool.idle_bytes == 0
    for _ in range(3):
        pool.lend(SIZE)[:] = b"\xff" * SIZE
    after = str(kept) + repr(np.asarray(kept).tolist() if not isinstance(kept, list) else bytes(kept[0]["deep"][0]))
    assert after == before
    idle = pool.idle_bytes
    del kept
    assert pool.idle_bytes == idle + size_class(SIZE)


@given(st.lists(st.tuples(st.integers(0, 400_000), st.integers(0, 9)), max_size=40))
def test_no_two_living_views_share_memory(steps: list[tuple[int, int]]) -> None:
    pool = BufferPool(idle_limit_bytes=1 << 20)
    living: dict[int, tuple[memoryview, int]] = {}
    for number, (nbytes, slot) in enumerate(steps):
        living.pop(slot, None)
        view = pool.lend(nbytes)
        assert view.nbytes == nbytes
        assert not view.readonly
        view[:] = bytes([number % 251]) * nbytes
        living[slot] = (view, number % 251)
        del view
        assert all(bytes(held) == bytes([mark]) * held.nbytes for held, mark in living.values())
        assert pool.idle_bytes <= 1 << 20


@given(st.integers(64 << 10, 1 << 34))
def test_rounding_wastes_an_eighth_at_most(nbytes: int) -> None:
    assert nbytes <= size_class(nbytes) <= nbytes + max(nbytes / 8, 4096) + 4096
    assert size_class(size_class(nbytes)) == size_class(nbytes)


def test_idle_memory_is_limited() -> None:
    pool = BufferPool(idle_limit_bytes=3 * size_class(SIZE))
    views = [pool.lend(SIZE) for _ in range(10)]
    del views
    assert pool.idle_bytes == 3 * size_class(SIZE)


def test_a_cycle_gives_its_memory_back_to_the_collector() -> None:
    pool = BufferPool()
    cycle: list[Any] = [pool.lend(SIZE)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert pool.idle_bytes == size_class(SIZE)


def test_many_threads_lend_and_return() -> None:
    pool, wrong = BufferPool(), []

    def work(mark: int) -> None:
        for n in range(200):
            view = pool.lend(SIZE + 1000 * (n % 5))
            view[:100] = bytes([mark]) * 100
            view[-100:] = bytes([mark]) * 100
            if bytes(view[:100]) != bytes(view[-100:]) or view[0] != mark:
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_c_library_can_be_told_to_keep_memory() -> None:
    assert keep_freed(1 << 20) in (True, False)  # not every C library can be told; none may fail
