"""The clouds by name. Their modules are imported when asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ephemeron.platforms.recorded.cloud import Cloud

_CLOUDS = {
    "aws": "ephemeron.platforms.aws.cloud:AwsLambda",
    "openfaas": "ephemeron.platforms.openfaas.cloud:OpenFaas",
    "ray": "ephemeron.platforms.ray.cloud:Ray",
    "lithops": "ephemeron.platforms.lithops.cloud:Lithops",
}
CLOUDS = tuple(_CLOUDS)
"""Platforms on which functions go on without any process of this machine."""


def cloud(name: str) -> Cloud[Any]:
    """The cloud of that name, one of `CLOUDS`."""
    module, _, kind = _CLOUDS[name].partition(":")
    made: Cloud[Any] = getattr(import_module(module), kind)()
    return made
