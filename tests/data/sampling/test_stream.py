from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jobs import chi_square_z

from ephemeron.data.sampling.sampler import CountedRandom, epoch_words


@given(st.integers(1, 3000), st.integers(0, 100), st.integers(0, 2**64))
def test_prefixes_are_of_one_order_of_all(count, first, seed) -> None:
    found = list(CountedRandom(seed).prefixes(count, first))
    whole = found[-1]
    assert sorted(whole.tolist()) == list(range(count))
    for prefix in found:
        assert prefix.tolist() == whole[: len(prefix)].tolist()
    assert len(set(map(len, found))) == len(found)


def test_prefixes_are_uniform_through_all_blocks() -> None:
    """With 30 numbers and a first block of 1 there are blocks of 1, 4 and the rest."""
    stream = CountedRandom(5)
    firsts, fifth_last, pairs = Counter(), Counter(), Counter()
    for _ in range(6000):
        whole = list(stream.prefixes(30, 1))[-1]
        firsts[int(whole[0])] += 1
        fifth_last[int(whole[-5])] += 1
        pairs[bool(whole.argsort()[3] < whole.argsort()[17])] += 1
    assert chi_square_z(firsts, 30) < 4
    assert chi_square_z(fifth_last, 30) < 4
    assert chi_square_z(pairs, 2) < 4


def test_a_stream_is_its_number_of_calls() -> None:
    one = CountedRandom(9)
    one.words(5)
    list(one.prefixes(100, 3))
    two = CountedRandom(9, one.calls)
    np.testing.assert_array_equal(one.shuffled(np.arange(20)), two.shuffled(np.arange(20)))


def test_streams_of_rounds_and_epochs_do_not_meet() -> None:
    stream = CountedRandom(1)
    words = [tuple(stream.words(3)) for _ in range(20)]
    words += [tuple(epoch_words(3, seed=1, epoch=e, job=j)) for e in range(20) for j in range(5)]
    assert len(set(words)) == len(words)
