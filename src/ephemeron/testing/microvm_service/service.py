"""The service: operations of the API, and the endpoint of every MicroVM."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
import uuid
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from ephemeron.communication.direct.tls_socket import until_first_ends
from ephemeron.communication.rpc.http import Handler, HttpRequest, Response, ask, json_response
from ephemeron.functions.cgroups import UNENFORCED, Enforcement, detect
from ephemeron.testing._emulation.service import EmulatedService, FaultConfig
from ephemeron.testing.lambda_service.functions import ACCOUNT, LambdaApiError
from ephemeron.testing.lambda_service.service import Guard
from ephemeron.testing.microvm_service.fleet import Fleet
from ephemeron.testing.microvm_service.images import Image, Images, ImageVersion, unpack
from ephemeron.testing.microvm_service.microvm import Microvm
from ephemeron.testing.microvm_service.model import ServiceError, WireModel

TOKEN_HEADER, PORT_HEADER = "x-aws-proxy-auth", "x-aws-proxy-port"
_TICK_S = 0.1
_ENDPOINT = re.compile(r"/endpoint/(?P<id>[^/]+)(?P<path>/.*)")
_LINES = 5_000
_QUOTAS = {"L-CD1C0CC4": "memory_gb", "L-535CA9B6": "launches_s"}
"""Service Quotas: GB of memory of all MicroVMs, and RunMicrovm requests each second."""
Fetch = Callable[[str], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningMicrovm:
    """State of one MicroVM."""

    id: str
    pid: int
    state: str
    payload: str
    """Of its run hook."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Token:
    microvm: str
    ports: tuple[range, ...]
    until: float


