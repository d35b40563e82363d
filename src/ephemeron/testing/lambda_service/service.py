"""The service: routes and the check of credentials."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

from ephemeron.communication.direct.transport import LOOPBACK
from ephemeron.communication.rpc.http import Handler, HttpRequest, Response, json_response
from ephemeron.functions.cgroups import UNENFORCED, Enforcement, detect
from ephemeron.testing._emulation.service import EmulatedService, FaultConfig
from ephemeron.testing.lambda_service.environment import LambdaEnvironment
from ephemeron.testing.lambda_service.functions import ACCOUNT, Functions, LambdaApiError, LambdaFunction
from ephemeron.testing.lambda_service.invoking import RETRY_AFTER_S, Invoker
from ephemeron.testing.lambda_service.logs import Logs

_CREDENTIAL = re.compile(r"Credential=([^/,\s]+)/\d+/([^/]+)/([^/]+)/aws4_request")
_FUNCTION = r"/functions/(?P<name>[^/]+)"
_TICK_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningLambdaService:
    """State of one environment."""

    pid: int
    function: str
    request_id: str
    """Request id of its invocation; empty while it is idle."""
    payload: bytes


@dataclass
class Guard:
    """Access checks. Signatures are not verified; errors are those of AWS."""

    expired: set[str] = field(default_factory=set)
    """Access keys that have expired."""
    unknown: set[str] = field(default_factory=set)
    denied: dict[str, set[str]] = field(default_factory=dict)
    """Per access key, or `*`, the actions that are denied to it, such as `lambda:InvokeFunction`."""

    def check(self, request: HttpRequest, action: str, region: str) -> None:
        """Raises `LambdaApiError` unless the caller may do this."""
        found = _CREDENTIAL.search(request.headers.get("authorization", ""))
        if found is None:
            raise LambdaApiError(403, "MissingAuthenticationTokenException", "Missing Authentication Token")
        key, scope, _ = found.groups()
        if key in self.expired:
            raise LambdaApiError(403, "ExpiredTokenException", "The security token included in the request is expired")
        if key in self.unknown:
            raise LambdaApiError(403, "UnrecognizedClientException", "The security token included in the request is invalid.")
        if scope != region:
            text = f"Credential should be scoped to a valid region, not '{scope}'."
            raise LambdaApiError(403, "InvalidSignatureException", text)
        if action in self.denied.get(key, ()) or action in self.denied.get("*", ()):
            text = f"User: arn:aws:iam::{ACCOUNT}:user/{key} is not authorized to perform: {action} because no identity-based policy allows the {action} action"
            raise LambdaApiError(403, "AccessDeniedException", text)


class LambdaService(EmulatedService):
    """AWS Lambda and the reading side of CloudWatch Logs on a port, in a thread of this process.

    Args:
        region: the only one that it serves.
        concurrency: of the account.
        environment: variables of every function, for example where its S3 is.
        port: 0: a free one.
        enforce: False leaves CPU alone and watches memory, as where control groups are missing.
        retry_after_s, queue_pause_s, idle_s: pauses, see `Invoker`.
        memory_quota_mb: of the account; new ones have 3,008.
        host: where the service and the Runtime API listen.
        launcher: makes the beginning of the command of each process, such as `ip netns exec NAME` for a network namespace
            of its own, from which `host` must be reached; called in the service's thread.
    """

    def __init__(
        self,
        *,
        region: str = "us-east-1",
        concurrency: int = 1_000,
        environment: Mapping[str, str] | None = None,
        port: int = 0,
        enforce: bool = True,
        retry_after_s: Sequence[float] = RETRY_AFTER_S,
        queue_pause_s: float = 1.0,
        idle_s: float = 300.0,
        memory_quota_mb: int = 10_240,
        host: str = LOOPBACK,
        launcher: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        super().__init__("lambda", port, host)
        self._launcher = launcher
        self.region = region
        self.guard = Guard()
        self.logs = Logs()
        self.invoker = Invoker(self._make, concurrency=concurrency, retry_after_s=retry_after_s, queue_pause_s=queue_pause_s, idle_s=idle_s)
        self.functions = Functions(self._folder / "code", region)
        self.functions.memory_quota_mb = memory_quota_mb
        self._variables = dict(environment or {})
        self._enforcement = detect() if enforce else Enforcement(kind="none", unenforced=UNENFORCED)

    @property
    def faults(self) -> FaultConfig:
        return self.invoker.faults

    def environments(self) -> list[RunningLambdaService]:
        """Every process there is, busy ones first."""

        async def look() -> list[RunningLambdaService]:
            return [
                RunningLambdaService(
                    pid=e.pid,
                    function=e.function.name,
                    request_id=e.work.request_id if e.work else "",
                    payload=e.work.payload if e.work else b"",
                )
                for e in self.invoker.environments
            ]

        return self._do(look())

    # -- routes ---------------------------------------------------------------------------------------------

    def _routes(self) -> list[tuple[str, re.Pattern[str], str, Callable[..., Coroutine[Any, Any, Response]]]]:
        f = _FUNCTION
        table: list[tuple[str, str, str, Callable[..., Coroutine[Any, Any, Response]]]] = [
            ("POST", "/2015-03-31/functions/?", "CreateFunction", self._create),
            ("GET", "/2015-03-31/functions/?", "ListFunctions", self._list),
            ("POST", f"/2015-03-31{f}/invocations", "InvokeFunction", self._invoke),
            ("GET", f"/2015-03-31{f}", "GetFunction", self._get),
            ("DELETE", f"/2015-03-31{f}", "DeleteFunction", self._delete),
            ("GET", f"/2015-03-31{f}/configuration", "GetFunctionConfiguration", self._get_configuration),
            ("PUT", f"/2015-03-31{f}/configuration", "UpdateFunctionConfiguration", self._configure),
            ("PUT", f"/2015-03-31{f}/code", "UpdateFunctionCode", self._update_code),
            ("PUT", f"/2019-09-25{f}/event-invoke-config", "PutFunctionEventInvokeConfig", self._put_events),
            ("GET", f"/2019-09-25{f}/event-invoke-config", "GetFunctionEventInvokeConfig", self._get_events),
            ("PUT", f"/2024-08-31{f}/recursion-config", "PutFunctionRecursionConfig", self._put_recursion),
            ("GET", f"/2024-08-31{f}/recursion-config", "GetFunctionRecursionConfig", self._get_recursion),
            ("PUT", f"/2017-10-31{f}/concurrency", "PutFunctionConcurrency", self._put_concurrency),
            ("DELETE", f"/2017-10-31{f}/concurrency", "DeleteFunctionConcurrency", self._delete_concurrency),
            ("GET", f"/2019-09-30{f}/concurrency", "GetFunctionConcurrency", self._get_concurrency),
            ("GET", "/2016-08-19/account-settings/?", "GetAccountSettings", self._account),
        ]
        return [(method, re.compile(path), action, answer) for method, path, action, answer in table]

    def _handler(self) -> Handler:
        routes = self._routes()

        async def answer(request: HttpRequest) -> Response:
            try:
                if "x-amz-target" in request.headers:
                    self.guard.check(request, f"logs:{request.headers['x-amz-target'].rpartition('.')[2]}", self.region)
                    return await self.logs.handle(request)
                for method, path, action, work in routes:
                    found = path.fullmatch(request.path)
                    if found and method == request.method:
                        self.guard.check(request, f"lambda:{action}", self.region)
                        answered = await work(request, **found.groupdict())
                        return _with_id(answered)
                raise LambdaApiError(404, "UnknownOperationException", f"{request.method} {request.path} is not spoken here")
            except LambdaApiError as e:
                return _with_id(e.response())
            except (ValueError, KeyError, TypeError) as e:
                return _with_id(LambdaApiError(400, "SerializationException", f"{type(e).__name__}: {e}").response())

        return answer

    async def _create(self, request: HttpRequest) -> Response:
        return json_response(self.functions.create(request.json()).describe(state="Pending"), status=201)

    async def _list(self, request: HttpRequest) -> Response:
        return json_response({"Functions": [f.describe() for f in self.functions]})

    async def _get(self, request: HttpRequest, name: str) -> Response:
        function = self.functions.find(name)
        code = {"ImageUri": function.image} if function.image else {"Location": ""}
        concurrency = {} if function.reserved is None else {"ReservedConcurrentExecutions": function.reserved}
        return json_response({"Configuration": function.describe(), "Code": code, "Concurrency": concurrency})

    async def _get_configuration(self, request: HttpRequest, name: str) -> Response:
        return json_response(self.functions.find(name).describe())

    async def _configure(self, request: HttpRequest, name: str) -> Response:
        return json_response(self.functions.configure(name, request.json()).describe(update="InProgress"))

    async def _update_code(self, request: HttpRequest, name: str) -> Response:
        return json_response(self.functions.update_code(name, request.json()).describe(update="InProgress"))

    async def _delete(self, request: HttpRequest, name: str) -> Response:
        self.functions.delete(name)
        return Response(status=204)

    async def _invoke(self, request: HttpRequest, name: str) -> Response:
        function = self._version(request, name)
        return await self.invoker.invoke(function, request, find=self.functions.find)

    def _version(self, request: HttpRequest, name: str) -> LambdaFunction:
        """The function, if it has the version that is asked for. On managed instances only published versions run."""
        function, wanted = self.functions.find(name), dict(parse_qsl(request.query)).get("Qualifier", "")
        if wanted not in ("", "$LATEST.PUBLISHED") or (wanted and not (function.calls and function.published)):
            raise LambdaApiError(404, "ResourceNotFoundException", f"Function not found: {function.arn}:{wanted}")
        if function.calls and not wanted:
            raise LambdaApiError(400, "InvalidParameterValueException", "$LATEST of a function on managed instances is not invoked")
        return function

    async def _put_events(self, request: HttpRequest, name: str) -> Response:
        function, wanted = self.functions.find(name), request.json()
        retries, age = int(wanted.get("MaximumRetryAttempts", 2)), float(wanted.get("MaximumEventAgeInSeconds", 21_600))
        if not 0 <= retries <= 2 or not 60 <= age <= 21_600:
            raise LambdaApiError(400, "InvalidParameterValueException", "retries are 0 to 2, the event age 60 to 21600 seconds")
        function.retries, function.event_age_s = retries, age
        function.events_configured = True
        return await self._get_events(request, name)

    async def _get_events(self, request: HttpRequest, name: str) -> Response:
        function = self.functions.find(name)
        if not function.events_configured:
            text = f"The function {function.arn} doesn't have an EventInvokeConfig"
            raise LambdaApiError(404, "ResourceNotFoundException", text)
        return json_response(
            {"FunctionArn": function.arn, "MaximumRetryAttempts": function.retries, "MaximumEventAgeInSeconds": int(function.event_age_s)}
        )

    async def _put_recursion(self, request: HttpRequest, name: str) -> Response:
        self.functions.find(name).recursion = str(request.json()["RecursiveLoop"])
        return await self._get_recursion(request, name)

    async def _get_recursion(self, request: HttpRequest, name: str) -> Response:
        return json_response({"RecursiveLoop": self.functions.find(name).recursion})

    async def _put_concurrency(self, request: HttpRequest, name: str) -> Response:
        self.functions.find(name).reserved = int(request.json()["ReservedConcurrentExecutions"])
        return await self._get_concurrency(request, name)

    async def _delete_concurrency(self, request: HttpRequest, name: str) -> Response:
        self.functions.find(name).reserved = None
        return Response(status=204)

    async def _get_concurrency(self, request: HttpRequest, name: str) -> Response:
        reserved = self.functions.find(name).reserved
        return json_response({} if reserved is None else {"ReservedConcurrentExecutions": reserved})

    async def _account(self, request: HttpRequest) -> Response:
        limit = self.invoker.concurrency
        reserved = sum(f.reserved or 0 for f in self.functions)
        return json_response(
            {
                "AccountLimit": {
                    "ConcurrentExecutions": limit,
                    "UnreservedConcurrentExecutions": limit - reserved,
                    "CodeSizeUnzipped": 262_144_000,
                    "CodeSizeZipped": 52_428_800,
                    "TotalCodeSize": 80_530_636_800,
                },
                "AccountUsage": {"FunctionCount": len(list(self.functions)), "TotalCodeSize": 0},
            }
        )

    # -- environments---------------------------------------------------------------------------------------

    def _make(self, function: LambdaFunction) -> LambdaEnvironment:
        stream = self._shared_stream(function) or f"2026/01/01/[$LATEST]{uuid.uuid4().hex}"
        variables = {"AWS_ENDPOINT_URL_LAMBDA": self.url, **self._variables}
        return LambdaEnvironment(
            function,
            self._enforcement,
            variables=variables,
            region=self.region,
            folder=self._folder,
            stream=stream,
            log=lambda message: self.logs.write(function.log_group, stream, message),
            host=self.host,
            launcher=self._launcher(),
        )

    def _shared_stream(self, function: LambdaFunction) -> str:
        """Log stream of an environment of managed instances that has room for one more process; empty: there is none."""
        live = Counter(e.stream for e in self.invoker.environments if e.function.name == function.name and e.alive)
        return next((stream for stream, processes in live.items() if processes < function.calls), "")

    async def _work(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            await self.invoker.expire(keep=self._is_current)

    def _is_current(self, environment: LambdaEnvironment) -> bool:
        try:
            return self.functions.find(environment.function.name).revision == environment.function.revision
        except LambdaApiError:
            return False

    async def _end(self) -> None:
        await self.invoker.close()


def _with_id(response: Response) -> Response:
    if "x-amzn-RequestId" in response.headers:
        return response
    headers = {**response.headers, "x-amzn-RequestId": str(uuid.uuid4())}
    return Response(status=response.status, headers=headers, body=response.body)
