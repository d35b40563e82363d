"""Preparation of a run before a function is started: everything is checked, and the objects of the channel are made.

The data is loaded, the model is built once and tried with one batch, and samples are divided among ranks by role.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ephemeron.communication.channels.base import Buffer
from ephemeron.communication.keys import Keys
from ephemeron.config.paths import cores
from ephemeron.data import assign
from ephemeron.errors import JobError
from ephemeron.functions.base import Call, Limits
from ephemeron.prices import Prices
from ephemeron.training.driver.launching.admission import check_call, check_memory, check_time
from ephemeron.training.driver.launching.bundle_check import bundled, check_bundle
from ephemeron.training.driver.launching.memory import estimate, quota_for
from ephemeron.training.driver.launching.script_trial import refuse_with_script, script_trial
from ephemeron.training.driver.launching.training_data import TrainingData, training_data
from ephemeron.training.driver.launching.trial import Trial, trial_of
from ephemeron.training.driver.records import CodeSource
from ephemeron.training.driver.renewal import source_of
from ephemeron.training.driver.resizing import check_resizes
from ephemeron.training.job import AVERAGE, Configuration, Fault, Job, Target, TrainingOptions, check_limits, sync_name
from ephemeron.training.job.convergence import outside_region
from ephemeron.training.worker.spec import RunSpec

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A run, ready to be launched."""

    job: Job
    spec: RunSpec
    objects: dict[str, list[Buffer]]
    """Key to buffers; the specification itself comes last."""
    model_bytes: int
    """S_m: bytes of the exchanged vector."""
    source: CodeSource | None = None
    """Origin of the code, for `renewal`; None: the run cannot get new code."""
    test_samples: int = 0
    notes: tuple[str, ...] = ()
    """Remarks for the reader of the run's output."""

    @property
    def code(self) -> bytes | None:
        """Bundle of the code; None: there is none."""
        found = self.objects.get(Keys(self.spec.run_id).code)
        return None if found is None else b"".join(found)


def refuse_contradictions(c: Configuration) -> None:
    """Refuses combinations of options that no protocol supports.

    Raises:
        JobError: names both options.
    """
    if c.regions.region:  # `regions.driver.launch` refuses what does not work with them, and each group is checked by itself
        return
    sync, _ = sync_name(c.sync)
    server = c.pattern == "parameter-server"
    if server and sync in ("hap", "hsp"):
        raise JobError(f"sync '{sync}' needs aggregating workers, pattern 'parameter-server' has none", remedy="use bsp, ssp:N or asp")
    if server and c.exchange.compression != "none":
        raise JobError(f"compression '{c.exchange.compression}' is not for pattern 'parameter-server'", remedy="use compression 'none'")
    if server and sync == "asp" and c.exchange.quantity == "parameters":
        raise JobError("an asynchronous parameter server adds changes; exchange 'parameters' does not apply", remedy="use gradients")
    _refuse_local_steps(c, sync)
    if c.stages.count > 1:
        _refuse_with_stages(c, sync)
    if c.exchange.ranks_per_machine > 1:
        _refuse_two_levels(c)
    if c.pattern == "pipelined" and sync in ("asp", "hsp"):
        raise JobError(f"pattern 'pipelined' needs every contribution of an iteration, sync '{sync}' does not wait", remedy="use k-reduce")
    if sync in ("asp", "hsp") and c.exchange.quantity == "parameters":
        raise JobError(f"exchange 'parameters' under '{sync}' would undo what others did", remedy="use exchange 'gradients'")
    if c.exchange.compression == "int8" and c.exchange.quantity == "parameters":
        raise JobError("compression 'int8' is for gradients; parameters would lose their small values", remedy="use bf16")
    if server and c.direct:
        raise JobError(
            "pattern 'parameter-server' sums in its server, not over direct channels",
            remedy="leave the pattern out, or use --channel parameter_server",
        )
    if server != c.channel.startswith(("ps://", "parameter_server")) and server:
        raise JobError(
            f"pattern 'parameter-server' needs a parameter server, channel is '{c.channel}'",
            remedy="use --channel parameter_server or ps://host:port",
        )


