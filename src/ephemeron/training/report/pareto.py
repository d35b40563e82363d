"""A plan as people look at it: the front of time and cost, in a terminal, on a page and as a picture.

A single best configuration hides what it costs to be a little faster. The front shows it: every configuration that
nothing beats in both time and cost, with the chosen one, the limits, and the same job on virtual machines.
"""

from __future__ import annotations

import textwrap
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from ephemeron.errors import MissingExtra
from ephemeron.rendering.palette import BAD, LINE_COLOURS
from ephemeron.training.planner.plan import Plan
from ephemeron.training.report.headline import usd
from ephemeron.training.report.plan_page import html
from ephemeron.training.report.scatter import Scatter, ScatterLabels, ScatterMark, functions, scatter
from ephemeron.units import human_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["html", "png", "terminal", "write_plan_report"]

_COLUMNS, _ROWS, _LEFT = 66, 17, 10
_INK, _SOFT = "#1b2027", "#5d6673"


def write_plan_report(plan: Plan, out: Path) -> list[Path]:
    """Writes plan.html, plan.json and, where matplotlib is installed, plan.png.

    Args:
        plan: what to show.
        out: folder to write to; made if it is not there.

    Returns:
        The files written, the page first.
    """
    out.mkdir(parents=True, exist_ok=True)
    page, picture, value = out / "plan.html", out / "plan.png", out / "plan.json"
    page.write_text(html(plan), encoding="utf-8")
    plan.save(value)
    try:
        png(plan, picture)
    except MissingExtra:
        return [page, value]
    return [page, picture, value]


def terminal(plan: Plan) -> str:
    """The front as text of at most 80 columns, readable without colour."""
    s = scatter(plan)
    cells = [[" "] * _COLUMNS for _ in range(_ROWS)]

    def at(seconds: float, cost_usd: float) -> tuple[int, int]:
        x = round(s.time.share(seconds) * (_COLUMNS - 1))
        y = round((1 - s.cost.share(cost_usd)) * (_ROWS - 1))
        return min(max(x, 0), _COLUMNS - 1), min(max(y, 0), _ROWS - 1)

    if s.budget_usd:
        y = at(s.time.lo or 1.0, s.budget_usd)[1]
        cells[y] = list("┄" * _COLUMNS)
    if s.deadline_s:
        x = at(s.deadline_s, s.cost.hi)[0]
        for row in cells:
            row[x] = "┊"
    path = [at(m.seconds, m.cost_usd) for m in s.front]
    for (x0, y0), (x1, y1) in pairwise(path):
        for i in range(1, steps := max(abs(x1 - x0), abs(y1 - y0))):
            cells[y0 + round(i / steps * (y1 - y0))][x0 + round(i / steps * (x1 - x0))] = "·"
    for x, y in path:
        cells[y][x] = "o"
    letters = [chr(ord("A") + i) for i in range(min(26, len(s.machines)))]
    for letter, m in zip(letters, s.machines, strict=False):
        x, y = at(m.seconds, m.cost_usd)
        near = [i for i in (x, x + 1, x - 1, x + 2, x - 2) if 0 <= i < _COLUMNS and cells[y][i] not in letters]
        cells[y][near[0] if near else x] = letter
    x, y = at(s.choice.seconds, s.choice.cost_usd)
    cells[y][x] = "◆"
    names = {at(s.time.lo or 1.0, v)[1]: name for v, name in reversed(s.cost.ticks)}
    lines = ["cost".rjust(_LEFT)]
    for i, row in enumerate(cells):
        name = names.get(i, "")
        lines.append(f"{name:>{_LEFT}} {'┤' if name else '│'}{''.join(row)}".rstrip())
    return "\n".join([*lines, *_foot(s), "", *_legend(s, letters)])


