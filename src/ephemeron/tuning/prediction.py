"""Time and cost of a trial before its start: the planner's model, from a profile of the study's job.

The profile is of the job as its file has it. What trials that have finished took, relative to their predictions, corrects those
of later trials: of the same model where there are any, else of all. Sparse jobs have a model of their own; other asynchronous
protocols and divided models are not predicted.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ephemeron.errors import PlanInfeasible, UserError
from ephemeron.runs.kinds import load_kind
from ephemeron.runs.predictions import Basis, Prediction
from ephemeron.training import planning_workflow
from ephemeron.training.job import Configuration, Job, sync_name
from ephemeron.training.planner.model.exchange import ExecutionOptions
from ephemeron.training.planner.model.prediction import predict
from ephemeron.training.planner.model.profile import PlatformProfile, Profile, Workload, load_profile
from ephemeron.tuning.results import parameters_text
from ephemeron.tuning.space import Parameter, Value, Values, grid_size
from ephemeron.tuning.study_file import StudyFile
from ephemeron.units import duration

SAMPLES = 200
"""Combinations of which a space is estimated, where it has more."""
_NEUTRAL = ("optimizer", "run", "limits", "seed", "scheduler", "epochs", "clip_norm", "clip_value")
"""Keys of a job that its time per step does not depend on, or whose influence the model knows."""
_SPARSE_NEUTRAL = ("sparse.optimizer.options.", "sparse.shards", "sparse.model.options.l2")
"""The same of sparse jobs: beginnings of dotted keys."""


@dataclass(frozen=True, slots=True)
class TrialPrediction:
    """Time and cost of one trial."""

    seconds: float
    cost_usd: float


@dataclass(slots=True)
class TrialPredictor:
    """Predictions of trials, corrected by what earlier ones took.

    Args:
        workload: of the job; None: nothing is predicted.
        platforms: on which it may run, with their channels.
        note: why nothing is predicted.
        sparse: a `sparse.job.predictor.SparsePredictor`, where the job is a sparse one.
    """

    workload: Workload | None = None
    platforms: tuple[PlatformProfile, ...] = ()
    note: str = ""
    sparse: Any = None
    _ratios: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    @classmethod
    def of(cls, study: StudyFile, on_progress: Callable[[str], None], *, measures: bool = True) -> TrialPredictor:
        """Reads the profile of a study's job, or measures it, if `measures`."""
        spec, (job, c) = study.spec, any_of(study)
        if not spec.predict:
            return cls(note="predictions are switched off (predict = false)")
        try:
            if job.sparse is not None:
                found = load_kind("sparse").make_predictor(
                    job, platform=c.platform, profile=spec.profile, measures=measures, on_progress=on_progress
                )
                return cls(sparse=found)
            profile = (
                load_profile(spec.profile)
                if spec.profile is not None
                else planning_workflow.profile_for(job, c.platform, channel=_probed(c), measures=measures, on_progress=on_progress)
            )
            platforms = planning_workflow.platforms_for(c.platform, profile.platform, channel=None)
            return cls(workload=planning_workflow.scaled(profile, platforms).workload, platforms=platforms)
        except UserError as e:
            if spec.profile is not None:
                raise
            return cls(note=f"time and cost are not predicted: {e}")

    @property
    def rests_on(self) -> tuple[Basis, ...]:
        """What predictions rest on; nothing where there are none."""
        if self.sparse is not None:
            return self.sparse.rests_on  # type: ignore[no-any-return]
        if self.workload is None:
            return ()
        return tuple(
            basis
            for p in self.platforms
            for basis in (
                Basis(source="profile", what=f"{self.workload.name}: {p.source}"),
                Basis(source="prices", what=f"prices of {p.name}", as_of=p.as_of),
            )
        )

    @property
    def known(self) -> bool:
        """Whether anything is predicted."""
        return self.workload is not None or self.sparse is not None

    def predict(self, job: Job, c: Configuration, values: Values) -> TrialPrediction | None:
        """Time and cost of a run to its end; None: they cannot be predicted."""
        if self.sparse is not None:
            run = self.sparse.predicted(job, c)
            slower, dearer = self._ratio(values)
            return TrialPrediction(run.seconds * slower, run.cost_usd * dearer)
        platform = next((p for p in self.platforms if p.channel == _channel(c)), None)
        known = sync_name(c.sync)[0] in ("bsp", "hap") and c.stages.count == 1 and c.memory_mb and not c.resize.schedule
        if self.workload is None or platform is None or not known:
            return None
        terms = ExecutionOptions(
            pattern=c.pattern,
            sync=c.sync,
            compression=c.exchange.compression,
            epochs=job.epochs,
            lifetime_s=c.function_timeout_s or None,
            checkpoint_every=c.checkpoint_every,
        )
        p = predict(
            self.workload.with_local_steps(c.exchange.local_steps),
            platform,
            terms,
            workers=c.workers,
            memory_mb=c.memory_mb,
            aggregators=c.aggregators,
            batch=c.batch_size,
            other_batch=c.nonaggregator_batch_size,
        )
        times, costs = self._ratio(values)
        seconds, cost_usd = float(p.seconds) * times, float(p.cost_usd) * costs
        return TrialPrediction(seconds, cost_usd) if seconds < float("inf") else None

    def learn(self, values: Values, predicted: TrialPrediction | None, seconds: float, cost_usd: float) -> None:
        """Takes into account what a finished trial took.

        Args:
            values: of the trial.
            predicted: what was predicted, as corrected then.
            seconds, cost_usd: what it took.
        """
        if predicted is not None and predicted.seconds > 0 and predicted.cost_usd > 0:
            times, costs = self._ratio(values)
            taken = times * seconds / predicted.seconds, costs * cost_usd / predicted.cost_usd
            self._ratios.setdefault(_kind(values), []).append(taken)

    def _ratio(self, values: Values) -> tuple[float, float]:
        same = self._ratios.get(_kind(values)) or [r for each in self._ratios.values() for r in each]
        if not same:
            return 1.0, 1.0
        return statistics.median(r[0] for r in same), statistics.median(r[1] for r in same)


