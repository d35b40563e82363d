from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ephemeron.data.cache.policy import LazyHeap


@given(st.lists(st.tuples(st.integers(0, 9), st.one_of(st.none(), st.integers(-5, 5))), max_size=200))
def test_it_is_a_dictionary_with_a_largest_entry(steps) -> None:
    heap, plain = LazyHeap(), {}
    for number, (key, score) in enumerate(steps):
        if score is None:
            heap.discard(key)
            plain.pop(key, None)
        else:
            heap.put(key, score, number)
            plain[key] = (-score, number)
        assert len(heap) == len(plain)
        if plain:
            key = min(plain, key=plain.__getitem__)
            assert heap.head() == (key, -plain[key][0])
            assert heap.score(key) == -plain[key][0]


def test_keys_need_no_order() -> None:
    heap = LazyHeap()
    heap.put("a", 1.0, 1)
    heap.put(("b", 2), 1.0, 2)
    heap.put(None, 1.0, 3)
    assert heap.head() == ("a", 1.0)


def test_changing_one_entry_for_ever_needs_bounded_memory() -> None:
    heap = LazyHeap()
    for n in range(10_000):
        heap.put("key", n, n)
    assert len(heap._entries) < 100
