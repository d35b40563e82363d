"""Live progress of a run: bars on a terminal, plain lines elsewhere, all on standard error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ephemeron.cli.terminal import Part, make_console, text_of
from ephemeron.config.typed import plain
from ephemeron.events import (
    Ended,
    Evaluated,
    Event,
    FaultFired,
    GenerationStarted,
    GroupStarted,
    Invoked,
    Measured,
    Note,
    RegionAdded,
    RegionReplanned,
    RegionResized,
    RunStarted,
    Traffic,
)
from ephemeron.events import Progress as Iterated
from ephemeron.prices import Prices, load_prices
from ephemeron.runs.cost import CostMeter, GroupMeter, latest_metrics
from ephemeron.runs.summary import RunResult
from ephemeron.training.driver.failures import in_short
from ephemeron.training.driver.progress import ProgressLines
from ephemeron.training.driver.records import ResultSummary
from ephemeron.training.worker.recovery.fencing import attempt_text
from ephemeron.units import human_bytes, human_count, human_metric, human_seconds, human_usd

_BAD = ("lost", "timed_out", "out_of_memory")
"""Ends of functions that are shown at once. An error of the user's code ends the run, which reports it."""


class Display:
    """Shows a run's events as they come.

    Args:
        console: by default standard error.
        prices: for the cost so far; by default the built-in ones.
        after: time of the run, seconds; what happened until then counts, and is not shown.
    """

    def __init__(self, console: Console | None = None, prices: Prices | None = None, after: float = -1.0) -> None:
        self._after = after
        self.console = console or make_console(to_stderr=True)
        self.ledger = CostMeter(prices or load_prices("objects"))
        self._lines = ProgressLines(self.ledger)
        self.started: RunStarted | None = None
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TextColumn("{task.fields[info]}"),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
        )
        self._all: TaskID | None = None
        self._ranks: dict[int, TaskID] = {}
        self._shown_iteration = 0
        self._said: set[str] = set()

    def __enter__(self) -> Display:
        if self.console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.console.is_terminal:
            self._bars.stop()

    def on_event(self, event: Event) -> None:
        """Shows one event."""
        self.ledger.feed(event)
        if event.t <= self._after:
            self.started = event if isinstance(event, RunStarted) else self.started
            return
        handlers: dict[type[Event], Callable[[Any], None]] = {
            RunStarted: self._run_started,
            Iterated: self._iterated,
            Evaluated: self._evaluated,
            Measured: self._measured,
            Invoked: self._invoked,
            GenerationStarted: self._generation_started,
            RegionAdded: self._region_added,
            RegionReplanned: self._region_replanned,
            RegionResized: self._region_resized,
            Ended: self._ended,
            Note: self._note,
            FaultFired: self._fault,
        }
        show = handlers.get(type(event))
        if show is not None:
            show(event)
        if line := self._lines.of(event, paced=not self.console.is_terminal):
            self._say(line)

    def _say(self, *parts: Part) -> None:
        self.console.print(text_of(*parts), soft_wrap=True)

    def _run_started(self, e: RunStarted) -> None:
        again = self.started is not None
        self.started = e
        c = e.configuration
        how = f"{c.get('pattern')} with {human_count(e.aggregators, 'aggregator')}"
        if "shards" in c:
            how = f"{c.get('model')} in a sparse store of {human_count(int(c['shards']), 'shard')}"
        how = f", {how}, {c.get('sync')}, {human_count(e.iterations, 'iteration')}" if e.iterations else ""
        quota = ", ".join(f"{g.name} {g.workers} × {g.memory_mb} MB" for g in e.groups)
        functions = human_count(e.workers, "function") + (f" ({quota})" if quota else f" of {e.memory_mb} MB" if e.memory_mb else "")
        self._say((f"run {e.run_id}", "bold"), f"{' resumed' if again else ''} on {e.platform}{f': {functions}{how}' if e.workers else ''}")
        plan = c.get("regions_plan")
        for group in e.groups:
            self._say(f"  {started_line(group, e.samples)}", f" (plan {plan})" if plan else "")
        for note in e.notes:
            self._say("  ", ("note", "yellow"), f" {note}")
        if self.console.is_terminal and self._all is None and e.iterations:
            self._all = self._bars.add_task("all", total=e.iterations, info="")
            if e.workers <= 16:
                self._ranks = {
                    r: self._bars.add_task(
                        f"rank {r}", total=next((g.iterations for g in e.groups if g.has(r)), e.iterations), info="starting"
                    )
                    for r in range(e.workers)
                }

    def _generation_started(self, e: GenerationStarted) -> None:
        if self.started is None:
            return
        self._say(
            (human_seconds(e.t), "cyan"),
            f" from iteration {e.from_iteration} on: {human_count(e.workers, 'function')} of {e.memory_mb} MB, "
            f"{human_count(e.aggregators, 'aggregator')}, batches of {e.batch_size}",
        )
        if self._all is None:
            return
        self._bars.update(self._all, total=e.iterations)
        for rank, bar in self._ranks.items():
            self._bars.update(bar, total=e.iterations, visible=rank < e.workers)
        if self._ranks and e.workers <= 16:
            for rank in range(len(self._ranks), e.workers):
                self._ranks[rank] = self._bars.add_task(f"rank {rank}", total=e.iterations, info="starting")

    def _region_added(self, e: RegionAdded) -> None:
        g = e.group
        self._say(
            (human_seconds(e.t), "cyan"),
            f" region {g.name} is started with {human_count(g.workers, 'function')} of {g.memory_mb} MB on {g.platform}, and joins the others",
        )

    def _region_replanned(self, e: RegionReplanned) -> None:
        saved = 1 - e.usd_per_hour / e.usd_per_hour_before if e.usd_per_hour_before else 0.0
        cost = f"{saved:.1%} of cost saved" if saved >= 0 else f"{-saved:.1%} more cost"
        self._say(
            (human_seconds(e.t), "cyan"),
            f" region {e.region}: {e.iteration_s:.3g} s an iteration, asks for {human_count(e.wanted, 'function')} "
            f"in place of {e.workers} (all regions: {e.time_factor:.3f} × the time, {cost})",
        )

    def _region_resized(self, e: RegionResized) -> None:
        self._say(
            (human_seconds(e.t), "cyan"),
            f" region {e.region}: {human_count(e.workers, 'function')} of {e.memory_mb} MB from iteration {e.from_iteration} on, "
            f"batches of {e.batch_size}",
        )
        group = next((g.started for g in self.ledger.groups if g.started.name == e.region), None)
        if group is None or not self._ranks:
            return
        for own in range(max(group.workers, e.workers)):
            rank = group.rank(own)
            if rank in self._ranks:
                self._bars.update(self._ranks[rank], visible=own < e.workers)
            elif own < e.workers and len(self._ranks) < 16:
                self._ranks[rank] = self._bars.add_task(f"rank {rank}", total=group.iterations, info="starting")

    def _iterated(self, e: Iterated) -> None:
        if self.started is None or self._all is None:
            return
        slowest = self.ledger.finished()
        info = f"loss {human_metric(self.ledger.loss)}  {human_usd(self.ledger.cost_usd(e.t))}"
        self._bars.update(self._all, completed=slowest, info=info)
        if e.rank in self._ranks:
            self._bars.update(self._ranks[e.rank], completed=e.iteration + 1, info=f"loss {human_metric(e.loss)}")

    def _evaluated(self, e: Evaluated) -> None:
        if self.started is None or self.started.merges_evaluations or not self.ledger.is_evaluated(e.iteration):
            return
        self._show_metrics(e, latest_metrics(self.ledger))

    def _show_metrics(self, e: Evaluated | Measured, metrics: Mapping[str, float | None]) -> None:
        if self.started is None or e.iteration <= self._shown_iteration:
            return
        self._shown_iteration = e.iteration
        if any(value is not None for value in metrics.values()):
            self._say(
                f"epoch {e.epoch}/{self.started.epochs}  iteration {e.iteration}  loss {human_metric(self.ledger.loss)}  "
                f"{listed(metrics)}{human_seconds(e.t)}  {human_usd(self.ledger.cost_usd(e.t))}"
            )
            for group in self.ledger.groups:
                self._say(f"  {region_line(group, e.t)}")

    def _measured(self, e: Measured) -> None:
        self._show_metrics(e, e.metrics)
        if e.decision:
            self._say((human_seconds(e.t), "cyan"), f" the run ends after iteration {e.iteration}: {e.decision}")

    def _invoked(self, e: Invoked) -> None:
        if e.reason in ("replacement", "duplicate"):
            self._say((human_seconds(e.t), "yellow"), f" rank {e.rank}: attempt {attempt_text(e.attempt)} started as a {e.reason}")

    def _ended(self, e: Ended) -> None:
        if e.status in _BAD:
            status = e.status.replace("_", " ")
            self._say((human_seconds(e.t), "red"), f" rank {e.rank}, attempt {attempt_text(e.attempt)}: {status} {in_short(e.error)}")

    def _note(self, e: Note) -> None:
        if e.text in self._said:
            return  # a warning of every rank, or the cause of a failure that was noted already
        self._said.add(e.text)
        self._say((e.level, "red" if e.level == "error" else "yellow"), f" {e.text}")

    def _fault(self, e: FaultFired) -> None:
        self._say(("fault", "magenta"), f" {e.fault}")

    def conclude(self, result: RunResult) -> None:
        """Shows the result in a few lines."""
        s, run = result.summary, result.folder.run_id
        trained = s if isinstance(s, ResultSummary) else None
        colour = {"finished": "green", "stopped": "yellow"}.get(s.status, "red")
        simulated = "simulated " if s.platform == "simulated" else ""
        self._say(
            (s.status, f"bold {colour}"),
            f" after {simulated}{human_seconds(s.seconds)}, {human_count(trained.iterations, 'iteration') + ', ' if trained else ''}"
            f"{human_count(s.invocations, 'invocation')}: {human_usd(s.cost_usd)} at {s.prices} prices"
            + (tested(trained.metrics) if trained else ""),
        )
        if trained:
            self._show_traffic(trained.traffic)
            self._compared(result)
        for cause in result.causes:
            if cause not in self._said:
                self._say("  ", ("cause", "yellow" if s.status == "stopped" else "red"), f" {cause}")
        if result.causes and s.status == "failed" and s.platform != "simulated":
            self._say(f"  output of the functions with tracebacks: ephemeron logs {run}")
        if trained:
            self._say(f"  report: {result.folder.path / 'report.html'}")
            if s.status != "finished" and s.platform != "simulated":
                self._say(f"  continue with: ephemeron resume {run}")

    def _show_traffic(self, traffic: Traffic) -> None:
        direct = f"; {human_bytes(traffic.direct_bytes_sent)} sent over direct links" if traffic.direct_bytes else ""
        self._say(
            f"  {human_count(traffic.puts, 'put')}, {human_count(traffic.gets, 'get')}, {human_count(traffic.polls, 'poll')}; "
            f"{human_bytes(traffic.bytes_up)} up, {human_bytes(traffic.bytes_down)} down{direct}"
        )

    def _compared(self, result: RunResult) -> None:
        from ephemeron.training.report.prediction import compare, render_text

        comparison = compare(result.folder.path, plain(result.summary))
        if comparison is None:
            return
        self.console.print()
        self.console.print(render_text(comparison.rows), soft_wrap=True)
        for note in comparison.notes:
            self.console.print(note)
        self.console.print()


