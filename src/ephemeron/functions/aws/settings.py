"""Settings of the Lambda function, the clients of AWS, and their errors in one line."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from ephemeron.errors import EphemeronError, JobError, MissingExtra
from ephemeron.functions.async_invoke.sizes import function_of

FUNCTION = "ephemeron"
THROTTLED = frozenset(
    {
        "TooManyRequestsException",
        "ThrottlingException",
        "Throttling",
        "RequestLimitExceeded",
        "EC2ThrottledException",
        "ServiceException",
        "InternalFailure",
        "ServiceUnavailable",
        "ServiceUnavailableException",
    }
)
"""Error codes after which the same request may succeed."""
UNANSWERED = frozenset({"EndpointConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "ConnectionClosedError"})
"""Errors after which it is unknown whether the request was served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsSettings:
    """Location of the function. Without secrets: those come from the usual chain of AWS clients."""

    function: str = FUNCTION
    """Name of the deployment: of its first function."""
    sizes_mb: tuple[int, ...] = ()
    """Memory sizes that are deployed, the first is that of `function`; empty: not asked, or that one alone."""
    qualifier: str = ""
    """Version to invoke; empty: the function itself."""
    region: str | None = None
    """None: AWS_REGION, AWS_DEFAULT_REGION, or that of `~/.aws/config`."""
    endpoint: str | None = None
    """Endpoint of the Lambda and Logs APIs of another service; None: AWS, or AWS_ENDPOINT_URL_LAMBDA."""
    every_s: float = 5.0
    """Seconds between reports of functions, and between rounds of the collector."""

    def located(self) -> AwsSettings:
        """The settings with their region filled in.

        Raises:
            JobError: there is none, or AWS knows no such region.
            MissingExtra: boto3 is not installed.
        """
        session = _session()  # which knows AWS_DEFAULT_REGION and the configuration's, not AWS_REGION
        region = self.region or os.environ.get("AWS_REGION") or session.get_config_variable("region")
        if not region:
            raise JobError("no AWS region is set", remedy="give --aws-region, or set AWS_REGION")
        known = sorted(
            {r for part in session.get_available_partitions() for r in session.get_available_regions("lambda", partition_name=part)}
        )
        if region not in known:
            close = difflib.get_close_matches(region, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"use one of {', '.join(known)}"
            raise JobError(f"AWS region {region!r} has no Lambda", remedy=hint)
        return dataclasses.replace(self, region=region)

    def function_of(self, memory_mb: int) -> str:
        """Name of the function of a memory size."""
        return function_of(self.function, self.sizes_mb, memory_mb)

    @property
    def log_group(self) -> str:
        """Log group of all functions of the deployment."""
        return f"/aws/lambda/{self.function}"


def identity(settings: AwsSettings) -> str:
    """Used credentials: the end of the key's id, and its source in the usual chain. Makes no request.

    Raises:
        JobError: there are none, or they cannot be had.
    """
    try:
        found = _session().get_credentials()
        key = None if found is None else found.get_frozen_credentials().access_key
    except Exception as e:
        raise refused(e, settings, doing="finding credentials") from e
    if not key:
        raise JobError("no AWS credentials were found", remedy="set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    return f"of key …{key[-4:]}, from {found.method}"


def client(settings: AwsSettings, service: str, *, tries: int = 1) -> Any:
    """A boto3 client for `lambda` or `logs`. Safe to use from many threads.

    Args:
        settings: where.
        service: as boto3 calls it.
        tries: of each request, where AWS throttles or does not answer; 1: who sends decides about trying again.

    Raises:
        MissingExtra: boto3 is not installed.
    """
    session = _session()
    from botocore.config import Config

    config = Config(connect_timeout=5, read_timeout=30, retries={"mode": "standard", "total_max_attempts": tries}, max_pool_connections=32)
    return session.create_client(service, region_name=settings.region, endpoint_url=settings.endpoint, config=config)


def code_of(e: BaseException) -> str:
    """The error code that AWS gave, or the name of what happened on the way."""
    response = getattr(e, "response", None)
    if isinstance(response, dict):
        return str(response.get("Error", {}).get("Code", ""))
    return type(e).__name__


def explain(e: Exception, settings: AwsSettings, *, doing: str) -> tuple[str, str]:
    """Problem and remedy, each in a few words.

    Args:
        e: of botocore.
        doing: the action that failed, as IAM calls it, such as `lambda:InvokeFunction`.
    """
    code, where = code_of(e), f"function {settings.function!r} in {settings.region}"
    if code == "ResourceNotFoundException":
        return f"{where} does not exist", "run: ephemeron cloud deploy aws (or give --aws-function and --aws-region)"
    if code in ("ExpiredTokenException", "ExpiredToken", "RequestExpired"):
        return "the AWS credentials have expired", "get new ones, for example with: aws sso login"
    if code in ("UnrecognizedClientException", "InvalidClientTokenId", "MissingAuthenticationTokenException"):
        return "AWS does not know these credentials", "check AWS_ACCESS_KEY_ID, AWS_PROFILE and AWS_SESSION_TOKEN"
    if code in ("InvalidSignatureException", "SignatureDoesNotMatch"):
        text = str(getattr(e, "response", {}).get("Error", {}).get("Message", ""))
        if "valid region" in text:
            return f"region {settings.region} is not the one that answers: {text}", "give the right --aws-region"
        return "AWS rejects the signature", "check AWS_SECRET_ACCESS_KEY and this machine's clock"
    if code in ("AccessDeniedException", "AccessDenied"):
        return f"these credentials may not {doing} for {where}", "attach client-policy.json, which deploy has written"
    if code in (
        "NoCredentialsError",
        "PartialCredentialsError",
        "CredentialRetrievalError",
        "ProfileNotFound",
        "TokenRetrievalError",
        "SSOTokenLoadError",
        "UnauthorizedSSOTokenError",
    ):
        return "no AWS credentials were found", "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    if code in UNANSWERED:
        return f"AWS Lambda in {settings.region} does not answer: {_line(e)}", "check the network, region and endpoint"
    if code == "InvalidParameterValueException" and "less than or equal to" in str(e) and "emorySize" in str(e):
        return f"this account may not have functions of that memory: {_line(e)}", (
            "new accounts begin with 3,008 MB: use less, or ask AWS for more (Service Quotas, Lambda)"
        )
    if code in THROTTLED:
        return f"AWS throttles {doing} ({code})", "try again, or ask for a higher quota"
    return f"{doing} failed for {where}: {_line(e)}", "see the message"


def refused(e: Exception, settings: AwsSettings, *, doing: str) -> EphemeronError:
    """The error to raise where nothing has been started yet."""
    problem, remedy = explain(e, settings, doing=doing)
    return JobError(problem, remedy=remedy)


def delete_if_there(request: Callable[[], object], refuse: Callable[[Exception], Exception]) -> bool:
    """Makes a request to delete something; False: there was none.

    Args:
        request: the call.
        refuse: the error to raise for another one.
    """
    try:
        request()
    except Exception as e:
        if code_of(e) == "ResourceNotFoundException":
            return False
        raise refuse(e) from e
    return True


def _line(e: Exception) -> str:
    return " ".join(str(e).split())[:300]


def _session() -> Any:
    """A new session of AWS clients: one may not be used by two threads at once while clients are made.

    Descriptions of AWS's services and regions are read from disk once in a process: that is most of the time of a new client.
    """
    try:
        import boto3  # noqa: F401 - whose releases know new services
        from botocore.session import get_session
    except ModuleNotFoundError:
        raise MissingExtra("boto3", "aws") from None
    session = get_session()
    session.register_component("data_loader", _descriptions(session.get_config_variable("data_path") or ""))
    return session


@cache
def _descriptions(folders: str) -> Any:
    """Loader of the descriptions, which keeps what it has read.

    Args:
        folders: of further ones, as in AWS_DATA_PATH.
    """
    from botocore.loaders import create_loader

    return create_loader(folders or None)
