"""One random schedule on real processes: functions that are killed and frozen, clients and daemons that die, stores behind a
faulty network, caches that restart, clocks that step. A schedule is a function of its seed. Its timing on the machine
is not, so reproducing a failure may take several repetitions.

The model is synthetic (its gradients are sensitive to every lost, repeated or reordered update) and functions load no PyTorch,
so a schedule takes seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from benchmarks import chaos_function
from benchmarks.common import ROOT
from benchmarks.servers import Server, restarted_valkey, started_valkey
from ephemeron.communication.channels import open_channel
from ephemeron.communication.channels.retrying import Retrying, RetryPolicy
from ephemeron.communication.keys import Keys
from ephemeron.errors import DaemonGone
from ephemeron.events import Ended, Event, FaultFired, Invoked, Progress
from ephemeron.functions import simulation
from ephemeron.functions.base import Limits
from ephemeron.functions.local import LocalPlatform
from ephemeron.functions.simulated import SimulatedPlatform
from ephemeron.prices import load_prices
from ephemeron.testing.faulty_proxy import HTTP_TROUBLES, TCP_TROUBLES, FaultyProxy, seeded
from ephemeron.training.driver.launching.prepare import Prepared
from ephemeron.training.driver.run_driver import RunDriver, RunOutcome
from ephemeron.training.job import Configuration, Job, Simulation, Target
from ephemeron.training.tensors import digest
from ephemeron.training.worker.spec import RunSpec

LIMIT_S = 150.0
"""Seconds after which a schedule counts as hanging."""
CHANNELS = ("folder", "s3", "valkey")
MODES = ("bsp", "hap", "ssp:1", "asp", "pipelined", "scatter")
TROUBLES = ("kill", "freeze", "client", "daemon", "network", "pause", "clock", "lifetime")
RESTARTS = 0.6
"""Share of the schedules over a cache in which the cache restarts."""
BUCKET = "chaos"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Faults of one run."""

    seed: int
    channel: str
    mode: str
    workers: int
    aggregators: int
    iterations: int
    checkpoint_every: int
    function_timeout_s: float
    step_s: float
    """Seconds of computing per iteration."""
    faults: tuple[str, ...]
    """Faults that functions inject into themselves."""
    freezes: tuple[tuple[int, int, float], ...]
    """Rank, iteration, seconds."""
    client_dies_at: int | None
    daemon_dies_at: int | None
    network_rate: float
    pauses: tuple[tuple[int, float], ...]
    """Faults of the network: iteration, seconds."""
    restart_at: int | None
    """Restarts of the cache."""
    skew_s: float

    @property
    def troubles(self) -> int:
        """Number of processes that die, for the bound on invocations."""
        dead = self.client_dies_at is not None, self.daemon_dies_at is not None
        return len(self.faults) + len(self.freezes) + self.workers * sum(dead) + (self.restart_at is not None)


def schedule_of(seed: int) -> Schedule:
    """Schedule of a seed."""
    rng = random.Random(f"live/{seed}")
    channel, mode = rng.choice(CHANNELS), rng.choice(MODES)
    workers = rng.choice((2, 2, 3))
    chosen = set(rng.sample(TROUBLES, rng.choice((1, 2, 2, 3))))
    lifetimes = "lifetime" in chosen
    iterations = rng.randint(30, 40) if lifetimes else rng.randint(8, 14)

    def at() -> int:
        return rng.randrange(1, iterations - 1)

    kills = [
        f"kill:rank={rng.randrange(workers)},iteration={at()},phase={rng.choice(('compute', 'upload', 'download'))}"
        for _ in range(rng.choice((1, 1, 2)))
    ]
    freezes = ((rng.randrange(workers), at(), rng.uniform(0.3, 3.0)),)
    remote = channel != "folder"
    return Schedule(
        seed=seed,
        channel=channel,
        mode=mode,
        workers=workers,
        aggregators=rng.randint(1, workers),
        iterations=iterations,
        checkpoint_every=rng.randint(2, 5),
        function_timeout_s=rng.uniform(4.0, 6.0) if lifetimes else 900.0,
        step_s=rng.uniform(0.1, 0.2) if lifetimes else 0.0,
        faults=tuple(kills) if "kill" in chosen else (),
        freezes=freezes if "freeze" in chosen else (),
        client_dies_at=at() if "client" in chosen else None,
        daemon_dies_at=at() if "daemon" in chosen else None,
        network_rate=rng.uniform(0.02, 0.12) if "network" in chosen and remote else 0.0,
        pauses=((at(), rng.uniform(0.5, 3.0)),) if "pause" in chosen and remote else (),
        restart_at=at() if channel == "valkey" and rng.random() < RESTARTS else None,
        skew_s=rng.choice((1.0, 60.0, 7200.0)) if "clock" in chosen else 0.0,
    )


