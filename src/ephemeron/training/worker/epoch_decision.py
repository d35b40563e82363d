"""The decision of the user's code, after each epoch, on how the functions of the run change."""

from __future__ import annotations

from ephemeron.training.metrics import Metrics
from ephemeron.training.task.schedule import Decide, EpochMeasurements
from ephemeron.training.worker.control import ResizeRequest
from ephemeron.training.worker.lifecycle import InvocationLifecycle


class EpochDecision:
    """Measures epochs on rank 0, and asks for the changes that the user's code decides.

    Args:
        lifecycle: of the invocation.
        decide: the user's code.
    """

    def __init__(self, lifecycle: InvocationLifecycle, decide: Decide) -> None:
        self._lifecycle, self._decide = lifecycle, decide
        self._timeline = lifecycle.spec.timeline
        self._began = lifecycle.now()
        self._loss, self._samples = 0.0, 0

    def record(self, loss: float, samples: int) -> None:
        """Takes in the loss of an iteration."""
        self._loss, self._samples = self._loss + loss * samples, self._samples + samples

    async def after(self, iteration: int, metrics: Metrics) -> None:
        """Asks for a change, if an epoch has ended and the user's code wants one.

        Args:
            iteration: which is computed next.
            metrics: of the last evaluation.
        """
        if not self._timeline.starts_epoch(iteration):
            return
        lifecycle, c = self._lifecycle, self._lifecycle.spec.configuration
        measured = EpochMeasurements(
            epoch=self._timeline.epoch_of(iteration), epochs=lifecycle.spec.epochs, iteration=iteration,
            run_s=lifecycle.run_now(), epoch_s=lifecycle.now() - self._began, iteration_s=lifecycle.timeouts.typical_s,
            spent_usd=lifecycle.spent_usd() * c.workers, loss=self._loss / max(1, self._samples), metrics=dict(metrics),
            workers=c.workers, memory_mb=c.memory_mb, aggregators=c.aggregators, batch_size=c.batch_size,
            nonaggregator_batch_size=c.nonaggregator_batch_size,
        )  # fmt: skip
        self._began, self._loss, self._samples = lifecycle.now(), 0.0, 0
        wanted = await lifecycle.invocation.compute(lambda: self._decide(measured), samples=0)
        if wanted is not None and wanted.changes:
            lifecycle.resize_request = ResizeRequest(name=f"epoch {measured.epoch}", resize=wanted)
