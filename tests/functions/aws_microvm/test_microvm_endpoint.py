"""Endpoints of the local MicroVM service for WebSocket: whom they let in, to which process, and what members use of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("boto3", "1.44", reason="no AWS client that knows MicroVMs; pip install 'ephemeron[aws]'")
pytest.importorskip("websockets", "15", reason="no WebSocket; pip install 'ephemeron[aws-microvm]'")

import websockets.asyncio.client
import websockets.exceptions
from microvm_world import keys, settings_of
from test_microvm_service import APPLICATION, archive, built, started, state

from ephemeron.communication.direct.connection import LinkFailed
from ephemeron.functions.aws_microvm.api import MicrovmApi
from ephemeron.functions.aws_microvm.endpoint import MicrovmEndpoints
from ephemeron.functions.aws_microvm.settings import client
from ephemeron.testing.microvm_service import MicrovmService
from running import until

ECHO = """
import threading
from websockets.sync.server import serve

def echo(connection):
    for message in connection:
        connection.send(os.environ["NAME"] + message)

os.environ["NAME"] = str(os.getpid()) + " "
server = serve(echo, "127.0.0.1", 0)
threading.Thread(target=server.serve_forever, daemon=True).start()
with open(os.environ["TRACE"], "a") as file:
    file.write(f"listens {server.socket.getsockname()[1]}\\n")
"""
NO_INGRESS = "arn:aws:lambda:us-east-1:aws:network-connector:aws-network-connector:NO_INGRESS"
first_line, _, rest = APPLICATION.lstrip().partition("\n")
CODE = archive({"Dockerfile": 'FROM base\nCMD ["python3", "app.py"]\n', "app.py": f"{first_line}\n{ECHO}\n{rest}"})


class World:
    """A service, an image, and the ports at which the processes of its MicroVMs listen."""

    def __init__(self, service: MicrovmService, trace: Path) -> None:
        self.service, self.trace = service, trace
        self.client: Any = client(settings_of(service))
        self.image = built(self.client)

    def start(self, **more: Any) -> tuple[str, int, MicrovmEndpoints]:
        """Id of a new MicroVM, the port at which it listens, and endpoints as that MicroVM sees them."""
        before = self._ports()
        id = started(self.client, self.image, **more)
        assert state(self.client, id) == "RUNNING", self.client.get_microvm(microvmIdentifier=id)["stateReason"]
        until(lambda: len(self._ports()) > len(before))
        return id, self._ports()[-1], MicrovmEndpoints(id, lambda: MicrovmApi(self.client))

    def _ports(self) -> list[int]:
        return [int(line.split()[1]) for line in self.trace.read_text().splitlines() if line.startswith("listens")]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    trace = tmp_path / "trace"
    trace.touch()
    with keys(), MicrovmService(fetch=lambda uri: CODE, memory_gb=2.0, environment={"TRACE": str(trace)}) as service:
        yield World(service, trace)


async def said(url: str, headers: Any, text: str = "x") -> str:
    async with asyncio.timeout(120), websockets.asyncio.client.connect(url, additional_headers=headers, proxy=None) as connection:
        await connection.send(text)
        return str(await connection.recv())


def refused(url: str, headers: Any) -> int:
    with pytest.raises(websockets.exceptions.InvalidStatus) as caught:
        asyncio.run(said(url, headers))
    return caught.value.response.status_code


def test_members_reach_each_other_s_ports_and_nothing_else(world: World) -> None:
    (one, port, endpoints), (two, other_port, others) = world.start(), world.start()
    address = asyncio.run(endpoints.own(port))
    assert address == f"{one}/{port}/{world.service.url}/endpoint/{one}"
    url, headers = asyncio.run(others.open(address))
    assert url == f"ws{world.service.url.removeprefix('http')}/endpoint/{one}/"
    pids = {microvm.id: microvm.pid for microvm in world.service.microvms()}
    assert asyncio.run(said(url, headers, "y" * 500_000)) == f"{pids[one]} {'y' * 500_000}"
    assert list(world.service.upgraded) == [one]
    token = {name: value for name, value in headers.items() if name == "X-aws-proxy-auth"}
    assert refused(url, {}) == 403
    assert refused(url, {"X-aws-proxy-port": str(port)}) == 403
    assert refused(url, token) == 403, "a token for another port"
    assert refused(url, {**headers, "X-aws-proxy-port": str(other_port)}) == 403
    assert refused(url.replace(one, two), headers) == 403, "another MicroVM's token"
    _, wide = asyncio.run(others.open(f"{one}/{other_port}/{world.service.url}/endpoint/{one}"))
    with pytest.raises(websockets.exceptions.InvalidMessage):  # another one's port is not reached: the hooks' server answers
        asyncio.run(said(url, wide))


def test_closed_endpoints_stay_closed(world: World) -> None:
    id, port, endpoints = world.start(ingressNetworkConnectors=[NO_INGRESS])
    address = asyncio.run(endpoints.own(port))
    assert address is not None
    assert refused(*asyncio.run(endpoints.open(address))) == 403
    assert id not in world.service.upgraded


def test_a_token_is_used_again_and_renewed_in_time(world: World) -> None:
    now = [0.0]
    id, port, _ = world.start()
    endpoints = MicrovmEndpoints(id, lambda: MicrovmApi(world.client), clock=lambda: now[0])

    async def token() -> str:
        _, headers = await endpoints.open(f"{id}/{port}/https://somewhere")
        return headers["X-aws-proxy-auth"]

    async def main() -> None:
        first = await token()
        now[0] = 149.0
        assert await token() == first
        now[0] = 151.0
        assert await token() != first

    asyncio.run(main())


def test_what_the_platform_refuses_is_a_failed_link(world: World) -> None:
    endpoints = MicrovmEndpoints("microvm-absent", lambda: MicrovmApi(world.client))
    assert asyncio.run(endpoints.own(80)) is None
    with pytest.raises(LinkFailed, match="CreateMicrovmAuthToken"):
        asyncio.run(endpoints.open("microvm-absent/80/abc.example"))
