"""Policies: the minimum permissions of the build, of MicroVMs, of the client and of the deployer, as documents for review.

A MicroVM has no ARN of its own: what may be done with it is said of its image. Listing knows no resources. Network connectors of
AWS have to be allowed by name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from ephemeron.errors import JobError
from ephemeron.functions.aws.deploy.policy import LOG_DAYS, Statement
from ephemeron.functions.aws_microvm.preflight import EGRESS, NO_INGRESS
from ephemeron.functions.aws_microvm.settings import AwsMicrovmSettings

_OBJECTS = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject"]
_MAKE = [
    "lambda:CreateMicrovmImage",
    "lambda:UpdateMicrovmImage",
    "lambda:GetMicrovmImage",
    "lambda:GetMicrovmImageVersion",
    "lambda:DeleteMicrovmImage",
]
_CONNECT = ["lambda:GetMicrovm", "lambda:CreateMicrovmAuthToken"]
_HANDLE = ["lambda:GetMicrovm", "lambda:SuspendMicrovm", "lambda:ResumeMicrovm", "lambda:TerminateMicrovm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrovmPlace:
    """Image and buckets of the policies. Account and region may be variables of CloudFormation."""

    image: str
    region: str
    account: str
    artifact_bucket: str
    artifact_key: str
    bucket: str = ""
    """Of the channel; empty: the channel is a cache."""
    prefix: str = ""
    sizes_mb: tuple[int, ...] = ()
    """Of the deployment; one size or none: `image` alone."""
    direct: bool = False
    """Whether MicroVMs connect to each other's endpoints."""

    @property
    def images(self) -> str | tuple[str, ...]:
        """ARNs of the images of all sizes."""
        names = (self.image, *(f"{self.image}-{mb}" for mb in self.sizes_mb[1:]))
        found = tuple(f"arn:aws:lambda:{self.region}:{self.account}:microvm-image:{name}" for name in names)
        return found if len(found) > 1 else found[0]

    @property
    def log_arn(self) -> str:
        return f"arn:aws:logs:{self.region}:{self.account}:log-group:/aws/lambda-microvms/{self.image}"

    @property
    def connectors(self) -> tuple[str, ...]:
        egress = EGRESS.format(region=self.region)
        return (egress,) if self.direct else (egress, NO_INGRESS.format(region=self.region))

    def role_arn(self, kind: str) -> str:
        """ARN of a role that the template makes: `build` or `run`."""
        return f"arn:aws:iam::{self.account}:role/{self.image}-microvm-{kind}"


def place_of(
    settings: AwsMicrovmSettings, *, account: str, channel: str, artifact: str, sizes_mb: tuple[int, ...] = (), direct: bool = False
) -> MicrovmPlace:
    """From the settings, the channel's address and the place of the ZIP.

    Raises:
        JobError: the channel is no bucket and no cache, or the ZIP is not in a bucket.
    """
    assert settings.region is not None
    parts, code = urlsplit(channel), urlsplit(artifact)
    if parts.scheme not in ("s3", "redis", "rediss"):
        raise JobError(
            f"channel {channel!r} is nothing that MicroVMs share", remedy="give --channel s3://bucket/prefix, or rediss://host:port"
        )
    if code.scheme != "s3" or not code.netloc or not code.path.strip("/"):
        raise JobError(f"--artifact {artifact!r} is no object in S3", remedy="give s3://bucket/key.zip")
    s3 = parts.scheme == "s3"
    return MicrovmPlace(
        image=settings.image,
        region=settings.region,
        account=account,
        artifact_bucket=code.netloc,
        artifact_key=code.path.strip("/"),
        bucket=parts.netloc if s3 else "",
        prefix=parts.path.strip("/") if s3 else "",
        sizes_mb=sizes_mb,
        direct=direct,
    )


def build_statements(place: MicrovmPlace) -> list[Statement]:
    """Permissions of the role that builds the image: it reads the ZIP, and writes the build's log."""
    return [_allow("ReadTheCode", ["s3:GetObject"], f"arn:aws:s3:::{place.artifact_bucket}/{place.artifact_key}"), _logs(place)]


def run_statements(place: MicrovmPlace) -> list[Statement]:
    """Permissions of the role of MicroVMs: objects of runs, successors, their own end, their log."""
    return [
        _allow("StartSuccessors", ["lambda:RunMicrovm"], place.images),
        _allow("EndItself", ["lambda:TerminateMicrovm"], place.images),
        *([_allow("ConnectToOthers", _CONNECT, place.images)] if place.direct else []),
        *_pass(place),
        _logs(place),
        *_objects(place),
    ]


def client_statements(place: MicrovmPlace) -> list[Statement]:
    """Permissions of the client: to start, watch, suspend and end MicroVMs, and to read the objects of runs."""
    return [
        _allow("StartFunctions", ["lambda:RunMicrovm"], place.images),
        _allow("HandleFunctions", _HANDLE, place.images),
        _allow("LookAtTheImage", ["lambda:GetMicrovmImageVersion"], place.images),
        _allow("List", ["lambda:ListMicrovms", "lambda:ListMicrovmImages", "servicequotas:GetServiceQuota"], "*"),
        *_pass(place),
        _allow("ReadTheLog", ["logs:FilterLogEvents"], f"{place.log_arn}:*"),
        *_objects(place),
    ]


