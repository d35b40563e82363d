"""Shards as processes of this machine: started, supervised, and started again with their state when they die.

    python -m ephemeron.sparse.store.processes          one shard; settings as JSON in the first line of its input

A shard's process ends, and stores its state first, when its input ends: also when its parent is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ephemeron.communication.channels.address import open_channel
from ephemeron.communication.rpc.auth import Token, token_text
from ephemeron.config import own_processes
from ephemeron.config.typed import Positive, Typed, build, plain
from ephemeron.errors import EphemeronError, JobError, ServiceUnreachable, UserError
from ephemeron.events import StoreRequests, Traffic
from ephemeron.runs.function_set import LossBudget
from ephemeron.runs.services import Said, ServiceRun, read_token
from ephemeron.sparse.store.places import framed
from ephemeron.sparse.store.shard import TOKEN_VARIABLE, Shard, ShardOptions

_log = logging.getLogger(__name__)

_STEADY_S = 10.0
_END_S = 30.0
"""Seconds in which a shard stores its state when it is ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """First line of a process's input."""

    options: ShardOptions
    channel: str = ""
    """Address of the channel; empty: the state is lost with the process."""
    token: str
    """Never in an argument or a log."""
    report_s: Positive = 5.0
    """Seconds between reports, by which the parent sees that the process runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReport:
    """A line of a process's output: its address when it is ready, from time to time that it runs, and its end."""

    host: str = ""
    port: int = 0
    attempt: int = 0
    end: str = ""
    error: str = ""
    user: bool = False
    """Whether the error is a mistake of the user."""
    gets: int = 0
    pushes: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    """Of this process with its channel."""


class ShardProcesses:
    """All shards of a store, each a process.

    Args:
        options: of each shard.
        token: of the store.
        channel: address for snapshots, logs and addresses; empty: none.
        frozen_s: seconds without a report after which a process is killed, and started again.
    """

    def __init__(self, options: Sequence[ShardOptions], *, token: Token, channel: str = "", frozen_s: float = 30.0) -> None:
        if not token:
            raise JobError("a sparse store has no token", remedy=f"set {TOKEN_VARIABLE} to a long random text")
        token = token_text(token)
        self._settings = [ProcessSettings(options=o, channel=channel, token=token, report_s=frozen_s / 6) for o in options]
        self._frozen_s = frozen_s
        self._processes: list[asyncio.subprocess.Process | None] = [None] * len(options)
        self._tasks: list[asyncio.Task[None]] = []
        self._ending = False
        self.restarts = 0
        """Processes that died and were started again."""
        self.reports: list[ProcessReport] = [ProcessReport()] * len(options)
        """The last report of each shard."""
        self._ended_traffic = Traffic()
        """Of processes that have died, up to their last reports."""

    @property
    def traffic(self) -> Traffic:
        """Requests to the channel by all shards so far, those of processes that died included."""
        return sum((report.traffic for report in self.reports), self._ended_traffic)

    @property
    def addresses(self) -> list[str]:
        """`HOST:PORT` of each shard, as clients name them."""
        return [
            f"{settings.options.reached_at or report.host}:{report.port}"
            for settings, report in zip(self._settings, self.reports, strict=True)
        ]

    @property
    def pids(self) -> list[int]:
        """Process of each shard."""
        return [process.pid for process in self._processes if process is not None]

    async def start(self) -> list[str]:
        """Starts all shards and returns their addresses.

        Raises:
            JobError: a port is occupied, or the store has other settings.
            EphemeronError: a shard did not start.
        """
        try:
            await asyncio.gather(*(self._start(shard) for shard in range(len(self._settings))))
        except BaseException:
            await self.close()
            raise
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._supervise(shard)) for shard in range(len(self._settings))]
        return self.addresses

    async def wait(self) -> None:
        """Waits until all shards have been stopped by a client, or one cannot be kept alive.

        Raises:
            EphemeronError: says why.
        """
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()

    async def close(self) -> None:
        """Ends all shards, which store their state."""
        self._ending = True
        for process in self._processes:
            if process is not None and process.stdin is not None:
                process.stdin.close()
        try:
            async with asyncio.timeout(_END_S):
                await asyncio.gather(*(self._drain(shard) for shard in range(len(self._processes))))
        except TimeoutError:
            _log.warning("shards did not end within %g s, and are killed", _END_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in self._processes:
            if process is not None:
                if process.returncode is None:
                    process.kill()
                await process.wait()

    async def _start(self, shard: int) -> None:
        process = await asyncio.create_subprocess_exec(
            *own_processes.command("sparse-shard"), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True
        )
        self._processes[shard] = process
        assert process.stdin is not None
        process.stdin.write(json.dumps(plain(self._settings[shard])).encode() + b"\n")
        report = await self._report(process)
        while report is not None and not (report.port or report.end or report.error):
            report = await self._report(process)  # it is restoring its state
        if report is None or not report.port:
            await process.wait()
            if report is not None and report.user:
                raise JobError(report.error)
            reason = report.error if report is not None and report.error else f"exit code {process.returncode}"
            raise ServiceUnreachable(f"shard {shard} of the sparse store did not start: {reason}")
        self._ended_traffic += self.reports[shard].traffic
        self.reports[shard] = report
        options = replace(self._settings[shard].options, port=report.port)
        self._settings[shard] = replace(self._settings[shard], options=options)

    async def _report(self, process: asyncio.subprocess.Process) -> ProcessReport | None:
        assert process.stdout is not None
        line = await process.stdout.readline()
        return build(ProcessReport, json.loads(line), where="report of a shard") if line.strip() else None

    async def _drain(self, shard: int) -> None:
        process = self._processes[shard]
        if self._tasks:
            await asyncio.wait({self._tasks[shard]})
        elif process is not None:
            await process.communicate()

    async def _supervise(self, shard: int) -> None:
        loop, budget = asyncio.get_running_loop(), LossBudget()
        while True:
            process, begun = self._processes[shard], loop.time()
            assert process is not None
            last = await self._follow(shard, process)
            code = await process.wait()
            if self._ending or (last is not None and last.end == "stopped"):
                return
            if loop.time() - begun > _STEADY_S:
                budget = LossBudget()
            what = last.error or last.end if last is not None else f"exit code {code}"
            if not self._settings[shard].channel:
                raise ServiceUnreachable(f"shard {shard} has ended ({what}), and its state with it: it had no channel")
            if budget.ended(what) or (last is not None and last.end == "replaced"):
                raise ServiceUnreachable(f"shard {shard} has ended ({what})")
            _log.warning("shard %d has ended (%s): starting it again", shard, what)
            await self._start(shard)
            self.restarts += 1

    async def _follow(self, shard: int, process: asyncio.subprocess.Process) -> ProcessReport | None:
        """Reads the reports of a process to their end, and kills it when they stop coming. Returns the last one."""
        last: ProcessReport | None = None
        while True:
            try:
                async with asyncio.timeout(None if self._ending else self._frozen_s):
                    report = await self._report(process)
            except TimeoutError:
                if not self._ending:
                    _log.warning("shard %d has not answered for %g s: it is killed", shard, self._frozen_s)
                    process.kill()
                    return None
                continue
            if report is None:
                return last
            last = report
            self.reports[shard] = replace(report, host=self.reports[shard].host, port=self.reports[shard].port)


async def _serve(settings: ProcessSettings, tell: Callable[[ProcessReport], None], ended: asyncio.Event) -> None:
    options = settings.options
    channel = open_channel(settings.channel) if settings.channel else None
    place = None if channel is None else framed(channel, owner=f"shard-{options.shard}-{os.getpid()}")
    shard = Shard(
        options,
        token=settings.token,
        channel=place,
        ready=lambda host, port: tell(ProcessReport(host=host, port=port, attempt=shard.attempt)),
    )

    def now(end: str = "") -> ProcessReport:
        status, traffic = shard.status, Traffic() if place is None else place.traffic
        return ProcessReport(end=end, attempt=shard.attempt, gets=status.gets, pushes=status.pushes, traffic=traffic)

    async def report() -> None:
        while True:
            await asyncio.sleep(settings.report_s)
            tell(now())

    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(_end_with(ended, shard)), loop.create_task(report())]
    try:
        tell(now(await shard.run()))
    finally:
        for task in tasks:
            task.cancel()
        if channel is not None:
            await channel.close()


