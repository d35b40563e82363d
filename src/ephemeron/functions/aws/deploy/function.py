"""Deployment of the function, with the settings of long runs: no retries, short event age, recursion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ephemeron.errors import JobError
from ephemeron.functions.async_invoke.call_tracker import EVENT_AGE_S
from ephemeron.functions.async_invoke.sizes import FUNCTION, SIZES, function_of, sizes_in, text_of
from ephemeron.functions.aws.deploy.package import HANDLER
from ephemeron.functions.aws.managed_instances import PUBLISH_TO, QUALIFIER, TIMEOUT_S, VCPUS, ManagedInstances, of_function
from ephemeron.functions.aws.settings import AwsSettings, code_of, delete_if_there, refused
from ephemeron.functions.shipped_code import python_version

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
    log_group: str = ""
    """Instead of the function's own."""
    timeout_s: int = 900
    image: str = ""
    """URI in ECR; or"""
    zipped: bytes = b""
    python: str = field(default_factory=python_version)
    """Version for a ZIP; an image has its own."""
    layers: tuple[str, ...] = ()
    subnets: tuple[str, ...] = ()
    """Subnets of a VPC with a cache; none: no VPC."""
    security_groups: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables, encrypted at rest by AWS. The only place for a cache's password."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Tags of the function, by which AWS tells its cost apart. An update adds them to those that there are."""
    digest: str = ""
    managed: ManagedInstances | None = None
    """Instances of one's own; then `memory_mb` is that of a call."""

    def __post_init__(self) -> None:
        if bool(self.image) == bool(self.zipped):
            raise JobError("a function is an image or a ZIP", remedy="give --image URI, or --zip")
        if not 128 <= self.memory_mb <= 10_240:
            raise JobError(f"memory of {self.memory_mb} MB is outside Lambda's 128 to 10,240 MB")
        longest = 900 if self.managed is None else TIMEOUT_S
        if not 1 <= self.timeout_s <= longest:
            raise JobError(
                f"a time limit of {self.timeout_s} s is outside Lambda's 1 to {longest} s",
                remedy="" if self.managed is not None else f"managed instances have {TIMEOUT_S} s: --managed-instances",
            )
        if self.managed is not None:
            self.managed.environment_mb(self.memory_mb)
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
        found = _found(client, settings.function)
        exists = found is not None
        if found is not None and (of_function(found) is None) != (wanted.managed is None):
            raise JobError(
                f"function {settings.function!r} exists, and cannot be moved to managed instances or away from them",
                remedy=f"run: ephemeron cloud remove aws --function {settings.function}; or give another name with --function",
            )
        publish = {} if wanted.managed is None else {"PublishTo": PUBLISH_TO}
        version = {} if wanted.managed is None else {"Qualifier": QUALIFIER}
        if exists:
            doing = "lambda:UpdateFunctionConfiguration"
            client.update_function_configuration(FunctionName=settings.function, **_configuration(wanted, settings))
            _settled(client, settings.function, "function_updated_v2")
            doing = "lambda:UpdateFunctionCode"
            client.update_function_code(FunctionName=settings.function, **_code(wanted), **publish)
            _settled(client, settings.function, "function_updated_v2")
            if wanted.tags:
                assert found is not None
                doing = "lambda:TagResource"
                client.tag_resource(Resource=found["FunctionArn"], Tags=dict(wanted.tags))
        else:
            doing = "lambda:CreateFunction"
            client.create_function(
                FunctionName=settings.function,
                PackageType="Image" if wanted.image else "Zip",
                Code=_code(wanted),
                Description="Trains models for ephemeron; invoked by `ephemeron train --platform aws`.",
                **_configuration(wanted, settings),
                **publish,
                **({"Tags": dict(wanted.tags)} if wanted.tags else {}),
            )
            _settled(client, settings.function, "function_active_v2")
        doing = "lambda:PutFunctionEventInvokeConfig"
        client.put_function_event_invoke_config(
            FunctionName=settings.function, MaximumRetryAttempts=0, MaximumEventAgeInSeconds=int(EVENT_AGE_S), **version
        )
        doing = "lambda:PutFunctionRecursionConfig"
        client.put_function_recursion_config(FunctionName=settings.function, RecursiveLoop="Allow")
    except JobError:
        raise
    except Exception as e:
        raise refused(e, settings, doing=doing) from e
    return "updated" if exists else "created"