class MicrovmService(EmulatedService):
    """AWS Lambda MicroVMs on a port of loopback, in a thread of this process.

    Args:
        region: the only one that it serves.
        memory_gb: quota of the account; new accounts have less than 400.
        ahead: MicroVMs of an image that are started in advance: a start is then as fast as one from a snapshot.
        launches_s: RunMicrovm requests each second, as Service Quotas tells it. Not enforced: see `throttle`.
        environment: variables of every MicroVM, for example where its S3 is.
        fetch: code artifact of a URI; None: from S3, by `boto3`.
        port: 0: a free one.
        enforce: False leaves CPU alone and watches memory, as where control groups are missing.
    """

    def __init__(
        self,
        *,
        region: str = "us-east-1",
        memory_gb: float = 400.0,
        ahead: int = 0,
        launches_s: float = 5.0,
        environment: Mapping[str, str] | None = None,
        fetch: Fetch | None = None,
        port: int = 0,
        enforce: bool = True,
    ) -> None:
        super().__init__("microvms", port)
        self.region, self.guard, self.launches_s = region, Guard(), launches_s
        self.output: deque[str] = deque(maxlen=_LINES)
        """Lines that MicroVMs have printed, each after its MicroVM's id."""
        self.images = Images(self._folder / "images", region, ACCOUNT)
        self._model = WireModel()
        self._variables = dict(environment or {})
        self._fetch = fetch or _from_s3
        self._tokens: dict[str, _Token] = {}
        self.upgraded: deque[str] = deque(maxlen=_LINES)
        """MicroVMs to whose ports a connection was passed on as a whole, such as a WebSocket."""
        self._building: set[asyncio.Task[None]] = set()
        self._enforcement = detect() if enforce else Enforcement(kind="none", unenforced=UNENFORCED)
        self._memory_gb, self._ahead = memory_gb, ahead
        self._fleet: Fleet | None = None

    @property
    def fleet(self) -> Fleet:
        """All MicroVMs; touched on the loop only."""
        if self._fleet is None:
            # Also for what MicroVMs ask for: their own end, and their successors.
            here = {
                "AWS_ENDPOINT_URL_LAMBDA_MICROVMS": self.url,
                "AWS_ACCESS_KEY_ID": "ASIALOCALMICROVM",
                "AWS_SECRET_ACCESS_KEY": "local",
                "AWS_SESSION_TOKEN": "local",
            }
            self._fleet = Fleet(
                self._folder / "microvms",
                self._enforcement,
                memory_gb=self._memory_gb,
                variables={**here, **self._variables},
                ahead=self._ahead,
                on_line=lambda id, line: self.output.append(f"{id} {line.rstrip()}"),
            )
        return self._fleet

    @property
    def faults(self) -> FaultConfig:
        return self.fleet.faults

    def microvms(self) -> list[RunningMicrovm]:
        """Every MicroVM that is not terminated, oldest first."""

        async def look() -> list[RunningMicrovm]:
            return [
                RunningMicrovm(id=m.id, pid=m.pid, state=m.state, payload=str(m.request.get("runHookPayload", "")))
                for m in self.fleet.running()
            ]

        return self._do(look())

    def requests(self) -> list[Mapping[str, Any]]:
        """RunMicrovm requests that have started a MicroVM, oldest first."""

        async def look() -> list[Mapping[str, Any]]:
            return list(self.fleet.requests)

        return self._do(look())

    def lose(self, id: str) -> None:
        """Kills a MicroVM as a host that fails does: at once, without a hook."""

        async def lose() -> None:
            self.fleet.all[id].kill()

        self._do(lose())

    # -- requests -------------------------------------------------------------------------------------------

    def _handler(self) -> Handler:
        async def answer(request: HttpRequest) -> Response:
            if (found := _ENDPOINT.fullmatch(request.path)) is not None:
                return await self._through_endpoint(request, found["id"], found["path"])
            if (target := request.headers.get("x-amz-target")) is not None:
                return self._quota(request, target)
            try:
                operation = self._model.parse(request)
                self.guard.check(request, f"lambda:{operation.name}", self.region)
                if operation.name == "RunMicrovm" and self.faults.take("throttle"):
                    raise ServiceError("ThrottlingException", "Rate exceeded", retry_after_s=1)
                work = self._operations().get(operation.name)
                if work is None:
                    raise ServiceError("InternalServerException", f"{operation.name} is not emulated")
                value = await work(operation.parameters)
                return self._model.answer(operation.name, value)
            except ServiceError as e:
                return self._model.refusal(e)
            except LambdaApiError as e:
                return e.response()

        return answer

    def _operations(self) -> Mapping[str, Callable[[Mapping[str, Any]], Coroutine[Any, Any, Mapping[str, Any]]]]:
        return {
            "CreateMicrovmImage": self._create_image,
            "UpdateMicrovmImage": self._update_image,
            "GetMicrovmImage": self._get_image,
            "GetMicrovmImageVersion": self._get_version,
            "ListMicrovmImages": self._list_images,
            "DeleteMicrovmImage": self._delete_image,
            "RunMicrovm": self._run_microvm,
            "GetMicrovm": self._get,
            "ListMicrovms": self._list,
            "SuspendMicrovm": self._suspend,
            "ResumeMicrovm": self._resume,
            "TerminateMicrovm": self._terminate,
            "CreateMicrovmAuthToken": self._token,
        }

    def _quota(self, request: HttpRequest, target: str) -> Response:
        """Service Quotas, as far as it is asked here; CloudWatch Logs, which has no groups."""
        if target.startswith("Logs_"):
            text = "The specified log group does not exist."
            return json_response({"__type": "ResourceNotFoundException", "message": text}, status=400)
        name = _QUOTAS.get(str(request.json().get("QuotaCode")))
        if not target.endswith(".GetServiceQuota") or name is None:
            return json_response({"__type": "NoSuchResourceException"}, status=400)
        value = self.launches_s if name == "launches_s" else self.fleet.memory_gb
        return json_response({"Quota": {"QuotaCode": request.json()["QuotaCode"], "ServiceCode": "lambda", "Value": value}})

    # -- images ---------------------------------------------------------------------------------------------

    async def _create_image(self, p: Mapping[str, Any]) -> Mapping[str, Any]:
        image, version = self.images.create(p)
        self._build(image, version, "CREATED", "CREATE_FAILED")
        return {**version.described(), **image.summary(), "imageVersion": version.number}

    async def _update_image(self, p: Mapping[str, Any]) -> Mapping[str, Any]:
        image = self.images.find(p["imageIdentifier"])
        if image.state in ("CREATING", "UPDATING"):
            raise ServiceError("ConflictException", f"image {image.name} is {image.state}")
        image.state = "UPDATING"
        version = self.images.add_version(image, p)
        self._build(image, version, "UPDATED", "UPDATE_FAILED")
        return {**version.described(), **image.summary(), "updatedAt": time.time(), "imageVersion": version.number}

    async def _get_image(self, p: Mapping[str, Any]) -> Mapping[str, Any]:
        image = self.images.find(p["imageIdentifier"])
        return {**image.summary(), "tags": dict(image.tags)}

    async def _get_version(self, p: Mapping[str, Any]) -> Mapping[str, Any]:
        image = self.images.find(p["imageIdentifier"])
        version = image.version(p["imageVersion"])
        out = {
            **version.described(),
            "imageArn": image.arn,
            "imageVersion": version.number,
            "state": version.state,
            "status": version.status,
            "createdAt": version.created_at,
        }
        return {**out, "stateReason": version.reason} if version.reason else out

    async def _list_images(self, p: Mapping[str, Any]) -> Mapping[str, Any]:
        wanted = p.get("nameFilter", "")
        return {"items": [image.summary() for image in self.images.by_arn.values() if wanted in image.name]}

    async def _delete_image(self, p: Mapping[str, Any]) -> Mapping[str, Any]:
        image = self.images.find(p["imageIdentifier"])
        if any(m.arn == image.arn for m in self.fleet.running()):
            raise ServiceError("ConflictException", f"MicroVMs of image {image.name} are running")
        del self.images.by_arn[image.arn]
        return {"imageIdentifier": image.arn, "state": "DELETED"}

    def _build(self, image: Image, version: ImageVersion, good: str, bad: str) -> None:
        async def work() -> None:
            version.state = "IN_PROGRESS"
            problem = await self._built(image, version)
            version.state, version.reason = ("FAILED" if problem else "SUCCESSFUL"), problem
            image.state = bad if problem else good

        task = asyncio.create_task(work())
        self._building.add(task)
        task.add_done_callback(self._building.discard)

    async def _built(self, image: Image, version: ImageVersion) -> str:
        """Builds a version; returns what went wrong."""
        probe = self.fleet.make(image.arn, version, {})
        try:
            data = await asyncio.to_thread(self._fetch, version.request["codeArtifact"]["uri"])
            version.command = await asyncio.to_thread(unpack, data, version.folder)
            await probe.boot()
            if (answer := await probe.hook("validate", {})).status != 200:
                return f"the validate hook answered {answer.status}"
            await self.fleet.stock(image.arn, version)
        except (ServiceError, RuntimeError, OSError, ValueError, asyncio.IncompleteReadError, TimeoutError) as e:
            return str(e) or type(e).__name__
        except Exception as e:  # noqa: BLE001 - botocore makes its error classes at run time
            return f"the code artifact cannot be read: {e}"
        finally:
            await probe.dispose()
        return ""

    # -- MicroVMs -------------------------------------------------------------------------------------------

    async def _run_microvm(self, p: Mapping[str, Any]) -> Mapping[str, Any]:
        image = self.images.find(p["imageIdentifier"])
        version = image.version(p["imageVersion"]) if "imageVersion" in p else image.active()
        if version is None or version.state != "SUCCESSFUL":
            raise ServiceError("ValidationException", f"image {image.name} has no active version")
        return self._described(self.fleet.run(image, version, p))

    def _find(self, p: Mapping[str, Any]) -> Microvm:
        id = p["microvmIdentifier"]
        if id not in self.fleet.all:
            raise ServiceError("ResourceNotFoundException", f"{id} does not exist")
        return self.fleet.all[id]

    async def _get(self, p: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._described(self._find(p))

    def _described(self, m: Microvm) -> dict[str, Any]:
        names = ("executionRoleArn", "idlePolicy", "ingressNetworkConnectors", "egressNetworkConnectors")
        out: dict[str, Any] = {
            "microvmId": m.id,
            "state": m.state,
            "endpoint": f"{self.url}/endpoint/{m.id}",
            "imageArn": m.arn,
            "imageVersion": m.version.number,
            "maximumDurationInSeconds": m.maximum_s,
            "startedAt": m.started_at,
            **{name: m.request[name] for name in names if name in m.request},
        }
        if m.terminated_at:
            out["terminatedAt"] = m.terminated_at
        return {**out, "stateReason": m.reason} if m.reason else out

    async def _list(self, p: Mapping[str, Any]) -> Mapping[str, Any]:
        wanted = p.get("imageIdentifier")
        found = [m for m in reversed(self.fleet.all.values()) if wanted in (None, m.arn)]
        first, most = int(p.get("nextToken") or 0), int(p.get("maxResults", 50))
        page = found[first : first + most]
        items = [{name: self._described(m)[name] for name in ("microvmId", "state", "imageArn", "imageVersion", "startedAt")} for m in page]
        more = first + most < len(found)
        return {"items": items, "nextToken": str(first + most)} if more else {"items": items}

    async def _suspend(self, p: Mapping[str, Any]) -> Mapping[str, Any]:
        await self.fleet.suspend(self._find(p))
        return {}

    async def _resume(self, p: Mapping[str, Any]) -> Mapping[str, Any]:
        await self.fleet.resume(self._find(p))
        return {}

    async def _terminate(self, p: Mapping[str, Any]) -> Mapping[str, Any]:
        self.fleet.end(self._find(p), "Terminated by a request")
        return {}

    # -- endpoints ------------------------------------------------------------------------------------------

    async def _token(self, p: Mapping[str, Any]) -> Mapping[str, Any]:
        if p["expirationInMinutes"] > 60:
            raise ServiceError("ValidationException", "tokens last 60 minutes at most")
        microvm, token = self._find(p), secrets.token_urlsafe(32)
        until = time.time() + 60 * p["expirationInMinutes"]
        self._tokens[token] = _Token(microvm=microvm.id, ports=tuple(map(_ports, p["allowedPorts"])), until=until)
        return {"authToken": {"X-aws-proxy-auth": token}}

    async def _through_endpoint(self, request: HttpRequest, id: str, path: str) -> Response:
        token, port = (self._tokens.get(request.headers.get(TOKEN_HEADER, "")), int(request.headers.get(PORT_HEADER, 8080)))
        microvm = self.fleet.all.get(id)
        if microvm is None or token is None or token.microvm != id or token.until < time.time():
            return json_response({"message": "the token is missing, of another MicroVM, or has expired"}, status=403)
        connectors = [str(c).rpartition(":")[2] for c in microvm.request.get("ingressNetworkConnectors", ())]
        if not any(port in ports for ports in token.ports) or "NO_INGRESS" in connectors:
            return json_response({"message": "this port is closed"}, status=403)
        microvm.last_request = time.monotonic()
        if microvm.state == "SUSPENDED" and microvm.request.get("idlePolicy", {}).get("autoResumeEnabled"):
            await self.fleet.resume(microvm)
        if microvm.state != "RUNNING":
            return json_response({"message": f"the MicroVM is {microvm.state}"}, status=502)
        headers = {"Host": urlsplit(self.url).netloc, "x-amzn-requestid": str(uuid.uuid4())}
        to = microvm.port_of(port)
        if request.headers.get("upgrade"):
            self.upgraded.append(id)
            return Response(takes_over=partial(forward, request=request, path=path, more=headers, port=to))
        with contextlib.suppress(OSError, ValueError, asyncio.IncompleteReadError):
            return await ask("127.0.0.1", to, request.method, path, headers=headers, body=request.body)
        return json_response({"message": "the application does not answer"}, status=502)

    async def _work(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self.fleet.look()

    async def _end(self) -> None:
        for task in self._building:
            task.cancel()
        await asyncio.gather(*self._building, return_exceptions=True)
        await self.fleet.close()


def _ports(wanted: Mapping[str, Any]) -> range:
    if "allPorts" in wanted:
        return range(1, 65_536)
    if "range" in wanted:
        return range(wanted["range"]["startPort"], wanted["range"]["endPort"] + 1)
    return range(wanted["port"], wanted["port"] + 1)


def _from_s3(uri: str) -> bytes:
    """Reads a code artifact, by this process's own credentials and AWS_ENDPOINT_URL_S3."""
    import boto3

    parts = urlsplit(uri)
    return bytes(boto3.client("s3").get_object(Bucket=parts.netloc, Key=parts.path[1:])["Body"].read())


_CHUNK = 1 << 18
_KEPT_BACK = ("x-aws-proxy-auth", "x-aws-proxy-port", "host")


async def forward(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, request: HttpRequest, path: str, more: Mapping[str, str], port: int
) -> None:
    """Sends a request on to a port of loopback, and then all bytes of both ends, until one of them closes.

    Args:
        reader, writer: of the client.
        request: as it came.
        path: at the MicroVM.
        more: headers that the endpoint adds.
        port: of the MicroVM's process.
    """
    try:
        there, onward = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        return
    headers = {name: value for name, value in request.headers.items() if name not in _KEPT_BACK} | dict(more)
    target = f"{path}?{request.query}" if request.query else path
    lines = [f"{request.method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    onward.write("\r\n".join(lines).encode("latin-1") + request.body)
    try:
        await until_first_ends(_pass(reader, onward), _pass(there, writer))
    finally:
        onward.close()
        with contextlib.suppress(OSError):
            await onward.wait_closed()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
