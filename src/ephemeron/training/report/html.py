"""The report as one HTML file that needs nothing else, no server, no network, no script to be readable; and its pictures as one PNG.

It is opened from a disk, mailed, and printed years later, so style, script and pictures are all inside, and its
own security policy forbids it to fetch anything. Size: some 50 kB, up to 1.5 MB for the longest timelines.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from markupsafe import Markup

from ephemeron.rendering import png
from ephemeron.rendering.page import card, document, header, items, side_by_side, tiled
from ephemeron.training.report import charts, map_items, tables
from ephemeron.training.report.headline import Headline, Result, cost_mix, learning_note, moved, usd
from ephemeron.training.report.map_items import MapItems
from ephemeron.training.report.prediction import CAPTION, Comparison, render_table
from ephemeron.training.report.run_summary import RunSummary
from ephemeron.training.report.timeline import caption, timeline
from ephemeron.units import human_bytes, human_count, human_seconds


def render_html(
    story: RunSummary,
    result: Result | None,
    comparison: Comparison | None = None,
    origin: Mapping[str, str] | None = None,
    mapped: MapItems | None = None,
) -> str:
    """The whole page.

    Args:
        story: what happened.
        result: the run's `result.json`, if there is one; may be partial.
        comparison: the plan against it, if the run had one.
        origin: command line and commit of the run, as far as they are known.
        mapped: items of a durable map; None: the run is none.
    """
    figures = Headline.of(story, result)
    parts = _parts(story, figures, comparison, origin or {}, mapped)
    if tables.exchanging(story):
        parts[3:3] = _regions(story, result)
    return document(f"{figures.job or 'run'} · {figures.run_id}", parts, script=True)


def _regions(story: RunSummary, result: Result | None) -> list[Markup]:
    return [
        card("Regions", tables.region_table(story, result), tables.CAPTION),
        side_by_side(
            card("Iterations by region", tables.progress_chart(story)), card("Waiting for other regions", tables.waiting_chart(story))
        ),
    ]


def _parts(
    story: RunSummary, figures: Headline, comparison: Comparison | None, origin: Mapping[str, str], mapped: MapItems | None
) -> list[Markup]:
    drawn = charts.learning_chart(story)
    note = learning_note(story)
    parts = [
        _header(story, figures),
        _tiles(story, figures, mapped),
        *([] if mapped is None else map_items.cards(mapped)),
        card("What each function did", timeline(story, figures), caption(story) if story.lanes else ""),
        side_by_side(
            *([card("Learning", drawn, note)] if figures.trains else []),
            card("Cost over time", charts.cost_chart(story, figures)),
            card("Bytes through the channel", charts.bytes_chart(story)),
            card("Requests to the channel", charts.requests_chart(story)),
        ),
    ]
    drawn_metrics = [card(name, picture) for name, picture in charts.metric_charts(story)]
    if drawn_metrics:
        parts.append(side_by_side(*drawn_metrics))
    if comparison:
        words = " ".join((*comparison.notes, CAPTION))
        parts.append(card("Predicted and measured", render_table(comparison), words))
    if figures.others:
        parts.append(card("Evaluations", tables.evaluation_table(story)))
    timed = any(any(lane.totals.values()) for lane in story.lanes)
    overlap = "Phases may overlap, so a row can add up to more than the time alive. Shares are of the time alive."
    parts += [
        card("Time by phase", tables.phase_table(story), overlap if timed else ""),
        card("Bill", tables.bill_table(story, figures)),
        card("Invocations", tables.invocation_table(story)),
    ]
    said = tables.said_table(story)
    if said:
        parts.append(card("Notes and faults", said))
    known = {name: value for name, value in origin.items() if value}
    if known:
        parts.append(card("Origin", tables.settings_table(known.items())))
    parts.append(card("Configuration", tables.configuration_table(figures)))
    if story.environment:
        parts.append(card("Environment", items(story.environment)))
    return parts


def _header(story: RunSummary, figures: Headline) -> Markup:
    run = story.run
    on = f" · {run.platform}" if run and run.platform else ""
    when = f" · {datetime.fromtimestamp(run.wall_time, UTC):%Y-%m-%d %H:%M} UTC" if run and run.wall_time else ""
    known = figures.status in ("finished", "stopped", "failed", "running")
    caption = "No end is recorded: the run goes on, or its client ended before it."
    return header(
        "ephemeron run report",
        figures.job or "run",
        figures.summary,
        pill=figures.status,
        pill_style=figures.status if known else "other",
        code=figures.run_id,
        place=on + when,
        caption=caption if figures.status == "running" else "",
        causes=story.causes,
    )


def _tiles(story: RunSummary, figures: Headline, mapped: MapItems | None) -> Markup:
    n, budget, t = figures.iterations, figures.budget_usd, story.spending.traffic
    again = figures.invocations - len(story.lanes)
    calls = f"{human_count(figures.invocations, 'invocation', grouped=True)}" + (f", {again:,} beyond the first" if again > 0 else "")
    mix = cost_mix(story)
    tiles = [
        ("Time", human_seconds(figures.seconds), f"{human_seconds(figures.seconds / n)} per iteration" if n else ""),
        ("Cost", usd(figures.cost_usd), f"{figures.cost_usd / budget:.0%} of the budget" if budget else mix),
        *(_training_tiles(figures) if mapped is None else map_items.tiles(mapped)),
        ("Functions", f"{figures.workers}", f"{figures.quotas}; {calls}") if figures.regions else ("Functions", figures.quotas, calls),
        ("Billed", f"{figures.gb_seconds:,.2f} GB-s", mix if budget else ""),
        ("Moved", human_bytes(t.bytes_up + t.bytes_down + t.direct_bytes_sent), moved(story)),
    ]
    return tiled(tiles)


def _training_tiles(figures: Headline) -> list[tuple[str, str, str]]:
    planned = f"of {figures.planned_iterations:,} planned" if figures.planned_iterations else ""
    return [
        _test_figure(figures),
        ("Training loss", _or_dash(figures.train_loss, ".4g"), _told("last iteration", figures.train_loss)),
        ("Iterations", f"{figures.iterations:,}", planned),
    ]


def _test_figure(figures: Headline) -> tuple[str, str, str]:
    """The accuracy where there is one, else the program's first metric, else the loss."""
    if figures.accuracy is not None:
        return "Accuracy", f"{figures.accuracy:.3f}", _told("test loss {:.4g}", figures.test_loss)
    if figures.others:
        name, value = figures.others[0]
        return name.replace("_", " ").capitalize(), f"{value:.4g}", _told("test loss {:.4g}", figures.test_loss)
    return "Test loss", _or_dash(figures.test_loss, ".4g"), _told("last evaluation", figures.test_loss)


def _told(words: str, value: float | None) -> str:
    return "" if value is None else words.format(value)


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def write_png(story: RunSummary, result: Result | None, path: Path) -> None:
    """Writes timeline, learning, cost and traffic.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    figures = Headline.of(story, result)
    learning = [("Learning", charts.learning_chart(story))] if figures.trains else []
    png.write_png(
        path,
        f"{figures.job or 'run'}  ·  {figures.run_id}  ·  {figures.status}",
        figures.summary,
        [
            [("What each function did", timeline(story, figures))],
            [*learning, ("Cost over time", charts.cost_chart(story, figures))],
            [("Bytes through the channel", charts.bytes_chart(story)), ("Requests to the channel", charts.requests_chart(story))],
        ],
    )
