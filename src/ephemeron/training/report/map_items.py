"""Items of a durable map, as its client has told them: what pages, the dashboard and `report --json` show of them.

The table of results has all items; a run has its counts, its slowest items and the first of those that have failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from ephemeron.config.typed import build
from ephemeron.errors import JobError
from ephemeron.rendering.page import card, table
from ephemeron.runs.folders import PROGRESS_FILE, RESULT_FILE, RunFolder
from ephemeron.training.report.headline import usd
from ephemeron.units import human_count, human_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowItem:
    """One of the slowest items."""

    key: str
    seconds: float
    cost_usd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedItem:
    """An item that has failed."""

    key: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MapItems:
    """Items of a map."""

    table: str
    """Place of the results."""
    items: int
    recorded: int
    """Before it began."""
    computed: int = 0
    """By it, failures included."""
    items_per_s: float = 0.0
    item_usd: float | None = None
    """Mean of an item that it has computed, of its seconds at list prices; None: there is none."""
    slowest: tuple[SlowItem, ...] = ()
    failed: tuple[FailedItem, ...] = ()
    """The first of them."""
    failures: int = 0
    """All of them."""
    estimate: str = ""


def read_map_items(folder: RunFolder) -> MapItems | None:
    """What the client of a map has told last; None: the run is none, or its client has told nothing yet."""
    for name in (RESULT_FILE, PROGRESS_FILE):
        details = (folder.read(name) or {}).get("details")
        if isinstance(details, Mapping) and details:
            try:
                return build(MapItems, details, where=name)
            except JobError:  # of another release
                return None
    return None


def tiles(found: MapItems) -> list[tuple[str, str, str]]:
    """Headline figures."""
    done = f"{human_count(found.computed, 'item', grouped=True)} computed"
    before = f", {found.recorded:,} recorded before" if found.recorded else ""
    return [
        ("Items", f"{found.items:,}", done + before),
        ("Throughput", f"{found.items_per_s:,.3g} per second", found.estimate),
        ("Cost per item", "–" if found.item_usd is None else usd(found.item_usd), "its seconds, at list prices"),
        ("Failed items", f"{found.failures:,}", "--retry-failed computes them again" if found.failures else ""),
    ]


def cards(found: MapItems) -> list[Markup]:
    """Failed items and the slowest ones."""
    made: list[Markup] = []
    if found.failed:
        left = found.failures - len(found.failed)
        words = f"{left:,} more are in {found.table}." if left > 0 else f"Their tracebacks are in {found.table}."
        made.append(
            card("Failed items", table(["key", "error"], [[one.key, one.error] for one in found.failed], words=2, style="keyed"), words)
        )
    if found.slowest:
        rows: list[list[Any]] = [[one.key, human_seconds(one.seconds), usd(one.cost_usd)] for one in found.slowest]
        made.append(card("Slowest items", table(["key", "took", "cost"], rows, style="keyed"), f"All items are in {found.table}."))
    return made
