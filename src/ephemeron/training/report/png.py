"""The report as one picture of four panels, for slides, papers and terminals that cannot show a page."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ephemeron.errors import MissingExtra
from ephemeron.rendering.palette import BAD, LINE_COLOURS, PHASE_COLOURS
from ephemeron.rendering.svg import time_ticks
from ephemeron.training.report.charts import accuracy_axis, loss_axis, test_points
from ephemeron.training.report.headline import Headline, Result, compact, usd
from ephemeron.training.report.lanes import SHOWN_FIRST, STACKED_LANES, Lane, cells
from ephemeron.training.report.run_summary import RunSummary
from ephemeron.units import human_bytes, human_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE, _ORANGE, _GREEN = LINE_COLOURS["blue"], LINE_COLOURS["orange"], LINE_COLOURS["green"]
_AMBER, _GREY = LINE_COLOURS["amber"], LINE_COLOURS["grey"]
_INK, _SOFT = "#1b2027", "#5d6673"


def write_png(story: RunSummary, result: Result | None, path: Path) -> None:
    """Learning, timeline, cost and traffic in one figure.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as e:
        raise MissingExtra("matplotlib", "report") from e
    figures = Headline.of(story, result)
    figure = Figure(figsize=(13, 8.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    _head(figure, figures)
    _learning(axes[0, 0], story)
    _timeline(axes[0, 1], story)
    _cost(axes[1, 0], story, figures)
    _traffic(axes[1, 1], story)
    figure.savefig(path, format="png")


def _head(figure: Figure, figures: Headline) -> None:
    name = f"{figures.job or 'run'}  ·  {figures.run_id}  ·  {figures.status}"
    figure.suptitle(
        f"{_plain(name)}\n{_plain(figures.summary)}", fontsize=12, color=_INK, x=0.012, ha="left", linespacing=1.6
    )


def _plain(words: str) -> str:
    """matplotlib would take a pair of dollar signs for mathematics."""
    return words.replace("$", r"\$")


def _panel(ax: Axes, title: str) -> None:
    ax.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=_INK)
    ax.tick_params(labelsize=8.5, colors=_SOFT)
    for name, spine in ax.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(_SOFT)
    ax.grid(axis="y", color="#eceff2")
    ax.set_axisbelow(True)


def _over_time(ax: Axes, story: RunSummary) -> None:
    ax.set_xlim(0, story.seconds or 1)
    ticks = time_ticks(0, story.seconds or 1, 6)
    ax.set_xticks([t for t, _ in ticks], [name for _, name in ticks])
    ax.set_xlabel("time since launch", fontsize=8.5, color=_SOFT)


def _legend(ax: Axes, place: Literal["upper left", "center right"]) -> None:
    ax.legend(fontsize=8, loc=place, labelcolor=_INK, facecolor="white", framealpha=0.85, edgecolor="none")


def _empty(ax: Axes, words: str) -> None:
    ax.text(0.5, 0.5, words, transform=ax.transAxes, ha="center", color=_SOFT, fontsize=9.5)
    ax.set_xticks([])
    ax.set_yticks([])


def _learning(ax: Axes, story: RunSummary) -> None:
    _panel(ax, "Learning")
    told = story.learning
    loss, accuracy = test_points(told)
    values = [y for _, y in (*told.loss, *loss) if math.isfinite(y)]
    if not values:
        _empty(ax, "no iteration was finished with a finite loss")
        return
    faint = 0.35 if told.smooth else 1.0
    ax.plot(*_xy(told.loss), color=_BLUE, lw=0.8 if told.smooth else 1.5, alpha=faint, label="training loss")
    if told.smooth:
        ax.plot(*_xy(told.smooth), color=_BLUE, lw=1.6, label=f"mean of {told.window} iterations")
    axis = loss_axis(values)
    ax.set_yscale("log" if axis.log else "linear")
    if not axis.log:
        ax.set_ylim(axis.lo, axis.hi)
    ax.set_xlabel("iteration", fontsize=8.5, color=_SOFT)
    ax.set_ylabel(axis.title, fontsize=8.5, color=_SOFT)
    if told.evaluations:
        ax.plot(*_xy(loss), "--o", ms=3, lw=1.2, color=_ORANGE, label="test loss")
    known = [y for _, y in accuracy if math.isfinite(y)]
    if known:
        right = ax.twinx()
        right.plot(*_xy(accuracy), "-o", ms=3, lw=1.4, color=_GREEN)
        ax.plot([], [], "-o", ms=3, color=_GREEN, label="test accuracy (right)")
        right.set_ylim(accuracy_axis(known).lo, 1.0)
        right.tick_params(labelsize=8.5, colors=_SOFT)
        right.spines[:].set_visible(False)
    _legend(ax, "center right")


def _timeline(ax: Axes, story: RunSummary) -> None:
    merged = f" (phases merged within {human_seconds(story.column_s)})" if story.merged else ""
    _panel(ax, "What each function did" + merged)
    ax.grid(False)
    if not story.lanes:
        _empty(ax, "no function has been called")
        return
    place = {lane.rank: i for i, lane in enumerate(story.lanes)}
    _lifetimes(ax, story, place)
    for lane in story.lanes:
        _lane(ax, lane, place[lane.rank], stacked=not story.merged or len(place) <= STACKED_LANES)
    _marks(ax, story, place)
    seen = {s.phase for lane in story.lanes for s in lane.segments}
    seen |= {p for lane in story.lanes for c in lane.columns for p in c.seconds}
    for phase in SHOWN_FIRST:
        if phase in seen:
            ax.broken_barh([], (0, 0), color=PHASE_COLOURS[phase], label=phase)
    _over_time(ax, story)
    step = max(1, len(place) // 16)
    shown = list(place.items())[::step]
    ax.set_yticks([y for _, y in shown], [f"rank {rank}" for rank, _ in shown])
    ax.set_ylim(len(place) - 0.4, -0.6)
    ax.legend(fontsize=8, frameon=False, ncols=6, loc="upper left", bbox_to_anchor=(-0.02, -0.13), labelcolor=_INK,
              columnspacing=1.2, handlelength=1.2)  # fmt: skip


def _lifetimes(ax: Axes, story: RunSummary, place: dict[int, int]) -> None:
    """A pale ground while the code runs, and a line under each invocation; in low lanes only under the bad ones."""
    for rank, y in place.items():
        alive = [(r.start, r.end - r.start) for r in story.invocations if r.rank == rank]
        ax.broken_barh(alive, (y - 0.38, 0.76), color="#f0f2f4", lw=0)
    rows = [r for r in story.invocations if len(place) <= STACKED_LANES or not r.well]
    colours = [_SOFT if r.well else BAD for r in rows]
    under = [place[r.rank] + 0.44 for r in rows]
    ax.hlines(under, [r.invoked for r in rows], [r.end for r in rows], colors=colours, lw=0.9)


def _lane(ax: Axes, lane: Lane, y: float, *, stacked: bool) -> None:
    segments = cells(lane.columns) if not stacked else lane.segments
    for phase in SHOWN_FIRST:
        bars = [(s.start, s.end - s.start) for s in segments if s.phase == phase]
        if bars:
            ax.broken_barh(bars, (y - 0.38, 0.76), color=PHASE_COLOURS[phase], lw=0)
    if lane.columns and stacked:
        _columns(ax, lane, y)


def _columns(ax: Axes, lane: Lane, y: float) -> None:
    """Shares stacked from below; the vertical axis points down."""
    from matplotlib.collections import PolyCollection

    floor = [y + 0.38] * len(lane.columns)
    for phase in SHOWN_FIRST:
        boxes = []
        for i, c in enumerate(lane.columns):
            top = floor[i] - 0.76 * c.seconds.get(phase, 0.0) / (c.end - c.start)
            boxes.append([(c.start, floor[i]), (c.end, floor[i]), (c.end, top), (c.start, top)])
            floor[i] = top
        ax.add_collection(PolyCollection(boxes, facecolors=PHASE_COLOURS[phase], linewidths=0, antialiaseds=False))


def _marks(ax: Axes, story: RunSummary, place: dict[int, int]) -> None:
    kinds = {"relay": ("o", "white", _INK), "replacement": ("D", _INK, "white"), "resume": (">", _INK, "white")}
    for kind, (shape, fill, edge) in kinds.items():
        at = [(r.invoked, place[r.rank] + 0.44) for r in story.invocations if r.reason == kind]
        if at:
            ax.plot(*_xy(at), shape, ms=5, mfc=fill, mec=edge, mew=0.9, ls="", label=kind, clip_on=False)
    bad = [(r.end, place[r.rank]) for r in story.invocations if not r.well and r.status != "cancelled"]
    bad += [(f.t, place[f.rank]) for f in story.faults if f.rank in place]
    if bad:
        ax.plot(*_xy(bad), "x", ms=6, mec=BAD, mew=1.8, ls="", label="fault or bad end", clip_on=False)


def _xy(points: object) -> tuple[list[float], list[float]]:
    pairs = list(points)  # type: ignore[call-overload]
    return [x for x, _ in pairs], [y for _, y in pairs]


def _cost(ax: Axes, story: RunSummary, figures: Headline) -> None:
    _panel(ax, "Cost over time")
    spent = story.spending
    if not spent.total_usd:
        _empty(ax, "nothing was paid for")
        return
    names = {"compute": "compute_usd", "requests": "requests_usd", "calls": "calls_usd"}
    ax.stackplot(spent.times, *(spent.series[n] for n in names.values()), labels=list(names),
                 colors=[_GREEN, _AMBER, _GREY], alpha=0.55, lw=0)  # fmt: skip
    ax.plot(spent.times, spent.series["total_usd"], color=_INK, lw=1.2, label="total")
    if figures.budget_usd and figures.budget_usd <= 20 * spent.total_usd:
        ax.axhline(figures.budget_usd, color=BAD, ls="--", lw=1.1, label="budget")
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter(lambda v, _: _plain(usd(v)))
    _over_time(ax, story)
    _legend(ax, "upper left")


def _traffic(ax: Axes, story: RunSummary) -> None:
    _panel(ax, "Traffic through the channel")
    spent = story.spending
    if not any(spent.series.get("gets", ())) and not any(spent.series.get("puts", ())):
        _empty(ax, "nothing was moved")
        return
    ax.plot(spent.times, spent.series["bytes_down"], color=_BLUE, lw=1.5, label="bytes down")
    ax.plot(spent.times, spent.series["bytes_up"], color=_AMBER, lw=1.5, label="bytes up")
    right = ax.twinx()
    for name, colour in (("puts", _AMBER), ("gets", _BLUE), ("polls", _GREY)):
        right.plot(spent.times, spent.series[name], color=colour, lw=1.0, ls=":")
        ax.plot([], [], color=colour, lw=1.0, ls=":", label=f"{name} (right)")
    right.set_ylim(bottom=0)
    right.yaxis.set_major_formatter(lambda v, _: compact(v))
    right.tick_params(labelsize=8.5, colors=_SOFT)
    right.spines[:].set_visible(False)
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter(lambda v, _: human_bytes(v))
    _over_time(ax, story)
    _legend(ax, "upper left")
