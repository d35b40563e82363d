"""A running estimate of the mean of results, and when it is precise enough: for simulation studies. Pure.

The interval is that of the normal distribution, from `LEAST` results on. Results count in the order in which they come, so where quick items have other
values than slow ones an early end favours the quick ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any, TypeAlias

from ephemeron.errors import JobError

Enough: TypeAlias = "float | str | Callable[[Estimate], bool]"
"""When an estimate is precise enough."""
LEAST = 30
"""Results without which no width is trusted."""


class Estimate:
    """Mean, variance and confidence interval of numbers, one after another (Welford).

    Args:
        enough: width of the interval at which it is enough: a number, or a share of the mean such as `"1%"`; or a function of this estimate, asked
            after each result from the 30th on.
        part: of results that are objects; None: results are numbers.
        confidence: of the interval.

    Raises:
        JobError: it is none of these.
    """

    def __init__(self, enough: Enough, *, part: str | None = None, confidence: float = 0.95) -> None:
        self._decides = enough if callable(enough) else None
        text = "1" if callable(enough) else str(enough).strip()
        self.is_relative = text.endswith("%")
        try:
            self.target = float(text.removesuffix("%")) / (100 if self.is_relative else 1)
        except ValueError:
            self.target = math.nan
        if not 0 < self.target < math.inf:
            raise JobError(f"stop_when = {enough!r} is no width", remedy="write a number such as 0.01, or a share of the mean such as 1%")
        self.part, self._z = part, NormalDist().inv_cdf(0.5 + confidence / 2)
        self.count, self.mean, self._squares = 0, 0.0, 0.0

    def add(self, text: str) -> str:
        """Takes a result, as JSON.

        Returns:
            Why it has no number; empty: it has.
        """
        value: Any = json.loads(text)
        if self.part is not None:
            if not isinstance(value, dict) or self.part not in value:
                return f"the result has no {self.part!r}, which is to be estimated"
            value = value[self.part]
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"{'the result' if self.part is None else self.part} is {value!r:.60}, and no number to be estimated"
        self.count += 1
        step = value - self.mean
        self.mean += step / self.count
        self._squares += step * (value - self.mean)
        return ""

    @property
    def width(self) -> float:
        """Of the confidence interval; infinite where there are too few results."""
        if self.count < LEAST:
            return math.inf
        return 2 * self._z * math.sqrt(self._squares / (self.count - 1) / self.count)

    @property
    def is_enough(self) -> bool:
        """Whether no more results are wanted."""
        if self._decides is not None:
            return self.count >= LEAST and bool(self._decides(self))
        return self.width <= self.target * (abs(self.mean) if self.is_relative else 1)

    def __str__(self) -> str:
        about = f" ± {self.width / 2:.3g}" if math.isfinite(self.width) else ""
        return f"mean {self.mean:.6g}{about} of {self.count:,}"
