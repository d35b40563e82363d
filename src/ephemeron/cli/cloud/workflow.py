"""`ephemeron cloud workflow`: workflows of functions on OpenFaaS, as documents."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ephemeron.units import human_count

if TYPE_CHECKING:
    from ephemeron.functions.openfaas.workflow import Workflow
    from ephemeron.functions.openfaas.workflow_gateway import WorkflowGateway


@click.group()
def workflow() -> None:
    """Workflows on OpenFaaS: documents of steps that come after others."""


def _at_gateway(command: Any) -> Any:
    for option in (
        click.option("--openfaas-gateway", metavar="URL", help="Gateway of OpenFaaS.  [default: OPENFAAS_URL, or http://127.0.0.1:8080]"),
        click.option("--namespace", default="", metavar="NAME", help="Namespace of the functions.  [default: the gateway's own]"),
    ):
        command = option(command)
    return command


@workflow.command("validate")
@click.argument("document", metavar="WORKFLOW.json", type=click.Path(path_type=Path))
def validate_command(document: Path) -> None:
    """Check WORKFLOW.json, and print its steps in an order in which they can run.

    \b
    {"name": "counting", "steps": [
      {"name": "schedule", "function": "plan-epoch"},
      {"name": "shanghai", "function": "count-words", "after": ["schedule"]}]}
    """
    found = _read(document)
    click.echo(f"workflow {found.name}: {human_count(len(found.steps), 'step')}")
    waiting, done = list(found.steps), set[str]()
    while waiting:
        ready = [step for step in waiting if done.issuperset(step.after)]
        for step in ready:
            after = f" after {', '.join(step.after)}" if step.after else ""
            click.echo(f"  {step.name}: {step.function}{after}")
            waiting.remove(step)
        done.update(step.name for step in ready)


@workflow.command("deploy")
@click.argument("document", metavar="WORKFLOW.json", type=click.Path(path_type=Path))
@_at_gateway
def deploy_command(document: Path, openfaas_gateway: str | None, namespace: str) -> None:
    """Store WORKFLOW.json at a gateway that has workflows, in place of one of the same name."""
    found, gateway = _read(document), _gateway(openfaas_gateway, namespace)
    if not gateway.known():
        raise _without_workflows(document)
    click.echo(f"workflow {found.name} {gateway.deploy(found)}")


@workflow.command("invoke")
@click.argument("what", metavar="NAME|WORKFLOW.json")
@click.option("--request", "body", default="", metavar="TEXT", help="Input of the first steps; - reads it from stdin.")
@click.option("--step", metavar="NAME", help="Call the function of this step alone.")
@_at_gateway
def invoke_command(what: str, body: str, step: str | None, openfaas_gateway: str | None, namespace: str) -> None:
    """Call all steps of a workflow, and print the answer of the last ones.

    \b
    ephemeron cloud workflow invoke counting --request '{"samples": 60000}'
    ephemeron cloud workflow invoke workflow.json

    A NAME is a workflow that was deployed. The steps of a WORKFLOW.json are called from here, which works at every gateway.
    """
    import asyncio

    from ephemeron.errors import GatewayError, JobError

    request = sys.stdin.buffer.read() if body == "-" else body.encode()
    gateway = _gateway(openfaas_gateway, namespace)
    if what.endswith(".json"):
        found = _read(Path(what))
        if step is not None:
            raise JobError("--step is for a workflow that was deployed", remedy="give its name in place of the file")
        answer = asyncio.run(gateway.run_here(found, request)).answer
    else:
        if not gateway.known():
            raise _without_workflows(Path("WORKFLOW.json"))
        reply = gateway.invoke(what, request) if step is None else gateway.invoke_step(what, step, request)
        if not 200 <= reply.status < 300:
            raise GatewayError(reply.status, reply.text())
        answer = reply.body
    click.echo(answer.decode(errors="replace"))


def _read(path: Path) -> Workflow:
    from ephemeron.errors import JobError
    from ephemeron.functions.openfaas.workflow import parse_workflow

    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise JobError(f"{path} cannot be read: {e.strerror}", remedy="give the path of a workflow") from None
    except ValueError as e:
        raise JobError(f"{path} is no JSON: {e}", remedy="give an object with name and steps") from None
    return parse_workflow(value, where=str(path))


def _gateway(url: str | None, namespace: str) -> WorkflowGateway:
    from ephemeron.functions.openfaas.gateway import Gateway
    from ephemeron.functions.openfaas.settings import OpenFaasSettings, credentials
    from ephemeron.functions.openfaas.workflow_gateway import WorkflowGateway

    settings = OpenFaasSettings(gateway=url or "", namespace=namespace).located()
    return WorkflowGateway(Gateway(settings, credentials()))


def _without_workflows(document: Path) -> Exception:
    from ephemeron.errors import JobError

    return JobError("this gateway has no workflows", remedy=f"call the steps from here: ephemeron cloud workflow invoke {document}")