def _refuse_local_steps(c: Configuration, sync: str) -> None:
    if c.stages.count > 1 and c.exchange.local_steps > 1:
        raise JobError("local steps are not for a model on several functions", remedy="use exchange.local_steps = 1")
    if c.exchange.local_steps > 1 and c.exchanged == "gradients":
        raise JobError(
            f"exchange.local_steps = {c.exchange.local_steps} with exchange 'gradients': after a step of its own a rank's parameters differ",
            remedy="use exchange 'deltas' or 'parameters'; for one step with more samples, a larger batch_size",
        )
    if c.exchange.outer_optimizer != Target(target=AVERAGE) and c.exchanged != "deltas":
        raise JobError(
            f"outer_optimizer '{c.exchange.outer_optimizer.target}' steps with merged deltas, and exchange is '{c.exchanged}'",
            remedy="use exchange 'deltas'",
        )
    if c.pattern == "parameter-server" and sync == "asp" and (c.exchange.local_steps > 1 or c.exchanged == "deltas"):
        raise JobError(
            "an asynchronous parameter server adds the change by one step of each rank; local steps and exchange 'deltas' do not apply",
            remedy="use sync bsp, or pattern k-reduce",
        )


def _refuse_two_levels(c: Configuration) -> None:
    text = (
        f"exchange.ranks_per_machine = {c.exchange.ranks_per_machine} is for direct channels under BSP and models that are on one function"
    )
    if not c.direct:
        raise JobError(f"{text}; channel is '{c.channel}'", remedy="use --channel direct or direct+STORE")
    if c.sync != "bsp":
        raise JobError(f"{text}; sync is '{c.sync}'", remedy="use sync 'bsp'")
    if c.stages.count > 1:
        raise JobError(f"{text}; stages.count = {c.stages.count}", remedy="leave exchange.ranks_per_machine out")


def _refuse_with_stages(c: Configuration, sync: str) -> None:
    if sync != "bsp":
        raise JobError(f"sync '{c.sync}' is not for a model on several functions", remedy="use sync 'bsp'")
    if c.pattern in ("parameter-server", "standalone"):
        raise JobError(f"pattern '{c.pattern}' is not for a model on several functions", remedy="use k-reduce or pipelined")
    if c.exchange.quantity != "gradients":
        raise JobError(f"exchange '{c.exchange.quantity}' is not for a model on several functions", remedy="use exchange 'gradients'")


def _refuse_program_with_stages(job: Job) -> None:
    """Stages divide a model and a loss; they have no merged gradient of all parameters, and one optimiser each."""
    if job.task is not None:
        raise JobError(f"task {job.task.target} cannot be divided into stages", remedy="name a model and a loss, or use stages = 1")
    usual = TrainingOptions()
    given = [f.name for f in dataclasses.fields(usual) if getattr(job, f.name) != getattr(usual, f.name)]
    refused = [name for name in given if name not in ("evaluate_every", "device", "keep_last", "staleness")]
    if refused:
        raise JobError(f"{refused[0]} is not for a model on several functions", remedy="use stages = 1")


def _refuse_decisions(spec: RunSpec) -> None:
    """Refuses merged evaluations where ranks do not come to them together."""
    sync, _ = sync_name(spec.configuration.sync)
    if not spec.shares_evaluations or sync in ("bsp", "hap"):
        return
    what = "early_stopping, keep_best, monitored schedulers and metrics that are no means"
    if sync != "hsp":
        raise JobError(f"{what} need sync bsp, hap or hsp, not {spec.configuration.sync}", remedy="use --sync bsp, hap or hsp")
    if spec.evaluation_interval % spec.split.iterations:
        raise JobError(
            f"{what} under sync hsp need evaluations at the ends of epochs, where ranks meet, not every {spec.options.evaluate_every}",
            remedy='say evaluate_every = "1 epoch"',
        )


