"""Client of the gateway's documented API (openfaas/faas, `api-docs/spec.openapi.yml`), on the standard library.

Requests block; asyncio callers use threads. Requests are not repeated here: only the caller knows whether that is safe.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

from ephemeron.errors import GatewayError, JobError
from ephemeron.functions.openfaas.settings import PASSWORD_ENV, USER_ENV, Credentials, OpenFaasSettings

TIMEOUT_S = 30.0
THROTTLED = frozenset({429, 502, 503, 504})
"""After these the same request may succeed."""
UNREACHABLE = 0
"""In place of a status: no answer came."""
_SHOWN = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayReply:
    """Answer of the gateway."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes

    @property
    def call_id(self) -> str:
        """X-Call-Id, the gateway's id of a call."""
        return self.headers.get("x-call-id", "")

    def text(self) -> str:
        """The body in one line, shortened."""
        return " ".join(self.body.decode(errors="replace").split())[:_SHOWN]


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSpec:
    """Deployment of a function: the used part of the API's `FunctionDeployment`."""

    service: str
    image: str
    namespace: str = ""
    process: str = ""
    """`envProcess`: command of of-watchdog; empty: that of the image."""
    variables: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    secrets: Sequence[str] = ()
    memory_mb: int
    """Requested and limit, MiB: never more than was asked for, and never given to others."""
    cpus: float

    def to_json(self) -> dict[str, object]:
        resources = {"memory": f"{self.memory_mb}Mi", "cpu": f"{round(self.cpus * 1000)}m"}
        out: dict[str, object] = {
            "service": self.service,
            "image": self.image,
            "envVars": dict(self.variables),
            "labels": dict(self.labels),
            "annotations": dict(self.annotations),
            "secrets": list(self.secrets),
            "limits": resources,
            "requests": resources,
        }
        if self.process:
            out["envProcess"] = self.process
        if self.namespace:
            out["namespace"] = self.namespace
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionStatus:
    """State of a function at the gateway."""

    name: str
    image: str
    replicas: int
    available: int
    annotations: Mapping[str, str]

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> FunctionStatus:
        return cls(
            name=str(value["name"]),
            image=str(value.get("image", "")),
            replicas=int(value.get("replicas") or 0),
            available=int(value.get("availableReplicas") or 0),
            annotations=dict(value.get("annotations") or {}),
        )


