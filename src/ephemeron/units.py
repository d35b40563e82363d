"""The two megabytes, and numbers as people read them.

Clouds count memory quotas in MiB and call them MB; networks count MB/s in powers of ten. Both are kept,
each under its own name, so that nothing is off by 4.9 %.
"""

from __future__ import annotations

import math

MB = 1_000_000
"""Bytes in a megabyte of transfer."""

MIB = 1 << 20
"""Bytes in a megabyte of a memory quota."""


def human_count(n: int, noun: str, *, grouped: bool = False) -> str:
    """`1, "function" -> '1 function'`, `2 -> '2 functions'`; `grouped`: `12,345 functions`."""
    return f"{n:{',' if grouped else ''}} {noun}{'' if n == 1 else 's'}"


def human_bytes(n: float) -> str:
    """`1234567 -> '1.2 MB'`."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(n) < 1000 or unit == "GB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    raise AssertionError("unreachable")


def human_seconds(s: float) -> str:
    """`3725 -> '1 h 02 min'`."""
    if s < 1:
        return f"{s * 1000:.0f} ms"
    if s < 60:
        return f"{s:.1f} s"
    if s < 3600:
        return f"{int(s // 60)} min {int(s % 60):02d} s"
    return f"{int(s // 3600)} h {int(s % 3600 // 60):02d} min"


def duration(seconds: float) -> str:
    """Three digits: `95 -> '95 s'`, `600 -> '10 min'`, `9000 -> '2.5 h'`."""
    if math.isinf(seconds):
        return "for ever"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def exact_seconds(s: float) -> str:
    """Four significant digits, with a unit that fits the size: `0.0123 -> '12.3 ms'`, `3e-06 -> '3 µs'`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if s >= size:
            return f"{s / size:.4g} {unit}"
    return f"{s * 1e6:.4g} µs" if s else "0 s"


def human_metric(value: float) -> str:
    """Four decimals, or digits, of a loss or a metric: `0.99164 -> '0.9916'`, `133802391734.3 -> '1.338e+11'`."""
    return f"{value:.4f}" if abs(value) < 1e5 else f"{value:.4g}"


def human_usd(usd: float) -> str:
    """Enough digits to see a fraction of a cent: `0.000123 -> '$0.000123'`, `3.5 -> '$3.50'`."""
    return f"${usd:.2f}" if abs(usd) >= 1 else f"${usd:.6f}"
