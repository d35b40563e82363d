"""The gateway: routes and basic authentication."""

from __future__ import annotations

import base64
import hmac
import json
import random
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs

from ephemeron.communication.rpc.http import Handler, HttpRequest, Response, json_response
from ephemeron.functions.cgroups import Enforcement, detect
from ephemeron.testing._emulation.service import EmulatedService, FaultConfig
from ephemeron.testing.openfaas_gateway.fleet import Fleet, find
from ephemeron.testing.openfaas_gateway.functions import GatewayApiError, GatewayFunction, Image, parse
from ephemeron.testing.openfaas_gateway.queueing import Queue
from ephemeron.testing.openfaas_gateway.workflows import Workflows

_CALL = re.compile(r"/(function|async-function)/([^/]+)(/.*)?")
_INFO = {
    "provider": {"provider": "emulator", "orchestration": "processes", "version": {"sha": "", "release": "0"}},
    "version": {"sha": "", "release": "0.27.0", "commit_message": ""},
    "arch": "x86_64",
}
_Answer = Callable[[HttpRequest], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningGateway:
    """State of one replica."""

    pid: int
    """Process id of its first process."""
    function: str
    ready: bool
    body: bytes
    """Id of the call that it serves; empty while it is idle."""


class OpenFaasGateway(EmulatedService):
    """A gateway on a port of loopback, in a thread of this process.

    Args:
        password: of user `admin`; empty: /system is open.
        environment: variables of every replica, for example where its S3 is.
        inflight: asynchronous calls that are delivered at the same time (Community Edition: 1).
        port: 0: a free one.
        seed: of the choice among replicas.
    """

    def __init__(
        self,
        *,
        password: str = "",
        user: str = "admin",
        environment: Mapping[str, str] | None = None,
        inflight: int = 10,
        port: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__("openfaas", port)
        self._user, self._password = user, password
        self._variables = dict(environment or {})
        self._images: dict[str, Image] = {}
        self._functions: dict[str, GatewayFunction] = {}
        self._secrets: dict[str, str] = {}
        self.enforcement: Enforcement = detect()
        self._fleet = Fleet(self._images, self.enforcement, environment=self._environment, folder=self._folder, rng=random.Random(seed))
        self._workflows = Workflows(self._deliver, lambda: list(self._functions))
        self.queue = Queue(self._deliver, self._find, inflight=inflight)

    @property
    def faults(self) -> FaultConfig:
        return self.queue.faults

    def add_image(self, name: str, folder: Path) -> None:
        """Makes a recipe's folder known as an image, as if it had been built and pushed.

        Raises:
            ValueError: it is no recipe.
        """
        image = Image.of(folder)
        self._images[name] = image

    def replicas(self) -> list[RunningGateway]:
        """Every replica there is."""

        async def look() -> list[RunningGateway]:
            return [
                RunningGateway(pid=r.pid, function=r.function.name, ready=r.ready, body=r.serving[0].body if r.serving else b"")
                for r in self._fleet.all
            ]

        return self._do(look())

    def log(self, function: str) -> list[str]:
        """Output of its replicas."""
        return [line for replica in self._fleet.of(function) for _, line in replica.log]

    def lose(self, calls: int = 1) -> None:
        """Accepts the next asynchronous calls and never runs them."""
        self._set_fault("lose", calls)

    # -- routes ---------------------------------------------------------------------------------------------

    def _handler(self) -> Handler:
        routes: dict[tuple[str, str], _Answer] = {
            ("GET", "/system/info"): self._info,
            ("GET", "/system/functions"): self._list,
            ("POST", "/system/functions"): self._deploy,
            ("PUT", "/system/functions"): self._update,
            ("DELETE", "/system/functions"): self._delete,
            ("GET", "/system/secrets"): self._list_secrets,
            ("POST", "/system/secrets"): self._put_secret,
            ("PUT", "/system/secrets"): self._put_secret,
            ("DELETE", "/system/secrets"): self._delete_secret,
            ("GET", "/system/logs"): self._logs,
        }

        async def answer(request: HttpRequest) -> Response:
            try:
                if found := _CALL.fullmatch(request.path):
                    return await self._call(request, found[1], found[2], found[3] or "")
                if done := await self._workflows.call(request):
                    return done
                if request.path == "/healthz":
                    return Response(body=b"OK")
                if request.path.startswith("/system/"):
                    self._check(request)
                    if found := re.fullmatch(r"/system/function/([^/]+)", request.path):
                        return await self._status(found[1])
                    if found := re.fullmatch(r"/system/scale-function/([^/]+)", request.path):
                        return await self._scale(found[1], request)
                    if request.path == "/system/workflows":
                        return await self._workflows.system(request)
                    if work := routes.get((request.method, request.path)):
                        return await work(request)
                raise GatewayApiError(404, "404 page not found")
            except GatewayApiError as e:
                return Response(status=e.status, headers={"Content-Type": "text/plain"}, body=e.text.encode())
            except (ValueError, KeyError, TypeError) as e:
                return Response(status=400, body=f"unable to unmarshal request: {e}".encode())

        return answer

    def _check(self, request: HttpRequest) -> None:
        """Basic authentication."""
        if not self._password:
            return
        expected = base64.b64encode(f"{self._user}:{self._password}".encode()).decode()
        if not hmac.compare_digest(request.headers.get("authorization", ""), f"Basic {expected}"):
            raise GatewayApiError(401, "invalid credentials")

    async def _call(self, request: HttpRequest, kind: str, name: str, path: str) -> Response:
        headers, told = dict(request.headers), {}
        if not headers.get("x-call-id"):
            headers["x-call-id"] = told["X-Call-Id"] = str(uuid.uuid4())
        headers["x-start-time"] = told["X-Start-Time"] = str(time.time_ns())
        inner = HttpRequest(method=request.method, path=path or "/", headers=headers, body=request.body, query=request.query)
        if kind == "async-function":
            if request.method != "POST":
                raise GatewayApiError(405, "")
            self._find(name)
            self.queue.accept(name, inner, call_id=headers["x-call-id"])
            return Response(status=202, headers=told)
        answer = await self._deliver(name, inner)
        kept = {n: v for n, v in answer.headers.items() if n.lower() not in ("x-call-id", "x-start-time")}
        return Response(status=answer.status, headers={**kept, **told}, body=answer.body)

    async def _deliver(self, name: str, request: HttpRequest) -> Response:
        try:
            return await self._fleet.deliver(self._find(name), request)
        except GatewayApiError as e:
            return Response(status=e.status, body=e.text.encode())

    def _find(self, name: str) -> GatewayFunction:
        return find(self._functions, name)

    async def _info(self, request: HttpRequest) -> Response:
        return json_response(_INFO)

    async def _list(self, request: HttpRequest) -> Response:
        return json_response([f.describe(available=self._fleet.available(f.name)) for f in self._functions.values()])

    async def _status(self, name: str) -> Response:
        function = self._find(name)
        return json_response(function.describe(available=self._fleet.available(function.name)))

    async def _deploy(self, request: HttpRequest) -> Response:
        function = parse(request.json(), known_secrets=frozenset(self._secrets))
        if function.name in self._functions:
            raise GatewayApiError(500, f'unable create Deployment: deployments.apps "{function.name}" already exists')
        self._functions[function.name] = function
        self._fleet.settle(function)
        return Response(status=202)

    async def _update(self, request: HttpRequest) -> Response:
        function = parse(request.json(), known_secrets=frozenset(self._secrets))
        before = self._find(function.name)
        function.revision, function.replicas = before.revision + 1, max(before.replicas, function.replicas)
        function.created_at, function.invocations = before.created_at, before.invocations
        self._functions[function.name] = function
        self._fleet.settle(function)
        return Response(status=202)

    async def _delete(self, request: HttpRequest) -> Response:
        function = self._find(str(request.json().get("functionName") or ""))
        del self._functions[function.name]
        self._fleet.remove(function.name)
        return Response(status=202)

    async def _scale(self, name: str, request: HttpRequest) -> Response:
        if request.method != "POST":
            raise GatewayApiError(405, "")
        function, replicas = self._find(name), int(request.json()["replicas"])
        if replicas < 0:
            raise GatewayApiError(400, "replicas cannot be negative")
        function.replicas = replicas
        self._fleet.settle(function)
        return Response(status=202)

    async def _list_secrets(self, request: HttpRequest) -> Response:
        return json_response([{"name": name, "namespace": "openfaas-fn"} for name in self._secrets])

    async def _put_secret(self, request: HttpRequest) -> Response:
        value = request.json()
        name, text = str(value.get("name") or ""), value.get("value")
        if text is None and "rawValue" in value:
            text = base64.b64decode(value["rawValue"]).decode()
        if not name or text is None:
            raise GatewayApiError(400, "a secret has a name and a value")
        if (request.method == "PUT") != (name in self._secrets):
            raise GatewayApiError(404 if request.method == "PUT" else 400, f"secret {name!r}: no such, or there already")
        self._secrets[name] = str(text)
        return Response(status=202 if request.method == "PUT" else 201)

    async def _delete_secret(self, request: HttpRequest) -> Response:
        if self._secrets.pop(str(request.json().get("name") or ""), None) is None:
            raise GatewayApiError(404, "no such secret")
        return Response(status=204)

    async def _logs(self, request: HttpRequest) -> Response:
        function = self._find(parse_qs(request.query).get("name", [""])[0])
        lines = sorted(line for replica in self._fleet.of(function.name) for line in replica.log)
        texts = [
            json.dumps(
                {
                    "name": function.name,
                    "namespace": "openfaas-fn",
                    "instance": "",
                    "text": text,
                    "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at)),
                }
            )
            for at, text in lines
        ]
        return Response(headers={"Content-Type": "application/x-ndjson"}, body="\n".join([*texts, ""]).encode())

    # -- living ---------------------------------------------------------------------------------------------

    def _environment(self, function: GatewayFunction) -> dict[str, str]:
        """Variables of a replica; its secrets are files, as in a cluster, in another folder."""
        folder = self._folder / f"secrets-{function.name}-{function.revision}"
        folder.mkdir(exist_ok=True, mode=0o700)
        for name in function.secrets:
            (folder / name).write_text(self._secrets[name])
        return {**self._variables, "EPHEMERON_SECRETS_FOLDER": str(folder)}

    async def _work(self) -> None:
        self.queue.start()

    async def _end(self) -> None:
        await self.queue.close()
        await self._fleet.close()
