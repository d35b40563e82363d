"""The blocking facade: `train`, `attach`, `stop`, `resume`. Everything below it is asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ephemeron.channels import Channel, open_channel, public_address
from ephemeron.channels.credentials import environment
from ephemeron.channels.keys import Keys
from ephemeron.errors import EphemeronError, JobError, RunFailed, RunNotFound, UserError
from ephemeron.events import Event, RunEnded, RunStarted, from_json, to_json
from ephemeron.job import Configuration, Fault, Job, Simulation
from ephemeron.performance.profile import Profile
from ephemeron.planning import Plan
from ephemeron.platforms.base import Limits
from ephemeron.platforms.clouds import CLOUDS
from ephemeron.platforms.clouds import cloud as cloud_of
from ephemeron.prices import Prices, load_prices
from ephemeron.tensors import Arrays, decode_state
from ephemeron.training import home, live, parameter_server
from ephemeron.training.bill import Ledger, summary
from ephemeron.training.home import PLAN_FILE, PROFILE_FILE, RunFolder
from ephemeron.training.prepare import Prepared, prepare
from ephemeron.training.trigger import Ending, Trigger, together
from ephemeron.worker.spec import RunSpec

if TYPE_CHECKING:
    from ephemeron.platforms.recorded.cloud import Cloud, Settings

OnEvent = Callable[[Event], None]
SIMULATED_MEMORY_MB = 1769
LOCAL_COLD_START_S = 3.0
"""Of a function of this machine: the lead that successors get."""


@dataclass(frozen=True, slots=True)
class Result:
    """A run that has ended."""

    summary: dict[str, Any]
    """What `--json` prints."""
    folder: RunFolder
    causes: tuple[str, ...] = ()
    """Why it failed, if it did."""

    @property
    def finished(self) -> bool:
        return bool(self.summary["status"] == "finished")

    def raise_if_failed(self) -> Result:
        """This result.

        Raises:
            RunFailed: the run failed.
        """
        if self.summary["status"] == "failed":
            raise RunFailed(self.folder.run_id, self.causes)
        return self


def configure(job: Job, **overrides: Any) -> Configuration:
    """The job's own `[run]` values under explicit ones (None: not given), with defaults for the platform.

    Raises:
        JobError: a value is out of range, or two values contradict each other.
    """
    values = {**job.run, **{k: v for k, v in overrides.items() if v is not None}}
    _count_stages(values)
    c = Configuration(**values)
    if c.pattern == "standalone" and "workers" not in values:
        c = dataclasses.replace(c, workers=1)
    c = c.resolved()
    limits = platform_limits(c.platform)
    channel = c.channel
    if channel == "folder" and c.pattern == "parameter-server":
        channel = "parameter_server"
    if c.platform == "simulated":
        if channel not in ("folder", "memory", "parameter_server"):
            raise JobError(
                f"channel '{channel}' cannot be simulated", remedy="leave --channel out: the simulator has its own"
            )
        channel = "parameter_server" if channel == "parameter_server" else "memory"
    elif channel == "memory":
        raise JobError("channel 'memory' lives in one process and cannot join functions", remedy="use folder")
    if c.platform in CLOUDS:  # its function has the memory and the time limit that it was deployed with
        return c
    memory_mb = c.memory_mb
    if not memory_mb:
        from ephemeron.platforms.local import default_memory_mb

        memory_mb = SIMULATED_MEMORY_MB if c.platform == "simulated" else default_memory_mb(c.workers)
    return dataclasses.replace(c, channel=channel, memory_mb=memory_mb, lifetime_s=c.lifetime_s or limits.lifetime_s)


def _count_stages(values: dict[str, Any]) -> None:
    """A placement says how many stages there are; stages and replicas say how many workers."""
    if values.get("placement"):
        from ephemeron.training.stages import placed_stages

        count, schedule = placed_stages(values["placement"])
        values.setdefault("stages", count)
        if "micro_batches" not in values and "schedule" not in values:
            values |= {"micro_batches": schedule.micro_batches, "schedule": schedule.kind}
            values.setdefault("recompute", schedule.recompute)
    if "workers" not in values and ("stages" in values or "replicas" in values):
        values["workers"] = (values.get("stages") or 1) * (values.get("replicas") or 1)


def platform_limits(name: str) -> Limits:
    """What a platform allows."""
    if name == "simulated":
        return Limits()
    if name in CLOUDS:
        return cloud_of(name).limits
    from ephemeron.platforms.local import default_limits

    return default_limits()


def train(
    job: Job, configuration: Configuration | None = None, *, faults: Sequence[Fault] = (), prices_file: Path | None = None,
    on_event: OnEvent = lambda event: None, out: Path | None = None, patience_s: float = 20.0, plan: Plan | None = None,
    profile: Profile | None = None, cloud: Settings | None = None,
) -> Result:  # fmt: skip
    """Trains a job on functions and waits for its end.

    Args:
        job: what to train.
        configuration: how; from `configure`. None: the job's own defaults.
        faults: to inject.
        prices_file: instead of the built-in prices.
        on_event: sees everything that happens.
        out: folder into which result, weights and report are copied.
        patience_s: shortest wait before a silent peer is replaced.
        plan: that the configuration is from; kept beside the run and compared with it in the report.
        profile: that the plan is from; kept so that it can be refined by what the run took.
        cloud: where on a cloud, such as `AwsSettings` for platform `aws`; None: the platform's own defaults.

    Raises:
        UserError: refused; nothing was started or paid for.
    """
    c = configuration or configure(job)
    run_id = home.new_run_id(job.name)
    world = job.simulation
    simulated = c.platform == "simulated"
    public, secrets = public_address(c.channel)
    c = dataclasses.replace(c, channel=public)
    limits = platform_limits(c.platform)
    cold_start_s = world.cold_start_s if simulated else LOCAL_COLD_START_S
    if c.platform in CLOUDS:
        where = cloud_of(c.platform)
        cloud = _settings(where, cloud)
        c, limits = where.admit(c, cloud, secrets)
        cold_start_s = where.cold_start_s
    elif cloud is not None:
        raise JobError(f"{type(cloud).__name__} is not for platform {c.platform}")
    prepared = prepare(
        job, c, run_id=run_id, limits=limits, prices=load_prices(_service(c.channel), prices_file),
        faults=faults, patience_s=patience_s, cold_start_s=cold_start_s,
        network=(world.latency_s, world.bandwidth_mb_s) if simulated else (0.0, None),
    )  # fmt: skip
    folder = home.create(run_id)
    run = _record(prepared.spec, folder, job)
    if cloud is not None:
        run[c.platform] = dataclasses.asdict(cloud)  # type: ignore[call-overload]
    folder.write("run.json", run)
    if plan is not None:
        plan.save(folder.path / PLAN_FILE)
    if profile is not None:
        profile.save(folder.path / PROFILE_FILE)
    try:
        with environment(secrets):
            if simulated:
                from ephemeron import simulation

                ending, ledger = simulation.run(_simulate(prepared, folder, world, on_event))
            else:
                ending, ledger = asyncio.run(_live(folder, run, prepared.spec, on_event, secrets, prepared=prepared))
    except EphemeronError:
        if not folder.events.exists():  # refused before the run began: there is nothing to come back to
            shutil.rmtree(folder.path)
        raise
    return _conclude(folder, run, ledger, ending, out)


def _settings(where: Cloud[Any], given: Settings | None) -> Settings:
    if given is None:
        given = where.settings()
    if not isinstance(given, where.settings):
        raise JobError(f"{type(given).__name__} is not for platform {where.name}",
                       remedy=f"give {where.settings.__name__}")  # fmt: skip
    located: Settings = given.located()
    return located


def attach(run_id: str, *, on_event: OnEvent = lambda event: None, out: Path | None = None) -> Result:
    """Watches a run that is under way as if it had been started here; collects one that has ended meanwhile.

    Raises:
        RunNotFound: no such run.
        UserError: it is not running and has no result: resume it.
    """
    folder, run, spec = _open(run_id)
    ending, ledger = asyncio.run(_live(folder, run, spec, on_event, {}, attach=True))
    return _conclude(folder, run, ledger, ending, out)


def resume(run_id: str, *, on_event: OnEvent = lambda event: None, out: Path | None = None) -> Result:
    """Starts a stopped or failed run again, every rank from its newest checkpoint.

    Raises:
        RunNotFound: no such run.
        UserError: the run has finished, or was simulated.
    """
    folder, run, spec = _open(run_id)
    result = folder.read("result.json")
    if result is not None and result["status"] == "finished":
        raise UserError(f"run {folder.run_id} has finished; there is nothing to resume")
    ending, ledger = asyncio.run(_live(folder, run, spec, on_event, {}))
    return _conclude(folder, run, ledger, ending, out)


def stop(run_id: str, *, now: bool = False) -> str:
    """Asks a run to stop at its next consistent iteration; `now` kills its functions. Either can be resumed.

    Returns:
        The run's full name.
    """
    folder, run, _ = _open(run_id)
    asyncio.run(_stop(folder, run, now=now))
    return folder.run_id


async def _stop(folder: RunFolder, run: dict[str, Any], *, now: bool) -> None:
    try:
        platform = await live.attach(folder, run)
    except live.NotRunning:
        raise UserError(f"run {folder.run_id} is not running") from None
    async with platform:
        if now:
            await platform.cancel_all(folder.run_id)
            return
        with environment(_server_secrets(folder)):
            channel = open_channel(run["address"])
            await channel.put(Keys(folder.run_id).control, [b"stop"])
            await channel.close()


# -- living -------------------------------------------------------------------------------------------------


async def _simulate(
    prepared: Prepared, folder: RunFolder, world: Simulation, on_event: OnEvent
) -> tuple[Ending, Ledger]:
    from ephemeron.platforms.simulated import SimulatedPlatform
    from ephemeron.worker.loop import run_worker

    platform = SimulatedPlatform(world, run_worker, seed=prepared.spec.seed, log=folder.events)
    clock = asyncio.get_running_loop().time
    trigger = Trigger(platform, platform.store, prepared.spec, channel_address="memory", clock=clock, on_event=on_event)
    await trigger.launch(prepared)
    ending = await trigger.watch()
    await platform.close()
    return ending, trigger.ledger


async def _live(
    folder: RunFolder, run: dict[str, Any], spec: RunSpec, on_event: OnEvent, secrets: dict[str, str], *,
    prepared: Prepared | None = None, attach: bool = False,
) -> tuple[Ending, Ledger]:  # fmt: skip
    """Launches (with `prepared`), attaches to, or resumes a run, and watches it to its end."""
    async with contextlib.AsyncExitStack() as stack:
        server = parameter_server.known(folder.path)
        if run["configuration"]["channel"] == "parameter_server" and not attach:
            server = parameter_server.start(folder.path)
            run["address"] = server.address
            folder.write("run.json", run)
        if server is not None:
            stack.callback(server.stop)
            secrets = {**secrets, "EPHEMERON_CHANNEL_TOKEN": server.token}
        stack.enter_context(environment(secrets))
        channel = await stack.enter_async_context(open_channel(run["address"]))
        if attach:
            try:
                platform = await live.attach(folder, run)
            except live.NotRunning:
                return await _already_over(folder, spec, channel, on_event)
        else:
            await _probe(channel, spec.run_id)
            platform = await live.start(folder, run, secrets)
        stack.push_async_callback(platform.shutdown)
        trigger = Trigger(
            platform, channel, spec, channel_address=run["address"], clock=time.time, on_event=on_event,
            origin=run["wall_time"] if attach else None, session=_session(folder) if attach else 0.0,
        )  # fmt: skip
        with _interruptible(trigger):
            if prepared is not None:
                await trigger.launch(prepared)
            elif not attach:
                await trigger.resume(_last_t(folder))
                run["wall_time"] = trigger.origin
                folder.write("run.json", run)
            return await trigger.watch(), trigger.ledger


async def _probe(channel: Channel, run_id: str) -> None:
    """Writes and deletes a small object, so that a wrong address fails before a function is paid for."""
    key = f"{run_id}/probe"
    await channel.put(key, [b"ephemeron"])
    await channel.delete([key])


async def _already_over(folder: RunFolder, spec: RunSpec, channel: Channel, on_event: OnEvent) -> tuple[Ending, Ledger]:
    """The functions are gone: their result, if they left one."""
    ledger = Ledger(spec.prices)
    for event in _events(folder):
        ledger.feed(event)
        on_event(event)
    data = await channel.fetch(Keys(spec.run_id).result)
    if data is None:
        status = (folder.read("result.json") or {}).get("status", "interrupted")
        raise UserError(
            f"run {folder.run_id} is not running ({status}); continue it with: ephemeron resume {folder.run_id}"
        )
    ended = RunEnded(t=ledger.ended_at, status="finished")
    with folder.events.open("a") as log:
        log.write(to_json(ended) + "\n")
    on_event(ended)
    ending = Ending("finished", [], *decode_state(data))
    await together(ending, channel, Keys(spec.run_id))
    return ending, ledger


@contextmanager
def _interruptible(trigger: Trigger) -> Iterator[None]:
    """First Ctrl-C: stop at a checkpoint. Second: kill."""
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        (trigger.kill_requested if trigger.stop_requested.is_set() else trigger.stop_requested).set()

    handled = [signal.SIGINT, signal.SIGTERM]
    try:
        for number in handled:
            loop.add_signal_handler(number, interrupt)
    except (RuntimeError, ValueError, NotImplementedError):
        handled = []  # not the main thread: whoever called us handles signals
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)


def _server_secrets(folder: RunFolder) -> dict[str, str]:
    server = parameter_server.known(folder.path)
    return {} if server is None else {"EPHEMERON_CHANNEL_TOKEN": server.token}


# -- records ------------------------------------------------------------------------------------------------


def _record(spec: RunSpec, folder: RunFolder, job: Job) -> dict[str, Any]:
    c = spec.configuration
    return {
        "run_id": spec.run_id,
        "job": job.name,
        "platform": c.platform,
        "address": folder.objects.resolve().as_uri() if c.channel == "folder" else c.channel,
        "configuration": dataclasses.asdict(c),
        "spec": json.loads(spec.to_bytes()),
        "budget_usd": job.limits.budget_usd,
        "wall_time": time.time(),
    }


def _open(run_id: str) -> tuple[RunFolder, dict[str, Any], RunSpec]:
    folder = home.find(run_id)
    run = folder.read("run.json")
    if run is None:
        raise RunNotFound(f"run {run_id!r} has no readable run.json")
    if run["platform"] == "simulated":
        raise UserError(f"run {folder.run_id} was simulated: its functions lived and ended inside one command")
    return folder, run, RunSpec.from_bytes(json.dumps(run["spec"]).encode())


def _events(folder: RunFolder) -> Iterator[Event]:
    with folder.events.open() as lines:
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                yield from_json(line)


def _session(folder: RunFolder) -> float:
    """`wall_time` of the latest launch or resume."""
    return max((e.wall_time for e in _events(folder) if isinstance(e, RunStarted)), default=0.0)


def _last_t(folder: RunFolder) -> float:
    return max((e.t for e in _events(folder)), default=0.0)


def _conclude(folder: RunFolder, run: dict[str, Any], ledger: Ledger, ending: Ending, out: Path | None) -> Result:
    """Writes result, weights and report, and copies them to `out`."""
    value = summary(ledger, run, status=ending.status, final=ending.final)
    folder.write("result.json", value)
    written = [folder.path / "result.json"]
    if ending.arrays is not None:
        write_weights(folder.weights, ending.arrays, (ending.final or {}).get("bf16", ()))
        written.append(folder.weights)
    written += write_report(folder, ledger.prices)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for path in written:
            shutil.copy2(path, out / path.name)
    return Result(value, folder, tuple(ending.causes))


def write_report(folder: RunFolder, prices: Prices, out: Path | None = None) -> list[Path]:
    """`report.html` and, if matplotlib is there, `report.png`."""
    from ephemeron import report

    return report.write_report(folder.path, out, prices=prices)


def write_weights(path: Path, arrays: Arrays, bf16: Sequence[str]) -> None:
    """A safetensors file with the names of the module's `state_dict`, loadable by any tool."""
    if bf16:
        import torch
        from safetensors.torch import save_file

        tensors = {n: torch.from_numpy(a) for n, a in arrays.items()}
        save_file({n: t.view(torch.bfloat16) if n in bf16 else t for n, t in tensors.items()}, str(path))
    else:
        from safetensors.numpy import save_file as save_numpy

        save_numpy(arrays, str(path))


def _service(channel: str) -> str:
    if channel.startswith(("redis://", "rediss://")):
        return "cache"
    return "server" if channel.startswith(("ps://", "parameter_server")) else "objects"


def prices_of(run: dict[str, Any]) -> Prices:
    """The prices that a run was billed at."""
    return Prices(**run["spec"]["prices"])
