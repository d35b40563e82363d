"""`ephemeron cloud deploy aws` and `ephemeron cloud remove aws`: creation and removal of the function on AWS Lambda."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ephemeron.errors import JobError

if TYPE_CHECKING:
    from ephemeron.functions.aws.settings import AwsSettings

_PASSED_ON = (
    "EPHEMERON_CHANNEL_USER",
    "EPHEMERON_CHANNEL_PASSWORD",
    "EPHEMERON_ENTRIES",
    "EPHEMERON_RENDEZVOUS",
    "EPHEMERON_RENDEZVOUS_TOKEN",
    "EPHEMERON_DIRECT_TLS",
)
_ACCOUNT = "ACCOUNT"


def _where(command: Any) -> Any:
    for option in (
        click.option("--endpoint", metavar="URL", help="Another Lambda service, such as the local one."),
        click.option("--region", metavar="REGION", help="Region of the function.  [default: as for all AWS clients]"),
        click.option("--function", default="ephemeron", show_default=True, metavar="NAME", help="Name of the function."),
    ):
        command = option(command)
    return command


@click.command("aws")
@_where
@click.option(
    "--channel", required=True, metavar="ADDRESS", help="Channel that the function may use: s3://bucket/prefix or redis://host:port."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("aws"),
    show_default=True,
    help="Folder for the recipe, the policies and the template.",
)
@click.option(
    "--memory-mb",
    metavar="MB[,MB…]",
    default="1769",
    show_default=True,
    help="Memory sizes, one function for each; the first is for runs that name none. 1,769 MB bring one vCPU.",
)
@click.option(
    "--function-timeout-s",
    type=click.IntRange(1, 5400),
    default=900,
    show_default=True,
    help="Time limit of the function; longer runs are handed off. Up to 5,400 s on managed instances.",
)
@click.option("--role", metavar="ARN", help="Role of the function, which template.json creates. Without it nothing is uploaded.")
@click.option("--image", metavar="URI", help="Image in Amazon ECR, built and pushed by image/build.sh.")
@click.option("--zip", "as_zip", is_flag=True, help="Upload a ZIP instead of an image: without PyTorch, unless a layer brings it.")
@click.option("--no-dependencies", is_flag=True, help="The ZIP holds ephemeron only; layers, or the local service, bring the rest.")
@click.option("--layer", "layers", multiple=True, metavar="ARN", help="Layer for the ZIP (repeatable).")
@click.option("--subnet", "subnets", multiple=True, metavar="ID", help="Subnet of the VPC with the cache (repeatable).")
@click.option("--security-group", "groups", multiple=True, metavar="ID", help="Security group of the function in that VPC (repeatable).")
@click.option(
    "--managed-instances",
    "provider",
    metavar="NAME",
    help="Run on EC2 instances of your own: name of the capacity provider, which template.json creates.",
)
@click.option(
    "--calls-per-environment",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Calls that share an environment of managed instances, each with --memory-mb.",
)
@click.option("--gib-per-vcpu", type=float, default=2.0, show_default=True, help="GiB of memory for each vCPU of managed instances.")
@click.option("--max-vcpus", type=int, default=32, show_default=True, help="vCPUs of all managed instances, at most.")
@click.option("--instance-type", "types", multiple=True, metavar="TYPE", help="EC2 instance type that may be used (repeatable).")
def deploy_aws(
    function: str,
    region: str | None,
    endpoint: str | None,
    channel: str,
    out: Path,
    memory_mb: str,
    function_timeout_s: int,
    role: str | None,
    image: str | None,
    as_zip: bool,
    no_dependencies: bool,
    layers: tuple[str, ...],
    subnets: tuple[str, ...],
    groups: tuple[str, ...],
    provider: str | None,
    calls_per_environment: int,
    gib_per_vcpu: float,
    max_vcpus: int,
    types: tuple[str, ...],
) -> None:
    """Write what AWS Lambda needs into a folder, for review; with --role, also create or update the function.

    The function gets no retries, drops calls that have waited for a minute, and may invoke itself without limit: a run
    replaces lost functions itself, and a run of hours is a chain of invocations. A cache's password is taken
    from EPHEMERON_CHANNEL_PASSWORD into the function's environment, which AWS encrypts; its certificate authority, as
    text, from EPHEMERON_CHANNEL_CA.
    """
    from ephemeron.communication.channels import public_address
    from ephemeron.communication.channels.address import store_address
    from ephemeron.communication.channels.tls import for_functions
    from ephemeron.communication.direct.transport import listening_variables
    from ephemeron.functions.async_invoke.sizes import function_of, parse_sizes
    from ephemeron.functions.aws.deploy import function as functions
    from ephemeron.functions.aws.deploy import package, policy
    from ephemeron.functions.aws.managed_instances import ManagedInstances
    from ephemeron.functions.aws.settings import AwsSettings, client
    from ephemeron.functions.source_bundle import digest

    public, secrets = public_address(channel)
    if secrets:
        raise JobError("credentials do not belong in --channel", remedy="set EPHEMERON_CHANNEL_PASSWORD instead")
    sizes = parse_sizes(memory_mb, low_mb=128, high_mb=10_240)
    settings = AwsSettings(function=function, region=region, endpoint=endpoint).located()
    account = role.split(":")[4] if role and role.count(":") >= 5 else _ACCOUNT
    managed = None
    if provider is not None:
        managed = ManagedInstances(
            provider=provider, calls=calls_per_environment, gib_per_vcpu=gib_per_vcpu, max_vcpus=max_vcpus, instance_types=types
        )
    elif calls_per_environment > 1 or types:
        raise JobError(
            "several calls in an environment, and instance types, are for managed instances", remedy="give --managed-instances NAME"
        )
    vpc = bool(subnets) and managed is None  # instances are in the network of their provider
    place = policy.place_of(settings, account=account, channel=store_address(public), vpc=vpc, sizes_mb=sizes)
    place = dataclasses.replace(place, managed=managed, subnets=subnets, security_groups=groups)
    written = [*policy.write(out, place), *package.write_image_recipe(out / "image")]
    for path in written:
        click.echo(f"wrote {path}")
    if role is None:
        _next_steps(out, place, settings)
        return
    data = b""
    if as_zip:
        data = package.build_zip(out, requirements=() if no_dependencies else package.REQUIREMENTS)
        (out / "function.zip").write_bytes(data)
        click.echo(f"wrote {out / 'function.zip'} ({len(data) / 2**20:.1f} MB of {package.ZIPPED_MB})")
    wanted = functions.LambdaSpec(
        role=role,
        memory_mb=sizes[0],
        timeout_s=function_timeout_s,
        image=image or "",
        zipped=data,
        layers=layers,
        subnets=subnets,
        security_groups=groups,
        digest=digest(),
        managed=managed,
        variables={
            **{name: os.environ[name] for name in _PASSED_ON if name in os.environ},
            **for_functions(),
            **(listening_variables(public) if subnets else {}),
        },
    )
    for name, done in functions.deploy_sizes(client(settings, "lambda", tries=5), settings, wanted, sizes).items():
        size = next((mb for mb in sizes if function_of(function, sizes, mb) == name), 0)
        what = f": {size} MB, {function_timeout_s} s, no retries" if done != "deleted" else ", whose size is not wanted"
        click.echo(f"{done} function {name} in {settings.region}{what}")
    costs = "they cost nothing while they do not" if len(sizes) > 1 else "it costs nothing while it does not"
    if managed is not None:
        costs = "Lambda keeps instances up, which are billed also while nothing runs: the function does not"
    click.echo(f"{costs} run" + ("; the image costs $0.10 per GB and month in ECR" if image else "") + ", and nothing else was made")
    click.echo(f"train with: ephemeron train JOB --platform aws --channel {public} --workers 4")


@click.command("aws")
@_where
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def remove_aws(function: str, region: str | None, endpoint: str | None, yes: bool) -> None:
    """Delete the functions of all sizes and their log, and list what is not deleted."""
    from ephemeron.functions.aws.deploy.function import delete, functions_of
    from ephemeron.functions.aws.settings import AwsSettings, client

    settings = AwsSettings(function=function, region=region, endpoint=endpoint).located()
    if not yes:
        click.confirm(f"delete function {function} in {settings.region}, in all its sizes, and its log?", abort=True)
    api = client(settings, "lambda", tries=5)
    for name in functions_of(api, settings) or [function]:
        there = delete(api, dataclasses.replace(settings, function=name))
        click.echo(f"deleted function {name}" if there else f"there is no function {name}")
    _delete(
        f"log {settings.log_group}",
        settings,
        "logs:DeleteLogGroup",
        lambda: client(settings, "logs", tries=5).delete_log_group(logGroupName=settings.log_group),
    )
    click.echo("not touched: the stack of template.json, the image in ECR, objects of runs in the bucket (ephemeron runs clean --all)")


def _delete(what: str, settings: AwsSettings, action: str, request: Callable[[], Any]) -> None:
    from ephemeron.functions.aws.settings import code_of, refused

    try:
        request()
        click.echo(f"deleted {what}")
    except Exception as e:
        if code_of(e) != "ResourceNotFoundException":
            raise refused(e, settings, doing=action) from e
        click.echo(f"there is no {what}")


def _next_steps(out: Path, place: Any, settings: Any) -> None:
    region = settings.region
    click.echo(f"""
nothing was sent to AWS. Read these files, then:
  aws cloudformation deploy --region {region} --stack-name {place.function} --template-file {out}/template.json \\
      --capabilities CAPABILITY_NAMED_IAM
  aws ecr create-repository --region {region} --repository-name {place.function}
  {out}/image/build.sh {_ACCOUNT}.dkr.ecr.{region}.amazonaws.com/{place.function}:1
  ephemeron cloud deploy aws --channel … --role arn:aws:iam::{_ACCOUNT}:role/{place.function}-function \\
      --image {_ACCOUNT}.dkr.ecr.{region}.amazonaws.com/{place.function}:1""")