def _foot(s: Scatter) -> list[str]:
    rule, names = ["─"] * _COLUMNS, [" "] * (_COLUMNS + 2)
    end = -2
    for value, name in s.time.ticks:
        x = round(s.time.share(value) * (_COLUMNS - 1))
        start = max(0, min(x - len(name) // 2, _COLUMNS + 2 - len(name)))
        if start <= end + 1:
            continue
        rule[x] = "┬"
        names[start : start + len(name)] = name
        end = start + len(name)
    return [
        f"{' ' * _LEFT} └{''.join(rule)}",
        f"{' ' * _LEFT}  {''.join(names)}".rstrip(),
        f"{'time':>{_LEFT + 2 + _COLUMNS}}",
    ]


def _legend(s: Scatter, letters: list[str]) -> list[str]:
    lines = [f"  ◆ {s.choice.words}  (chosen)"]
    if s.front:
        n = len(s.front)
        lines.append(
            f"  o {n} configuration{'s' if n != 1 else ''} of functions that no other beats in both time and cost"
        )
    lines += [f"  {letter} {m.words}" for letter, m in zip(letters, s.machines, strict=False)]
    if s.deadline_s:
        lines.append(f"  ┊ deadline {human_seconds(s.deadline_s)}")
    if s.budget_usd:
        lines.append(f"  ┄ budget {usd(s.budget_usd)}")
    if s.beyond:
        words = "beyond the picture: " + "; ".join(s.beyond)
        lines += textwrap.wrap(words, 78, initial_indent="    ", subsequent_indent="    ")
    return lines


def png(plan: Plan, path: Path) -> None:
    """The front as one picture.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as e:
        raise MissingExtra("matplotlib", "report") from e
    s = scatter(plan)
    figure = Figure(figsize=(10, 6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    name = plan.profile.workload or "plan"
    head = f"{name}  ·  {functions(plan.choice)}  ·  {human_seconds(s.choice.seconds)}, {usd(s.choice.cost_usd)}"
    ax.set_title(_plain(head), loc="left", fontsize=11.5, fontweight="bold", color=_INK, pad=14)
    _axes(ax, s)
    _points(ax, s)
    ax.legend(fontsize=8.5, loc="best", labelcolor=_INK, facecolor="white", framealpha=0.85, edgecolor="none")
    figure.savefig(path, format="png")


def _plain(words: str) -> str:
    """matplotlib would take a pair of dollar signs for mathematics."""
    return words.replace("$", r"\$")


def _axes(ax: Axes, s: Scatter) -> None:
    for name, reach in (("x", s.time), ("y", s.cost)):
        axis = ax.xaxis if name == "x" else ax.yaxis
        if reach.log:
            (ax.set_xscale if name == "x" else ax.set_yscale)("log")
        (ax.set_xlim if name == "x" else ax.set_ylim)(reach.lo, reach.hi)
        axis.set_ticks([v for v, _ in reach.ticks], [_plain(words) for _, words in reach.ticks])
        axis.set_ticks([], minor=True)
    ax.set_xlabel("time", fontsize=9, color=_SOFT)
    ax.set_ylabel("cost", fontsize=9, color=_SOFT)
    ax.tick_params(labelsize=8.5, colors=_SOFT)
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_SOFT)
    ax.grid(color="#eceff2")
    ax.set_axisbelow(True)


def _points(ax: Axes, s: Scatter) -> None:
    blue, orange, amber = (LINE_COLOURS[c] for c in ("blue", "orange", "amber"))
    xs, ys = [m.seconds for m in s.front], [m.cost_usd for m in s.front]
    labels = ScatterLabels()
    _beside(ax, s, labels, s.choice, _INK)
    for m in s.machines:
        _beside(ax, s, labels, m, _SOFT)
    if xs:
        ax.plot(xs, ys, "-o", color=blue, lw=1.2, ms=5, label="functions: no others beat these in both")
    for m in s.front:
        if m.seconds != s.choice.seconds or m.cost_usd != s.choice.cost_usd:
            _beside(ax, s, labels, m, _SOFT)
    ax.plot([s.choice.seconds], [s.choice.cost_usd], "o", ms=11, mfc=orange, mec="white", mew=1.4, label="chosen")
    for i, m in enumerate(s.machines):
        label = "one virtual machine" if not i else None
        ax.plot([m.seconds], [m.cost_usd], "D", ms=6, mfc=amber, mec="white", mew=0.8, ls="", label=label)
    if s.deadline_s:
        ax.axvline(s.deadline_s, color=BAD, ls="--", lw=1.1, label=f"deadline {human_seconds(s.deadline_s)}")
    if s.budget_usd:
        ax.axhline(s.budget_usd, color=BAD, ls=":", lw=1.4, label=_plain(f"budget {usd(s.budget_usd)}"))


def _beside(ax: Axes, s: Scatter, labels: ScatterLabels, m: ScatterMark, colour: str) -> None:
    """The label of a point, if there is room for it."""
    bold = m is s.choice
    words = f"{m.label} MB" if bold else m.label
    if labels.room(900 * s.time.share(m.seconds), -520 * s.cost.share(m.cost_usd), words, letter=8.5 if bold else 6.8):
        ax.annotate(
            _plain(words), (m.seconds, m.cost_usd), xytext=(7, 6), textcoords="offset points", color=colour,
            fontsize=9 if bold else 7.5, fontweight="bold" if bold else "normal", zorder=5,
        )  # fmt: skip
