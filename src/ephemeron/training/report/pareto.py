"""A plan as people look at it: the front of time and cost, in a terminal, on a page and as a picture.

A single best configuration hides what it costs to be a little faster. The front shows it: every configuration that
nothing beats in both time and cost, with the chosen one, the limits, and the same job on virtual machines.
"""

from __future__ import annotations

import textwrap
from itertools import pairwise
from pathlib import Path

from ephemeron.errors import MissingExtra
from ephemeron.rendering.png import write_png
from ephemeron.training.planner.plan import Plan
from ephemeron.training.report.headline import usd
from ephemeron.training.report.plan_page import html, picture
from ephemeron.training.report.scatter import Scatter, functions, scatter
from ephemeron.units import human_seconds

__all__ = ["html", "png", "terminal", "write_plan_report"]

_COLUMNS, _ROWS, _LEFT = 66, 17, 10


def write_plan_report(plan: Plan, out: Path) -> list[Path]:
    """Writes plan.html, plan.json and, where matplotlib is installed, plan.png.

    Args:
        plan: what to show.
        out: folder to write to; made if it is not there.

    Returns:
        The files written, the page first.
    """
    out.mkdir(parents=True, exist_ok=True)
    page, drawn, value = out / "plan.html", out / "plan.png", out / "plan.json"
    page.write_text(html(plan), encoding="utf-8")
    plan.save(value)
    try:
        png(plan, drawn)
    except MissingExtra:
        return [page, value]
    return [page, drawn, value]


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
    return [f"{' ' * _LEFT} └{''.join(rule)}", f"{' ' * _LEFT}  {''.join(names)}".rstrip(), f"{'time':>{_LEFT + 2 + _COLUMNS}}"]


def _legend(s: Scatter, letters: list[str]) -> list[str]:
    lines = [f"  ◆ {s.choice.words}  (chosen)"]
    if s.front:
        n = len(s.front)
        lines.append(f"  o {n} configuration{'s' if n != 1 else ''} of functions that no other beats in both time and cost")
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
    """The picture of the page by itself.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    c = plan.choice
    below = f"{functions(c)}  ·  {human_seconds(c.predicted.seconds)}, {usd(c.predicted.cost_usd)}"
    write_png(path, plan.profile.workload or "plan", below, [[("Time and cost", picture(plan))]])
