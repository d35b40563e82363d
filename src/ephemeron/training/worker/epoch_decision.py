"""The decision of the user's code, after each epoch, on how the functions of the run change."""

from __future__ import annotations

import dataclasses

from ephemeron.runs.metrics import Metrics
from ephemeron.training.task.schedule import Decide, EpochMeasurements
from ephemeron.training.worker.control import ResizeRequest
from ephemeron.training.worker.lifecycle import InvocationLifecycle
from ephemeron.training.worker.recovery.checkpoint import EndedEpoch


class EpochDecision:
    """Measures epochs on rank 0, and asks for the changes that the user's code decides.

    Args:
        lifecycle: of the invocation.
        decide: the user's code.
        ended: the epoch that has ended with the generation before; None: none has.
    """

    def __init__(self, lifecycle: InvocationLifecycle, decide: Decide, ended: EndedEpoch | None = None) -> None:
        self._lifecycle, self._decide, self._ended = lifecycle, decide, ended
        self._timeline = lifecycle.spec.timeline
        self._trace = lifecycle.invocation.trace
        self._begin()

    def _begin(self) -> None:
        self._began, self._before = self._lifecycle.now(), dict(self._trace.totals)
        self._loss, self._terms = 0.0, 0.0

    def record(self, loss: float, terms: float) -> None:
        """Takes in the loss of an iteration, a mean over so many terms."""
        self._loss, self._terms = self._loss + loss * terms, self._terms + terms

    def ended(self, metrics: Metrics) -> EndedEpoch:
        """The epoch until now, or the one that had ended where this invocation began.

        Args:
            metrics: of the last evaluation.
        """
        if self._ended is not None:  # it was evaluated after a hand-off
            return dataclasses.replace(self._ended, metrics=self._ended.metrics or dict(metrics))
        phases: dict[str, float] = {phase: total - self._before[phase] for phase, total in self._trace.totals.items()}
        return EndedEpoch(
            seconds=self._lifecycle.now() - self._began, loss=self._loss / (self._terms or 1.0), phases=phases, metrics=dict(metrics)
        )

    async def after(self, iteration: int, metrics: Metrics) -> None:
        """Asks for a change, if an epoch has ended and the user's code wants one.

        Args:
            iteration: which is computed next.
            metrics: of the last evaluation.
        """
        epoch, self._ended = self.ended(metrics), None
        if not self._timeline.starts_epoch(iteration):
            return
        lifecycle, c, phases = self._lifecycle, self._lifecycle.spec.configuration, epoch.phases
        measured = EpochMeasurements(
            epoch=self._timeline.epoch_of(iteration),
            epochs=lifecycle.spec.epochs,
            iteration=iteration,
            run_s=lifecycle.run_now(),
            epoch_s=epoch.seconds,
            iteration_s=lifecycle.timeouts.typical_s,
            spent_usd=lifecycle.run_usd(),
            loss=epoch.loss,
            metrics=epoch.metrics,
            fetch_s=phases.get("load", 0.0) + phases.get("download", 0.0),
            compute_s=phases.get("compute", 0.0),
            update_s=phases.get("upload", 0.0) + phases.get("aggregate", 0.0),
            workers=c.workers,
            memory_mb=c.memory_mb,
            aggregators=c.aggregators,
            batch_size=c.batch_size,
            nonaggregator_batch_size=c.nonaggregator_batch_size,
        )
        self._begin()
        wanted = await lifecycle.invocation.compute(lambda: self._decide(measured), samples=0)
        if wanted is not None and wanted.changes:
            lifecycle.resize_request = ResizeRequest(name=f"epoch {measured.epoch}", resize=wanted)
