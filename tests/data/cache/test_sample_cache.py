from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ephemeron.data.cache import Accessed, Admission, Announced, Cache, Joined, Left, Likely, NextUse
from ephemeron.data.cache.baselines import ALSD, LFU, LRU, Belady, MinIO, RefCnt
from ephemeron.errors import JobError

KEYS = range(12)
POLICIES = [LRU, LFU, MinIO, RefCnt, ALSD, NextUse, lambda: ALSD(cost_aware=True), lambda: NextUse(cost_aware=True)]

steps = st.lists(
    st.one_of(
        st.tuples(st.just("use"), st.sampled_from(KEYS), st.integers(0, 12), st.booleans(), st.sampled_from("ab")),
        st.tuples(st.just("unpin"), st.integers(0, 30)),
        st.tuples(st.just("remove"), st.sampled_from(KEYS)),
        st.tuples(st.just("announce"), st.permutations(KEYS), st.sampled_from("ab")),
        st.tuples(st.just("likely"), st.dictionaries(st.sampled_from(KEYS), st.floats(0, 9)), st.sampled_from("ab")),
        st.tuples(st.just("leave"), st.sampled_from("ab")),
        st.tuples(st.just("join"), st.sampled_from("ab")),
    ),
    max_size=60,
)


@pytest.mark.parametrize("policy", POLICIES)
@given(steps=steps, capacity=st.integers(1, 40))
def test_bytes_and_pins_hold_whatever_happens(policy, steps, capacity) -> None:
    cache, sizes, pins, here, now_s = Cache(capacity, policy()), {}, [], set(), 0.0
    for step in steps:
        now_s += 0.5
        evicted: tuple[object, ...] = ()
        match step:
            case "use", key, nbytes, pin, job:
                assert cache.lookup(job, key, now_s=now_s) == (key in sizes)
                before = dict(sizes)
                told = cache.admit(key, nbytes=nbytes, cost_s=nbytes % 3, pin=pin)
                evicted = told.evicted
                if told.admitted:
                    sizes.setdefault(key, nbytes)
                    pins += [key] * pin
                else:
                    assert key not in before
                    assert evicted == ()
                    assert nbytes > capacity or not pin
                assert key not in evicted
            case "unpin", at if pins:
                evicted = cache.unpin(pins.pop(at % len(pins)))
            case "remove", key if key in sizes and key not in pins:
                cache.remove(key)
                del sizes[key]
            case "announce", keys, job:
                cache.observe(Announced(job=job, keys=keys))
            case "likely", weights, job:
                cache.observe(Likely(job=job, weights=weights))
            case "leave", job:
                here.discard(job)
                cache.observe(Left(job=job))
            case "join", job if job not in here:
                here.add(job)
                cache.observe(Joined(job=job, keys=KEYS))
        for key in evicted:
            assert key not in pins
            del sizes[key]
        assert {k for k in KEYS if k in cache} == set(sizes)
        assert cache.used_bytes == sum(sizes.values())
        assert cache.pinned_bytes == sum(sizes[k] for k in set(pins))
        assert cache.used_bytes <= max(capacity, cache.pinned_bytes)
    assert len(cache) == len(sizes)


def test_what_is_larger_than_the_cache_is_refused_without_a_victim() -> None:
    cache = Cache(10, LRU())
    assert cache.admit("a", nbytes=10).admitted
    assert cache.admit("b", nbytes=11, pin=True) == Admission(admitted=False)
    assert "a" in cache


def test_no_more_goes_than_has_to() -> None:
    cache = Cache(10, LRU())
    for key in "abcde":
        cache.admit(key, nbytes=2)
    assert cache.admit("f", nbytes=4).evicted == ("a", "b")
    assert cache.used_bytes == 10


def test_only_pins_may_exceed_the_capacity_and_only_while_they_last() -> None:
    cache = Cache(10, LRU())
    cache.admit("a", nbytes=6, pin=True)
    cache.admit("b", nbytes=4)
    assert cache.admit("c", nbytes=8, pin=True) == Admission(admitted=True, evicted=("b",))
    assert cache.used_bytes == cache.pinned_bytes == 14
    assert not cache.admit("d", nbytes=1).admitted
    assert cache.unpin("a") == ("a",)
    assert cache.used_bytes == 8


def test_an_object_is_pinned_until_everybody_has_been_served() -> None:
    cache = Cache(2, LRU())
    cache.admit("a", nbytes=1, pin=True)
    cache.pin("a")
    cache.admit("b", nbytes=1)
    cache.unpin("a")
    assert cache.admit("c", nbytes=1).evicted == ("b",)
    cache.unpin("a")
    assert cache.admit("d", nbytes=1).evicted == ("a",)


def test_a_newcomer_that_is_worth_least_takes_nobody_with_it() -> None:
    """Room for it would cost the one object that ranks below it, and not suffice."""
    cache = Cache(3, Belady(["soon", "next", "late", "new", "next", "soon", "new"]))
    for key, nbytes in (("soon", 1), ("next", 1), ("late", 1)):
        cache.lookup("job", key, now_s=0.0)
        cache.admit(key, nbytes=nbytes)
    cache.lookup("job", "new", now_s=0.0)
    assert cache.admit("new", nbytes=3) == Admission(admitted=False)
    assert "late" in cache


def test_admitting_twice_changes_nothing_but_pins() -> None:
    cache = Cache(4, LRU())
    cache.admit("a", nbytes=3)
    assert cache.admit("a", nbytes=2, pin=True) == Admission(admitted=True)
    assert (cache.used_bytes, cache.pinned_bytes) == (3, 3)


def test_mistakes_are_named() -> None:
    with pytest.raises(JobError, match="capacity_bytes = 0 of a cache is below 1; leave the cache out"):
        Cache(0, LRU())
    cache = Cache(5, LRU())
    with pytest.raises(ValueError, match="object 'a' has -1 bytes"):
        cache.admit("a", nbytes=-1)
    with pytest.raises(ValueError, match="an access is a lookup"):
        cache.observe(Accessed(job="j", key="a", now_s=0.0))
    with pytest.raises(KeyError):
        cache.pin("a")
    with pytest.raises(KeyError):
        cache.unpin("a")
    cache.admit("a", nbytes=1, pin=True)
    with pytest.raises(ValueError, match="pinned 1 times"):
        cache.remove("a")
