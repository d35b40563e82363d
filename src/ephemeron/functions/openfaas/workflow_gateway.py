"""Workflows at a gateway: deployed, listed, called and deleted; also on gateways of OpenFaaS that know no workflows.

Cloudless-Training adds workflows to the gateway (section 3): an entity under `/system/workflows`, calls under `/workflow/NAME`, and calls of one function
inside it under `/workflow/NAME/STEP`. The local gateway (`ephemeron.testing.openfaas_gateway`) has them. At a gateway without them, `run_here` calls the
functions of a workflow in their order from this process.
"""

from __future__ import annotations

import asyncio
import json

from ephemeron.errors import GatewayError, JobError
from ephemeron.functions.openfaas.gateway import Gateway, GatewayReply
from ephemeron.functions.openfaas.workflow import Workflow, WorkflowRun, WorkflowStep, execute, parse_workflow, undeployed

_NOT_FOUND = 404


class WorkflowGateway:
    """Workflows of one gateway.

    Args:
        gateway: client of it. Its requests block; callers on a loop use threads.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def known(self) -> bool:
        """Whether the gateway has workflows."""
        try:
            self._gateway.system("GET", "/system/workflows")
        except GatewayError as e:
            if e.status == _NOT_FOUND:
                return False
            raise
        return True

    def deploy(self, workflow: Workflow) -> str:
        """POST /system/workflows, or PUT if there is one of that name. Returns `created` or `updated`.

        Raises:
            JobError: a function is not deployed.
            GatewayError: the gateway has no workflows (status 404), or refuses this one.
        """
        self.check_functions(workflow)
        there = workflow.name in [each.name for each in self.deployed()]
        self._gateway.system("PUT" if there else "POST", "/system/workflows", workflow.to_json())
        return "updated" if there else "created"

    def check_functions(self, workflow: Workflow) -> None:
        """Refuses a workflow whose functions are not deployed.

        Raises:
            JobError: names step and function.
        """
        if problem := undeployed(workflow, [function.name for function in self._gateway.functions()]):
            raise JobError(f"workflow {workflow.name}: {problem}", remedy="deploy the function first")

    def deployed(self) -> list[Workflow]:
        """GET /system/workflows."""
        found = json.loads(self._gateway.system("GET", "/system/workflows").body or b"[]")
        return [parse_workflow(value, where="answer of the gateway") for value in found]

    def delete(self, name: str) -> None:
        """DELETE /system/workflows.

        Raises:
            GatewayError: status 404: there is none.
        """
        self._gateway.system("DELETE", "/system/workflows", {"name": name})

    def invoke(self, name: str, body: bytes) -> GatewayReply:
        """/workflow/NAME: waits for all steps.

        Returns:
            The answer of the last ones; of a step that failed its status, with the name of the step.

        Raises:
            GatewayError: no answer came.
        """
        return self._gateway.request("POST", f"/workflow/{name}", body)

    def invoke_step(self, name: str, step: str, body: bytes) -> GatewayReply:
        """/workflow/NAME/STEP: calls one function inside the workflow.

        Raises:
            GatewayError: no answer came.
        """
        return self._gateway.request("POST", f"/workflow/{name}/{step}", body)

    async def run_here(self, workflow: Workflow, body: bytes) -> WorkflowRun:
        """Calls the functions of a workflow from here, through /function/NAME.

        Raises:
            JobError: a function is not deployed.
            GatewayError: a step has failed, or no answer came.
        """
        await asyncio.to_thread(self.check_functions, workflow)

        async def call(step: WorkflowStep, request: bytes) -> tuple[int, bytes]:
            reply = await asyncio.to_thread(self._gateway.request, "POST", f"/function/{step.function}", request)
            return reply.status, reply.body

        return await execute(workflow, body, call)
