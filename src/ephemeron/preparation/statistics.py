"""Statistics of columns, which merge exactly: the order of rows and the cut into partitions do not matter.

Moments: counts, sums, sums of squares and extremes.

A float64 is a whole number of 53 bits times a power of two. For each power, the whole numbers are summed in halves that float64
holds without rounding (2**20 values at a time); the results are added as integers of Python, in units of the smallest power. So a
sum of partial sums is the sum, and mean and variance are rounded once, at the end. Cost: about 0.1 µs per value.

Histograms, from which quantiles are taken: values are grouped by the leading bits of their float64 (sign, exponent, mantissa), which keep the order of the values. All bits are
used while there are at most 8,192 groups: then every distinct value has one, and quantiles equal NumPy's. Beyond that, the fewest
trailing bits are dropped that bring the groups down to 8,192. Parts of the data never drop more bits than the whole, so the result is that
of the whole. A quantile is then within its group: its rank is wrong by at most the share of rows in that group (`largest_share`;
uniform and normal values: about 0.1 % of the rows).

Occupancy, how many distinct keys were hashed into how many buckets: occupied buckets are a bit each. Distinct keys are counted by their hashes of 64 bits, of which the 262,144 smallest are kept (k minimum
values, Bar-Yossef et al. 2002): up to that number the count is exact, beyond it an estimate with a standard error of 0.2 %.

Counts: rows by text. Beyond a limit of texts only that it was exceeded is kept, which does not depend on the partitioning either.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

_AT_ONCE = 1 << 20
_HALF = 27
"""Bits of the lower half of a mantissa of 53."""
_LEAST = 1126
"""Sums are in units of 2**-1126: the exponent of the smallest number by `frexp`, -1073, and 53 bits."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Statistics of the values of a column that are there."""

    count: int = 0
    """Values."""
    missing: int = 0
    """NaN, which stands for an absent value."""
    infinite: int = 0
    """Values that are left out because they are infinite."""
    total: int = 0
    """Sum, in units of 2**-1126."""
    squares: int = 0
    """Sum of squares, in units of 2**-2252."""
    minimum: float = math.inf
    maximum: float = -math.inf

    @classmethod
    def of(cls, values: NDArray[Any]) -> Moments:
        """Those of an array of numbers."""
        values = np.asarray(values, np.float64).ravel()
        finite = values[np.isfinite(values)]
        if not len(finite):
            missing = int(np.isnan(values).sum())
            return cls(missing=missing, infinite=len(values) - missing)
        missing = int(np.isnan(values).sum()) if len(finite) < len(values) else 0
        total = squares = 0
        for at in range(0, len(finite), _AT_ONCE):
            one, two = _sums(finite[at : at + _AT_ONCE])
            total, squares = total + one, squares + two
        return cls(
            len(finite),
            missing,
            len(values) - missing - len(finite),
            total,
            squares,
            float(finite.min()) + 0.0,
            float(finite.max()) + 0.0,  # -0.0 is 0.0, whichever comes first
        )

    def merge(self, other: Moments) -> Moments:
        """Those of the values of both."""
        return Moments(
            self.count + other.count,
            self.missing + other.missing,
            self.infinite + other.infinite,
            self.total + other.total,
            self.squares + other.squares,
            min(self.minimum, other.minimum),
            max(self.maximum, other.maximum),
        )

    @property
    def mean(self) -> float:
        """The mean, correctly rounded; NaN without values."""
        return self.total / (self.count << _LEAST) if self.count else math.nan

    @property
    def mean_rest(self) -> float:
        """The exact mean less `mean`, rounded: it counts where values differ by about the rounding of their mean."""
        if not self.count:
            return math.nan
        return float(Fraction(self.total, self.count << _LEAST) - Fraction(self.mean))

    @property
    def variance(self) -> float:
        """The mean squared difference from the mean, correctly rounded; NaN without values, infinite or 0 if it is no float64."""
        if not self.count:
            return math.nan
        try:
            return self._spread / (self.count**2 << (2 * _LEAST))
        except OverflowError:
            return math.inf

    @property
    def deviation(self) -> float:
        """The root of the exact variance, to 2**-62 of it and then rounded; NaN without values. It is never infinite."""
        if not self.count:
            return math.nan
        more = max(0, 128 - self._spread.bit_length() + 1) // 2
        return math.isqrt(self._spread << (2 * more)) / (self.count << (_LEAST + more))

    @property
    def _spread(self) -> int:
        """The variance, in units of 2**-2252 by the square of the count."""
        return self.squares * self.count - self.total * self.total

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "count": self.count,
            "missing": self.missing,
            "infinite": self.infinite,
            "total": hex(self.total),
            "squares": hex(self.squares),
            "minimum": self.minimum.hex(),
            "maximum": self.maximum.hex(),
        }

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Moments:
        """The inverse of `plain`."""
        return cls(
            raw["count"],
            raw["missing"],
            raw["infinite"],
            int(raw["total"], 16),
            int(raw["squares"], 16),
            float.fromhex(raw["minimum"]),
            float.fromhex(raw["maximum"]),
        )


def _sums(values: NDArray[np.float64]) -> tuple[int, int]:
    """Sum and sum of squares of at most 2**20 finite values, in the units of `Moments`."""
    fractions, exponents = np.frexp(values)
    mantissas = np.ldexp(fractions, 53).astype(np.int64)
    least = int(exponents.min())
    bins = (exponents - least).astype(np.int64)
    size = int(bins.max()) + 1
    magnitudes = np.abs(mantissas)
    high, low = magnitudes >> _HALF, magnitudes & ((1 << _HALF) - 1)
    signs = np.sign(mantissas)
    total = _binned(bins, size, signs * high, 1) * (1 << _HALF) + _binned(bins, size, signs * low, 1)
    squares = 0
    for product, shift in ((high * high, 2 * _HALF), (high * low, _HALF + 1), (low * low, 0)):
        upper, lower = product >> _HALF, product & ((1 << _HALF) - 1)
        both = (_binned(bins, size, upper, 2) << _HALF) + _binned(bins, size, lower, 2)
        squares += both << shift
    offset = least - 53 + _LEAST
    return total << offset, squares << (2 * offset)


