"""Options that locate a function on a cloud, the same for every command that uses one."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ephemeron.errors import UserError

if TYPE_CHECKING:
    from ephemeron.functions.async_invoke.provider import Settings

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    ("aws", "function", "--aws-function", "NAME", "The function that `deploy aws` has made.  [default: ephemeron]"),
    ("aws", "region", "--aws-region", "REGION", "Where it is.  [default: as for all AWS clients]"),
    ("aws", "endpoint", "--aws-endpoint", "URL", "A Lambda service elsewhere, such as the local one."),
    ("openfaas", "gateway", "--openfaas-gateway", "URL", "Of OpenFaaS.  [default: OPENFAAS_URL, or http://127.0.0.1:8080]"),
    ("openfaas", "function", "--openfaas-function", "NAME",
     "The function that `deploy openfaas` has made.  [default: ephemeron]"),
    ("openfaas", "callback", "--openfaas-callback", "URL",
     "http://HOST:PORT of this machine, where the cluster reaches it: deaths of whole replicas are known at once."),
    ("ray", "address", "--ray-address", "ADDRESS", "Of a Ray cluster's head.  [default: RAY_ADDRESS, or auto]"),
    ("lithops", "backend", "--lithops-backend", "NAME", "Of Lithops' own configuration.  [default: localhost]"),
    ("lithops", "runtime", "--lithops-runtime", "IMAGE",
     "Runtime in which ephemeron is installed.  [default: as configured]"),
)  # fmt: skip
"""Platform, field of its settings, option, placeholder, help."""


def cloud_options(command: F) -> F:
    """Adds all of them to a command. `taken` removes them from the command's arguments."""
    for _, _, option, placeholder, text in reversed(_OPTIONS):
        command = click.option(option, metavar=placeholder, help=text)(command)
    return command


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

    values = {field: given[option] for name, field, option, _, _ in _OPTIONS if name == platform and option in given}
    foreign = [option for name, _, option, _, _ in _OPTIONS if name != platform and option in given]
    if foreign:
        raise UserError(f"platform {platform} takes no {', '.join(foreign)}")
    if platform not in CLOUDS:
        return None
    settings: Settings = cloud(platform).settings(**values)
    return settings
