"""Deployment of the function, with the settings of long runs: no retries, short event age, recursion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ephemeron.errors import JobError
from ephemeron.functions.async_invoke.call_tracker import EVENT_AGE_S
from ephemeron.functions.aws.deploy.package import HANDLER, PYTHON
from ephemeron.functions.aws.settings import AwsSettings, code_of, refused

DIGEST = "EPHEMERON_CODE"
"""Variable of the function with the digest of its code."""
VARIABLES_BYTES = 4096
"""Limit of AWS Lambda for names and values of all variables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LambdaSpec:
    """The function to deploy."""

    role: str
    """ARN of the role that it runs as."""
    memory_mb: int
    timeout_s: int = 900
    image: str = ""
    """URI in ECR; or"""
    zipped: bytes = b""
    layers: tuple[str, ...] = ()
    subnets: tuple[str, ...] = ()
    """Subnets of a VPC with a cache; none: no VPC."""
    security_groups: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables, encrypted at rest by AWS. The only place for a cache's password."""
    digest: str = ""

    def __post_init__(self) -> None:
        if bool(self.image) == bool(self.zipped):
            raise JobError("a function is an image or a ZIP", remedy="give --image URI, or --zip")
        if not 128 <= self.memory_mb <= 10_240:
            raise JobError(f"memory of {self.memory_mb} MB is outside Lambda's 128 to 10,240 MB")
        if not 1 <= self.timeout_s <= 900:
            raise JobError(f"a time limit of {self.timeout_s} s is outside Lambda's 1 to 900 s")
        taken = sum(len(name.encode()) + len(value.encode()) for name, value in self.variables.items())
        if taken > VARIABLES_BYTES:
            raise JobError(
                f"the function's environment has {taken} bytes, AWS Lambda takes {VARIABLES_BYTES}",
                remedy="give EPHEMERON_CHANNEL_CA a file with your own authority only",
            )


def deploy(client: Any, settings: AwsSettings, wanted: LambdaSpec) -> str:
    """Creates the function, or updates it. Returns `created` or `updated`.

    Raises:
        JobError: AWS refuses, in one line.
    """
    doing = "lambda:GetFunctionConfiguration"
    try:
        exists = _exists(client, settings.function)
        if exists:
            doing = "lambda:UpdateFunctionConfiguration"
            client.update_function_configuration(FunctionName=settings.function, **_configuration(wanted))
            _settled(client, settings.function, "function_updated_v2")
            doing = "lambda:UpdateFunctionCode"
            client.update_function_code(FunctionName=settings.function, **_code(wanted))
            _settled(client, settings.function, "function_updated_v2")
        else:
            doing = "lambda:CreateFunction"
            client.create_function(
                FunctionName=settings.function, PackageType="Image" if wanted.image else "Zip", Code=_code(wanted),
                Description="Trains models for ephemeron; invoked by `ephemeron train --platform aws`.",
                **_configuration(wanted),
            )  # fmt: skip
            _settled(client, settings.function, "function_active_v2")
        doing = "lambda:PutFunctionEventInvokeConfig"
        client.put_function_event_invoke_config(
            FunctionName=settings.function, MaximumRetryAttempts=0, MaximumEventAgeInSeconds=int(EVENT_AGE_S)
        )
        doing = "lambda:PutFunctionRecursionConfig"
        client.put_function_recursion_config(FunctionName=settings.function, RecursiveLoop="Allow")
    except Exception as e:
        raise refused(e, settings, doing=doing) from e
    return "updated" if exists else "created"


def _exists(client: Any, name: str) -> bool:
    try:
        client.get_function_configuration(FunctionName=name)
    except Exception as e:
        if code_of(e) == "ResourceNotFoundException":
            return False
        raise
    return True


def _settled(client: Any, name: str, waiter: str) -> None:
    client.get_waiter(waiter).wait(FunctionName=name, WaiterConfig={"Delay": 1, "MaxAttempts": 300})


def _code(wanted: LambdaSpec) -> dict[str, object]:
    return {"ImageUri": wanted.image} if wanted.image else {"ZipFile": wanted.zipped}


def _configuration(wanted: LambdaSpec) -> dict[str, object]:
    out: dict[str, object] = {
        "Role": wanted.role, "MemorySize": wanted.memory_mb, "Timeout": wanted.timeout_s,
        "Environment": {"Variables": {**wanted.variables, DIGEST: wanted.digest}},
        "VpcConfig": {"SubnetIds": list(wanted.subnets), "SecurityGroupIds": list(wanted.security_groups)},
    }  # fmt: skip
    if wanted.zipped:
        out |= {"Runtime": f"python{PYTHON}", "Handler": HANDLER, "Layers": list(wanted.layers)}
    return out
