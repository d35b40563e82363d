"""A run's report as one picture, for slides, papers and terminals that cannot show a page: the pictures of the page."""

from __future__ import annotations

from pathlib import Path

from ephemeron.rendering import png
from ephemeron.training.report import charts
from ephemeron.training.report.headline import Headline, Result
from ephemeron.training.report.run_summary import RunSummary
from ephemeron.training.report.timeline import timeline


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
