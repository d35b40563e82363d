"""A histogram from which quantiles are taken, and which merges exactly: the cut into partitions does not matter.

Values are grouped by the leading bits of their float64 (sign, exponent, mantissa), which keep the order of the values. All bits are
used while there are at most 8,192 groups: then every distinct value has one, and quantiles equal NumPy's. Beyond that, the fewest
trailing bits are dropped that bring the groups down to 8,192. Parts of the data never drop more bits than the whole, so the result is that
of the whole. A quantile is then within its group: its rank is wrong by at most the share of rows in that group (`largest_share`;
uniform and normal values: about 0.1 % of the rows).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ephemeron.preparation.encoding import array_text, text_array

GROUPS = 8192
"""Most groups: 128 kB of statistics per column."""
_FLIP = np.int64(0x7FFF_FFFF_FFFF_FFFF)


@dataclass(frozen=True, slots=True, eq=False)
class Histogram:
    """Numbers of values by group."""

    dropped: int
    """Trailing bits that are not used; 0: each group is one value."""
    keys: NDArray[np.int64]
    """Leading bits of the groups, ascending."""
    counts: NDArray[np.int64]
    minimum: float
    maximum: float

    @classmethod
    def of(cls, values: NDArray[Any]) -> Histogram:
        """Of the finite values of an array."""
        values = np.asarray(values, np.float64).ravel()
        values = values[np.isfinite(values)] + 0.0  # so that -0.0 is 0.0
        keys, counts = np.unique(_ordered(values.view(np.int64)), return_counts=True)
        least, most = (float(values.min()), float(values.max())) if len(values) else (math.inf, -math.inf)
        return cls(0, keys, counts.astype(np.int64), least, most)._within(GROUPS)

    def merge(self, other: Histogram) -> Histogram:
        """Of the values of both."""
        dropped = max(self.dropped, other.dropped)
        keys = np.concatenate([self.keys >> (dropped - self.dropped), other.keys >> (dropped - other.dropped)])
        order = np.argsort(keys, kind="stable")
        keys, counts = _grouped(keys[order], np.concatenate([self.counts, other.counts])[order])
        least, most = min(self.minimum, other.minimum), max(self.maximum, other.maximum)
        return Histogram(dropped, keys, counts, least, most)._within(GROUPS)

    def _within(self, groups: int) -> Histogram:
        more, differences = 0, self.keys[1:] ^ self.keys[:-1]
        while np.count_nonzero(differences >> more) >= groups:
            more += 1
        keys, counts = _grouped(self.keys >> more, self.counts)
        return Histogram(self.dropped + more, keys, counts, self.minimum, self.maximum)

    @property
    def count(self) -> int:
        """Values."""
        return int(self.counts.sum())

    @property
    def largest_share(self) -> float:
        """Largest share of values in one group: the bound of the error in rank; 0 where groups are single values."""
        return float(self.counts.max() / self.counts.sum()) if self.dropped and len(self.counts) else 0.0

    def quantiles(self, shares: Sequence[float]) -> NDArray[np.float64]:
        """Values below which these shares of all values are, interpolated as `numpy.quantile` does by default.

        Args:
            shares: from 0 to 1.
        """
        if not self.count:
            return np.full(len(shares), np.nan)
        positions = np.asarray(shares, np.float64) * (self.count - 1)
        below = np.floor(positions)
        low, high = self._at(below), self._at(np.minimum(below + 1, self.count - 1))
        weight = positions - below
        # as NumPy rounds: from the nearer of the two
        with np.errstate(over="ignore"):
            far = np.isinf(high - low)  # ends of float64: the weighted mean does not overflow
            found: NDArray[np.float64] = np.where(weight >= 0.5, high - (high - low) * (1 - weight), low + (high - low) * weight)
        found[far] = (low * (1 - weight) + high * weight)[far]
        return found

    def _at(self, ranks: NDArray[np.float64]) -> NDArray[np.float64]:
        """Values of these ranks, from 0."""
        ends = np.cumsum(self.counts)
        group = np.searchsorted(ends, ranks, side="right")
        low = _values(self.keys[group] << self.dropped)
        if not self.dropped:
            return low
        high = _values((self.keys[group] + 1) << self.dropped)
        low, high = np.maximum(low, self.minimum), np.minimum(high, self.maximum)
        within = (ranks - (ends[group] - self.counts[group]) + 0.5) / self.counts[group]
        return low * (1 - within) + high * within

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "dropped": self.dropped,
            "keys": array_text(self.keys),
            "counts": array_text(self.counts),
            "minimum": self.minimum.hex(),
            "maximum": self.maximum.hex(),
        }

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Histogram:
        """The inverse of `plain`."""
        keys, counts = text_array(raw["keys"], np.int64), text_array(raw["counts"], np.int64)
        return cls(raw["dropped"], keys, counts, float.fromhex(raw["minimum"]), float.fromhex(raw["maximum"]))


def _ordered(bits: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bits of float64 as numbers in the order of the values; its own inverse."""
    found: NDArray[np.int64] = np.where(bits < 0, bits ^ _FLIP, bits)
    return found


def _values(keys: NDArray[np.int64]) -> NDArray[np.float64]:
    return _ordered(keys).view(np.float64)


def _grouped(keys: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Distinct ones of ascending keys, and the sums of their counts."""
    if not len(keys):
        return keys, counts
    begins = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    return keys[begins], np.add.reduceat(counts, begins)