def _binned(bins: NDArray[np.int64], size: int, parts: NDArray[np.int64], power: int) -> int:
    """Sum of whole numbers of at most 28 bits, each times 2**(power * bin): exact, since 2**20 of them are below 2**53."""
    sums = np.bincount(bins, weights=parts, minlength=size)
    return sum(int(value) << (power * at) for at, value in enumerate(sums) if value)


# -- histograms ----------------------------------------------------------------------------------------------------


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


# -- arrays as text in JSON ---------------------------------------------------------------------------------------


def array_text(array: NDArray[Any]) -> str:
    """Content of an array, little-endian, in base64."""
    return base64.b64encode(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes()).decode()


def text_array(text: str, dtype: Any) -> NDArray[Any]:
    """The inverse of `array_text`."""
    return np.frombuffer(base64.b64decode(text), np.dtype(dtype).newbyteorder("<")).astype(dtype)


# -- occupancy -----------------------------------------------------------------------------------------------------


KEPT = 1 << 18


@dataclass(frozen=True, slots=True, eq=False)
class Occupancy:
    """Keys and buckets."""

    buckets: int
    """All there are."""
    bits: NDArray[np.uint8]
    """One for each bucket, set if a key is in it."""
    smallest: NDArray[np.uint64]
    """Smallest hashes, ascending."""

    @classmethod
    def of(cls, hashes: NDArray[np.uint64], buckets: int) -> Occupancy:
        """Of keys with these hashes; a key's bucket is the remainder of its hash."""
        occupied = np.zeros(buckets, bool)
        occupied[hashes % np.uint64(buckets)] = True
        return cls(buckets, np.packbits(occupied), _distinct(hashes)[:KEPT])

    def merge(self, other: Occupancy) -> Occupancy:
        """Of the keys of both."""
        return Occupancy(self.buckets, self.bits | other.bits, _distinct(np.concatenate([self.smallest, other.smallest]))[:KEPT])

    @property
    def occupied(self) -> int:
        """Buckets with at least one key."""
        return int(np.unpackbits(self.bits).sum())

    @property
    def exact(self) -> bool:
        """Whether the number of keys is exact."""
        return len(self.smallest) < KEPT

    @property
    def distinct(self) -> int:
        """Distinct keys."""
        if self.exact:
            return len(self.smallest)
        return max(KEPT, round((KEPT - 1) * 2.0**64 / float(self.smallest[-1])))

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {"buckets": self.buckets, "bits": array_text(self.bits), "smallest": array_text(self.smallest)}

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Occupancy:
        """The inverse of `plain`."""
        return cls(raw["buckets"], text_array(raw["bits"], np.uint8), text_array(raw["smallest"], np.uint64))


def _distinct(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Distinct ones, ascending. Sorting them takes a hundredth of the time of `numpy.unique`, which builds a table first."""
    ordered = np.sort(hashes)
    return ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])] if len(ordered) else ordered


# -- counts of texts -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """Rows by text."""

    limit: int
    """Most texts."""
    counts: Mapping[str, int]
    """Empty if there are more texts than the limit."""
    exceeded: bool = False
    """Whether there are."""

    @classmethod
    def of(cls, texts: Sequence[str], counts: Sequence[int] | NDArray[np.int64], limit: int) -> Counts:
        """Of distinct texts, of which those without rows do not count."""
        return cls(limit, {text: int(count) for text, count in zip(texts, counts, strict=True) if count})._within()

    def merge(self, other: Counts) -> Counts:
        """Of the rows of both."""
        if self.exceeded or other.exceeded:
            return Counts(self.limit, {}, exceeded=True)
        found = dict(self.counts)
        for text, count in other.counts.items():
            found[text] = found.get(text, 0) + count
        return Counts(self.limit, found)._within()

    def _within(self) -> Counts:
        return self if len(self.counts) <= self.limit else Counts(self.limit, {}, exceeded=True)

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {"limit": self.limit, "counts": dict(sorted(self.counts.items())), "exceeded": self.exceeded}

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Counts:
        """The inverse of `plain`."""
        return cls(raw["limit"], raw["counts"], raw["exceeded"])


# -- all kinds ------------------------------------------------------------------------------------------------------

Statistic: TypeAlias = Moments | Histogram | Occupancy | Counts
_KINDS: dict[str, Any] = {"moments": Moments, "histogram": Histogram, "occupancy": Occupancy, "counts": Counts}
REFUSED = "refused"
"""Key of the reason for which there are no statistics: unlike theirs, it has no slash."""


def statistic_document(found: Mapping[str, Statistic]) -> dict[str, Any]:
    """Statistics as JSON."""
    names = {kind: name for name, kind in _KINDS.items()}
    return {key: {"kind": names[type(one)], "value": one.plain()} for key, one in found.items()}


def read_statistics(raw: Mapping[str, Any]) -> dict[str, Statistic]:
    """The inverse of `statistic_document`."""
    return {key: _KINDS[one["kind"]].read(one["value"]) for key, one in raw.items()}


def merge_statistics(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Statistic]:
    """Statistics of the rows of both; or the refusal of a row of one."""
    for found in (one, other):
        if REFUSED in found:
            return dict(found)
    return {key: one[key].merge(other[key]) for key in one}