async def _end_with(ended: asyncio.Event, shard: Shard) -> None:
    await ended.wait()
    shard.stop.set()


async def _main() -> int:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    settings = build(ProcessSettings, json.loads(await reader.readline()), where="settings of a shard")
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)

    async def until_eof() -> None:
        await reader.read()
        ended.set()

    def tell(report: ProcessReport) -> None:
        with contextlib.suppress(OSError):  # the parent has died
            print(json.dumps(plain(report)), flush=True)

    watching = loop.create_task(until_eof())
    try:
        await _serve(settings, tell, ended)
    except EphemeronError as e:
        tell(ProcessReport(error=str(e), user=isinstance(e, UserError)))
        return 1
    finally:
        watching.cancel()
    return 0


# -- the parameter store of sparse models as a service of this machine (`runs.services`) --------------------------


ADDRESS = "channel"
"""Private setting: address of the channel with its credentials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings(Typed):
    """Settings of the service."""

    shards: tuple[ShardOptions, ...]
    channel: str = ""
    """Address for snapshots and logs, without credentials; empty: none."""
    token_file: str = ""
    """File with the token; empty: an environment variable has it."""


async def serve(service: ServiceRun) -> Said:
    """See `runs.services.Serve`."""
    o = build(StoreSettings, service.header.payload, where=f"settings of {service.header.run_id}")
    token = read_token(o.token_file, TOKEN_VARIABLE, "the store")
    processes = ShardProcesses(o.shards, token=token, channel=service.private.get(ADDRESS, o.channel))
    addresses = await processes.start()
    said = Said(
        f"sparse store at {', '.join(addresses)}; Ctrl-C ends it",
        {"addresses": addresses, "pids": processes.pids, "run_id": service.header.run_id},
    )
    shards = tuple(replace(each, port=int(at.rpartition(":")[2])) for each, at in zip(o.shards, addresses, strict=True))
    ending, dying = asyncio.create_task(service.over.wait()), asyncio.create_task(processes.wait())
    try:
        service.ready(said, address=",".join(addresses), payload=plain(replace(o, shards=shards)))
        await asyncio.wait({ending, dying}, return_when=asyncio.FIRST_COMPLETED)
        if dying.done():
            dying.result()
    finally:
        ending.cancel()
        dying.cancel()
        await processes.close()
        if service.run.begun:
            service.run.emit(StoreRequests(t=service.run.t, source="shards", traffic=processes.traffic))
    gets, pushes = (sum(getattr(report, name) for report in processes.reports) for name in ("gets", "pushes"))
    return Said(
        f"{gets} multi-gets and {pushes} changes were served; {processes.restarts} shards were started again",
        {"gets": gets, "pushes": pushes, "restarts": processes.restarts},
    )


if __name__ == "__main__":
    sys.exit(asyncio.run(_main()))
