"""Latency and bandwidth of a link from timed messages. Pure.

NetSplit (section 4.2, figure 4-3) fits a line by least squares. Over five orders of magnitude of size that would fit the largest
messages only. Here the squares of relative errors are minimised, so that the latency is as accurate as the bandwidth. The fastest
message of each size counts, because other load on the machine can only add time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ephemeron.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """Line through timed messages: seconds = latency_s + nbytes / bandwidth_bytes_s."""

    latency_s: float
    bandwidth_bytes_s: float
    worst_error: float
    """Largest relative difference of a size's fastest message from the line."""


def fit_link(samples: Mapping[int, Sequence[float]], *, replies: bool = True) -> LinkFit:
    """Line through the fastest message of each size.

    Args:
        samples: seconds by bytes sent; at least two sizes.
        replies: whether times include an empty reply; half of the time of an empty message is then the way back.

    Raises:
        JobError: too few sizes, a time that is not positive, or times that do not grow with the size.
    """
    if len(samples) < 2:
        raise JobError(f"a link needs messages of two sizes, not of {sorted(samples)}", remedy="send larger ones too")
    points = {n: min(times) for n, times in samples.items() if times}
    for n, seconds in points.items():
        if not seconds > 0:
            raise JobError(f"a message of {n} bytes took {seconds} s", remedy="measure again")
    intercept, slope = _line(points)
    if intercept < 0:
        intercept, slope = 0.0, _through_origin(points)
    if not slope > 0:
        raise JobError(f"messages of {max(points)} bytes are not slower than those of {min(points)}", remedy="send larger ones")
    worst = max(abs(intercept + slope * n - t) / t for n, t in points.items())
    return LinkFit(latency_s=intercept / 2 if replies else intercept, bandwidth_bytes_s=1 / slope, worst_error=worst)


def _line(points: Mapping[int, float]) -> tuple[float, float]:
    """Intercept and slope by relative least squares: normal equations with weights 1/t²."""
    w = [1 / t**2 for t in points.values()]
    sw = sum(w)
    mx = sum(a * n for a, n in zip(w, points, strict=True)) / sw
    my = sum(a * t for a, t in zip(w, points.values(), strict=True)) / sw
    sxx = sum(a * (n - mx) ** 2 for a, n in zip(w, points, strict=True))
    sxy = sum(a * (n - mx) * (t - my) for a, (n, t) in zip(w, points.items(), strict=True))
    slope = sxy / sxx
    return my - slope * mx, slope


def _through_origin(points: Mapping[int, float]) -> float:
    return sum(n / t for n, t in points.items()) / sum((n / t) ** 2 for n, t in points.items())
