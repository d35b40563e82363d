"""The four line charts of the page: learning, cost, bytes and requests."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

from markupsafe import Markup

from ephemeron.rendering.page import legend
from ephemeron.rendering.svg import Scale, Tick, el, joined, log_ticks, nothing, path, text, ticks, time_ticks, whole_ticks
from ephemeron.training.report.headline import Headline, compact, usd
from ephemeron.training.report.metrics import EvaluationPoint, Learning, Points
from ephemeron.training.report.run_summary import RunSummary
from ephemeron.units import human_bytes, human_count

WIDTH, HEIGHT = 560, 270
METRICS = 12
"""Metrics that have a chart; a page with more is slow to read."""
LEFT, RIGHT, TOP, BOTTOM = 62, 54, 24, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartLine:
    """One line of a chart."""

    label: str
    points: Points
    colour: str
    """A name in `palette.LINE_COLOURS`."""
    marks: tuple[str, ...] = ()
    """Tooltips of the points; points are drawn as dots when given."""
    faint: bool = False
    dashed: bool = False
    right: bool = False
    """On the right axis."""
    fill: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A vertical axis."""

    title: str
    lo: float
    hi: float
    ticks: list[Tick]
    log: bool = False


def learning_chart(story: RunSummary) -> Markup:
    """Loss per iteration, and the test set per epoch."""
    told = story.learning
    lines: list[ChartLine] = []
    if story.learning_of:
        for (name, each), colour in zip(story.learning_of, cycle(("blue", "amber", "green", "grey")), strict=False):
            loss, accuracy = test_points(each)
            said = tuple(map(_said, each.evaluations))
            lines.append(ChartLine(label=f"{name}: training loss", points=each.smooth or each.loss, colour=colour, faint=True))
            lines.append(ChartLine(label=f"{name}: test loss", points=loss, colour=colour, marks=said))
            lines.append(
                ChartLine(label=f"{name}: test accuracy (right)", points=accuracy, colour=colour, marks=said, right=True, dashed=True)
            )
    elif told.smooth:
        lines.append(ChartLine(label="training loss", points=told.loss, colour="blue", faint=True))
        lines.append(ChartLine(label=f"mean of {human_count(told.window, 'iteration')}", points=told.smooth, colour="blue"))
    elif told.loss:
        lines.append(ChartLine(label="training loss", points=told.loss, colour="blue"))
    if told.evaluations and not story.learning_of:
        said = tuple(map(_said, told.evaluations))
        loss, accuracy = test_points(told)
        lines.append(ChartLine(label="test loss", points=loss, colour="orange", marks=said, dashed=True))
        lines.append(ChartLine(label="test accuracy (right)", points=accuracy, colour="green", marks=said, right=True))
    losses = [y for line in lines if not line.right for _, y in line.points if math.isfinite(y)]
    if not losses:
        return nothing("No iteration was finished with a finite loss, so there is none to show.")
    last = max(x for line in lines for x, _ in line.points)
    accuracies = [e.accuracy for e in told.evaluations if e.accuracy is not None]
    right = accuracy_axis(accuracies) if accuracies else None
    return chart(lines, whole_ticks(0, last, 6), (0.0, last or 1.0), "iteration", loss_axis(losses), right)


def metric_charts(story: RunSummary) -> list[tuple[str, Markup]]:
    """A chart for each metric that the program logs beside loss and accuracy, by name; at most `METRICS`."""
    names = dict.fromkeys(name.partition("/")[2] for name, _ in story.learning.curves)
    return [(name, _metric_chart(name, story.learning)) for name in list(names)[:METRICS]]


def _metric_chart(name: str, told: Learning) -> Markup:
    kinds = (("train", "of iterations", "blue"), ("evaluation", "of evaluations", "orange"))
    known = dict(told.curves)
    lines = [
        ChartLine(label=label, points=known[f"{split}/{name}"], colour=colour, dashed=split == "evaluation")
        for split, label, colour in kinds
        if f"{split}/{name}" in known
    ]
    values = [y for line in lines for _, y in line.points]
    lo, hi = min(values), max(values)
    margin = (hi - lo) * 0.05 or abs(hi) * 0.05 or 1.0
    lo, hi = lo - margin, hi + margin
    last = max(x for line in lines for x, _ in line.points)
    axis = Axis(title="", lo=lo, hi=hi, ticks=ticks(lo, hi, 5, "{:.4g}".format))
    return chart(lines, whole_ticks(0, last, 6), (0.0, last), "iteration", axis, None)


