"""Options that say where functions run, how many and for how much: one definition for every command that runs functions."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ephemeron.cli.bounds import bounded
from ephemeron.config.typed import Count, Positive
from ephemeron.errors import UserError

if TYPE_CHECKING:
    from ephemeron.functions.async_invoke.provider import Settings

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    ("aws", "function", "--aws-function", "NAME", "Function that `cloud deploy aws` has created.  [default: ephemeron]"),
    ("aws", "region", "--aws-region", "REGION", "Region of the function.  [default: as for all AWS clients]"),
    ("aws", "endpoint", "--aws-endpoint", "URL", "Another Lambda service, such as the local one."),
    ("aws-microvm", "image", "--aws-microvm-image", "NAME", "Image that `cloud deploy aws-microvm` has created.  [default: ephemeron]"),
    ("aws-microvm", "region", "--aws-microvm-region", "REGION", "Region of the image.  [default: as for all AWS clients]"),
    ("aws-microvm", "endpoint", "--aws-microvm-endpoint", "URL", "Another service of MicroVMs, such as the local one."),
    ("openfaas", "gateway", "--openfaas-gateway", "URL", "Gateway of OpenFaaS.  [default: OPENFAAS_URL, or http://127.0.0.1:8080]"),
    ("openfaas", "function", "--openfaas-function", "NAME", "Function that `cloud deploy openfaas` has created.  [default: ephemeron]"),
    (
        "openfaas",
        "callback",
        "--openfaas-callback",
        "URL",
        "http://HOST:PORT at which the cluster reaches this machine: lost replicas are then noticed at once.",
    ),
    ("ray", "address", "--ray-address", "ADDRESS", "Head of a Ray cluster.  [default: RAY_ADDRESS, or auto]"),
    ("ray", "gpus", "--ray-gpus", "N", "GPUs of each function, whole ones or a part of one.  [default: 0]"),
    ("lithops", "backend", "--lithops-backend", "NAME", "Backend in Lithops' own configuration.  [default: localhost]"),
    ("lithops", "runtime", "--lithops-runtime", "IMAGE", "Runtime in which ephemeron is installed.  [default: as configured]"),
)
"""Platform, field of its settings, option, placeholder, help."""


def cloud_options(command: F) -> F:
    """Adds all of them to a command. `taken` removes them from the command's arguments."""
    for _, _, option, placeholder, text in reversed(_OPTIONS):
        command = click.option(option, metavar=placeholder, help=text)(command)
    return command


def place_options(
    *, platform: str = "local", channel: str = "folder", workers: str = "cores of this machine, 100 elsewhere", budget: str = "none"
) -> Callable[[F], F]:
    """Adds `--platform`, options of clouds, `--channel`, `--max-workers` and `--budget-usd` to a command. None: not given.

    Args:
        platform, channel, workers, budget: what holds where they are not given, for the help.
    """

    def add(command: F) -> F:
        for option in (
            click.option(
                "--budget-usd",
                type=float,
                callback=bounded(Positive),
                help=f"Cost at which what is left is cancelled or stopped.  [default: {budget}]",
            ),
            renamed_option("--workers", "--max-workers"),
            click.option("--max-workers", type=int, callback=bounded(Count), help=f"Functions at once.  [default: {workers}]"),
            click.option(
                "--channel",
                metavar="ADDRESS",
                help=f"Store of what functions exchange: folder, s3://bucket/prefix, gs://…, az://…, redis://host:port.  [default: {channel}]",
            ),
            cloud_options,
            click.option("--platform", metavar="NAME", help=f"Platform on which functions run.  [default: {platform}]"),
        ):
            command = option(command)
        return command

    return add


def renamed_option(old: str, new: str, *, is_flag: bool = False) -> Callable[[F], F]:
    """Adds an option that is refused with its present name."""

    def refuse(context: click.Context, option: click.Parameter, given: object) -> None:
        if given:
            raise UserError(f"there is no {old}; use {new}")

    return click.option(old, is_flag=is_flag, hidden=True, expose_value=False, callback=refuse)


def taken(flags: MutableMapping[str, Any]) -> dict[str, str]:
    """Removes these options from a command's arguments; returns those that were given, by option."""
    found = {option: flags.pop(option[2:].replace("-", "_")) for _, _, option, _, _ in _OPTIONS}
    return {option: value for option, value in found.items() if value}


def cloud_settings(platform: str, given: dict[str, str]) -> Settings | None:
    """Settings for a platform; None where it is no cloud.

    Raises:
        UserError: an option of another platform was given.
    """
    from ephemeron.functions.registry import CLOUDS, cloud

    values: dict[str, Any] = {field: given[option] for name, field, option, _, _ in _OPTIONS if name == platform and option in given}
    foreign = [option for name, _, option, _, _ in _OPTIONS if name != platform and option in given]
    if foreign:
        raise UserError(f"platform {platform} takes no {', '.join(foreign)}")
    if platform not in CLOUDS:
        return None
    settings = cloud(platform).settings
    if "gpus" in values:
        values["gpus"] = _number(values["gpus"], "--ray-gpus")
    made: Settings = settings(**values)
    return made


def _number(text: str, option: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{option} is {text!r}, not a number") from None
