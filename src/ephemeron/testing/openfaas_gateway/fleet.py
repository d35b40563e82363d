"""Replicas of all functions, and the choice of one for a request."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from ephemeron.communication.rpc.http import HttpRequest, Response
from ephemeron.functions.cgroups import Enforcement
from ephemeron.testing.openfaas_gateway.functions import GatewayApiError, GatewayFunction, Image
from ephemeron.testing.openfaas_gateway.replica import Gone, Replica

_FROM_ZERO_S = 30.0
_POLL_S = 0.05


class Fleet:
    """The replicas of all functions.

    Args:
        images: by name; a function of an image that is not here never gets a replica (`ErrImagePull`).
        enforcement: how limits are imposed on this machine.
        environment: variables of every replica; the function's secrets are where `secrets` says.
        secrets: makes the folder of a function's secrets.
        folder: for temporary files.
        rng: picks replicas. The gateway does not know who is busy.
    """

    def __init__(
        self,
        images: dict[str, Image],
        enforcement: Enforcement,
        *,
        environment: Callable[[GatewayFunction], dict[str, str]],
        folder: Path,
        rng: random.Random,
    ) -> None:
        self._images, self._enforcement, self._environment = images, enforcement, environment
        self._folder, self._rng = folder, rng
        self._replicas: dict[str, list[Replica]] = defaultdict(list)
        self._leaving: dict[asyncio.Task[None], Replica] = {}

    def of(self, name: str) -> list[Replica]:
        """Replicas of a function that are not on their way out."""
        return self._replicas[name]

    @property
    def all(self) -> list[Replica]:
        """Every replica."""
        return [replica for replicas in self._replicas.values() for replica in replicas]

    def available(self, name: str) -> int:
        """Number of ready replicas."""
        return sum(replica.ready for replica in self._replicas[name])

    def settle(self, function: GatewayFunction) -> None:
        """Makes it as many replicas of the latest revision as are wanted."""
        mine = self._replicas[function.name]
        stale = [r for r in mine if r.function.revision != function.revision]
        current = [r for r in mine if r not in stale]
        current.sort(key=lambda r: not r.serving)  # busy ones first: those stay
        for replica in [*stale, *current[function.replicas :]]:
            mine.remove(replica)
            self._let_go(replica, replica.leave())
        image = self._images.get(function.image)
        for _ in range(function.replicas - len(current) if image is not None else 0):
            assert image is not None
            replica = Replica(function, image, self._enforcement, variables=self._environment(function), folder=self._folder)
            mine.append(replica)
            replica.start()

    def remove(self, name: str) -> None:
        """Ends all replicas of a function."""
        for replica in self._replicas.pop(name, []):
            self._let_go(replica, replica.dispose())

    async def deliver(self, function: GatewayFunction, request: HttpRequest) -> Response:
        """Passes a request to any ready replica; if there is none at all, one is started first."""
        if function.replicas == 0:
            function.replicas = 1
            self.settle(function)
            for _ in range(round(_FROM_ZERO_S / _POLL_S)):
                if self.available(function.name):
                    break
                await asyncio.sleep(_POLL_S)
        ready = [replica for replica in self._replicas[function.name] if replica.ready]
        if not ready:
            return Response(status=503, body=f"No endpoints available for: {function.name}.".encode())
        function.invocations += 1
        try:
            return await self._rng.choice(ready).handle(request)
        except Gone:
            return Response(status=502)

    async def close(self) -> None:
        """Ends everything."""
        everything = self.all
        self._replicas.clear()
        for replica in self._leaving.values():
            replica.kill()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        await asyncio.gather(*(replica.dispose() for replica in everything))

    def _let_go(self, replica: Replica, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._leaving[task] = replica
        task.add_done_callback(self._leaving.pop)


def find(functions: dict[str, GatewayFunction], name: str) -> GatewayFunction:
    """A function by its name, a namespace after it is passed over.

    Raises:
        GatewayApiError: 404.
    """
    function = functions.get(name) or functions.get(name.rpartition(".")[0])
    if function is None:
        raise GatewayApiError(404, f"Not Found: error finding function {name}")
    return function