def started_line(group: GroupStarted, samples: int) -> str:
    """What a region starts with, of a run with so many samples, and what is expected of it."""
    waits = "" if group.predicted_waiting_share is None else f", waits {group.predicted_waiting_share:.1%}"
    epoch = (
        f", about {human_seconds(group.predicted_epoch_s)} and {human_usd(group.predicted_epoch_usd)} an epoch"
        if group.predicted_epoch_s
        else ""
    )
    return f"{group.name}: {human_count(group.workers, 'function')}, {group.samples / max(samples, 1):.1%} of the samples{waits}{epoch}"


def region_line(group: GroupMeter, t: float) -> str:
    """What a region does, until `t`."""
    a = group.activity
    released = f", {human_count(a.released, 'function')} released early" if a.released else ""
    kernel = (
        f" (kernel: {human_bytes(a.wan_kernel_bytes_sent)}, {human_bytes(a.wan_kernel_bytes_received)})" if a.wan_kernel_bytes_sent else ""
    )
    return (
        f"{group.started.name}: {a.steps_per_s:.3g} steps/s, waits {a.waiting_share:.1%}, {human_count(a.staleness, 'round')} ahead, "
        f"{human_bytes(a.wan_bytes_sent)} sent, {human_bytes(a.wan_bytes_received)} received{kernel}, {human_usd(group.cost_usd(t))}{released}"
    )


def listed(metrics: Mapping[str, float | None]) -> str:
    """Metrics in a line, such as `test loss 0.1203  accuracy 0.9512  `."""
    known = {name: value for name, value in metrics.items() if value is not None}
    return "".join(f"{'test loss' if name == 'loss' else name} {human_metric(value)}  " for name, value in known.items())


def tested(metrics: Mapping[str, float | None]) -> str:
    """`; accuracy 0.9512`: what the program reports beside the loss, or the test loss, or nothing."""
    loss = metrics.get("loss")
    others = [f"{name} {human_metric(value)}" for name, value in metrics.items() if name != "loss" and value is not None]
    if others:
        return f"; {', '.join(others)}"
    return "" if loss is None else f"; test loss {human_metric(loss)}"