class Gateway:
    """One gateway.

    Args:
        settings: which, and which function; located.
        credentials: for everything but invocations; None: it does without.
        timeout_s: of each request.
    """

    def __init__(self, settings: OpenFaasSettings, credentials: Credentials | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        self.settings = settings
        self._credentials, self._timeout_s = credentials, timeout_s
        parts = urlsplit(settings.gateway)
        self._host, self._port, self._base = parts.hostname or "", parts.port, parts.path.rstrip("/")
        self._tls = parts.scheme == "https"

    # -- the system's part: authenticated --------------------------------------------------------------------

    def info(self) -> Mapping[str, object]:
        """GET /system/info: provider and versions."""
        return self._object(self.system("GET", "/system/info"))

    def functions(self) -> list[FunctionStatus]:
        """GET /system/functions: everything in the namespace."""
        return [FunctionStatus.of(value) for value in json.loads(self.system("GET", self._path("functions")).body or b"[]")]

    def function(self) -> FunctionStatus:
        """GET /system/function/NAME.

        Raises:
            GatewayError: status 404: it is not deployed.
        """
        return FunctionStatus.of(self._object(self.system("GET", self._path(f"function/{self.settings.function}"))))

    def deploy(self, spec: FunctionSpec) -> str:
        """POST /system/functions, or PUT if it is there already. Returns `created` or `updated`."""
        try:
            self.function()
        except GatewayError as e:
            if e.status != 404:
                raise
            self.system("POST", "/system/functions", spec.to_json())
            return "created"
        self.system("PUT", "/system/functions", spec.to_json())
        return "updated"

    def delete(self) -> None:
        """DELETE /system/functions."""
        self.system("DELETE", self._path("functions"), {"functionName": self.settings.function})

    def scale(self, replicas: int) -> None:
        """POST /system/scale-function/NAME."""
        s = self.settings
        body = {"serviceName": s.function, "namespace": s.namespace, "replicas": replicas}
        self.system("POST", self._path(f"scale-function/{s.function}"), body)

    def set_secret(self, name: str, value: str) -> None:
        """POST /system/secrets, or PUT if there is one of that name. The value goes nowhere else."""
        body = {"name": name, "value": value, **({"namespace": self.settings.namespace} if self.settings.namespace else {})}
        known = {item["name"] for item in json.loads(self.system("GET", self._path("secrets")).body or b"[]")}
        self.system("PUT" if name in known else "POST", "/system/secrets", body)

    def delete_secret(self, name: str) -> None:
        """DELETE /system/secrets."""
        self.system("DELETE", self._path("secrets"), {"name": name, "namespace": self.settings.namespace})

    # -- the functions' part: open ---------------------------------------------------------------------------

    def invoke(self, body: bytes, *, path: str = "", method: str = "POST", headers: Mapping[str, str] | None = None) -> GatewayReply:
        """/function/NAME: waits for the function, and returns its answer with any status.

        Raises:
            GatewayError: no answer came.
        """
        return self.request(method, f"/function/{self.settings.path_name}{path}", body, headers or {})

    def invoke_async(self, body: bytes, *, callback: str = "", memory_mb: int = 0) -> str:
        """/async-function/NAME: queues a call and returns its X-Call-Id.

        Args:
            body: for the function.
            callback: URL to which the queue-worker posts how it ended.
            memory_mb: size of the function; 0: the deployment's first.

        Raises:
            GatewayError: it was not accepted.
        """
        headers = {"Content-Type": "application/json", **({"X-Callback-Url": callback} if callback else {})}
        reply = self.request("POST", f"/async-function/{self.settings.of_size(memory_mb).path_name}", body, headers)
        if reply.status != 202:
            raise GatewayError(reply.status, reply.text())
        return reply.call_id

    def request(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> GatewayReply:
        """One request. Redirections are returned, proxies are not used.

        Raises:
            GatewayError: no answer came.
        """
        connection = self._connection()
        try:
            connection.request(method, self._base + path, body or None, dict(headers or {}))
            answer = connection.getresponse()
            data = answer.read()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return GatewayReply(status=answer.status, headers=found, body=data)
        except (OSError, http.client.HTTPException) as e:
            said = getattr(e, "strerror", None) or str(e) or type(e).__name__
            raise GatewayError(UNREACHABLE, f"{self.settings.gateway} does not answer: {said}") from e
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if self._tls:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout_s, context=context)
        return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)

    def system(self, method: str, path: str, value: Any = None) -> GatewayReply:
        """An authenticated request.

        Args:
            method, path: such as GET and /system/info.
            value: sent as JSON.

        Raises:
            GatewayError: refused, or no answer came.
        """
        headers = {}
        if self._credentials is not None:
            pair = f"{self._credentials.user}:{self._credentials.password}".encode()
            headers["Authorization"] = f"Basic {base64.b64encode(pair).decode()}"
        body = b""
        if value is not None:
            body, headers["Content-Type"] = json.dumps(value).encode(), "application/json"
        reply = self.request(method, path, body, headers)
        if not 200 <= reply.status < 300:
            raise GatewayError(reply.status, reply.text())
        return reply

    def _path(self, what: str) -> str:
        namespace = self.settings.namespace
        return f"/system/{what}" + (f"?namespace={quote(namespace)}" if namespace else "")

    def _object(self, reply: GatewayReply) -> Mapping[str, object]:
        try:
            value = json.loads(reply.body)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise GatewayError(reply.status, f"no answer of an OpenFaaS gateway: {reply.text()}")
        return value


def explain(e: GatewayError, settings: OpenFaasSettings, *, doing: str) -> tuple[str, str]:
    """Problem and remedy, each in a few words.

    Args:
        e: error of the gateway.
        settings: where.
        doing: the action, such as `deploying`.
    """
    where = f"function {settings.function!r} at {settings.gateway}"
    said = f": {e.text}" if e.text else ""
    if e.status == UNREACHABLE:
        return e.text, "check --openfaas-gateway, or: kubectl port-forward -n openfaas svc/gateway 8080:8080"
    if e.status in (401, 403):
        return f"the gateway at {settings.gateway} refuses this user or password", (
            f"set {PASSWORD_ENV} (and {USER_ENV}, if it is not admin); it is in the cluster's secret basic-auth"
        )
    if e.status == 404:
        return (f"{where} is not deployed", "run: ephemeron cloud deploy openfaas (or give --openfaas-gateway and --openfaas-function)")
    if e.status == 429:
        return f"{doing} {where}: too many requests{said}", "try again, or allow the queue and the function more"
    if e.status in (502, 503, 504):
        return f"{doing} {where}: nothing behind the gateway answers (status {e.status}){said}", (
            "look at the function's replicas: kubectl get pods -n openfaas-fn"
        )
    return f"{doing} {where} failed (status {e.status}){said}", "see the gateway's log"


def refused(e: GatewayError, settings: OpenFaasSettings, *, doing: str) -> JobError:
    """The error before a function was started."""
    problem, remedy = explain(e, settings, doing=doing)
    return JobError(problem, remedy=remedy)
