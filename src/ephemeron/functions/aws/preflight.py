"""Checks of the account and the function before a run begins; each refusal is one line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ephemeron.errors import JobError, PlanInfeasible
from ephemeron.functions.async_invoke.call_tracker import EVENT_AGE_S
from ephemeron.functions.async_invoke.sizes import function_of, not_deployed, sizes_in, sizes_text, text_of
from ephemeron.functions.aws.managed_instances import QUALIFIER, ManagedInstances, of_function
from ephemeron.functions.aws.platform import LIMITS
from ephemeron.functions.aws.settings import AwsSettings, client, code_of, refused
from ephemeron.functions.base import Limits
from ephemeron.functions.source_bundle import check_release, packages_in

COMMAND = "ephemeron cloud deploy aws"
USUAL_CONCURRENCY = 1_000
"""Functions at once in an account whose quota is not reduced."""
_LOOPBACK = ("localhost", "127.0.0.1", "::1", "[::1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployedLambda:
    """The deployed function, or several that differ in their memory."""

    memory_mb: int
    """Memory of runs that name none."""
    timeout_s: int
    concurrency: int
    """Concurrent invocations: reserved for each function, or else unreserved in the account."""
    digest: str
    """Digest of its code; empty: unknown."""
    sizes_mb: tuple[int, ...]
    """All memory sizes, the default first. On managed instances, of a call."""
    managed: ManagedInstances | None = None
    """None: they run on Lambda's own capacity."""
    account_concurrency: int = USUAL_CONCURRENCY
    """Quota of the account."""

    @property
    def reduced(self) -> str:
        """Which quota of the account is below the usual one, and what to do; empty: none is known to be."""
        if self.account_concurrency >= USUAL_CONCURRENCY:
            return ""
        return (
            f"{self.account_concurrency} functions at once (usually {USUAL_CONCURRENCY:,}), and perhaps 3,008 MB of memory "
            "(usually 10,240); new accounts begin with reduced quotas: ask for more in Service Quotas"
        )

    @property
    def limits(self) -> Limits:
        """Limits of calls."""
        return dataclasses.replace(
            LIMITS,
            memory_min_mb=min(self.sizes_mb),
            memory_max_mb=max(self.sizes_mb),
            sizes_mb=self.sizes_mb,
            lifetime_s=float(self.timeout_s),
            concurrency=self.concurrency,
            deploy=COMMAND,
            packages=packages_in(self.digest),
            mb_per_vcpu=LIMITS.mb_per_vcpu if self.managed is None else 1024 * self.managed.gib_per_vcpu,
        )


def inspect(settings: AwsSettings, *, tries: int = 6) -> DeployedLambda:
    """Asks AWS about the functions of all sizes; starts none.

    Args:
        settings: located.
        tries: of each request.

    Raises:
        JobError: no credentials, expired or unknown ones, a missing permission, no such function, or one
            configured so that runs would break. Names the problem and the remedy.
    """
    first, sizes = _inspect_one(settings, tries)
    found = [first]
    for size in sizes[1:]:
        other, _ = _inspect_one(dataclasses.replace(settings, function=function_of(settings.function, sizes, size)), tries)
        if (other.memory_mb, other.digest) != (size, first.digest):
            raise JobError(
                f"function {settings.function!r} and that of {size} MB are not of one deployment",
                remedy=f"run: {COMMAND} --memory-mb {text_of((first.memory_mb, *sizes[1:]))}",
            )
        found.append(other)
    return dataclasses.replace(
        first,
        sizes_mb=tuple(f.memory_mb for f in found),
        timeout_s=min(f.timeout_s for f in found),
        concurrency=min(f.concurrency for f in found),
    )


def located_sizes(settings: AwsSettings, deployed: DeployedLambda) -> AwsSettings:
    """The settings with the sizes and the version that are deployed."""
    qualifier = "" if deployed.managed is None else QUALIFIER
    return dataclasses.replace(settings, sizes_mb=deployed.sizes_mb, qualifier=qualifier)


def _inspect_one(settings: AwsSettings, tries: int) -> tuple[DeployedLambda, tuple[int, ...]]:
    """One function, and the sizes that its deployment has by its variables."""
    api = client(settings, "lambda", tries=tries)
    name = settings.function

    def ask(action: str, request: Callable[[], Any]) -> Any:
        try:
            return request()
        except Exception as e:
            raise refused(e, settings, doing=f"lambda:{action}") from e

    function = ask("GetFunctionConfiguration", lambda: api.get_function_configuration(FunctionName=name))
    managed = of_function(function)
    version = {} if managed is None else {"Qualifier": QUALIFIER}
    events = ask("GetFunctionEventInvokeConfig", lambda: _events(api, name, version))
    recursion = ask("GetFunctionRecursionConfig", lambda: api.get_function_recursion_config(FunctionName=name))
    reserved = ask("GetFunctionConcurrency", lambda: api.get_function_concurrency(FunctionName=name))
    account = ask("GetAccountSettings", api.get_account_settings)["AccountLimit"]
    ask("InvokeFunction", lambda: api.invoke(FunctionName=name, InvocationType="DryRun", Payload=b"{}", **version))
    _check_settings(settings, function, events, recursion)
    variables = function.get("Environment", {}).get("Variables", {})
    memory_mb = int(function["MemorySize"]) // (1 if managed is None else managed.calls)
    deployed = DeployedLambda(
        memory_mb=memory_mb,
        sizes_mb=(memory_mb,),
        timeout_s=int(function["Timeout"]),
        concurrency=int(reserved.get("ReservedConcurrentExecutions", account["UnreservedConcurrentExecutions"])),
        digest=str(variables.get("EPHEMERON_CODE", "")),
        managed=managed,
        account_concurrency=int(account.get("ConcurrentExecutions", USUAL_CONCURRENCY)),
    )
    return deployed, sizes_in(variables)