def spec_of(s: Schedule, address: str) -> RunSpec:
    """Run specification of a schedule."""
    pattern = {"pipelined": "pipelined", "scatter": "scatter-reduce"}.get(s.mode, "k-reduce")
    sync = s.mode if pattern == "k-reduce" else "bsp"
    configuration = Configuration(
        platform="local",
        channel=address,
        pattern=pattern,
        sync=sync,
        workers=s.workers,  # type: ignore[arg-type]
        aggregators=0 if pattern == "scatter-reduce" else s.aggregators,
        memory_mb=512,
        batch_size=4,
        function_timeout_s=s.function_timeout_s,
        checkpoint_every=s.checkpoint_every,
    ).resolved()
    return RunSpec(
        run_id=f"chaos-{s.seed}",
        model=Target(target="none"),
        loss=Target(target="none"),
        optimizer=Target(target="none"),
        configuration=configuration,
        epochs=1,
        seed=s.seed,
        dtype="float32",
        samples=4 * s.workers * s.iterations,
        prices=load_prices("objects"),
        faults=s.faults,
        trainer="synthetic",
        trainer_options={"elements": 600},
        peer_timeout_s=3.0,
        cold_start_s=1.0,
    )


def expected(spec: RunSpec) -> str:
    """Weights of the undisturbed run, in virtual time; empty where weights depend on time."""
    if spec.configuration.sync not in ("bsp", "hap"):
        return ""
    import dataclasses

    calm = dataclasses.replace(
        spec, faults=(), configuration=dataclasses.replace(spec.configuration, platform="simulated", function_timeout_s=900.0)
    )

    async def main() -> str:
        platform = SimulatedPlatform(Simulation(compute={"a": 50.0, "b": 4.0, "m": 0.0}), limits=Limits())
        clock = asyncio.get_running_loop().time
        trigger = RunDriver(platform, platform.store, calm, channel_address="memory", clock=clock)
        await trigger.launch(_prepared(calm))
        ending = await trigger.watch()
        assert ending.arrays is not None, ending.causes
        return digest(ending.arrays)

    return simulation.run(main())


def _prepared(spec: RunSpec) -> Prepared:
    job = Job(name="chaos", model=Target(target="none"))
    return Prepared(job=job, spec=spec, objects={Keys(spec.run_id).spec: [spec.to_bytes()]}, model_bytes=2400)


