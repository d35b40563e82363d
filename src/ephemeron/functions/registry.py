"""Clouds by name. Their modules are imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ephemeron.functions.async_invoke.provider import Provider

_CLOUDS = {
    "aws": "ephemeron.functions.aws.provider:AwsLambda",
    "aws-microvm": "ephemeron.functions.aws_microvm.provider:AwsMicrovm",
    "openfaas": "ephemeron.functions.openfaas.provider:OpenFaas",
    "ray": "ephemeron.functions.ray.provider:Ray",
    "lithops": "ephemeron.functions.lithops.provider:Lithops",
}
CLOUDS = tuple(_CLOUDS)
"""Platforms whose functions do not depend on a process of this machine."""


def cloud(name: str) -> Provider[Any]:
    """The cloud of that name, one of `CLOUDS`."""
    module, _, kind = _CLOUDS[name].partition(":")
    made: Provider[Any] = getattr(import_module(module), kind)()
    return made
