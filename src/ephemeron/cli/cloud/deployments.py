"""`ephemeron cloud deploy` and `ephemeron cloud remove`: options of each platform; `functions` does the work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ephemeron.cli.bounds import read_labels

if TYPE_CHECKING:
    from ephemeron.functions.async_invoke.provider import Deployer

F = TypeVar("F", bound=Callable[..., Any])

_NAME = "ephemeron"
_PLACES = {
    "aws": (
        ("--function", "function", "NAME", _NAME, "Name of the function."),
        ("--region", "region", "REGION", None, "Region of the function.  [default: as for all AWS clients]"),
        ("--endpoint", "endpoint", "URL", None, "Another Lambda service, such as the local one."),
    ),
    "aws-microvm": (
        ("--image", "image", "NAME", _NAME, "Name of the image."),
        ("--region", "region", "REGION", None, "Region of the image.  [default: as for all AWS clients]"),
        ("--endpoint", "endpoint", "URL", None, "Another service of MicroVMs, such as the local one."),
    ),
    "openfaas": (
        ("--function", "function", "NAME", _NAME, "Name of the function."),
        ("--namespace", "namespace", "NAME", "", "Namespace of the function.  [default: the gateway's own]"),
        ("--openfaas-gateway", "gateway", "URL", "", "Gateway of OpenFaaS.  [default: OPENFAAS_URL, or http://127.0.0.1:8080]"),
    ),
}
"""Where functions are, by platform: option, field of its settings, placeholder, default, help."""


def _place(platform: str) -> Callable[[F], F]:
    def add(command: F) -> F:
        for option, field, placeholder, default, text in reversed(_PLACES[platform]):
            command = click.option(option, field, metavar=placeholder, default=default, show_default=bool(default), help=text)(command)
        return command

    return add


def _wanted(platform: str, *, channel: str, memory_mb: int, sizes: str) -> Callable[[F], F]:
    """Options of every deployment.

    Args:
        platform: where.
        channel: help of `--channel`.
        memory_mb: default of `--memory-mb`.
        sizes: its help.
    """
    options = (
        _place(platform),
        click.option("--channel", required=True, metavar="ADDRESS", help=channel),
        click.option(
            "--out",
            type=click.Path(path_type=Path),
            default=Path(platform),
            show_default=True,
            help="Folder for what is to be reviewed: recipe, policies, template.",
        ),
        click.option("--memory-mb", metavar="MB[,MB…]", default=str(memory_mb), show_default=True, help=sizes),
        click.option("--python", metavar="VERSION", help="Python of functions.  [default: this one's]"),
        click.option(
            "--requirements",
            multiple=True,
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Packages for functions, beside ephemeron's own, in the format of pip (repeatable). They are kept in --out for the next deployment.",
        ),
        click.option(
            "--extra",
            "extras",
            multiple=True,
            metavar="NAME",
            help="The same for an extra of ephemeron: linalg, sparse, lightning, … (repeatable).",
        ),
    )

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def _deployer(platform: str, options: dict[str, Any]) -> tuple[Deployer[Any], Any]:
    """Who deploys there, and settings of the options, which are taken out of them."""
    from ephemeron.functions.registry import deployer

    found = deployer(platform)
    return found, found.settings(**{field: options.pop(field) for _, field, *_ in _PLACES[platform]})


def _deploy(platform: str, options: dict[str, Any]) -> None:
    found, settings = _deployer(platform, options)
    environment = {name: options.pop(name) for name in ("python", "requirements", "extras")}
    wanted = found.read(options.pop("channel"), options.pop("memory_mb"), options.pop("out"), options.pop("labels", None), **environment)
    found.deploy(settings.located(), wanted, options, click.echo)


def _deployment_labels(text: str) -> Callable[[F], F]:
    return click.option("--label", "--tag", "labels", multiple=True, metavar="NAME=VALUE", callback=read_labels, help=text)


@click.group()
def deploy() -> None:
    """Create the functions of a platform in an account or a cluster."""


@deploy.command("aws")
@_wanted(
    "aws",
    channel="Channel that the function may use: s3://bucket/prefix or redis://host:port.",
    memory_mb=1769,
    sizes="Memory sizes, one function for each; the first is for runs that name none. 1,769 MB bring one vCPU.",
)
@click.option(
    "--function-timeout-s",
    type=click.IntRange(1, 5400),
    default=900,
    show_default=True,
    help="Time limit of the function; longer runs are handed off. Up to 5,400 s on managed instances.",
)
@_deployment_labels("Tag of the functions, and of what template.json creates, by which AWS tells cost apart (repeatable).")
@click.option("--role", metavar="ARN", help="Role of the function, which template.json creates. Without it nothing is uploaded.")
@click.option("--image", metavar="URI", help="Image in Amazon ECR, built and pushed by image/build.sh.")
@click.option("--zip", "as_zip", is_flag=True, help="Upload a ZIP instead of an image: without PyTorch, unless a layer brings it.")
@click.option("--no-dependencies", is_flag=True, help="The ZIP holds ephemeron only; layers, or the local service, bring the rest.")
@click.option("--layer", "layers", multiple=True, metavar="ARN", help="Layer for the ZIP (repeatable).")
@click.option("--subnet", "subnets", multiple=True, metavar="ID", help="Subnet of the VPC with the cache (repeatable).")
@click.option(
    "--security-group", "security_groups", multiple=True, metavar="ID", help="Security group of the function in that VPC (repeatable)."
)
@click.option(
    "--managed-instances",
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
@click.option("--instance-type", "instance_types", multiple=True, metavar="TYPE", help="EC2 instance type that may be used (repeatable).")
def deploy_aws(**options: Any) -> None:
    """Write what AWS Lambda needs into a folder, for review; with --role, also create or update the function.

    The function gets no retries, drops calls that have waited for a minute, and may invoke itself without limit: a run
    replaces lost functions itself, and a run of hours is a chain of invocations. A cache's password is taken
    from EPHEMERON_CHANNEL_PASSWORD into the function's environment, which AWS encrypts; its certificate authority, as
    text, from EPHEMERON_CHANNEL_CA.
    """
    _deploy("aws", options)


@deploy.command("aws-microvm")
@_wanted(
    "aws-microvm",
    channel="Channel that functions may use: s3://bucket/prefix or rediss://…",
    memory_mb=2048,
    sizes="Baselines, one image for each; the first is for runs that name none. 2,048 MB bring one vCPU.",
)
@click.option("--artifact", required=True, metavar="S3_URI", help="Where the image's code is uploaded: s3://bucket/key.zip.")
@click.option("--role", metavar="ARN", help="Role of MicroVMs, which template.json creates. Without it nothing is uploaded.")
@click.option("--build-role", metavar="ARN", help="Role of the image's build.  [default: that of template.json]")
def deploy_microvm(**options: Any) -> None:
    """Write what AWS Lambda MicroVMs need into a folder, for review; with --role, also build the image.

    The image is a snapshot in which PyTorch is imported. It holds no secrets: a cache's password is taken from
    EPHEMERON_CHANNEL_PASSWORD when a run starts. A cache's certificate authority is no secret, and is taken from
    EPHEMERON_CHANNEL_CA into the image. A build takes minutes.
    """
    _deploy("aws-microvm", options)


@deploy.command("openfaas")
@_wanted(
    "openfaas",
    channel="Channel that the function uses: s3://… or redis://…",
    memory_mb=1769,
    sizes="Memory limits of replicas, one function for each; the first is for runs that name none. 60 MB are the handler's.",
)
@_deployment_labels("Label of the function's replicas in the cluster (repeatable).")
@click.option("--image", metavar="NAME", help="Image, built and pushed by build.sh. Without it nothing is sent to the gateway.")
@click.option("--cpus", type=float, default=0.0, help="CPU limit of a replica.  [default: one for 1,769 MB]")
@click.option(
    "--function-timeout-s", type=float, default=900.0, show_default=True, help="Time limit of a call; longer runs are handed off."
)
@click.option("--replicas", type=int, default=5, show_default=True, help="Replicas, at most; each worker needs one.")
@click.option("--inside", metavar="URL", help="Address of the gateway for functions.  [default: that of a standard installation]")
@click.option(
    "--s3-keys", is_flag=True, help="Give the function AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of this environment, as secrets."
)
@click.option("--contract-kit", is_flag=True, help="Include the entries of the platform contract in the recipe.")
def deploy_openfaas(**options: Any) -> None:
    """Write the function's image as a recipe, for review; with --image, also create or update the function.

    The password of the gateway is read from EPHEMERON_OPENFAAS_PASSWORD. A cache's password is taken from EPHEMERON_CHANNEL_PASSWORD
    into a secret of OpenFaaS, and nowhere else; its certificate authority, as text, from EPHEMERON_CHANNEL_CA.
    """
    _deploy("openfaas", options)


@click.group()
def remove() -> None:
    """Delete what `cloud deploy` has created. See `runs clean` for the objects of runs."""


def _remove_command(platform: str, text: str) -> click.Command:
    @click.command(platform, help=text)
    @_place(platform)
    @click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
    def command(yes: bool, **options: Any) -> None:
        found, settings = _deployer(platform, options)
        settings = settings.located()
        if not yes:
            click.confirm(f"delete {found.describe(settings)}?", abort=True)
        found.remove(settings, click.echo)

    return command


for _platform, _text in (
    ("aws", "Delete the functions of all sizes and their log, and list what is not deleted."),
    ("aws-microvm", "Terminate the MicroVMs of the images of all sizes, delete these and their log, and list what is not deleted."),
    ("openfaas", "Delete the functions of all sizes and their secrets, and list what is not deleted."),
):
    remove.add_command(_remove_command(_platform, _text))
