"""Random numbers that are counted, not carried: the n-th call gives the same on every machine and NumPy.

As in `ephemeron.data.shuffle`, numbers are Philox's raw words (`Generator` may change between versions, NEP 19), the key
is seed and purpose, and the counter says which call. A stream's whole state is the number of calls so far.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ephemeron.data.shuffle import Indices

Words = npt.NDArray[np.uint64]

_WORD = 2**64
_PURPOSE = 64
"""Apart from the purposes of `ephemeron.data.shuffle`. Part of the results: never change it."""
_ROUNDS, _EPOCHS = 0, 1


class CountedRandom:
    """The draws of one sampler.

    Args:
        seed: any integer.
        calls: how many draws were made before.
    """

    __slots__ = ("calls", "seed")

    def __init__(self, seed: int, calls: int = 0) -> None:
        self.seed = seed
        self.calls = calls

    def words(self, count: int) -> Words:
        """Fresh 64-bit words. A longer answer to the same call would begin with the same words."""
        self.calls += 1
        return self._words(count, self.calls)

    def shuffled(self, values: Indices) -> Indices:
        """The same values in uniformly random order."""
        return values[np.argsort(self.words(len(values)), kind="stable")]

    def prefixes(self, count: int, first: int) -> Iterator[Indices]:
        """Ever longer beginnings of one uniformly random order of 0 … count-1, the last one whole.

        The first few of a million cost as much as a few. The reader may stop at any time: all prefixes are of one and the
        same order.

        Args:
            count: how many numbers there are.
            first: length from which the first beginning is made, at least 1.
        """
        self.calls += 2
        rest, block = self.calls - 1, self.calls
        drawn = max(first, 1)
        while 4 * drawn < count:
            words = self._words(drawn, block) % np.uint64(count)
            _, at = np.unique(words, return_index=True)
            yield words[np.sort(at)].astype(np.intp)
            drawn *= 4
        # What the next block adds is what has not come yet, in random order; and before any block, that is everything.
        drawn //= 4
        if drawn < max(first, 1):
            yield np.argsort(self._words(count, rest), kind="stable").astype(np.intp, copy=False)
            return
        words = self._words(drawn, block) % np.uint64(count)
        _, at = np.unique(words, return_index=True)
        begun = words[np.sort(at)].astype(np.intp)
        absent = np.ones(count, dtype=bool)
        absent[begun] = False
        others = np.flatnonzero(absent)
        yield np.concatenate([begun, others[np.argsort(self._words(len(others), rest), kind="stable")]])

    def _words(self, count: int, call: int) -> Words:
        return _raw(count, self.seed, _ROUNDS, call, 0)


def epoch_words(count: int, *, seed: int, epoch: int, job: int) -> Words:
    """Words for a whole epoch of one job, or of all jobs that call themselves the same. Needs no history."""
    return _raw(count, seed, _EPOCHS, epoch, job)


def _raw(count: int, seed: int, kind: int, first: int, second: int) -> Words:
    key = np.array([seed % _WORD, _PURPOSE + kind], dtype=np.uint64)
    counter = np.array([0, first, second, 0], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)
