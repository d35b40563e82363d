"""Settings of the image that MicroVMs are started from, and errors of the API in one line."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ephemeron.errors import EphemeronError, JobError
from ephemeron.functions.aws import settings as aws
from ephemeron.functions.aws.settings import AwsSettings, code_of

IMAGE = "ephemeron"
SERVICE = "lambda-microvms"
ADDRESS = "EPHEMERON_HOOKS"
"""Variable with another address to take hooks at, HOST:PORT."""
REGIONS = ("us-east-1", "us-east-2", "us-west-2", "eu-west-1", "ap-northeast-1")
"""Regions of the launch in June 2026, for messages only: the service itself knows where it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsMicrovmSettings:
    """Location of the image. Without secrets: those come from the usual chain of AWS clients."""

    image: str = IMAGE
    region: str | None = None
    """None: AWS_REGION, AWS_DEFAULT_REGION, or that of `~/.aws/config`."""
    endpoint: str | None = None
    """Endpoint of another service; None: AWS, or AWS_ENDPOINT_URL_LAMBDA_MICROVMS."""
    every_s: float = 5.0
    """Seconds between reports of functions, and between rounds of the collector."""

    def located(self) -> AwsMicrovmSettings:
        """The settings with their region filled in.

        Raises:
            JobError: there is none, or AWS knows no such region.
            MissingExtra: boto3 is not installed.
        """
        return dataclasses.replace(self, region=self.aws.located().region)

    @property
    def aws(self) -> AwsSettings:
        """The same place, for clients and messages of AWS."""
        return AwsSettings(function=self.image, region=self.region, endpoint=self.endpoint)

    @property
    def log_group(self) -> str:
        """Log group of the MicroVMs."""
        return f"/aws/lambda-microvms/{self.image}"


def client(settings: AwsMicrovmSettings, service: str = SERVICE, *, tries: int = 1) -> Any:
    """A boto3 client. Safe to use from many threads.

    Args:
        settings: where.
        service: as boto3 calls it.
        tries: of each request, where AWS throttles or does not answer; 1: who sends decides about trying again.

    Raises:
        MissingExtra: boto3 is not installed.
        JobError: its model of the service is missing.
    """
    try:
        return aws.client(settings.aws, service, tries=tries)
    except Exception as e:
        if type(e).__name__ == "UnknownServiceError":
            raise JobError("this boto3 does not know AWS Lambda MicroVMs", remedy="pip install 'boto3>=1.44'") from None
        raise


def explain(e: Exception, settings: AwsMicrovmSettings, *, doing: str) -> tuple[str, str]:
    """Problem and remedy, each in a few words.

    Args:
        e: of botocore.
        doing: the action that failed, as IAM calls it, such as `lambda:RunMicrovm`.
    """
    code, where = code_of(e), f"MicroVM image {settings.image!r} in {settings.region}"
    if code == "ResourceNotFoundException":
        return (f"{where} does not exist", "run: ephemeron cloud deploy aws-microvm (or give --aws-microvm-image and --aws-microvm-region)")
    if code == "ServiceQuotaExceededException":
        text = " ".join(str(e).split())[:300]
        return (f"a quota of this account is used up: {text}", "use fewer or smaller functions, or ask for more (Service Quotas, Lambda)")
    if code == "InsufficientCapacityException":
        return f"AWS has no capacity for {where}", "try again, or use another region"
    problem, remedy = aws.explain(e, settings.aws, doing=doing)
    return problem.replace(f"function {settings.image!r}", f"MicroVM image {settings.image!r}"), remedy


def refused(e: Exception, settings: AwsMicrovmSettings, *, doing: str) -> EphemeronError:
    """The error to raise where nothing has been started yet."""
    if isinstance(e, EphemeronError):
        return e
    problem, remedy = explain(e, settings, doing=doing)
    return JobError(problem, remedy=remedy)