def profile_of(study: StudyFile) -> Profile | None:
    """The profile from which trials are predicted, as far as it is known without measuring; None: they are not predicted."""
    spec, (job, c) = study.spec, any_of(study)
    if not spec.predict:
        return None
    if spec.profile is not None:
        return load_profile(spec.profile)
    try:
        return planning_workflow.profile_for(job, c.platform, channel=_probed(c), measures=False)
    except UserError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpacePrediction:
    """What a whole study would take, without pruning."""

    trials: int
    seconds: float
    """At least: the functions' time, divided by the places, or the longest trial."""
    cost_usd: float
    cheapest: tuple[Values, TrialPrediction] | None
    dearest: tuple[Values, TrialPrediction] | None
    unpredicted: int
    """Combinations, of those that were looked at, that cannot be predicted or are contradictory."""
    looked_at: int


def predict_space(study: StudyFile, predictor: TrialPredictor, places: int) -> SpacePrediction:
    """Predicts a study from its grid, or from combinations that are drawn at random (seeded)."""
    found: list[tuple[Values, TrialPrediction, int]] = []
    points = list(_points(study)) if predictor.known else []
    for values in points:
        try:
            job, c = study.job.configured(values)
        except (UserError, PlanInfeasible):
            continue
        p = predictor.predict(job, c, values)
        if p is not None:
            found.append((values, p, c.workers))
    if not found:
        return SpacePrediction(
            trials=study.trials, seconds=0.0, cost_usd=0.0, cheapest=None, dearest=None, unpredicted=len(points), looked_at=len(points)
        )
    busy = statistics.fmean(p.seconds * workers for _, p, workers in found) * study.trials
    by_cost = sorted(((values, p) for values, p, _ in found), key=lambda each: each[1].cost_usd)
    return SpacePrediction(
        trials=study.trials,
        seconds=max(busy / places, max(p.seconds for _, p, _ in found)),
        cost_usd=statistics.fmean(p.cost_usd for _, p, _ in found) * study.trials,
        cheapest=by_cost[0],
        dearest=by_cost[-1],
        unpredicted=len(points) - len(found),
        looked_at=len(points),
    )


