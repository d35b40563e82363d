"""Loss curve and epoch corrections of a job, from simulated runs with real gradients; and their refinement by real runs."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ephemeron.errors import JobError
from ephemeron.events import Event, GenerationStarted, Measured, Progress, RunStarted
from ephemeron.training.driver import configure, train
from ephemeron.training.driver.result import Result
from ephemeron.training.job import EarlyStopping, Job
from ephemeron.tuning.siren.environment import EnvironmentSpec
from ephemeron.tuning.siren.epoch_model import Correction, EpochModel, MeasuredEpochs
from ephemeron.tuning.siren.loss_curve import LossCurve, fit_curve
from ephemeron.units import human_count

NEVER = 1_000_000
"""Evaluations without improvement after which a run that is measured ends."""
SHARES = (0.0, 0.55, 1.0)
HELD_OUT = 0.8
"""Places of the runs' numbers of functions between the least and the most, on a logarithmic scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """A run with fixed functions."""

    epochs: MeasuredEpochs
    losses: tuple[float, ...]
    """After each epoch."""
    start: float
    """Training loss of the first iteration."""


def world_sizes(least: int, most: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Numbers of functions of the runs to fit, and of those kept out of the fit."""

    def at(share: float) -> int:
        return round(float(least * (most / least) ** share))

    fitted = tuple(sorted({at(share) for share in SHARES}))
    return fitted, tuple({at(HELD_OUT)} - set(fitted))


def measured_run(job: Job, *, workers: int, memory_mb: int, sync: str, batch_size: int, aggregators: int) -> MeasuredRun:
    """A simulated run with real gradients.

    Raises:
        UserError: the job is refused.
        RunFailed: it failed.
    """
    early = job.early_stopping
    assert early is not None
    observed = dataclasses.replace(
        job,
        early_stopping=dataclasses.replace(early, patience=NEVER),
        keep_best=None,
        loggers=(),
        run={},
        limits=dataclasses.replace(job.limits, budget_usd=None, deadline_s=None, time_limit_s=None),
    )
    seen: list[Event] = []
    with other_home():
        configuration = configure(
            observed,
            platform="simulated",
            workers=workers,
            memory_mb=memory_mb,
            sync=sync,
            batch_size=batch_size,
            aggregators=min(aggregators, workers),
        )
        result = train(observed, configuration, on_event=seen.append, loggers=[])
    return of_run(result.raise_if_failed(), seen, early, workers=workers, memory_mb=memory_mb)


@contextlib.contextmanager
def other_home() -> Iterator[None]:
    """Has runs of this process stored in a temporary folder meanwhile."""
    before = os.environ.get("EPHEMERON_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EPHEMERON_HOME"] = folder
        try:
            yield
        finally:
            del os.environ["EPHEMERON_HOME"]
            if before is not None:
                os.environ["EPHEMERON_HOME"] = before


def of_run(result: Result, seen: Sequence[Event], early: EarlyStopping, *, workers: int, memory_mb: int) -> MeasuredRun:
    """What a run with fixed functions says of losses and epochs.

    Raises:
        JobError: it has no evaluations.
    """
    evaluated = [e for e in seen if isinstance(e, Measured)]
    losses = [e.metrics.get(early.monitor) for e in evaluated]
    if not evaluated or any(x is None for x in losses):
        raise JobError(f"the evaluations of the job report no {early.monitor!r}", remedy="monitor a metric of the job")
    first = [e.loss for e in seen if isinstance(e, Progress) and e.iteration == 0]
    began = min(e.t for e in seen if isinstance(e, Progress) and e.iteration == 0)
    spans = np.diff([evaluated[0].t, *(e.t for e in evaluated[1:])]) if len(evaluated) > 1 else [evaluated[0].t - began]
    share = float(np.sum(spans)) / result.summary.seconds
    return MeasuredRun(
        epochs=MeasuredEpochs(
            workers=workers,
            memory_mb=memory_mb,
            seconds=max(1e-6, float(np.mean(spans))),
            cost_usd=max(1e-12, result.summary.cost_usd * share / len(spans)),
        ),
        losses=tuple(float(x) for x in losses if x is not None),
        start=float(np.mean(first)),
    )


def fitted(
    job: Job,
    model: EpochModel,
    *,
    least: int,
    most: int,
    memory_mb: int,
    sync: str,
    batch_size: int,
    aggregators: int,
    samples: int,
    on_progress: Callable[[str], None] = lambda text: None,
) -> tuple[LossCurve, Correction, Correction]:
    """Loss curve and corrections of time and cost, with their errors in a run that is kept out of the fit.

    Args:
        job: with early stopping.
        model: of its epochs, not corrected.
        least, most: numbers of functions.
        memory_mb: of the simulated functions.
        sync, batch_size, aggregators: of the runs.
        samples: of an epoch.
        on_progress: called with a line for each run.
    """
    inside, outside = world_sizes(least, most)
    found = {}
    for workers in (*inside, *outside):
        on_progress(f"simulating a run with {human_count(workers, 'function')} and real gradients")
        found[workers] = measured_run(job, workers=workers, memory_mb=memory_mb, sync=sync, batch_size=batch_size, aggregators=aggregators)
    curve = fit_curve(
        {w: found[w].losses for w in inside},
        start=float(np.mean([r.start for r in found.values()])),
        samples=samples,
        batch_size=batch_size,
        scaled=job.scale_learning_rate,
        held_out={w: found[w].losses for w in outside},
    )
    corrected = model.corrected([found[w].epochs for w in inside], [found[w].epochs for w in outside])
    return curve, *corrected.corrections


def refined(spec: EnvironmentSpec, runs: Sequence[tuple[Sequence[Event], float]]) -> EnvironmentSpec:
    """An environment corrected by runs whose functions changed: epochs are so many times longer or dearer, losses fall so much faster.

    Args:
        spec: of the environment.
        runs: events and cost of each, in US dollars.

    Raises:
        JobError: a run has fewer than two evaluations, or functions that the environment does not know.
    """
    seconds, costs, rates = [], [], []
    model = spec.model()
    for seen, cost_usd in runs:
        epochs = _measured_epochs(seen, spec)
        known = [model.table.get((w, m)) for w, m, _, _, _ in epochs]
        if len(epochs) < 1 or any(k is None for k in known):
            raise JobError("the run has too few evaluations, or other functions than the policy", remedy="name another run")
        predicted = [k for k in known if k is not None]
        seconds.append(sum(s for _, _, s, _, _ in epochs) / sum(k.seconds for k in predicted))
        whole = sum(k.cost_usd for k in predicted) * (len(epochs) + 1) / len(epochs)
        costs.append(cost_usd / whole)
        rates.append(_rate([(w, before, after) for w, _, _, before, after in epochs], spec.curve))
    factors = [float(np.exp(np.mean(np.log(x)))) for x in (seconds, costs, rates)]
    curve = dataclasses.replace(spec.curve, rates=tuple(r * factors[2] for r in spec.curve.rates), noise=spec.curve.noise * factors[2])
    return dataclasses.replace(
        spec,
        curve=curve,
        seconds=dataclasses.replace(spec.seconds, factor=spec.seconds.factor * factors[0]),
        cost=dataclasses.replace(spec.cost, factor=spec.cost.factor * factors[1]),
    )


def _measured_epochs(seen: Sequence[Event], spec: EnvironmentSpec) -> list[tuple[int, int, float, float, float]]:
    """Functions, memory, seconds, and the losses before and after, of all epochs between two evaluations."""
    evaluated = sorted((e for e in seen if isinstance(e, Measured)), key=lambda e: e.epoch)
    changes = sorted((e for e in seen if isinstance(e, GenerationStarted)), key=lambda e: e.from_epoch)
    first = next((e for e in seen if isinstance(e, RunStarted)), None)
    found = []
    for before, after in itertools.pairwise(evaluated):
        now = next((c for c in reversed(changes) if c.from_epoch <= before.epoch), None)
        workers, memory = (getattr(now or first, name, 0) for name in ("workers", "memory_mb"))
        losses = before.metrics.get(spec.monitor), after.metrics.get(spec.monitor)
        if losses[0] and losses[1] and after.epoch == before.epoch + 1:
            found.append((workers, memory, after.t - before.t, losses[0], losses[1]))
    return found


def _rate(epochs: Sequence[tuple[int, float, float]], curve: LossCurve) -> float:
    """Factor of a curve's rates that makes its decrease over some epochs that of a run."""
    real = sum(math.log(before / after) for _, before, after in epochs)
    factors = np.geomspace(0.2, 5.0, 80)

    def decrease(factor: float) -> float:
        tried = dataclasses.replace(curve, rates=tuple(r * factor for r in curve.rates), noise=curve.noise * factor)
        return sum(math.log(before / float(tried.after_epoch(before, w))) for w, before, _ in epochs)

    return float(min(factors, key=lambda f: abs(decrease(float(f)) - real)))
