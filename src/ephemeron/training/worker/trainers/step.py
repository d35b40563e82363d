"""The port between the training loop and one iteration's computation, and the computation of a whole model.

The loop is the same for every worker: versions, checkpoints, hand-offs, the end of the run. What differs is how a rank computes
its contribution: alone (`WholeModelStep`), or with the functions that hold the model's other stages (`pipeline.step`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

from ephemeron.errors import EphemeronError, JobError
from ephemeron.runs.metrics import EvaluationSums
from ephemeron.training.collectives import Collective, Group, ReductionStatus
from ephemeron.training.collectives.group import Arrivals
from ephemeron.training.collectives.sync_policy import Policy
from ephemeron.training.worker.lifecycle import InvocationLifecycle
from ephemeron.training.worker.non_finite import FiniteCheck
from ephemeron.training.worker.spec import RunSpec
from ephemeron.training.worker.startup import StartedWorker
from ephemeron.training.worker.trainers.early_pieces import EarlyContribution, GivesEarly, overlaps
from ephemeron.training.worker.trainers.trainer import TrainingStep
from ephemeron.user_code import guarded

T = TypeVar("T")

LEAST_WORTH_S, MOST_WORTH_S = 0.002, 0.02


def poll_worth_s(spec: RunSpec) -> float:
    """Seconds of all functions' time that cost as much as a poll, within bounds: polls take time, too, and time counts."""
    c, prices = spec.configuration, spec.prices
    second_usd = prices.functions_usd(c.workers * c.memory_mb / 1024, 0)
    worth_s = prices.get_usd / second_usd if second_usd > 0 else 0.0
    return min(max(worth_s, LEAST_WORTH_S), MOST_WORTH_S)


class TimedCompute:
    """Computation on the invocation's compute thread, recorded as such.

    Args:
        lifecycle: of the invocation.
        status: of this rank; its iteration time is kept current.
    """

    def __init__(self, lifecycle: InvocationLifecycle, status: ReductionStatus) -> None:
        self._lifecycle, self._status = lifecycle, status

    async def __call__(self, work: Callable[[], T], *, samples: float, batches: int = 1) -> T:
        lifecycle, invocation = self._lifecycle, self._lifecycle.invocation
        began = invocation.now()
        result = await invocation.compute(work, samples=samples, batches=batches)
        invocation.trace.record("compute", began, invocation.now())
        lifecycle.timeouts.record_compute(invocation.now() - began)
        self._status.busy_s, self._status.spent_usd = lifecycle.timeouts.slowest_s, lifecycle.spent_usd()
        return result