def described(study: StudyFile, expected: SpacePrediction, predictor: TrialPredictor, places: int) -> Prediction:
    """A study's prediction as that of a run.

    Args:
        study: of which it is.
        expected, predictor: what is predicted, and from what.
        places: functions at once.
    """
    spec, (_, c) = study.spec, any_of(study)
    known = expected.cheapest is not None and expected.dearest is not None
    rows = [("trials", f"{expected.trials}, {spec.sampler}, pruner {spec.pruner.name}; time and cost are those of all, without pruning")]
    ends = {"cheapest": expected.cheapest, "dearest": expected.dearest}
    for name, found in ends.items():
        if found is not None:
            rows.append((name, f"{duration(found[1].seconds)} for ${found[1].cost_usd:.4g}: {parameters_text(found[0])}"))
    notes = [predictor.note] if predictor.note else [] if known else ["time and cost of these configurations cannot be predicted"]
    if spec.budget_usd is not None:
        notes.append(f"budget ${spec.budget_usd:g}: a trial that is predicted to exceed what is left of it is not started")
    if expected.unpredicted:
        notes.append(f"{expected.unpredicted} of {expected.looked_at} combinations contradict themselves or cannot be predicted")
    return Prediction(
        kind="study",
        name=spec.name,
        platform=c.platform,
        seconds=round(expected.seconds, 3) if known else None,
        cost_usd=expected.cost_usd if known else None,
        quota_mb=c.memory_mb,
        functions=places,
        rests_on=predictor.rests_on,
        notes=tuple(notes),
        details={
            "trials": expected.trials,
            "looked_at": expected.looked_at,
            "unpredicted": expected.unpredicted,
            **{
                name: None if found is None else {"parameters": dict(found[0]), "seconds": found[1].seconds, "cost_usd": found[1].cost_usd}
                for name, found in ends.items()
            },
        },
        rows=tuple(rows),
    )


def any_of(study: StudyFile) -> tuple[Job, Configuration]:
    """Job and configuration of the first combination that contradicts nothing.

    Raises:
        UserError: all that were looked at contradict themselves.
    """
    first: UserError | None = None
    for values in _points(study):
        try:
            return study.job.configured(values)
        except UserError as e:
            first = first or e
    assert first is not None
    raise first


def most_workers(study: StudyFile) -> int:
    """The largest number of functions of a trial, of the combinations that are looked at."""
    found = 1
    for values in _points(study):
        try:
            found = max(found, study.job.configured(values)[1].workers)
        except UserError:
            continue
    return found


def drawn_points(study: StudyFile, count: int) -> Sequence[dict[str, Value]]:
    """So many combinations of a space: its grid, or drawn at random (seeded)."""
    if study.spec.sampler == "grid" and grid_size(study.space) <= SAMPLES:
        return _points(study)[:count]
    draw = random.Random(study.spec.seed)
    return [{p.key: _drawn(p, draw) for p in study.space} for _ in range(count)]


def _points(study: StudyFile) -> Sequence[dict[str, Value]]:
    draw = random.Random(study.spec.seed)
    space = study.space
    if study.spec.sampler == "grid" and grid_size(space) <= SAMPLES:
        points: list[dict[str, Value]] = [{}]
        for parameter in space:
            points = [{**point, parameter.key: value} for point in points for value in parameter.grid_values()]
        return points
    edges = [{p.key: p.edges[0] for p in space}, {p.key: p.edges[-1] for p in space}]
    return [*edges, *({p.key: _drawn(p, draw) for p in space} for _ in range(SAMPLES - 2))]


def _drawn(parameter: Parameter, draw: random.Random) -> Value:
    r = parameter.range
    if r is None:
        return draw.choice(parameter.choices)
    if parameter.integer or r.step is not None:
        values = parameter.grid_values()
        return draw.choice(values)
    if r.log:
        return float(r.low * (r.high / r.low) ** draw.random())
    return draw.uniform(r.low, r.high)


def _kind(values: Mapping[str, Any]) -> str:
    """What a step's time depends on, of a trial's values."""
    return json.dumps({k: v for k, v in sorted(values.items()) if k.split(".")[0] not in _NEUTRAL and not k.startswith(_SPARSE_NEUTRAL)})


def _channel(c: Configuration) -> str:
    if c.direct:
        return "direct"
    if c.store.startswith(("redis://", "rediss://")):
        return "cache"
    return "server" if c.store.startswith(("ps://", "parameter_server")) else "objects"


def _probed(c: Configuration) -> str:
    return "folder" if c.platform == "simulated" else c.channel
