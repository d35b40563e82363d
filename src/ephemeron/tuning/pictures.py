"""Pictures of a study as SVG files: parallel coordinates of its trials, and importances of its parameters.

Self-contained, light and dark by the reader's setting. Text from outside is escaped (`rendering.svg`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ephemeron.rendering.palette import LINE_COLOURS
from ephemeron.rendering.svg import Scale, el, joined, log_ticks, num, text, ticks
from ephemeron.tuning.folder import StudyStatus, TrialRecord
from ephemeron.tuning.space import Parameter
from ephemeron.units import human_count

WIDTH, AXIS_FROM, HEIGHT = 960.0, 84.0, 300.0
_LEFT, _RIGHT = 70.0, 90.0
_BEST = LINE_COLOURS["orange"]
_STYLE = f"""
svg {{ background: #fff; font: 12px system-ui, sans-serif; }}
text {{ fill: #24292f; paint-order: stroke; stroke: #fff; stroke-width: 3px; }} .quiet {{ fill: #6b737c; }} .axis {{ stroke: #8a929c; }}
.trial {{ fill: none; stroke-width: 1.4; }} .cut {{ stroke: {LINE_COLOURS["grey"]}; opacity: .45; stroke-dasharray: 4 3; }}
.best {{ stroke: {_BEST}; stroke-width: 3; }} .bar {{ fill: {LINE_COLOURS["blue"]}; }} .title {{ font-weight: 600; font-size: 14px; }}
@media (prefers-color-scheme: dark) {{
 svg {{ background: #16191d; }} text {{ fill: #e6e8ea; stroke: #16191d; }} .quiet {{ fill: #9aa3ad; }} .cut {{ stroke: #9aa3ad; }}
}}
"""
_WORST, _GOOD = (176, 208, 232), (0, 74, 130)
"""Colours of the worst and of the best finished trial."""


@dataclass(frozen=True, slots=True)
class _Axis:
    title: str
    scale: Scale
    marks: list[tuple[float, str]]
    names: tuple[str, ...] = ()
    """Of choices, in their order."""

    def y(self, value: object) -> float:
        """Coordinate of a value."""
        return self.scale(self.names.index(repr(value)) if self.names else float(value))  # type: ignore[arg-type]


def parallel_coordinates(status: StudyStatus, space: Sequence[Parameter]) -> str:
    """One line for each trial with a value, across its parameters to the metric; empty where there is none.

    Finished trials are the darker the better they are, the best is marked, and pruned ones are dashed.
    """
    shown = [t for t in status.trials if t.value is not None and t.state in ("finished", "pruned")]
    if not shown:
        return ""
    sign = 1 if status.mode == "min" else -1
    values = [t.value or 0.0 for t in shown]
    finished = [t.value or 0.0 for t in shown if t.state == "finished"] or values
    metric = _numbers(status.metric, min(values), max(values), log=False, flip=status.mode == "min")
    axes = [*(_axis(p) for p in space), metric]
    step = (WIDTH - _LEFT - _RIGHT) / max(1, len(axes) - 1)
    xs = [_LEFT + i * step for i in range(len(axes))]
    # The best are drawn last, on top of the others.
    shown.sort(key=lambda t: (t.state == "finished", -sign * (t.value or 0.0)))
    lines = joined(_line(t, status, axes, xs, space, min(finished), max(finished)) for t in shown)
    drawn = joined(_drawn(axis, x, i, last=i == len(axes) - 1) for i, (axis, x) in enumerate(zip(axes, xs, strict=True)))
    title = (
        f"{status.name}: {human_count(len(shown), 'trial')}, {status.metric} ({'lower' if status.mode == 'min' else 'higher'} is better)"
    )
    note = "dark: good, light: poor, orange: best, dashed: pruned"
    return _document(AXIS_FROM + HEIGHT + 46, title, note, lines + drawn)


def importances(status: StudyStatus, weights: Mapping[str, float]) -> str:
    """One bar for each parameter; empty where there are no weights."""
    if not weights:
        return ""
    row = 28.0
    most = max(weights.values()) or 1.0
    bars = Markup("")
    for i, (name, weight) in enumerate(sorted(weights.items(), key=lambda item: -item[1])):
        y = 76 + i * row
        bars += text(300, y + 13, name, text_anchor="end")
        bars += el("rect", x=310, y=y, width=max(1.0, 540 * weight / most), height=18, rx=3, class_="bar")
        bars += text(318 + 540 * weight / most, y + 13, f"{weight:.0%}", class_="quiet")
    title = f"{status.name}: importance of each parameter for {status.metric}"
    return _document(90 + row * len(weights), title, "PED-ANOVA over finished trials", bars)


def _document(height: float, title: str, note: str, body: Markup) -> str:
    head = text(24, 28, title, class_="title") + text(24, 46, note, class_="quiet")
    style = el("style", Markup(_STYLE))
    return str(
        el(
            "svg",
            el("title", title),
            style,
            head,
            body,
            xmlns="http://www.w3.org/2000/svg",
            role="img",
            viewBox=f"0 0 {num(WIDTH)} {num(height)}",
            width=WIDTH,
            height=height,
        )
    )


def _axis(parameter: Parameter) -> _Axis:
    r = parameter.range
    if r is not None:
        return _numbers(parameter.key, float(r.low), float(r.high), log=r.log, flip=False)
    names = tuple(map(repr, parameter.choices))
    scale = Scale(-0.5, len(names) - 0.5, AXIS_FROM + HEIGHT, AXIS_FROM)
    return _Axis(parameter.key, scale, [(i, str(c)) for i, c in enumerate(parameter.choices)], names)


def _numbers(title: str, low: float, high: float, *, log: bool, flip: bool) -> _Axis:
    if low == high:
        low, high = low - 0.5, high + 0.5
    ends = (AXIS_FROM, AXIS_FROM + HEIGHT) if flip else (AXIS_FROM + HEIGHT, AXIS_FROM)
    marks = log_ticks(low, high) if log else ticks(low, high, 5, lambda v: f"{v:.4g}")
    return _Axis(title, Scale(low, high, *ends, log=log), marks)


def _drawn(axis: _Axis, x: float, number: int, *, last: bool) -> Markup:
    title_y = AXIS_FROM + HEIGHT + (20 if number % 2 == 0 else 36)
    out = el("line", x1=x, x2=x, y1=AXIS_FROM, y2=AXIS_FROM + HEIGHT, class_="axis")
    out += text(x, title_y, axis.title, text_anchor="end" if last else "middle")
    for value, words in axis.marks:
        y = axis.scale(value)
        out += el("line", x1=x - 4, x2=x, y1=y, y2=y, class_="axis")
        out += text(x + 6 if last else x - 7, y + 4, words, text_anchor="start" if last else "end", class_="quiet")
    return out


def _line(
    trial: TrialRecord, status: StudyStatus, axes: Sequence[_Axis], xs: Sequence[float], space: Sequence[Parameter], low: float, high: float
) -> Markup:
    chosen = [*(trial.parameters[p.key] for p in space), trial.value]
    points = [(x, axis.y(value)) for axis, x, value in zip(axes, xs, chosen, strict=True)]
    data = "".join(f"{'M' if i == 0 else 'L'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(points))
    words = f"trial {trial.number} ({trial.state}): " + ", ".join(
        f"{k} {v}" for k, v in (*trial.parameters.items(), (status.metric, trial.value))
    )
    style = "trial best" if trial.number == status.best else "trial" if trial.state == "finished" else "trial cut"
    share = 0.5 if high == low else ((trial.value or 0.0) - low) / (high - low)
    good = min(1.0, max(0.0, 1 - share if status.mode == "min" else share))
    mixed = "#" + "".join(f"{round(a + (b - a) * math.sqrt(good)):02x}" for a, b in zip(_WORST, _GOOD, strict=True))
    return el("path", el("title", words), d=data, class_=style, stroke=mixed if style == "trial" else None)
