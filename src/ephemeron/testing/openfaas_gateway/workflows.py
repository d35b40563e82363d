"""Workflows of the local gateway: the entity that Cloudless-Training adds to OpenFaaS (section 3), and calls of it."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence

from ephemeron.communication.rpc.http import HttpRequest, Response, json_response
from ephemeron.errors import GatewayError, JobError
from ephemeron.functions.openfaas.workflow import Workflow, WorkflowStep, execute, parse_workflow, undeployed
from ephemeron.testing.openfaas_gateway.functions import GatewayApiError

_CALL = re.compile(r"/workflow/([^/]+)(?:/([^/]+))?")

Deliver = Callable[[str, HttpRequest], Awaitable[Response]]
"""Gives a request to a function, and returns its answer."""


class Workflows:
    """All workflows of a gateway.

    Args:
        deliver: see `Deliver`.
        functions: names of the functions that are deployed.
    """

    def __init__(self, deliver: Deliver, functions: Callable[[], Sequence[str]]) -> None:
        self._deliver, self._functions = deliver, functions
        self._known: dict[str, Workflow] = {}

    async def system(self, request: HttpRequest) -> Response:
        """/system/workflows.

        Raises:
            GatewayApiError: the document is wrong, a function is not deployed, or there is no such workflow, or one already.
        """
        if request.method == "GET":
            return json_response([workflow.to_json() for workflow in self._known.values()])
        if request.method == "DELETE":
            del self._known[self._find(str(request.json().get("name") or "")).name]
            return Response(status=202)
        if request.method not in ("POST", "PUT"):
            raise GatewayApiError(405, "")
        try:
            workflow = parse_workflow(request.json())
        except JobError as e:
            raise GatewayApiError(400, str(e)) from None
        if problem := undeployed(workflow, self._functions()):
            raise GatewayApiError(400, problem)
        if request.method == "PUT":
            self._find(workflow.name)
        elif workflow.name in self._known:
            raise GatewayApiError(409, f"workflow {workflow.name} already exists")
        self._known[workflow.name] = workflow
        return Response(status=202)

    async def call(self, request: HttpRequest) -> Response | None:
        """/workflow/NAME and /workflow/NAME/STEP; None: neither.

        Raises:
            GatewayApiError: there is no such workflow or step, or a step has failed.
        """
        found = _CALL.fullmatch(request.path)
        if found is None:
            return None
        if request.method != "POST":
            raise GatewayApiError(405, "")
        workflow = self._find(found[1])
        if found[2] is not None:
            try:
                step = workflow.step(found[2])
            except JobError as e:
                raise GatewayApiError(404, str(e)) from None
            return await self._deliver(step.function, _to_function(request, request.body))

        async def call(step: WorkflowStep, body: bytes) -> tuple[int, bytes]:
            answer = await self._deliver(step.function, _to_function(request, body))
            return answer.status, answer.body

        try:
            return Response(body=(await execute(workflow, request.body, call)).answer)
        except GatewayError as e:
            raise GatewayApiError(e.status, e.text) from None

    def _find(self, name: str) -> Workflow:
        if name not in self._known:
            raise GatewayApiError(404, f"no workflow {name!r}")
        return self._known[name]


def _to_function(request: HttpRequest, body: bytes) -> HttpRequest:
    headers = {name: value for name, value in request.headers.items() if name != "content-length"}
    return HttpRequest(method="POST", path="/", headers=headers, body=body)
