"""Progress of a training run for Python programs: in a notebook that of all runs (`runs.notebook`), elsewhere lines.

A line for each number that the program logs, and at least one every `EVERY_S` seconds: what a log of a job without a terminal
shows. The command line writes these lines, too (`cli.progress`). No further package is needed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping

from ephemeron.events import Evaluated, Event, Measured, Note, Progress, RunEnded, RunStarted
from ephemeron.prices import Prices
from ephemeron.runs.cost import CostMeter, latest_metrics
from ephemeron.runs.notebook import in_notebook, on_event_in_notebook
from ephemeron.training.driver.step_metrics import StepMerger
from ephemeron.units import human_count, human_metric, human_seconds, human_usd

EVERY_S = 30.0
"""Longest time between two lines of a run that does iterations."""


def shown_progress(prices: Prices) -> Callable[[Event], None]:
    """Shows the progress of a run where a cell of a notebook runs, and elsewhere as lines on standard error.

    Args:
        prices: for the cost so far.
    """
    return on_event_in_notebook(prices) if in_notebook() else PrintedProgress(prices).on_event


def say(text: str) -> None:
    """Prints a line on standard error, at once."""
    print(text, file=sys.stderr, flush=True)


class ProgressLines:
    """Lines that say where a run is.

    A metric that the iterations before did not report has a line, such as one that a script logs now and then.

    Args:
        meter: of the run, fed with an event before `of` is called with it.
        clock: seconds.
    """

    def __init__(self, meter: CostMeter, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._meter, self._clock, self._merger = meter, clock, StepMerger()
        self._said_at = clock()
        self._known: Mapping[str, float] = {}
        """Metrics of the last iteration."""
        self._latest: dict[str, float] = {}

    def of(self, event: Event, *, paced: bool) -> str:
        """The line that an event calls for; empty: none.

        Args:
            paced: whether there is to be one every `EVERY_S` seconds, too.
        """
        row, now = self._merger.feed(event), self._clock()
        if row is not None and row.split == "train":
            named = {name: value for name, value in row.metrics.items() if name != "loss"}
            new = named.keys() - self._known.keys()
            self._known = named
            self._latest |= named
            if new:
                self._said_at = now
                return self._line(row.step, event.t, row.metrics)
        if isinstance(event, (Evaluated, Measured)):
            self._said_at = now  # those who show lines show it
        if not paced or not isinstance(event, Progress) or now - self._said_at < EVERY_S:
            return ""
        self._said_at = now
        return self._line(self._meter.finished(), event.t, {"loss": self._meter.loss, **self._latest})

    def _line(self, done: int, t: float, metrics: Mapping[str, float]) -> str:
        shown = "".join(f"{name} {human_metric(value)}  " for name, value in metrics.items())
        return f"iteration {done}/{self._meter.members.iterations}  {shown}{human_seconds(t)}  {human_usd(self._meter.cost_usd(t))}"


class PrintedProgress:
    """Lines for a run: its start, `ProgressLines`, evaluations, notes and its end.

    Args:
        prices: for the cost so far.
        say: takes a line.
        clock: seconds.
    """

    def __init__(self, prices: Prices, say: Callable[[str], None] = say, clock: Callable[[], float] = time.monotonic) -> None:
        self._meter, self._say = CostMeter(prices), say
        self._lines = ProgressLines(self._meter, clock=clock)
        self._evaluated, self._merges = 0, False
        self._said: set[str] = set()

    def on_event(self, event: Event) -> None:
        """Takes one event into account."""
        self._meter.feed(event)
        match event:
            case RunStarted():
                self._merges = event.merges_evaluations
                functions = human_count(event.workers, "function")
                self._say(f"run {event.run_id} on {event.platform}: {functions}, {human_count(event.iterations, 'iteration')}")
                for note in event.notes:
                    self._once(f"note: {note}")
            case Note():
                self._once(f"{event.level}: {event.text}")
            case Evaluated() if not self._merges:
                self._evaluation(event)
            case Measured():
                self._evaluation(event)
            case RunEnded():
                done = human_count(self._meter.finished(), "iteration")
                self._say(f"{event.status} after {human_seconds(event.t)}, {done}: {human_usd(self._meter.cost_usd(event.t))}")
        if line := self._lines.of(event, paced=True):
            self._say(line)

    def _once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)

    def _evaluation(self, event: Evaluated | Measured) -> None:
        if event.iteration <= self._evaluated or not self._meter.is_evaluated(event.iteration):
            return
        found = latest_metrics(self._meter)
        known = "".join(
            f"{'test loss' if name == 'loss' else name} {human_metric(value)}  " for name, value in found.items() if value is not None
        )
        if known:
            self._evaluated = event.iteration
            self._say(f"epoch {event.epoch}  iteration {event.iteration}  {known}{human_seconds(event.t)}")
