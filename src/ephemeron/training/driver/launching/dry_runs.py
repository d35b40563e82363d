"""A run without functions: everything is built and checked, two steps are done in a process with a function's memory, and what
would be started and paid is estimated. Nothing is stored, invoked or paid for.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ephemeron.communication.keys import Keys
from ephemeron.config.typed import build, plain
from ephemeron.errors import JobError, PlanInfeasible
from ephemeron.runs.predictions import Basis, Prediction, measured_now, price_basis
from ephemeron.runs.probe_process import run_probe
from ephemeron.training.driver.launching.launch import PreparedRun
from ephemeron.training.driver.launching.prepare import Prepared
from ephemeron.training.job import Configuration, sync_name
from ephemeron.training.planner.model.bounds import SHORTER_EVALUATIONS
from ephemeron.training.planner.model.builtin import builtin_platform, priced
from ephemeron.training.planner.model.exchange import ExecutionOptions
from ephemeron.training.planner.model.prediction import predict
from ephemeron.training.planner.model.profile import Workload
from ephemeron.training.planner.plan import Plan
from ephemeron.training.worker.trainers.first_steps import FirstSteps, objects_of
from ephemeron.units import human_bytes, human_count, human_metric, human_seconds, human_usd

RUN = "dry-run"
"""Name of a run that is not started."""
MOST_S = 600.0
"""Longest time of the first steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Time and cost of the run: the steps as they were measured here, the exchange by a built-in profile (`_transfers`)."""

    seconds: float
    cost_usd: float
    functions_usd: float
    requests_usd: float
    iteration_s: float
    invocations: int


def predict_run(ready: PreparedRun) -> Prediction:
    """Checks a run by its first steps, and predicts it: from its plan where it has one, else from these steps.

    Args:
        ready: the run, as `train` would start it.

    Raises:
        JobError: the steps fail, differ when they are repeated, or cannot be restored.
        PlanInfeasible: the steps need more than a function's quota, or no iteration fits the function timeout.
    """
    prepared, job = ready.prepared, ready.request.job
    spec, c = prepared.spec, prepared.spec.configuration
    steps = do_first_steps(prepared) if spec.stages is None else None
    estimate = None if steps is None else estimated(prepared, steps)
    keys = Keys(spec.run_id)
    sizes = {key: sum(memoryview(b).nbytes for b in buffers) for key, buffers in prepared.objects.items()}
    details = {
        "program": job.program.target,
        "configuration": plain(c),
        "iterations": spec.iterations,
        "epochs": spec.epochs,
        "samples": spec.samples,
        "test_samples": prepared.test_samples,
        "parameters": prepared.model_bytes // (8 if job.dtype == "float64" else 4),
        "code_bytes": sizes[keys.code],
        "initial_bytes": sizes.get(keys.init, 0),
        "first_steps": plain(steps),
        "estimate": plain(estimate),
    }
    notes = list(prepared.notes)
    if ready.refusal is not None:
        notes.append(f"{c.platform} does not admit it now: {ready.refusal}")
    if steps is None:
        notes.append("time and cost of models in stages are predicted by: ephemeron partition")
    elif estimate is None:
        notes.append(f"time and cost of sync '{c.sync}' cannot be predicted")
    found = Prediction(
        kind="training",
        name=job.name,
        platform=c.platform,
        seconds=None if estimate is None else estimate.seconds,
        cost_usd=None if estimate is None else estimate.cost_usd,
        memory_mb=None if steps is None else steps.peak_mb,
        quota_mb=c.memory_mb,
        functions=c.workers,
        invocations=None if estimate is None else estimate.invocations,
        rests_on=()
        if steps is None
        else (
            measured_now("two steps in a process of this machine"),
            Basis(source="assumed", what=f"exchange as on platform profile {_transfers(c)}"),
            price_basis(spec.prices),
        ),
        notes=tuple(notes),
        details=details,
        rows=tuple(_rows(details, steps, estimate)),
    )
    plan = ready.request.plan
    if isinstance(plan, Plan) and plan.epochs == spec.epochs:
        found = _as_planned(found, plan)
    return found.within(budget_usd=job.limits.budget_usd, deadline_s=job.limits.deadline_s)


def _as_planned(found: Prediction, plan: Plan) -> Prediction:
    """A prediction with the figures of the plan that is to be run."""
    p, u = plan.choice.predicted, plan.uncertainty
    return dataclasses.replace(
        found,
        seconds=p.seconds,
        seconds_range=None if u is None else u.time_s,
        cost_usd=p.cost_usd,
        cost_usd_range=None if u is None else u.cost_usd,
        invocations=p.invocations,
        rests_on=(
            Basis(source="profile", what=f"{plan.profile.workload or found.name}: {plan.profile.source}"),
            measured_now("memory of two steps in a process of this machine"),
            Basis(source="prices", what="prices of the plan", as_of=plan.profile.as_of),
        ),
    )


def _rows(details: Mapping[str, Any], r: FirstSteps | None, e: Estimate | None) -> Iterator[tuple[str, str]]:
    """What only a training run has, for readers."""
    c = details["configuration"]
    yield "program", f"{details['program']}: {human_count(details['parameters'], 'trained parameter')}"
    yield "data", f"{human_count(details['samples'], 'training sample')}, {human_count(details['test_samples'], 'evaluation sample')}"
    yield (
        "trains",
        f"{c['pattern']} with {human_count(c['aggregators'], 'aggregator')}, {c['sync']}, through {c['channel']}: "
        f"{human_count(details['iterations'], 'iteration')} in {human_count(details['epochs'], 'epoch')}",
    )
    if r is not None:
        losses = ", ".join("not finite" if loss is None else human_metric(loss) for loss in r.losses)
        yield "two steps", f"loss {losses}; {human_count(r.samples, 'sample')} in {human_seconds(r.step_s)} on {r.device}"
        for name in r.metrics[-1] if r.metrics else ():
            yield "", f"{name} {', '.join(human_metric(m[name]) for m in r.metrics if name in m)}"
        known = [f"{name} {human_metric(value)}" for name, value in r.evaluation.items() if value is not None]
        if r.evaluation:
            yield "evaluation", f"{', '.join(known) or 'no metrics'} after them, in {human_seconds(r.evaluation_s)}"
        yield "repeated", "the same to the last bit, also from a saved and restored state"
    sent = human_bytes(details["code_bytes"] + details["initial_bytes"])
    exchanged = "" if r is None else f"; each exchanges {human_bytes(r.vector_mb * 1e6)} an iteration"
    yield "sends", f"{sent} of code and weights to each function{exchanged}"
    if e is not None:
        usd = f"functions {human_usd(e.functions_usd)}, requests {human_usd(e.requests_usd)}"
        yield "steps", f"{human_seconds(e.iteration_s)} an iteration, as measured; {usd}"


def do_first_steps(prepared: Prepared) -> FirstSteps:
    """Does two steps in a new process, which is killed above the quota of a function."""
    quota_mb = prepared.spec.configuration.memory_mb
    keys = Keys(prepared.spec.run_id)
    with tempfile.TemporaryDirectory(prefix="ephemeron-dry-run-") as name:
        folder = Path(name)
        for file, key in objects_of(keys).items():
            if key not in prepared.objects:
                continue
            with (folder / file).open("wb") as out:
                for buffer in prepared.objects[key]:
                    out.write(buffer)
        done = run_probe("first-steps", str(folder), cwd=folder / "cwd", most_s=MOST_S, quota_mb=quota_mb)
    if done.ended == "time":
        raise JobError(f"two steps take more than {MOST_S:g} s", remedy="use a smaller batch")
    if done.ended == "memory":
        raise PlanInfeasible(f"two steps need more than the {quota_mb} MB of a function; use a larger --memory-mb", binding="memory")
    try:
        result = build(FirstSteps, json.loads(done.output), where="dry run")
    except ValueError:
        raise JobError(f"the process of the dry run ended early: {done.last_error}") from None
    if result.error:
        frames = f"\n{result.traceback.rstrip()}" if result.traceback else ""
        raise JobError(f"the first steps fail: {result.error}{frames}", remedy=result.remedy or None)
    return result


def estimated(prepared: Prepared, first_steps: FirstSteps) -> Estimate | None:
    """Time and cost by the planner's model, with the measured step."""
    spec, c = prepared.spec, prepared.spec.configuration
    if sync_name(c.sync)[0] not in ("bsp", "hap"):
        return None
    platform = priced(builtin_platform(_transfers(c)), spec.prices)
    step_s = max(first_steps.step_s, 1e-6)
    workload = Workload(
        model_mb=max(first_steps.vector_mb, 1e-6),
        a=step_s * c.memory_mb / max(1, first_steps.samples),
        b=0.0,
        m=0.0,
        memory_slope_mb=0.0,
        memory_base_mb=first_steps.peak_mb,
        dataset_mb=_share_mb(prepared),
        samples=spec.samples,
        test_samples=prepared.test_samples,
        state_mb=first_steps.state_mb,
    ).with_local_steps(c.exchange.local_steps)
    terms = ExecutionOptions(
        pattern=c.pattern,
        sync=c.sync,
        compression=c.exchange.compression,
        epochs=spec.epochs,
        lifetime_s=c.function_timeout_s or None,
        checkpoint_every=c.checkpoint_every,
    )
    p = predict(
        workload,
        platform,
        terms,
        workers=c.workers,
        memory_mb=c.memory_mb,
        aggregators=c.aggregators,
        batch=c.batch_size,
        other_batch=c.nonaggregator_batch_size,
    )
    if not math.isfinite(float(p.seconds)):
        evaluated = f" or no evaluation of {prepared.test_samples / c.workers:.0f} samples" if prepared.test_samples else ""
        raise PlanInfeasible(
            f"no iteration{evaluated} fits the function timeout of {terms.lifetime_s or platform.lifetime_s:g} s with "
            f"steps of {step_s:.3g} s; {SHORTER_EVALUATIONS}, or smaller batches",
            binding="lifetime",
        )
    return Estimate(
        seconds=float(p.seconds),
        cost_usd=float(p.cost_usd),
        functions_usd=float(p.functions_usd),
        requests_usd=float(p.requests_usd),
        iteration_s=float(p.iteration_s),
        invocations=round(float(p.invocations)),
    )


def _transfers(c: Configuration) -> str:
    """The built-in profile whose exchange is like that of a run."""
    service = "cache" if c.store.startswith("redis") else "server" if c.store.startswith(("ps:", "param")) else "s3"
    kind = "microvm" if c.platform == "aws-microvm" and service != "server" else "lambda"
    return f"aws-{kind}-{service}"


def _share_mb(prepared: Prepared) -> float:
    keys = Keys(prepared.spec.run_id)
    ranks: Sequence[int] = range(prepared.spec.configuration.workers)
    return sum(memoryview(b).nbytes for r in ranks for b in prepared.objects.get(keys.data(r), ())) / 1e6