def test_points(told: Learning) -> tuple[Points, Points]:
    """Loss and accuracy of the test set by iteration, NaN where there is none."""
    loss = tuple((float(e.iteration), math.nan if e.loss is None else e.loss) for e in told.evaluations)
    return loss, tuple((float(e.iteration), math.nan if e.accuracy is None else e.accuracy) for e in told.evaluations)


def _said(e: EvaluationPoint) -> str:
    said = [f"{name} not finite" if value is None else f"{name} {value:.4g}" for name, value in e.metrics.items()]
    return f"epoch {e.epoch}: {', '.join(s for s in said if s != 'accuracy not finite')}"


def loss_axis(values: list[float]) -> Axis:
    """Logarithmic when the loss falls by more than two decades."""
    lo, hi = min(values), max(values)
    if lo > 0 and hi / lo > 100:
        return Axis(title="loss (log)", lo=lo, hi=hi, ticks=log_ticks(lo, hi), log=True)
    lo = min(0.0, lo)
    hi = hi * 1.04 or 1.0
    return Axis(title="loss", lo=lo, hi=hi, ticks=ticks(lo, hi, 5, "{:g}".format))


def accuracy_axis(values: list[float]) -> Axis:
    """From 0 to 1, unless all of it is so near 1 that the shape would be lost."""
    lo = 0.9 if min(values) >= 0.92 else 0.0
    return Axis(title="accuracy", lo=lo, hi=1.0, ticks=ticks(lo, 1.0, 5, "{:.2g}".format))


def cost_chart(story: RunSummary, figures: Headline) -> Markup:
    """Cost over time, and the budget."""
    spent, top = story.spending, story.spending.total_usd
    lines = [ChartLine(label="total", points=spent.points("total_usd"), colour="blue", fill=True)]
    parts = (("compute (GB-seconds)", "compute_usd", "green"), ("requests", "requests_usd", "orange"))
    for label, name, colour in (*parts, ("calls", "calls_usd", "grey")):
        lines.append(ChartLine(label=label, points=spent.points(name), colour=colour, dashed=name == "calls_usd"))
    budget = figures.budget_usd if figures.budget_usd and figures.budget_usd <= 20 * (top or 1) else None
    return _over_time(story, lines, "US dollars", max(top, budget or 0.0), usd, budget)


def bytes_chart(story: RunSummary) -> Markup:
    """Bytes through the channel: the store, and direct links where functions have them."""
    of = story.spending.points
    lines = [
        ChartLine(label="downloaded", points=of("bytes_down"), colour="blue"),
        ChartLine(label="uploaded", points=of("bytes_up"), colour="amber"),
        ChartLine(label="sent over direct links", points=of("direct_bytes_sent"), colour="green"),
        ChartLine(label="received over direct links", points=of("direct_bytes_received"), colour="grey", dashed=True),
    ]
    return _over_time(story, lines, "bytes", _top(lines), human_bytes)


def requests_chart(story: RunSummary) -> Markup:
    """Requests to the channel."""
    of = story.spending.points
    lines = [
        ChartLine(label="gets", points=of("gets"), colour="blue"),
        ChartLine(label="polls that found nothing", points=of("polls"), colour="grey", dashed=True),
        ChartLine(label="puts", points=of("puts"), colour="amber"),
        ChartLine(label="deletes", points=of("deletes"), colour="green"),
    ]
    return _over_time(story, lines, "requests", _top(lines), compact)


def _top(lines: list[ChartLine]) -> float:
    return max((y for line in lines for _, y in line.points), default=0.0)


def _over_time(
    story: RunSummary, lines: list[ChartLine], title: str, top: float, label: Callable[[float], str], rule: float | None = None
) -> Markup:
    if not top or not story.seconds:
        return nothing("Nothing to show yet.")
    axis = Axis(title=title, lo=0.0, hi=top * 1.04, ticks=ticks(0.0, top * 1.04, 5, label))
    across = time_ticks(0, story.seconds, 6)
    return chart(lines, across, (0.0, story.seconds), "time since launch", axis, None, rule)