def prepare(
    job: Job,
    configuration: Configuration,
    *,
    run_id: str,
    limits: Limits,
    prices: Prices,
    faults: Sequence[Fault] = (),
    peer_timeout_s: float = 20.0,
    cold_start_s: float = 3.0,
    network: tuple[float, float | None] = (0.0, None),
    only_first: int | None = None,
    part: Sequence[int] | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Prepared:
    """Checks a job and a configuration, and makes the objects of the run.

    Args:
        job, configuration: what and how; the configuration is resolved.
        network: latency in seconds and MB/s of one function, where known.
        only_first: train on so many samples and test on none, for a calibration run.
        part: positions of the training samples to train on; None: all.
        on_progress: told what is checked.

    Raises:
        JobError, PlanInfeasible, MissingExtra: one line each; nothing has been started.
    """
    refuse_contradictions(configuration)
    if configuration.stages.count > 1:
        _refuse_program_with_stages(job)
    check_limits(job, configuration)
    most = max([configuration.workers, *(entry.workers or 1 for entry in configuration.resize.schedule)])
    for fault in faults:
        for rank in (fault.rank, fault.to):
            if rank >= most:
                raise JobError(f"fault {fault}: there is no rank {rank}", remedy=f"ranks are 0 to {most - 1}")
        if fault.kind == "cut" and not configuration.direct:
            raise JobError(f"fault {fault}: functions are not connected to each other", remedy="use --channel direct")
    data: TrainingData
    if job.script is None:
        on_progress(f"checking {job.name}: its data, a step and an evaluation, before a function is started")
        data, loop, tried = training_data(job, only_first=only_first, part=part), None, None
    else:
        refuse_with_script(job, configuration, calibrates=only_first is not None)
        data, loop, tried = script_trial(job, bundled(job), configuration, on_progress)
        job = dataclasses.replace(job, epochs=data.epochs)
    spec = RunSpec(
        run_id=run_id,
        name=job.name,
        model=job.model,
        loss=job.loss,
        optimizer=job.optimizer,
        task=job.task,
        options=job.options,
        time_limit_s=job.limits.time_limit_s,
        deadline_s=job.limits.deadline_s,
        configuration=configuration,
        epochs=job.epochs,
        seed=job.seed,
        dtype=job.dtype,
        samples=data.samples,
        prices=prices,
        budget_usd=job.limits.budget_usd,
        faults=tuple(map(str, faults)),
        peer_timeout_s=peer_timeout_s,
        cold_start_s=cold_start_s,
        flow=data.flow,
        last_batch=job.data.last_batch,
        script=loop,
        trainer="torch" if loop is None else "script",
        shared_cores=cores() if configuration.platform == "local" else 0,
        test_samples=data.test_samples,
        samples_globally=_samples_globally(job, configuration, data.flow is not None),
    )
    if spec.samples_globally:
        spec = dataclasses.replace(spec, parts=(spec.samples,))
    check_resizes(spec, limits)
    spec.check_shares()
    call = Call(
        run=run_id,
        rank=0,
        attempt=0,
        memory_mb=configuration.memory_mb,
        lifetime_s=configuration.function_timeout_s,
        channel=configuration.store,
    )
    check_call(call, workers=configuration.workers, limits=limits)
    if tried is None:
        tried = trial_of(job, data, smallest_batch(spec), epoch_length=spec.split.iterations * configuration.exchange.local_steps)
    spec = dataclasses.replace(spec, shares_evaluations=tried.shares_evaluations)
    _refuse_decisions(spec)
    if tried.takes_turns and configuration.sync in ("asp", "hsp"):
        raise JobError(
            f"optimisers that take turns need versions of one iteration each, which sync '{configuration.sync}' does not have",
            remedy="use --sync bsp",
        )
    _check_outer_optimizer(configuration)
    model_bytes, copies = tried.model_bytes, tried.optimizer_copies
    code = bundled(job)
    if job.script is None:
        check_bundle(job, code)
    divided, bounded, note = None, configuration, ""
    if configuration.stages.count > 1:
        from ephemeron.training.driver.launching import model_partition

        divided = model_partition.divide(
            job, configuration, data, spec=spec, optimizer_copies=copies, network=network, mb_per_vcpu=limits.mb_per_vcpu
        )
        spec = dataclasses.replace(spec, stages=divided.stages)
        # The bound of a stage is its share of the vector among its replicas. How evenly computing is divided is not known.
        bounded = dataclasses.replace(configuration, workers=configuration.group, stages=dataclasses.replace(configuration.stages, count=1))
        model_bytes = -(-model_bytes // configuration.stages.count)
    else:
        spec, note = _with_memory(spec, tried, data, most_mb=limits.memory_max_mb)
        check_memory(
            spec.configuration.memory_mb,
            model_bytes=model_bytes,
            optimizer_copies=copies,
            data_bytes=data.held_bytes(_most_samples(spec), configuration.batch_size * configuration.exchange.local_steps),
            most_mb=limits.memory_max_mb,
        )
    check_time(
        job,
        bounded,
        iterations=spec.iterations - spec.epochs,
        model_bytes=model_bytes,
        latency_s=network[0],
        bandwidth_mb_s=network[1],
        compute=job.simulation.compute if divided is None else None,
        tested=max((part.stop - part.start for r in range(configuration.workers) for part in spec.test_parts(r)), default=0),
    )
    if divided is None:
        objects = _objects(job, spec, data, tried.initial)
    else:
        objects = model_partition.objects(job, spec, data, divided)
    keys = Keys(run_id)
    objects = {keys.code: [code], **objects, keys.spec: [spec.to_bytes()]}
    _log.info("prepared run %s: %d samples, %d iterations, %d bytes of parameters", run_id, data.samples, spec.iterations, model_bytes)
    notes = tried.note, note, _undivided(job, configuration, tried), _outside(job, configuration, tried)
    return Prepared(
        job=job,
        spec=spec,
        objects=objects,
        model_bytes=model_bytes,
        test_samples=data.test_samples,
        source=source_of(job, tried.layout),
        notes=tuple(filter(None, notes)),
    )


def _check_outer_optimizer(c: Configuration) -> None:
    """Refuses an outer optimiser that cannot be made."""
    if c.exchanged == "deltas":
        import torch

        from ephemeron.training.task.outer_optimizer import OuterOptimizer

        OuterOptimizer(c.exchange.outer_optimizer, [torch.nn.Parameter(torch.zeros(1))])


def _samples_globally(job: Job, c: Configuration, flow: bool) -> bool:
    """Whether all functions go through one order of all samples.

    Raises:
        JobError: they are to, and cannot.
    """
    divided = c.stages.count > 1 or job.script is not None
    if divided and job.data.sampling == "global":
        what = "a script" if job.script is not None else "a model on several functions"
        raise JobError(f"data.sampling = 'global' is not for {what}", remedy="leave it out")
    return not divided and (job.data.sampling == "global" or (job.data.sampling == "auto" and flow))


def _undivided(job: Job, c: Configuration, tried: Trial) -> str:
    """A remark on a loss that does not bear to be divided, where it is."""
    return tried.undivided if c.workers > 1 or job.options.accumulate > 1 else ""


def _outside(job: Job, c: Configuration, tried: Trial) -> str:
    """Warning where the convergence of the protocol was not tested."""
    found = (
        outside_region(each, sync=c.sync, workers=c.group, exchange=c.exchanged, pattern=c.pattern, staleness=job.staleness)
        for each in tried.optimizers
    )
    return next(filter(None, found), "")


def _most_samples(spec: RunSpec) -> int:
    """Largest number of training samples that a function holds."""
    return spec.samples if spec.samples_globally else max(spec.split.counts)


def _with_memory(spec: RunSpec, tried: Trial, data: TrainingData, *, most_mb: int) -> tuple[RunSpec, str]:
    """The specification with a quota that the model fits into, and a remark on it, which may be empty."""
    c = spec.configuration
    if c.platform == "simulated":
        return spec, ""
    tested = -(-data.test_samples // c.workers)
    found = estimate(
        c,
        activations=tried.activations,
        state_bytes=tried.state_bytes,
        vector_bytes=tried.model_bytes,
        optimizer_copies=tried.optimizer_copies,
        stale=spec.options.staleness == "auto",
        data_bytes=data.held_bytes(_most_samples(spec) + tested, c.batch_size * c.exchange.local_steps),
        test_samples=tested,
    )
    quota_mb, note = quota_for(found, c, most_mb=most_mb)
    return dataclasses.replace(spec, configuration=dataclasses.replace(c, memory_mb=quota_mb)), note


def smallest_batch(spec: RunSpec) -> tuple[int, str]:
    """The smallest batch of any function, and which function has it."""
    c, split = spec.configuration, spec.split
    parts = c.stages.micro_batches * c.exchange.local_steps
    found = [
        (n // parts if n >= parts else 1, r, i)
        for i in sorted({0, split.iterations - 1})
        for r in range(c.group)
        if (n := split.batch_at(r, i)) > 0
    ]
    n, rank, iteration = min(found, key=lambda f: (f[0], -f[2], f[1]))
    who = f"rank {rank}" if c.stages.count == 1 else f"replica {rank}"
    return (n, f"{who} has {n} in iteration {iteration} of every epoch ({spec.samples} samples, global batch {split.global_batch})")


def _objects(job: Job, spec: RunSpec, data: TrainingData, initial: bytes) -> dict[str, list[Buffer]]:
    keys = Keys(spec.run_id)
    world = spec.configuration.workers
    objects: dict[str, list[Buffer]] = {keys.init: [initial]}
    if spec.script is not None:  # it loads its samples itself
        return objects
    shares = assign(data.samples, spec.split, job.seed)
    for part, indices in enumerate([np.concatenate(shares)] if spec.samples_globally else shares):
        objects[keys.data(part)] = data.share(indices)
    for rank, indices in enumerate(np.array_split(np.arange(data.test_samples), world)):
        objects[keys.test(rank)] = data.test_share(indices)
    return objects