def deployer_statements(place: MicrovmPlace) -> list[Statement]:
    """Permissions of who makes and removes the image."""
    return [
        _allow("UploadTheCode", ["s3:PutObject", "s3:DeleteObject"], f"arn:aws:s3:::{place.artifact_bucket}/{place.artifact_key}"),
        _allow("MakeTheImage", _MAKE, place.images),
        _allow("FindIt", ["lambda:ListMicrovmImages", "lambda:ListMicrovms"], "*"),
        _allow("EndMicrovms", ["lambda:TerminateMicrovm"], place.images),
        _allow("UseTheConnector", ["lambda:PassNetworkConnector"], place.connectors[0]),
        _allow("GiveTheRole", ["iam:PassRole"], place.role_arn("build")),
        _allow("RemoveTheLog", ["logs:DeleteLogGroup"], place.log_arn),
    ]


def template(place: MicrovmPlace) -> dict[str, object]:
    """CloudFormation: the two roles, the client's policy and the log group."""
    here = MicrovmPlace(
        image=place.image,
        region="${AWS::Region}",
        account="${AWS::AccountId}",
        artifact_bucket=place.artifact_bucket,
        artifact_key=place.artifact_key,
        bucket=place.bucket,
        prefix=place.prefix,
        sizes_mb=place.sizes_mb,
    )

    def role(kind: str, statements: Sequence[Statement]) -> dict[str, object]:
        return {
            "Type": "AWS::IAM::Role",
            "Properties": {
                "RoleName": f"{place.image}-microvm-{kind}",
                "AssumeRolePolicyDocument": _TRUST,
                "Policies": [{"PolicyName": kind, "PolicyDocument": _document(statements, substituted=True)}],
            },
        }

    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": "Roles, policy and log of ephemeron on AWS Lambda MicroVMs. The image is made by: ephemeron cloud deploy aws-microvm",
        "Resources": {
            "BuildRole": role("build", build_statements(here)),
            "RunRole": role("run", run_statements(here)),
            "ClientPolicy": {
                "Type": "AWS::IAM::ManagedPolicy",
                "Properties": {
                    "ManagedPolicyName": f"{place.image}-microvm-client",
                    "PolicyDocument": _document(client_statements(here), substituted=True),
                },
            },
            "Log": {
                "Type": "AWS::Logs::LogGroup",
                "Properties": {"LogGroupName": f"/aws/lambda-microvms/{place.image}", "RetentionInDays": LOG_DAYS},
            },
        },
    }


def write(folder: Path, place: MicrovmPlace) -> list[Path]:
    """Writes all documents.

    Raises:
        JobError: the folder cannot be written.
    """
    documents = {
        "build-policy.json": _document(build_statements(place)),
        "microvm-policy.json": _document(run_statements(place)),
        "client-policy.json": _document(client_statements(place)),
        "deployer-policy.json": _document(deployer_statements(place)),
        "template.json": template(place),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, document in documents.items():
            (folder / name).write_text(json.dumps(document, indent=2) + "\n")
    except OSError as e:
        raise JobError(f"cannot write the policies to {folder}: {e.strerror}") from None
    return [folder / name for name in documents]


_TRUST = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Principal": {"Service": "lambda.amazonaws.com"}, "Action": ["sts:AssumeRole", "sts:TagSession"]}],
}


def _pass(place: MicrovmPlace) -> list[Statement]:
    return [
        _allow("GiveTheRole", ["iam:PassRole"], place.role_arn("run")),
        *(_allow(f"UseConnector{n}", ["lambda:PassNetworkConnector"], arn) for n, arn in enumerate(place.connectors, 1)),
    ]


def _logs(place: MicrovmPlace) -> Statement:
    return _allow("WriteItsLog", ["logs:CreateLogStream", "logs:PutLogEvents"], f"{place.log_arn}:*")


def _objects(place: MicrovmPlace) -> list[Statement]:
    if not place.bucket:
        return []
    bucket, below = f"arn:aws:s3:::{place.bucket}", f"{place.prefix}/*" if place.prefix else "*"
    only = {"StringLike": {"s3:prefix": below}} if place.prefix else None
    listing = Statement(sid="ListRuns", actions=("s3:ListBucket",), resource=bucket, condition=only)
    return [_allow("ReadAndWriteRuns", _OBJECTS, f"{bucket}/{below}"), listing]


def _allow(sid: str, actions: Sequence[str], resource: str | tuple[str, ...]) -> Statement:
    return Statement(sid=sid, actions=tuple(actions), resource=resource)


def _document(statements: Sequence[Statement], *, substituted: bool = False) -> dict[str, object]:
    made = [replace(statement, substituted=substituted).to_json() for statement in statements]
    return {"Version": "2012-10-17", "Statement": made}
