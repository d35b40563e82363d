"""Minus zero as the mark of a parameter without gradient, which survives sums and takes no further bytes.

A parameter that took no part in a step has no gradient in PyTorch, and optimisers skip it: no decay, no momentum. A gradient
of zero has another effect. In IEEE 754 a sum is minus zero only if all of its terms are (round to nearest), and a
division by a positive number keeps it: the merged gradient of a parameter is minus zero throughout only if no rank had
one. Contributors write minus zero for absent gradients and never for others.

Not covered: a gradient all of whose elements are negative and underflow in its format.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ABSENT = -0.0


def is_absent(values: np.ndarray) -> np.ndarray:
    """Elementwise: whether a value is minus zero."""
    found: np.ndarray = (values == 0) & np.signbit(values)
    return found


def absent_parts(vector: np.ndarray, bounds: Sequence[tuple[int, int]]) -> frozenset[int]:
    """Numbers of the non-empty parts `start:stop` that are minus zero throughout."""
    filled = [(i, start, stop) for i, (start, stop) in enumerate(bounds) if stop > start]
    if not filled:
        return frozenset()
    first = is_absent(vector[[start for _, start, _ in filled]])  # nearly always the whole answer
    return frozenset(i for (i, start, stop), maybe in zip(filled, first, strict=True) if maybe and is_absent(vector[start:stop]).all())
