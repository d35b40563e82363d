"""Log source for Ray: ends of actors, so also deaths of nodes and of supervisors, which they cannot report.

One call of each actor stays open (`Actor.ended`), which Ray ends when the actor, or its node, is gone. An actor
that ended well has its outcome in the channel by then, which takes precedence.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ephemeron.functions.async_invoke.log_source import Death, LogReport
from ephemeron.functions.ray.cluster import ray_module

_TEXT = 300


@dataclass(kw_only=True)
class _Watched:
    since: float
    handle: Any = None
    answer: Any = None


class ActorWatch:
    """A log source for one run.

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
