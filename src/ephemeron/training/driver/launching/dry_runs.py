"""A run without functions: everything is built and checked, two steps are done in a process with a function's memory, and what
would be started and paid is estimated. Nothing is stored, invoked or paid for.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from ephemeron.communication.channels import public_address
from ephemeron.communication.channels.address import check_channel
from ephemeron.communication.keys import Keys
from ephemeron.config import own_processes
from ephemeron.config.typed import build
from ephemeron.errors import JobError, PlanInfeasible
from ephemeron.functions.base import Limits
from ephemeron.prices import Prices
from ephemeron.training.driver.launching.prepare import Prepared, prepare
from ephemeron.training.job import Configuration, Job, sync_name
from ephemeron.training.planner.model.bounds import SHORTER_EVALUATIONS
from ephemeron.training.planner.model.builtin import builtin_platform, priced
from ephemeron.training.planner.model.exchange import ExecutionOptions
from ephemeron.training.planner.model.prediction import predict
from ephemeron.training.planner.model.profile import Workload
from ephemeron.training.worker.trainers.first_steps import FirstSteps, objects_of
from ephemeron.units import MIB

_log = logging.getLogger(__name__)

RUN = "dry-run"
WATCH_S = 0.02
MOST_S = 600.0
"""Longest time of the first steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Time and cost of the run: the steps as they were measured here, the exchange by the built-in transfer profile of S3."""

    seconds: float
    cost_usd: float
    functions_usd: float
    requests_usd: float
    iteration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What a run would do."""

    program: str
    """Model or task."""
    configuration: Configuration
    iterations: int
    epochs: int
    samples: int
    test_samples: int
    parameters: int
    """Elements of the exchanged vector."""
    code_bytes: int
    initial_bytes: int
    first_steps: FirstSteps | None
    """None: models in stages are checked by the partition's own run."""
    estimate: Estimate | None
    """None: the synchronisation protocol cannot be predicted."""
    notes: tuple[str, ...] = ()


def dry_run(job: Job, configuration: Configuration, *, limits: Limits, prices: Prices) -> DryRun:
    """Checks a job as `train` would start it.

    Args:
        job, configuration: what and how; the configuration is complete.
        limits: of the platform.
        prices: of functions and of the channel.

    Raises:
        JobError: what `train` would refuse, or the steps fail, differ when they are repeated, or cannot be restored.
        PlanInfeasible: the steps need more than a function's quota.
    """
    check_channel(configuration.store)
    public, _ = public_address(configuration.store)
    configuration = dataclasses.replace(configuration, channel=public)
    prepared = prepare(job, configuration, run_id=RUN, limits=limits, prices=prices)
    spec = prepared.spec
    first_steps = do_first_steps(prepared) if spec.stages is None else None
    keys = Keys(RUN)
    sizes = {key: sum(memoryview(b).nbytes for b in buffers) for key, buffers in prepared.objects.items()}
    return DryRun(
        program=job.program.target,
        configuration=spec.configuration,
        iterations=spec.iterations,
        epochs=spec.epochs,
        samples=spec.samples,
        test_samples=prepared.test_samples,
        parameters=prepared.model_bytes // _itemsize(job),
        code_bytes=sizes[keys.code],
        initial_bytes=sizes.get(keys.init, 0),
        first_steps=first_steps,
        estimate=None if first_steps is None else estimated(prepared, first_steps),
        notes=prepared.notes,
    )


def _itemsize(job: Job) -> int:
    return 8 if job.dtype == "float64" else 4


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
        work = folder / "cwd"
        work.mkdir()
        command = own_processes.command("first-steps", str(folder))
        process = subprocess.Popen(command, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        killed = threading.Event()
        watcher = threading.Thread(target=_watch, args=(process, quota_mb, killed), daemon=True)
        watcher.start()
        try:
            out_text, err_text = process.communicate(timeout=MOST_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise JobError(f"two steps take more than {MOST_S:g} s", remedy="use a smaller batch") from None
        except BaseException:
            process.kill()
            process.communicate()
            raise
        watcher.join()
    if killed.is_set():
        raise PlanInfeasible(f"two steps need more than the {quota_mb} MB of a function; use a larger --memory-mb", binding="memory")
    try:
        result = build(FirstSteps, json.loads(out_text), where="dry run")
    except ValueError:
        last = err_text.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
        raise JobError(f"the process of the dry run ended early: {last[0]}") from None
    if result.error:
        frames = f"\n{result.traceback.rstrip()}" if result.traceback else ""
        raise JobError(f"the first steps fail: {result.error}{frames}", remedy=result.remedy or None)
    return result


def _watch(process: subprocess.Popen[str], quota_mb: int, killed: threading.Event) -> None:
    """Kills the process once it is above the quota; ends with it."""
    try:
        watched = psutil.Process(process.pid)
        while process.poll() is None:
            if watched.memory_info().rss > quota_mb * MIB:
                killed.set()
                process.kill()
                return
            try:
                process.wait(WATCH_S)
            except subprocess.TimeoutExpired:
                continue
    except psutil.Error:
        return  # it has ended


def estimated(prepared: Prepared, first_steps: FirstSteps) -> Estimate | None:
    """Time and cost by the planner's model, with the measured step."""
    spec, c = prepared.spec, prepared.spec.configuration
    if sync_name(c.sync)[0] not in ("bsp", "hap"):
        return None
    service = "cache" if c.store.startswith("redis") else "server" if c.store.startswith(("ps:", "param")) else "s3"
    kind = "microvm" if c.platform == "aws-microvm" and service != "server" else "lambda"
    platform = priced(builtin_platform(f"aws-{kind}-{service}"), spec.prices)
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
    ).with_local_steps(c.local_steps)
    terms = ExecutionOptions(
        pattern=c.pattern,
        sync=c.sync,
        compression=c.compression,
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
    )


def _share_mb(prepared: Prepared) -> float:
    keys = Keys(prepared.spec.run_id)
    ranks: Sequence[int] = range(prepared.spec.configuration.workers)
    return sum(memoryview(b).nbytes for r in ranks for b in prepared.objects.get(keys.data(r), ())) / 1e6
