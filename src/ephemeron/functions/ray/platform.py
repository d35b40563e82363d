"""Platform of Ray: one client's access to the calls of one run, and a watch over its actors, which cannot report their own deaths."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ephemeron import logs
from ephemeron.communication.channels.address import open_channel
from ephemeron.communication.channels.base import Channel
from ephemeron.errors import ChannelError
from ephemeron.functions.async_invoke.log_source import Death, LogReport
from ephemeron.functions.async_invoke.platform import AsyncInvokePlatform
from ephemeron.functions.async_invoke.records import BegunRecord, Record, RecordKeys, SentRecord, calls_prefix
from ephemeron.functions.base import Limits
from ephemeron.functions.ray.actor import Actor
from ephemeron.functions.ray.cluster import connect, disconnect, ray_module
from ephemeron.functions.ray.invoker import RaySender, WorkerSettings, namespace_of
from ephemeron.functions.ray.settings import RaySettings

LIMITS = Limits(memory_max_mb=1_048_576, lifetime_s=604_800.0, payload_bytes=16_000_000)
"""Ray has no limits of its own: these only refuse mistakes. `preflight.inspect` finds those of the cluster."""


class RayPlatform(AsyncInvokePlatform):
    """Functions of one run on a Ray cluster. Made by `open`.

    Args:
        run_dir: folder of the run, for `events.jsonl` and `calls.jsonl`.
        settings: which cluster; located.
        limits: what it allows.
        channel: of the run, by a connection of the platform's own, which the platform closes.
        run: its name.
    """

    name = "ray"

    def __init__(self, run_dir: Path, settings: RaySettings, limits: Limits, channel: Channel, run: str) -> None:
        self.settings = settings
        self.unenforced = (
            "CPU time is reserved by Ray and not limited; a function gets as many threads as its share has whole CPUs.",
            "Memory is watched every 30 ms: a burst between two looks can exceed the quota before its function is killed.",
            f"A cancelled function ends when its supervisor looks, every {settings.every_s:g} s.",
        )
        self._told = WorkerSettings(
            namespace=namespace_of(run),
            mb_per_vcpu=settings.mb_per_vcpu,
            gpus=settings.gpus,
            variables={**logs.variables(), **settings.variables},
        )
        self._watch = ActorWatch(self._told.namespace)
        super().__init__(run_dir, limits, channel, RecordKeys(calls_prefix(run)), every_s=settings.every_s)

    def sender(self) -> RaySender:
        return RaySender(self._told, Actor, channel=self._channel, names=self._names, announce=self._announce, every_s=self._every_s)

    @classmethod
    async def open(cls, run_dir: Path, settings: RaySettings, *, channel: str, run: str, limits: Limits = LIMITS) -> RayPlatform:
        """Opens the calls of a run, earlier ones included.

        Args:
            run_dir: made when missing.
            settings: which cluster.
            channel: address of the run's channel, which all nodes reach.
            run: its name.
            limits: see `preflight.inspect`.

        Raises:
            JobError: no cluster, or no channel at that address.
            MissingExtra: Ray or a library of the channel is absent.
        """
        settings = settings.located()
        run_dir.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(connect, settings.address, namespace_of(run))
        self = cls(run_dir, settings, limits, open_channel(channel), run)
        self._stack.push_async_callback(asyncio.to_thread, disconnect)
        try:
            await self.hold(channel, self._watch)
        except BaseException:
            await self.close()
            raise
        return self

    async def shutdown(self) -> None:
        """Ends all functions, also those that wait for a node, and detaches. Nothing once closed."""
        if self._closed:
            return
        try:
            with contextlib.suppress(ChannelError):
                await self.cancel_all("")
            await asyncio.to_thread(_kill_actors, self._told.namespace)
        finally:
            await super().shutdown()

    def _learn(self, record: Record) -> None:
        if isinstance(record, (SentRecord, BegunRecord)):
            self._watch.expect(record.request)
        super()._learn(record)


def _kill_actors(namespace: str) -> None:
    ray = ray_module()
    named: list[dict[str, str]] = ray.util.list_named_actors(all_namespaces=True)
    for actor in named:
        if actor["namespace"] == namespace:
            try:
                ray.kill(ray.get_actor(actor["name"], namespace=namespace))
            except ValueError:
                pass  # it has ended meanwhile


_TEXT = 300


@dataclass(kw_only=True)
class _Watched:
    since: float
    handle: Any = None
    answer: Any = None


class ActorWatch:
    """A log source for one run: ends of actors, so also deaths of nodes and of supervisors, which they cannot report.

    One call of each actor stays open (`Actor.ended`), which Ray ends when the actor, or its node, is gone. An actor
    that ended well has its outcome in the channel by then, which takes precedence.

    Args:
        namespace: in which its actors have their names.
        clock: seconds.
    """

    def __init__(self, namespace: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.problem = ""
        self._namespace, self._clock = namespace, clock
        self._watched: dict[str, _Watched] = {}
        self._over: set[str] = set()

    def expect(self, name: str) -> None:
        """An actor of that name has been made."""
        if name and name not in self._over:
            self._watched.setdefault(name, _Watched(since=self._clock()))

    async def poll(self) -> list[LogReport | Death]:
        """Actors that have ended since."""
        try:
            found = await asyncio.to_thread(self._look)
            self.problem = ""
        except Exception as e:  # noqa: BLE001 - any error of Ray while it has no head; the next round asks again
            self.problem = f"{type(e).__name__}: {_line(e)}"
            return []
        return found

    async def tail(self, stream: str, request: str) -> list[str]:
        """None: the nodes keep what actors print (`ray logs`)."""
        return []

    def _look(self) -> list[LogReport | Death]:
        ray = ray_module()
        out: list[LogReport | Death] = []
        for name, watched in list(self._watched.items()):
            why = self._why_over(ray, name, watched)
            if why is not None:
                del self._watched[name]
                self._over.add(name)
                # Ray keeps no bill: the time since the request is an upper bound.
                billed_s = math.ceil((self._clock() - watched.since) * 1000) / 1000
                out.append(LogReport(request=name, stream="", billed_s=billed_s, size_mb=1.0, used_mb=0.0))
                out.append(Death(request=name, stream="", timed_out=False, text=why))
        return out

    def _why_over(self, ray: Any, name: str, watched: _Watched) -> str | None:
        if watched.handle is None:
            try:
                watched.handle = ray.get_actor(name, namespace=self._namespace)
            except ValueError:
                return "its actor is gone"
        if watched.answer is None:
            watched.answer = watched.handle.ended.remote()
        if not ray.wait([watched.answer], timeout=0)[0]:
            return None
        try:
            ray.get(watched.answer)
        except ray.exceptions.ActorUnavailableError:
            watched.answer = None  # for the moment; it is asked again
            return None
        except ray.exceptions.RayError as e:
            return _line(e)
        return "its actor has ended"


def _line(e: BaseException) -> str:
    """The reason in an error of Ray, without its lines of names and addresses."""
    lines = [" ".join(line.split()) for line in str(e).splitlines()]
    said = [line for line in lines if line and ":" not in line.partition(" ")[0] and not line.startswith("class_name")]
    telling = [line for line in said if "node" in line.lower() or "killed" in line.lower() or "died" in line.lower()]
    return (" ".join(telling) or " ".join(said) or type(e).__name__)[:_TEXT]