def chart(
    lines: list[ChartLine],
    across: list[Tick],
    reach: tuple[float, float],
    x_title: str,
    left: Axis,
    right: Axis | None,
    rule: float | None = None,
) -> Markup:
    """A chart with its legend above it."""
    x = Scale(*reach, LEFT, WIDTH - RIGHT)
    ys = {False: _scale(left), True: _scale(right or left)}
    body = [_grid(x, across, ys[False], left), _right(ys[True], right) if right else Markup("")]
    lines = [line for line in lines if any(value and math.isfinite(value) for _, value in line.points)]
    body += [_line(line, x, ys[line.right]) for line in lines]
    if rule is not None:
        y = ys[False](rule)
        body.append(el("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="budget"))
        body.append(text(LEFT + 6, y + (13 if y < TOP + 14 else -5), f"budget {usd(rule)}", class_="bad"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    body.append(text(middle, HEIGHT - 5, x_title, class_="title", text_anchor="middle"))
    label = f"{left.title} by {x_title}"
    picture = el("svg", *body, viewBox=f"0 0 {WIDTH} {HEIGHT}", class_="chart", role="img", aria_label=label)
    return _legend(lines) + picture


def _scale(axis: Axis) -> Scale:
    return Scale(axis.lo, axis.hi, HEIGHT - BOTTOM, TOP, axis.log)


def _grid(x: Scale, across: list[Tick], y: Scale, axis: Axis) -> Markup:
    out = []
    for value, name in axis.ticks:
        at = y(value)
        out.append(el("line", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at, class_="grid"))
        out.append(text(LEFT - 7, at + 4, name, text_anchor="end"))
    for value, name in across:
        at = x(value)
        out.append(el("line", x1=at, x2=at, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM + 4, class_="axis"))
        out.append(text(at, HEIGHT - BOTTOM + 17, name, text_anchor="middle"))
    out.append(el("line", x1=LEFT, x2=WIDTH - RIGHT, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM, class_="axis"))
    out.append(text(LEFT - 7, TOP - 10, axis.title, class_="title", text_anchor="end"))
    return joined(out)


def _right(y: Scale, axis: Axis) -> Markup:
    names = [text(WIDTH - RIGHT + 7, y(v) + 4, name) for v, name in axis.ticks]
    return joined(names) + text(WIDTH - RIGHT - 12, TOP - 10, axis.title, class_="title")


def _line(line: ChartLine, x: Scale, y: Scale) -> Markup:
    style = f"line {line.colour}" + (" faint" if line.faint else "") + (" dashed" if line.dashed else "")
    data = path(line.points, x, y)
    out = Markup("")
    if line.fill:
        floor, first, last = y.a, x(line.points[0][0]), x(line.points[-1][0])
        out += el("path", d=f"{data}L{last:.1f} {floor:.1f}L{first:.1f} {floor:.1f}Z", class_=f"area {line.colour}")
    if len(line.points) > 1:
        out += el("path", d=data, class_=style)
    if line.marks or len(line.points) == 1:
        said = line.marks or (f"{line.label}: {line.points[0][1]:g}",)
        for (px, py), words in zip(line.points, said, strict=True):
            if math.isnan(py):
                continue
            dot = {"cx": x(px), "cy": y(py), "r": 3.2 if len(line.points) < 60 else 1.6}
            out += el("circle", el("title", words), class_=f"dot {line.colour}", **dot)
    return out


def _legend(lines: list[ChartLine]) -> Markup:
    keys = []
    for line in lines:
        key = el("line", x1=0, x2=22, y1=5, y2=5, class_=_key_style(line))
        swatch = el("svg", key, viewBox="0 0 22 10", width=22, height=10, aria_hidden="true")
        keys.append((swatch, line.label))
    return legend(keys)


def _key_style(line: ChartLine) -> str:
    return f"line {line.colour}" + (" faint" if line.faint else "") + (" dashed" if line.dashed else "")
