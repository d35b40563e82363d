"""Progress of a run in a notebook: one output of the cell, which is updated in place. No further package is needed."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from html import escape
from typing import Any

from ephemeron.events import Event, Note, Progress, RunEnded, RunStarted
from ephemeron.prices import Prices
from ephemeron.runs.cost import CostMeter, latest_metrics
from ephemeron.units import human_metric, human_seconds, human_usd

_EVERY_S = 0.25
"""Shortest time between two updates."""


def on_event_in_notebook(prices: Prices) -> Callable[[Event], None]:
    """Shows the progress of a run where a cell of a notebook runs; nothing elsewhere.

    Args:
        prices: for the cost so far.
    """
    if not in_notebook():
        return lambda event: None
    display = importlib.import_module("IPython.display").display
    handle = display(_Output("starting", "starting"), display_id=True)
    return CellProgress(prices, handle).on_event


def in_notebook() -> bool:
    """Whether a cell of a notebook runs."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and hasattr(shell, "kernel")


class CellProgress:
    """An output that follows a run.

    Args:
        prices: for the cost so far.
        handle: has `update(object)`, as the handle that IPython's `display` returns.
    """

    def __init__(self, prices: Prices, handle: Any) -> None:
        self._ledger, self._handle = CostMeter(prices), handle
        self._started: RunStarted | None = None
        self._notes: list[str] = []
        self._status, self._shown_s = "runs", 0.0

    def on_event(self, event: Event) -> None:
        """Takes one event into account."""
        self._ledger.feed(event)
        if isinstance(event, RunStarted):
            self._started, self._status = event, "runs"
            self._notes = list(dict.fromkeys([*self._notes, *event.notes]))
        elif isinstance(event, Note) and event.text not in self._notes:
            self._notes.append(event.text)
        elif isinstance(event, RunEnded):
            self._status = event.status
        now = time.monotonic()
        if not isinstance(event, Progress) or now - self._shown_s >= _EVERY_S:
            self._shown_s = now
            self._handle.update(self._output(event.t))

    def _output(self, t: float) -> _Output:
        run, ledger = self._started, self._ledger
        if run is None:
            return _Output("starting", "starting")
        done = ledger.finished()
        values = {
            **({"iteration": f"{done} of {ledger.members.iterations}"} if ledger.members.iterations else {}),
            "functions": str(ledger.members.workers),
            **({"loss": human_metric(ledger.loss)} if ledger.losses else {}),
            **{f"test {name}": human_metric(value) for name, value in latest_metrics(ledger).items() if value is not None},
            "time": human_seconds(t),
            "cost": human_usd(ledger.cost_usd(t)),
        }
        head = f"run {run.run_id} on {run.platform}: {self._status}"
        text = "\n".join([f"{head}; " + ", ".join(f"{name} {value}" for name, value in values.items()), *self._notes])
        cells = "".join(f"<th>{escape(name)}</th><td>{escape(value)}</td>" for name, value in values.items())
        notes = "".join(f"<div>{escape(note)}</div>" for note in self._notes)
        of = ledger.members.iterations
        bar = f'<progress value="{done}" max="{of}" style="width: 100%"></progress>' if of else ""
        return _Output(text, f"<div>{escape(head)}</div>{bar}<table><tr>{cells}</tr></table>{notes}")


class _Output:
    """Text and HTML of an output."""

    def __init__(self, text: str, html: str) -> None:
        self._text, self._html = text, html

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        return self._html