def check_fit(deployed: DeployedLambda, settings: AwsSettings, *, workers: int, memory_mb: int, lifetime_s: float) -> None:
    """Whether a run fits the functions: memory and time limit are theirs, not a call's.

    Raises:
        JobError: other memory, or a longer life.
        PlanInfeasible: binding is `concurrency`.
    """
    if memory_mb not in deployed.sizes_mb:
        raise JobError(
            f"function {settings.function!r} has {sizes_text(deployed.sizes_mb)}, the run wants {memory_mb} MB",
            remedy=f"{not_deployed(deployed.sizes_mb, memory_mb, COMMAND)}; or leave --memory-mb out",
        )
    if lifetime_s > deployed.timeout_s:
        raise JobError(
            f"function {settings.function!r} ends after {deployed.timeout_s} s, the run wants {lifetime_s:g} s",
            remedy=f"use --function-timeout-s {deployed.timeout_s}, or: ephemeron cloud deploy aws --function-timeout-s {int(lifetime_s)}",
        )
    if workers > deployed.concurrency:
        raise PlanInfeasible(
            f"{workers} workers are wanted, the quota of concurrent functions in {settings.region} is "
            f"{deployed.concurrency}; use fewer workers, or ask AWS for more (Service Quotas, Lambda)",
            binding="concurrency",
        )


def check_code(deployed: DeployedLambda, settings: AwsSettings, digest: str) -> None:
    """Whether client and function are of the same release. A function of unknown code is trusted.

    Raises:
        JobError: they are not.
    """
    check_release(deployed.digest, digest, what=f"function {settings.function!r}", deploying=COMMAND)


def check_channel(channel: str, settings: AwsSettings, secrets: dict[str, str]) -> None:
    """Whether functions elsewhere can reach it.

    Raises:
        JobError: it is on this machine, or needs credentials that functions do not have.
    """
    parts = urlsplit(channel)
    here = channel in ("folder", "parameter_server") or parts.scheme == "file" or parts.hostname in _LOOPBACK
    if here and not is_local(settings):
        raise JobError(
            f"channel {channel!r} is on this machine, where AWS Lambda cannot reach it",
            remedy="use s3://bucket/prefix, or redis:// in a VPC of the function",
        )
    if channel in ("folder", "parameter_server"):
        raise JobError(f"channel {channel!r} has no address that functions could be told", remedy="give a URL")
    if secrets:
        raise JobError(
            "functions do not get credentials from an address",
            remedy="give the function's role access to the bucket, or its environment the password (cloud deploy aws)",
        )


def is_local(settings: AwsSettings) -> bool:
    """Whether the service is on loopback: then everything of this machine can be reached."""
    import os

    endpoint = settings.endpoint or os.environ.get("AWS_ENDPOINT_URL_LAMBDA") or os.environ.get("AWS_ENDPOINT_URL")
    return endpoint is not None and urlsplit(endpoint).hostname in _LOOPBACK


def _events(api: Any, name: str, version: Mapping[str, str]) -> Mapping[str, int]:
    try:
        found = api.get_function_event_invoke_config(FunctionName=name, **version)
        return {key: int(found[key]) for key in ("MaximumRetryAttempts", "MaximumEventAgeInSeconds") if key in found}
    except Exception as e:
        if code_of(e) != "ResourceNotFoundException":
            raise
        return {}  # the function exists, so it is its configuration that does not: AWS's defaults hold


def _check_settings(settings: AwsSettings, function: Any, events: Any, recursion: Any) -> None:
    wrong = []
    if events.get("MaximumRetryAttempts", 2) != 0:
        wrong.append(f"retries failed calls {events.get('MaximumRetryAttempts', 2)} times")
    if events.get("MaximumEventAgeInSeconds", 21_600) > EVENT_AGE_S:
        wrong.append(f"keeps calls for {events.get('MaximumEventAgeInSeconds', 21_600)} s")
    if recursion.get("RecursiveLoop") != "Allow":
        wrong.append("ends chains of functions after 16 links")
    if wrong:
        raise JobError(f"function {settings.function!r} {', '.join(wrong)}", remedy="run: ephemeron cloud deploy aws")
    if function.get("State", "Active") in ("Pending", "Failed"):
        raise JobError(
            f"function {settings.function!r} is {function['State'].lower()}: {function.get('StateReason', '')}",
            remedy="wait, or deploy again",
        )
