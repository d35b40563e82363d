"""Counts, sums, sums of squares and extremes of a column, exactly: the order of rows and the cut into partitions do not matter.

A float64 is a whole number of 53 bits times a power of two. For each power, the whole numbers are summed in halves that float64
holds without rounding (2**20 values at a time); the results are added as integers of Python, in units of the smallest power. So a
sum of partial sums is the sum, and mean and variance are rounded once, at the end. Cost: about 0.1 µs per value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

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
