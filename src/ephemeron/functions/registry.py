"""Clouds by name, and who creates functions there. Their modules are imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ephemeron.functions.async_invoke.provider import Deployer, Provider

_CLOUDS = {
    "aws": "ephemeron.functions.aws.provider:AwsLambda",
    "aws-microvm": "ephemeron.functions.aws_microvm.provider:AwsMicrovm",
    "openfaas": "ephemeron.functions.openfaas.provider:OpenFaas",
    "ray": "ephemeron.functions.ray.provider:Ray",
    "lithops": "ephemeron.functions.lithops.provider:Lithops",
}
_DEPLOYERS = {
    "aws": "ephemeron.functions.aws.deploy.deployer:AwsDeployer",
    "aws-microvm": "ephemeron.functions.aws_microvm.deploy.deployer:AwsMicrovmDeployer",
    "openfaas": "ephemeron.functions.openfaas.deploy.deployer:OpenFaasDeployer",
}
CLOUDS = tuple(_CLOUDS)
"""Platforms whose functions do not depend on a process of this machine."""


def cloud(name: str) -> Provider[Any]:
    """The cloud of that name, one of `CLOUDS`."""
    made: Provider[Any] = _made(_CLOUDS[name])
    return made


def deployer(name: str) -> Deployer[Any]:
    """Creates and removes functions on the cloud of that name; those on Ray and Lithops are not created beforehand."""
    made: Deployer[Any] = _made(_DEPLOYERS[name])
    return made


def _made(named: str) -> Any:
    module, _, kind = named.partition(":")
    return getattr(import_module(module), kind)()