@dataclass(slots=True)
class World:
    """A running schedule."""

    s: Schedule
    spec: RunSpec
    folder: Path
    address: str
    proxy: FaultyProxy | None
    valkey: Server | None
    events: list[Any] = field(default_factory=list)
    done: set[str] = field(default_factory=set)
    pids: dict[str, int] = field(default_factory=dict)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    platform: LocalPlatform | None = None
    client_dies: asyncio.Event = field(default_factory=asyncio.Event)

    def on_event(self, event: Event) -> None:
        """Starts the faults of this iteration; each fault once."""
        self.events.append(event)
        if not isinstance(event, Progress):
            return
        s = self.s
        for n, (rank, iteration, seconds) in enumerate(s.freezes):
            if event.rank == rank and event.iteration >= iteration:
                self._once(f"freeze {n}", self._freeze(event.rank, seconds))
        for n, (iteration, seconds) in enumerate(s.pauses):
            if event.iteration >= iteration:
                self._once(f"pause {n}", self._pause(seconds))
        if s.restart_at is not None and event.iteration >= s.restart_at:
            self._once("restart", self._restart())
        if s.daemon_dies_at is not None and event.iteration >= s.daemon_dies_at:
            self._once("daemon", self._kill_daemon())
        if s.client_dies_at is not None and event.iteration >= s.client_dies_at:
            self._once("client", self._kill_client())

    def _once(self, what: str, work: Any) -> None:
        if what in self.done:
            work.close()
            return
        self.done.add(what)
        self.tasks.append(asyncio.ensure_future(work))

    async def _freeze(self, rank: int, seconds: float) -> None:
        assert self.platform is not None
        with contextlib.suppress(Exception):  # it, or the daemon, may have ended meanwhile
            latest = [e.invocation for e in self.events if isinstance(e, Invoked) and e.rank == rank][-1]
            pid = (await self.platform.status()).running.get(latest)
            if pid is not None:
                os.kill(pid, signal.SIGSTOP)
                try:
                    await asyncio.sleep(seconds)
                finally:
                    os.kill(pid, signal.SIGCONT)

    async def _pause(self, seconds: float) -> None:
        assert self.proxy is not None
        self.proxy.pause()
        await asyncio.sleep(seconds)
        self.proxy.resume()

    async def _restart(self) -> None:
        assert self.valkey is not None
        self.valkey.process.kill()
        await asyncio.to_thread(self.valkey.process.wait)
        await asyncio.sleep(0.5)
        self.valkey = await asyncio.to_thread(restarted_valkey, self.valkey)

    async def _kill_daemon(self) -> None:
        assert self.platform is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.platform.host_pid, signal.SIGKILL)

    async def _kill_client(self) -> None:
        self.client_dies.set()

    # -- clients ------------------------------------------------------------------------------------------

    async def run(self) -> RunOutcome:
        """Launches the run and watches it to the end, with a second client if the first one dies."""
        s, run_dir = self.s, self.folder / self.spec.run_id
        step_s = random.Random(s.seed).uniform(-s.skew_s, s.skew_s)
        env = {
            "EPHEMERON_ENTRIES": "worker=benchmarks.chaos_function:run",
            "EPHEMERON_PRELOAD": "ephemeron.training.worker.loop",
            "PYTHONPATH": str(ROOT),
            chaos_function.SKEW_S: str(s.skew_s),
            chaos_function.STEP_S: str(s.step_s),
            chaos_function.SEED: str(s.seed),
        }

        def clock() -> float:  # the client's own steps in the middle of the run
            late = any(isinstance(e, Progress) and e.iteration > s.iterations / 2 for e in self.events)
            return time.time() + (step_s if late else 0.0)

        async with open_channel(self.address) as channel:
            self.platform = await LocalPlatform.start(run_dir, env=env, enforce=False, restart=True)
            trigger = RunDriver(self.platform, channel, self.spec, channel_address=self.address, clock=clock, on_event=self.on_event)
            await trigger.launch(_prepared(self.spec))
            watching = asyncio.ensure_future(trigger.watch())
            dying = asyncio.ensure_future(self.client_dies.wait())
            await asyncio.wait([watching, dying], return_when=asyncio.FIRST_COMPLETED)
            dying.cancel()
            if watching.done():
                return await watching
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await self.platform.close()
        async with open_channel(self.address) as channel:
            self.events.clear()
            try:
                self.platform = await LocalPlatform.attach(run_dir, restart=True)
                session, origin, resuming = trigger.session, trigger.origin, False
            except DaemonGone:  # the daemon has died, too, or the run is over
                self.platform = await LocalPlatform.start(run_dir, env=env, enforce=False, restart=True)
                session, origin, resuming = 0.0, trigger.origin, True
            second = RunDriver(
                self.platform,
                channel,
                self.spec,
                channel_address=self.address,
                clock=clock,
                on_event=self.on_event,
                origin=origin,
                session=session,
                signing=trigger.signing,
            )
            if resuming:
                await second.resume(max((e.t for e in self.events), default=30.0))
            return await second.watch()

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        if self.platform is not None:
            with contextlib.suppress(Exception):
                await self.platform.shutdown()


@asynccontextmanager
async def stores(s: Schedule, folder: Path, s3_port: int) -> AsyncIterator[tuple[str, FaultyProxy | None, list[Server]]]:
    """Address, proxy and cache of a schedule."""
    if s.channel == "folder":
        yield (folder / "objects").resolve().as_uri(), None, []
        return
    servers = [started_valkey(folder, durable=True)] if s.channel == "valkey" else []
    port = servers[0].port if servers else s3_port
    troubles = TCP_TROUBLES if servers else HTTP_TROUBLES
    decide = seeded(s.seed, rate=s.network_rate, troubles=troubles)
    try:
        with FaultyProxy(port, http=not servers, decide=decide) as proxy:
            if servers:
                yield f"redis://127.0.0.1:{proxy.port}/0", proxy, servers
            else:
                keys = {"AWS_ACCESS_KEY_ID": "chaos", "AWS_SECRET_ACCESS_KEY": "chaos", "AWS_REGION": "us-east-1"}
                os.environ.update(keys, AWS_ENDPOINT_URL=f"http://127.0.0.1:{proxy.port}")  # functions have them from here
                yield f"s3://{BUCKET}/{s.seed}", proxy, servers
    finally:
        for server in servers:
            server.stop()


