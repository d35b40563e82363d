"""Updates that must not count: NaN, infinite, or far larger than the region's updates before.

The decision depends on the norms of the region alone, in the order of its rounds. So all regions that judge the updates of a synchronous
round decide alike, and so does a replacement that begins with the saved state. Pure.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ephemeron.regions.communicator.base import Update

FACTOR = 10.0
KEPT = 32
LEAST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantinedUpdate:
    """An update that does not count."""

    region: str
    fragment: int
    round: int
    why: str

    def __str__(self) -> str:
        return f"update of region {self.region}, fragment {self.fragment}, round {self.round} does not count: {self.why}"


class NormQuarantine:
    """Judges updates by their norms. Each update is judged once, in the order of its region's rounds.

    Args:
        factor: an update counts up to so many times the median of its region's last norms.
        kept: number of norms that the median is of.
        least: number of norms before which only NaN and infinity are refused.
        state: of an earlier one; see `state`.
    """

    def __init__(
        self, *, factor: float = FACTOR, kept: int = KEPT, least: int = LEAST, state: Mapping[str, Sequence[float]] | None = None
    ) -> None:
        self._factor, self._kept, self._least = factor, kept, least
        self._norms = {key: deque(norms, maxlen=kept) for key, norms in (state or {}).items()}

    def judge(self, update: Update, *, norm: float | None = None) -> QuarantinedUpdate | None:
        """Why an update does not count; None: it does, and its norm is part of later medians.

        Args:
            update: of any region.
            norm: of the vector as it was decoded here; None: as the sender says.
        """
        norm = update.norm if norm is None else norm
        norms = self._norms.setdefault(f"{update.region}/{update.fragment}", deque(maxlen=self._kept))
        why = ""
        if not math.isfinite(norm):
            why = f"its norm is {norm}"
        elif len(norms) >= self._least and norm > self._factor * (median := statistics.median(norms)):
            why = f"its norm {norm:.4g} is more than {self._factor:g} times {median:.4g}, the median of the last {len(norms)}"
        if not why:
            norms.append(norm)
            return None
        return QuarantinedUpdate(region=update.region, fragment=update.fragment, round=update.round, why=why)

    def state(self) -> dict[str, list[float]]:
        """Norms so far, as plain values for checkpoints and snapshots."""
        return {key: list(norms) for key, norms in sorted(self._norms.items())}
