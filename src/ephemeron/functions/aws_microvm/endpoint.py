"""Endpoints of MicroVMs for the direct channel: each MicroVM has one, and lets in who has a token for it.

An image is deployed for it: `cloud deploy aws-microvm --channel direct+…` leaves the endpoints open and lets MicroVMs make tokens.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from ephemeron.communication.direct.connection import LinkFailed
from ephemeron.communication.direct.websocket import EndpointAccess
from ephemeron.functions.aws_microvm.api import MicrovmApi
from ephemeron.functions.aws_microvm.settings import ADDRESS, AwsMicrovmSettings, client

MICROVM = "EPHEMERON_MICROVM"
"""Variable with the id of the MicroVM that a function runs in."""
PORT_HEADER = "X-aws-proxy-port"
_TOKEN_MINUTES = 5
_AGAIN_S = 60.0 * _TOKEN_MINUTES / 2


class MicrovmEndpoints(EndpointAccess):
    """Endpoints of the MicroVMs of one account. Addresses are ID/PORT/ENDPOINT.

    Args:
        id: of the MicroVM that this is.
        api: makes the client, which is made once and when it is needed first.
        clock: seconds.
    """

    def __init__(self, id: str, api: Callable[[], MicrovmApi], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._id, self._make, self._clock = id, api, clock
        self._api: MicrovmApi | None = None
        self._tokens: dict[tuple[str, int], tuple[float, Mapping[str, str]]] = {}

    async def own(self, port: int) -> str | None:
        found = await self._asked("GetMicrovm", lambda api: api.get(self._id))
        return f"{self._id}/{port}/{found.endpoint}" if found is not None and found.endpoint else None

    async def open(self, address: str) -> tuple[str, Mapping[str, str]]:
        id, port_text, endpoint = address.split("/", 2)
        port, now = int(port_text), self._clock()
        made_at, headers = self._tokens.get((id, port), (float("-inf"), {}))
        if now - made_at > _AGAIN_S:
            headers = await self._asked("CreateMicrovmAuthToken", lambda api: api.token(id, port, minutes=_TOKEN_MINUTES))
            self._tokens[id, port] = (now, headers)
        return f"{_websocket(endpoint)}/", {**headers, PORT_HEADER: str(port)}

    async def _asked(self, operation: str, ask: Callable[[MicrovmApi], Any]) -> Any:
        try:
            if self._api is None:
                self._api = await asyncio.to_thread(self._make)
            return await ask(self._api)
        except Exception as e:
            raise LinkFailed(f"lambda:{operation} of a MicroVM failed: {e}") from e


def own_endpoints() -> MicrovmEndpoints | None:
    """Endpoints, for a function in a MicroVM; None elsewhere."""
    id = os.environ.get(MICROVM)
    if not id:
        return None

    def api() -> MicrovmApi:
        return MicrovmApi(client(AwsMicrovmSettings(region=os.environ["AWS_REGION"]), tries=3))

    return MicrovmEndpoints(id, api)


def listening_host() -> str:
    """Address at which the endpoint reaches a function: that at which hooks are taken."""
    return os.environ.get(ADDRESS, "0.0.0.0:0").rpartition(":")[0]


def _websocket(endpoint: str) -> str:
    scheme, found, rest = endpoint.rstrip("/").partition("://")
    if not found:
        return f"wss://{scheme}"
    return f"{'ws' if scheme == 'http' else 'wss'}://{rest}"