def run(seed: int, *, s3_port: int) -> tuple[list[str], dict[str, int]]:
    """Runs the schedule of a seed.

    Args:
        s3_port: of a server with the bucket `BUCKET`, on loopback.

    Returns:
        The violated guarantees (empty if all hold), and how often each kind of fault happened.
    """
    s = schedule_of(seed)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    try:
        return asyncio.run(_run(s, folder, s3_port))
    except Exception as e:  # noqa: BLE001 - a schedule that raises has failed
        return [f"{type(e).__name__}: {e}"], {}
    finally:
        kill_left(folder)
        shutil.rmtree(folder, ignore_errors=True)


async def _run(s: Schedule, folder: Path, s3_port: int) -> tuple[list[str], dict[str, int]]:
    async with stores(s, folder, s3_port) as (address, proxy, servers):
        spec = spec_of(s, address)
        world = World(s, spec, folder, address, proxy, servers[0] if servers else None)
        try:
            async with asyncio.timeout(LIMIT_S):
                ending = await world.run()
        except TimeoutError:
            seen = max((e.iteration for e in world.events if isinstance(e, Progress)), default=-1)
            return [f"hangs: after {LIMIT_S:g} s at iteration {seen} of {s.iterations}"], {}
        finally:
            await world.close()
            if world.valkey is not None:
                servers[:] = [world.valkey]
        wrong = list(_wrong(s, await asyncio.to_thread(expected, spec), world, ending))
        if ending.status == "finished":
            wrong += await _left_over(address, Keys(spec.run_id))
        return wrong, _happened(world)


async def _left_over(address: str, keys: Keys) -> list[str]:
    """Objects that a finished run has left in its store besides its result and its specification."""
    async with open_channel(address) as channel:
        store = Retrying(channel, policy=RetryPolicy(), rng=random.Random(keys.run))
        left = set(await store.list(f"{keys.run}/")) - {keys.result, keys.spec}
    return [f"left over: {sorted(left)[:5]}"] if left else []


def _happened(world: World) -> dict[str, int]:
    counts = Counter(what.split(" ")[0] for what in world.done)
    counts.update(e.fault.partition(":")[0] for e in world.events if isinstance(e, FaultFired))
    counts["relay"] = sum(isinstance(e, Invoked) and e.reason == "relay" for e in world.events)
    counts["replacement"] = sum(isinstance(e, Invoked) and e.reason == "replacement" for e in world.events)
    counts["clock"] = int(world.s.skew_s > 0)
    if world.proxy is not None:
        counts.update(world.proxy.injected)
    return {f"on {world.s.channel}": 1, **{name: n for name, n in sorted(counts.items()) if n}}


def _wrong(s: Schedule, weights: str, world: World, ending: RunOutcome) -> Iterator[str]:
    if ending.status != "finished" or ending.arrays is None:
        yield f"{ending.status}: {'; '.join(ending.causes)}"
        return
    if weights and digest(ending.arrays) != weights:
        yield "weights differ from those of the undisturbed run"
    ended = [e for e in world.events if isinstance(e, Ended)]
    invoked = [e for e in world.events if isinstance(e, Invoked) and e.reason != "relay"]
    most = s.workers * (2 + s.troubles)
    if len(invoked) > most:
        yield f"{len(invoked)} invocations besides hand-offs, for {s.troubles} troubles at most {most}"
    for e in ended:
        if e.status == "error":
            yield f"rank {e.rank}, attempt {e.attempt} raised: {e.error}"


def kill_left(folder: Path) -> None:
    """Remaining processes of a schedule that has failed."""
    for process in psutil.process_iter(["cmdline", "cwd"]):
        with contextlib.suppress(psutil.Error):
            if str(folder) in " ".join(process.info["cmdline"] or ()) or str(process.info["cwd"]).startswith(str(folder)):
                process.kill()


@contextmanager
def s3_server() -> Iterator[int]:
    """Port of moto's server, with the bucket of all schedules."""
    import urllib.request

    from benchmarks.servers import answers_on
    from ephemeron.testing._emulation.service import free_port

    port = free_port()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.moto_server", "-H", "127.0.0.1", "-p", str(port)], cwd=ROOT, **quiet)  # type: ignore[call-overload]
    try:
        end = time.monotonic() + 60
        while not answers_on(port):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("the S3 server (moto) does not start; pip install 'moto[server,s3]'")
            time.sleep(0.05)
        made = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
        urllib.request.urlopen(made, timeout=30).close()
        yield port
    finally:
        process.terminate()
        process.wait()