class IterationStep(ABC):
    """Computation of a rank's contribution to an iteration.

    Args:
        started: the worker at its start.
    """

    def __init__(self, started: StartedWorker) -> None:
        self.started = started
        self.spec, self.trainer, self.status = started.spec, started.trainer, started.status
        self.lifecycle, self.invocation = started.lifecycle, started.lifecycle.invocation
        self.split, self.timeline = self.spec.split, self.spec.timeline
        self.member = self.spec.member(self.invocation.rank)
        self.compute = TimedCompute(self.lifecycle, self.status)
        self.finite = FiniteCheck(spec=self.spec, rank=self.invocation.rank, member=self.member)

    def batch(self, iteration: int) -> int:
        """Samples of this rank's batch."""
        return self.timeline.batch(self.member, iteration)

    @abstractmethod
    def group(self, policy: Policy) -> Group:
        """The ranks with which this one reduces gradients."""

    @abstractmethod
    async def run(self, iteration: int, *, early: Collective | None = None) -> tuple[TrainingStep, int]:
        """Contribution to an iteration, and the flags for all ranks.

        Args:
            iteration: to compute.
            early: takes pieces of the contribution meanwhile.
        """

    @abstractmethod
    async def evaluate(self, iteration: int) -> EvaluationSums:
        """Sums over this rank's slice of the test set, before `iteration` is computed."""

    def expected_evaluation_s(self, iteration: int) -> float:
        """Seconds that an evaluation may take: as long as the last one, or as its forward passes beside those of an iteration."""
        times, samples = self.lifecycle.timeouts, self.started.test_samples / 3
        return times.evaluation_s or times.slowest_s * samples / max(self.batch(iteration), 1)

    async def collect_garbage(self) -> None:
        """Deletes objects of the step that no rank needs any more."""

    def state(self) -> Arrivals:
        """Arrival times of the step's objects, for a successor."""
        return {}

    def new_group(self, policy: Policy) -> Group:
        """The group of all ranks."""
        lifecycle, c, direct = self.lifecycle, self.spec.configuration, self.invocation.direct
        return Group(
            mesh=direct.mesh if direct is not None and direct.in_memory else None,
            keys=lifecycle.keys,
            rank=self.invocation.rank,
            world=c.workers,
            aggregators=c.aggregators,
            channel=self.invocation.exchange,
            policy=policy,
            size=self.trainer.size,
            dtype=self.trainer.dtype,
            attempt=self.invocation.attempt,
            compression=c.exchange.compression,
            ranks_per_machine=c.exchange.ranks_per_machine,
            shared_cores=self.spec.shared_cores,
            iterations=self.spec.ends_at,
            status=self.status,
            trace=self.invocation.trace,
            poll_worth_s=poll_worth_s(self.spec),
            wait_timeout_s=lifecycle.wait_timeout_s,
            silence_timeout_s=lifecycle.timeouts.timeout_s,
            on_message=self.on_message,
            suspect=lifecycle.suspect,
            on_timeout=lifecycle.on_timeout,
        )

    def on_message(self, rank: int, busy_s: float, spent_usd: float) -> None:
        """A peer's iteration time is passed on with this rank's next message."""
        self.lifecycle.on_message(rank, busy_s, spent_usd)
        self.status.busy_s = self.lifecycle.timeouts.slowest_s


class WholeModelStep(IterationStep):
    """A rank that holds the whole model.

    Args:
        started: the worker at its start.

    Raises:
        JobError: the run divides its model.
    """

    def __init__(self, started: StartedWorker) -> None:
        super().__init__(started)
        if self.spec.stages is not None:
            raise JobError("this run divides its model into stages", remedy="call the entry 'stage'")
        self._overlaps = self.invocation.ctx.overlaps and overlaps() and isinstance(self.trainer, GivesEarly)

    def group(self, policy: Policy) -> Group:
        return self.new_group(policy)

    async def run(self, iteration: int, *, early: Collective | None = None) -> tuple[TrainingStep, int]:
        pieces = self._early(iteration, early)
        try:
            step = await self.compute(
                lambda: self._computed(iteration, pieces),
                samples=self.batch(iteration),
                batches=self.spec.configuration.exchange.local_steps,
            )
        finally:
            if pieces is not None:
                pieces.close()
        flags = None if pieces is None else pieces.flags
        return step, self.lifecycle.flags() if flags is None else flags

    def _early(self, iteration: int, collective: Collective | None) -> EarlyContribution | None:
        if collective is None or not self._overlaps or not collective.early:
            return None
        return EarlyContribution(collective, iteration, self.lifecycle.flags, checked=self.finite.stops)

    def _computed(self, iteration: int, early: EarlyContribution | None) -> TrainingStep:
        if isinstance(self.trainer, GivesEarly):
            self.trainer.give_early(early)
        try:
            with guarded():
                step = self.trainer.compute(iteration)
        except EphemeronError:
            raise
        except Exception as e:
            e.add_note(f"(in iteration {iteration}: {self.finite.batch_text(iteration)})")
            raise
        return self.finite.step(step, iteration, early.taken if early is not None else ())

    async def evaluate(self, iteration: int) -> EvaluationSums:
        samples = self.started.test_samples / 3  # a forward pass is about a third of a step
        return await self.compute(self.trainer.evaluate, samples=samples)
