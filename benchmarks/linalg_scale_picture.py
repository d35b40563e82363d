"""Dynamic parallelism as one SVG file for `benchmarks.linalg_scale`: a row for each simulated run, light or dark by the reader's setting.

Left: tasks that are ready or held by functions, and functions, over time (logarithmic, because stages differ by orders of magnitude).
Right: the share of all vCPUs that computes, below the share that runs; the area between the two is paid for and waits for tiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from ephemeron.rendering.palette import LINE_COLOURS
from ephemeron.rendering.svg import Scale, el, joined, num, path, text, ticks, time_ticks

_WIDTH, _ROW, _TOP, _PLOT, _HEIGHT = 960.0, 204.0, 74.0, 370.0, 124.0
_LEFTS = (62.0, 542.0)
_MOST = 1e4
_STYLE = f"""
svg {{ background: #fff; font: 12px system-ui, sans-serif; }} text {{ fill: #24292f; }} .quiet {{ fill: #59626b; }}
.title {{ font-weight: 600; font-size: 14px; }} .grid {{ stroke: #d5d9de; }} path {{ fill: none; stroke-width: 1.8; }}
.tasks {{ stroke: {LINE_COLOURS["blue"]}; }} .functions {{ stroke: {LINE_COLOURS["orange"]}; }}
path.running {{ fill: {LINE_COLOURS["orange"]}; opacity: .3; }} path.computing {{ fill: {LINE_COLOURS["green"]}; opacity: .8; }}
.key-tasks {{ fill: {LINE_COLOURS["blue"]}; }} .key-functions {{ fill: {LINE_COLOURS["orange"]}; }}
.key-running {{ fill: {LINE_COLOURS["orange"]}; opacity: .3; }} .key-computing {{ fill: {LINE_COLOURS["green"]}; opacity: .8; }}
@media (prefers-color-scheme: dark) {{
 svg {{ background: #16191d; }} text {{ fill: #e6e8ea; }} .quiet {{ fill: #9aa3ad; }} .grid {{ stroke: #3a4048; }}
 .tasks {{ stroke: #56b4e9; }} .key-tasks {{ fill: #56b4e9; }} .functions {{ stroke: #ff8c42; }} .key-functions {{ fill: #ff8c42; }}
 path.running, .key-running {{ fill: #ff8c42; }} path.computing, .key-computing {{ fill: #2cc295; }}
}}
"""


def parallelism(rows: Sequence[Mapping[str, Any]]) -> str:
    """The picture.

    Args:
        rows: of `linalg_scale.simulate`.
    """
    title = "Simulated: tasks, functions and utilisation over time"
    first = rows[0]
    note = f"n = {first['n']:,}, tiles of {first['tile']:,}, at most {first['functions']} functions of one vCPU"
    keys = (("tasks", "tasks ready or held"), ("functions", "functions"), ("running", "paid for, waits"), ("computing", "computes"))
    parts = [text(24, 26, title, class_="title"), text(24, 45, note, class_="quiet")]
    for place, (name, words) in enumerate(keys):
        x = (442, 588, 686, 812)[place]
        parts += [el("rect", x=x, y=36, width=12, height=10, class_=f"key-{name}"), text(x + 18, 45, words)]
    parts += [_row(row, _TOP + place * _ROW) for place, row in enumerate(rows)]
    height = _TOP + len(rows) * _ROW
    return (
        str(
            el(
                "svg",
                el("title", title),
                el("style", Markup(_STYLE)),
                joined(parts),
                xmlns="http://www.w3.org/2000/svg",
                role="img",
                viewBox=f"0 0 {num(_WIDTH)} {num(height)}",
                width=_WIDTH,
                height=height,
            )
        )
        + "\n"
    )


def _row(row: Mapping[str, Any], top: float) -> Markup:
    points, base = row["utilisation"], top + 26 + _HEIGHT
    share = row["utilisation_of_functions"]
    head = f"{row['operation'].replace('_', ' ')}: {row['seconds']:,.0f} s, {row['tasks']:,} tasks; functions compute {share:.0%} of their time"
    parts = [text(_LEFTS[0], top + 12, head)]
    counts = Scale(1.0, _MOST, base, base - _HEIGHT, log=True)
    shares = Scale(0.0, 1.0, base, base - _HEIGHT)
    end = points[-1]["until_s"]
    starts = [0.0, *(point["until_s"] for point in points[:-1])]
    marks = ([(10.0**k, f"{10**k:,}") for k in range(5)], ticks(0, 1, 4, lambda v: f"{v:.0%}"))
    for left, scale, axis in zip(_LEFTS, (counts, shares), marks, strict=True):
        x = Scale(0.0, end, left, left + _PLOT)
        for value, name in axis:
            y = scale(value)
            parts.append(el("line", x1=left, x2=left + _PLOT, y1=y, y2=y, class_="grid"))
            parts.append(text(left - 6, y + 4, name, text_anchor="end", class_="quiet"))
        parts += [text(x(v), base + 16, name, text_anchor="middle", class_="quiet") for v, name in time_ticks(0, end, 6)]

        def steps(values: Sequence[float]) -> list[tuple[float, float]]:
            return [(t, v) for a, p, v in zip(starts, points, values, strict=True) for t in (a, p["until_s"])]

        if scale is counts:
            for name, values in (
                ("tasks", [p["ready_tasks"] + p["held_tasks"] for p in points]),
                ("functions", [p["functions"] for p in points]),
            ):
                parts.append(el("path", d=path(steps([min(max(v, 1.0), _MOST) for v in values]), x, scale), class_=name))
        else:
            for name, values in (
                ("running", [p["functions"] / row["functions"] for p in points]),
                ("computing", [p["computing"] for p in points]),
            ):
                area = [(0.0, 0.0), *steps(values), (end, 0.0)]
                parts.append(el("path", d=path(area, x, scale) + "Z", class_=name))
    return joined(parts)