def deploy_sizes(client: Any, settings: AwsSettings, wanted: LambdaSpec, sizes_mb: Sequence[int]) -> dict[str, str]:
    """Creates or updates one function per memory size, all of one image or ZIP, and deletes those of sizes that are not wanted.

    Args:
        client: of boto3, for `lambda`.
        settings: names the first size's function; see `async_invoke.sizes`.
        wanted: what they have in common; its memory is ignored.
        sizes_mb: the first is the default of runs.

    Returns:
        Name of each function, and `created`, `updated` or `deleted`.

    Raises:
        JobError: AWS refuses, in one line.
    """
    before = functions_of(client, settings)
    variables = {**wanted.variables, FUNCTION: settings.function, SIZES: text_of(sizes_mb)} if len(sizes_mb) > 1 else wanted.variables
    done: dict[str, str] = {}
    for size in reversed(sizes_mb):  # the first size's function last: it tells clients of the others
        one = replace(settings, function=function_of(settings.function, sizes_mb, size))
        group = settings.log_group if one.function != settings.function else ""
        done[one.function] = deploy(client, one, replace(wanted, memory_mb=size, variables=variables, log_group=group))
    for name in before:
        if name not in done:
            delete(client, replace(settings, function=name))
            done[name] = "deleted"
    return done


def functions_of(client: Any, settings: AwsSettings) -> list[str]:
    """Names of the functions of a deployment, the first size's last; empty: there is none.

    Raises:
        JobError: AWS refuses, in one line.
    """
    try:
        found = client.get_function_configuration(FunctionName=settings.function)
    except Exception as e:
        if code_of(e) == "ResourceNotFoundException":
            return []
        raise refused(e, settings, doing="lambda:GetFunctionConfiguration") from e
    sizes = sizes_in(found.get("Environment", {}).get("Variables", {}))
    return [*(function_of(settings.function, sizes, size) for size in sizes[1:]), settings.function]


def delete(client: Any, settings: AwsSettings) -> bool:
    """Deletes a function; False: there was none.

    Raises:
        JobError: AWS refuses, in one line.
    """
    refuse = partial(refused, settings=settings, doing="lambda:DeleteFunction")
    return delete_if_there(lambda: client.delete_function(FunctionName=settings.function), refuse)


def _found(client: Any, name: str) -> Mapping[str, Any] | None:
    """Configuration of a function; None: there is none."""
    try:
        found: Mapping[str, Any] = client.get_function_configuration(FunctionName=name)
        return found
    except Exception as e:
        if code_of(e) == "ResourceNotFoundException":
            return None
        raise


def _settled(client: Any, name: str, waiter: str) -> None:
    client.get_waiter(waiter).wait(FunctionName=name, WaiterConfig={"Delay": 1, "MaxAttempts": 300})


def _code(wanted: LambdaSpec) -> dict[str, object]:
    return {"ImageUri": wanted.image} if wanted.image else {"ZipFile": wanted.zipped}


def _configuration(wanted: LambdaSpec, settings: AwsSettings) -> dict[str, object]:
    out: dict[str, object] = {
        "Role": wanted.role,
        "MemorySize": wanted.memory_mb,
        "Timeout": wanted.timeout_s,
        "Environment": {"Variables": {**wanted.variables, DIGEST: wanted.digest}},
        "VpcConfig": {"SubnetIds": list(wanted.subnets), "SecurityGroupIds": list(wanted.security_groups)},
    }
    if (managed := wanted.managed) is not None:
        assert settings.region is not None
        account = wanted.role.split(":")[4]
        variables = {**wanted.variables, DIGEST: wanted.digest, VCPUS: f"{managed.vcpus(wanted.memory_mb):g}"}
        out |= {
            "MemorySize": managed.environment_mb(wanted.memory_mb),
            "Environment": {"Variables": variables},
            "CapacityProviderConfig": managed.config(settings.region, account),
        }
        del out["VpcConfig"]  # the instances are in the provider's network
    if wanted.log_group:
        out["LoggingConfig"] = {"LogGroup": wanted.log_group}
    if wanted.zipped:
        out |= {"Runtime": f"python{wanted.python}", "Handler": HANDLER, "Layers": list(wanted.layers)}
    return out
