"""SVG elements, scales and ticks. Text from outside is escaped; see `page`.

Own helpers instead of a plotting library keep the page small, styleable by CSS (light, dark, print) and free of
anything to fetch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from markupsafe import Markup, escape

Tick = tuple[float, str]


def el(tag: str, *children: str, **attributes: str | float | None) -> Markup:
    """One element.

    Args:
        tag: its name.
        children: escaped unless they are `Markup`.
        attributes: escaped; `class_` is `class`, `_` is `-`, None is left out.
    """
    text = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{num(v) if isinstance(v, int | float) else escape(v)}"'
        for name, v in attributes.items()
        if v is not None
    )
    inside = "".join(map(escape, children))
    return Markup(f"<{tag}{text}>{inside}</{tag}>" if children else f"<{tag}{text}/>")


def nothing(words: str) -> Markup:
    """A paragraph in place of a picture or table that has nothing to show."""
    return el("p", words, class_="nothing")


def joined(parts: Iterable[str]) -> Markup:
    """Parts one after another, escaped unless they are `Markup`."""
    return Markup("").join(parts)


def text(x: float, y: float, words: str, **attributes: str | float | None) -> Markup:
    """A text element."""
    return el("text", words, x=x, y=y, **attributes)


def num(x: float) -> str:
    """Short: coordinates need no more than two decimals beyond their size."""
    if x == 0 or not math.isfinite(x):
        return "0"
    digits = 2 if abs(x) >= 1 else 2 - math.floor(math.log10(abs(x)))
    out = f"{x:.{min(digits, 9)}f}"
    return out.rstrip("0").rstrip(".") if "." in out else out


@dataclass(frozen=True, slots=True)
class Scale:
    """Values `lo..hi` onto coordinates `a..b`."""

    lo: float
    hi: float
    a: float
    b: float
    log: bool = False

    def __call__(self, value: float) -> float:
        lo, hi, v = self.lo, self.hi, value
        if self.log:
            lo, hi, v = math.log(lo), math.log(hi), math.log(max(v, self.lo))
        return self.a + (self.b - self.a) * (v - lo) / ((hi - lo) or 1.0)


def path(points: Iterable[tuple[float, float]], x: Scale, y: Scale) -> str:
    """Path data of a line through the points; it is interrupted where y is NaN."""
    data, pen = [], "M"
    for px, py in points:
        if math.isnan(py):
            pen = "M"
        else:
            data.append(f"{pen}{x(px):.1f} {y(py):.1f}")
            pen = "L"
    return "".join(data)


def step_of(span: float, n: int) -> float:
    """The step among 1, 2, 2.5 and 5 × 10^k that gives about `n` ticks."""
    raw = (span or 1.0) / max(n, 1)
    base = 10.0 ** math.floor(math.log10(raw))
    return next((m * base for m in (1, 2, 2.5, 5, 10) if m * base >= raw * 0.999), 10 * base)


def ticks(lo: float, hi: float, n: int, label: Callable[[float], str]) -> list[Tick]:
    """Round values within `lo..hi`."""
    step = step_of(hi - lo, n)
    first, last = math.ceil(lo / step - 1e-9), math.floor(hi / step + 1e-9)
    return [(i * step, label(i * step)) for i in range(first, last + 1)]


def log_ticks(lo: float, hi: float) -> list[Tick]:
    """Powers of ten, with 2 and 5 between them where there is room."""
    low, high = math.floor(math.log10(lo)), math.ceil(math.log10(hi))
    step = max(1, (high - low) // 6)
    factors = (1.0,) if high - low > 3 else (1.0, 2.0, 5.0) if high - low <= 2 else (1.0, 3.0)
    values = [m * 10.0**k for k in range(low, high + 1, step) for m in factors]
    return [(v, f"{v:g}") for v in values if lo <= v <= hi]


def time_ticks(lo: float, hi: float, n: int) -> list[Tick]:
    """Seconds, minutes or hours, whichever reads best."""
    size, unit = (1.0, "s") if hi <= 150 else (60.0, "min") if hi <= 9000 else (3600.0, "h")
    return [(v * size, name) for v, name in ticks(lo / size, hi / size, n, lambda v: f"{v:g} {unit}" if v else "0")]


def whole_ticks(lo: float, hi: float, n: int) -> list[Tick]:
    """For counts: never a fraction."""
    return [(v, name) for v, name in ticks(lo, hi, n, lambda v: f"{v:,.0f}") if v == int(v)]
