"""`ephemeron cloud`: platforms, what each needs and whether it works; creation and removal of functions.

`list` sends nothing to an account, a cluster or a network, so it is instant and costs nothing; `check` asks a platform.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from ephemeron.cli.cloud.deployments import deploy, remove
from ephemeron.cli.clouds import cloud_options, cloud_settings, taken
from ephemeron.cli.terminal import make_console
from ephemeron.config.typed import plain
from ephemeron.functions.base import Limits
from ephemeron.training.job import PLATFORMS
from ephemeron.units import human_count, human_seconds

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformRow:
    """One platform, as far as it is known without asking it."""

    name: str
    available: bool
    """Everything that it needs is installed."""
    missing: tuple[str, ...]
    """Modules that are not installed."""
    install: str
    """Command that installs them; empty where nothing is missing."""
    needs: str
    """Further requirements."""
    limits: Limits
    limits_from: str
    prices: str
    """Name and date of the price list; what is billed by it."""


def rows() -> list[PlatformRow]:
    """All platforms of this release."""
    from ephemeron.prices import load_prices
    from ephemeron.training.driver.launching.launch import platform_limits

    out = []
    for name in PLATFORMS:
        module, extra, needs, limits_from = _about(name)
        missing = tuple(m for m in (module, "torch") if m and not _installed(m))
        extras = ",".join(e for m, e in ((module, extra), ("torch", "torch")) if m in missing)
        prices = load_prices("objects", platform=name)
        own = f"{prices.name}, {prices.as_of}"
        what = f"${prices.gb_second_usd:.10f}".rstrip("0") + f" per GB-second ({own}; --prices FILE for others)"
        if name not in ("aws", "aws-microvm"):
            what = f"as if on AWS: {what}"
        out.append(
            PlatformRow(
                name=name,
                available=not missing,
                missing=missing,
                needs=needs,
                limits=platform_limits(name),
                limits_from=limits_from,
                prices=what,
                install=f"pip install 'ephemeron[{extras}]'" if missing else "",
            )
        )
    return out


def _about(name: str) -> tuple[str, str, str, str]:
    """Module, extra, what else is needed, and where limits come from."""
    from ephemeron.functions.registry import CLOUDS, cloud

    if name in CLOUDS:
        where = cloud(name)
        return where.module, where.extra, where.needs, where.limits_from
    if name == "simulated":
        return "", "", "nothing; time is virtual", "AWS Lambda's quotas"
    return "", "", "nothing", "this machine's memory; the rest as on AWS Lambda"


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # something stands in its place in sys.modules
        return False


@click.group(short_help="List and check platforms; deploy functions, remove them.")
def cloud() -> None:
    """List and check platforms, deploy functions and remove them.

    \b
    ephemeron cloud list                                           what has to be installed, limits, prices
    ephemeron cloud check aws --channel s3://bucket/prefix         credentials, permissions, quotas, a function, a bucket
    ephemeron cloud deploy aws --channel s3://bucket/prefix        write policies and a recipe, for review
    ephemeron cloud remove aws                                     delete what `cloud deploy` has created
    """


@cloud.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
def list_command(as_json: bool) -> None:
    """List where functions can run, what is missing for it, limits and prices."""
    found = rows()
    if as_json:
        for row in found:
            click.echo(json.dumps(plain(row)))
        return
    table = Table("platform", "installed", "needs", "memory MB", "lifetime", "at once", "limits from", box=None, pad_edge=False)
    for row in found:
        limits = row.limits
        table.add_row(
            row.name,
            "yes" if row.available else row.install,
            row.needs,
            f"{limits.memory_min_mb}-{limits.memory_max_mb}",
            human_seconds(limits.lifetime_s),
            str(limits.concurrency),
            row.limits_from,
        )
    make_console(for_tables=True).print(table)
    for text in dict.fromkeys(row.prices for row in found):
        click.echo(f"prices of {', '.join(row.name for row in found if row.prices == text)}: {text}")


@cloud.command("check")
@click.argument("platform", type=click.Choice(PLATFORMS), default="local")
@cloud_options
@click.option(
    "--channel",
    metavar="ADDRESS",
    default="",
    help="Channel to check.  [default: a folder on local; elsewhere none, and then no function is called]",
)
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Functions that have to run at once.")
@click.option("--no-call", is_flag=True, help="Skip the call of a function, which is billed on a cloud.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line: step, ok, text.")
def check_command(platform: str, channel: str, workers: int, no_call: bool, as_json: bool, **flags: Any) -> None:
    """Check credentials, permissions, quotas, and the round trip of one object and one function.

    \b
    ephemeron cloud check                                          this machine
    ephemeron cloud check aws --channel s3://bucket/prefix         an account, a function, a bucket
    ephemeron cloud check ray --channel redis://CACHE:6379         a cluster and all its nodes

    Each line is the result of one check. The first check that fails names the problem and a remedy, and the command ends with
    exit code 2. The function that is called puts and reads one object; a cloud bills a few seconds of it.
    """
    from ephemeron.training.driver.launching.diagnostics import diagnose

    settings = cloud_settings(platform, taken(flags))
    for finding in diagnose(platform, channel=channel, settings=settings, call=not no_call, workers=workers):
        if as_json:
            click.echo(json.dumps(dataclasses.asdict(finding)))
        else:
            mark = click.style("ok  ", fg="green") if finding.ok else click.style("FAIL", fg="red")
            click.echo(f"{mark}  {finding.step:<9}  {finding.text}")
        if not finding.ok:
            click.get_current_context().exit(2)


for _command in (deploy, remove, workflow):
    cloud.add_command(_command)
