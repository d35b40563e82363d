"""Who may do what: the least that a function, a client and a deployer need, as documents to read before they are used.

Three policies, because three parties differ: the function reads and writes the run's objects, invokes itself and
writes its log; the client starts functions and reads what they left; the deployer makes the function, and nothing
else. The template makes the first two and the log group, with CloudFormation, so that one command removes them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ephemeron.errors import JobError
from ephemeron.functions.aws.settings import AwsSettings

LOG_DAYS = 14
_INVOKE = ["lambda:InvokeFunction"]
_LOOK = [
    "lambda:GetFunctionConfiguration", "lambda:GetFunctionEventInvokeConfig", "lambda:GetFunctionRecursionConfig",
    "lambda:GetFunctionConcurrency",
]  # fmt: skip
_MAKE = [
    "lambda:CreateFunction", "lambda:UpdateFunctionCode", "lambda:UpdateFunctionConfiguration", "lambda:DeleteFunction",
    "lambda:GetFunction", "lambda:GetFunctionConfiguration", "lambda:PutFunctionEventInvokeConfig",
    "lambda:PutFunctionRecursionConfig",
]  # fmt: skip
_NETWORK = [
    "ec2:CreateNetworkInterface", "ec2:DescribeNetworkInterfaces", "ec2:DescribeSubnets", "ec2:DeleteNetworkInterface",
    "ec2:AssignPrivateIpAddresses", "ec2:UnassignPrivateIpAddresses",
]  # fmt: skip
_OBJECTS = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What the policies are about. Account and region may be CloudFormation's own words for them."""

    function: str
    region: str
    account: str
    bucket: str = ""
    prefix: str = ""
    vpc: bool = False

    def arn(self, service: str, resource: str) -> str:
        return f"arn:aws:{service}:{self.region}:{self.account}:{resource}"

    @property
    def function_arn(self) -> str:
        return self.arn("lambda", f"function:{self.function}")

    @property
    def log_arn(self) -> str:
        return self.arn("logs", f"log-group:/aws/lambda/{self.function}")


def place_of(settings: AwsSettings, *, account: str, channel: str, vpc: bool) -> Place:
    """From the function's settings and the channel's address.

    Raises:
        JobError: the channel is no bucket and no cache.
    """
    assert settings.region is not None
    parts = urlsplit(channel)
    if parts.scheme not in ("s3", "redis", "rediss"):
        raise JobError(f"channel {channel!r} is nothing that Lambda functions share",
                       remedy="give --channel s3://bucket/prefix, or redis:// in a VPC")  # fmt: skip
    s3 = parts.scheme == "s3"
    return Place(
        function=settings.function, region=settings.region, account=account, bucket=parts.netloc if s3 else "",
        prefix=parts.path.strip("/") if s3 else "", vpc=vpc,
    )  # fmt: skip


def function_policy(place: Place) -> dict[str, Any]:
    """What the function's role may do."""
    statements = [
        _allow("InvokeSuccessors", _INVOKE, place.function_arn),
        _allow("WriteItsLog", ["logs:CreateLogStream", "logs:PutLogEvents"], f"{place.log_arn}:*"),
        *_objects(place),
    ]
    if place.vpc:
        statements.append(_allow("JoinTheNetwork", _NETWORK, "*"))  # these actions know no resources
    return _document(statements)


def client_policy(place: Place) -> dict[str, Any]:
    """What whoever trains may do."""
    return _document([
        _allow("StartFunctions", [*_INVOKE, *_LOOK], place.function_arn),
        _allow("ReadTheQuota", ["lambda:GetAccountSettings"], "*"),
        _allow("ReadTheLog", ["logs:FilterLogEvents"], f"{place.log_arn}:*"),
        *_objects(place),
    ])  # fmt: skip


def deployer_policy(place: Place) -> dict[str, Any]:
    """What whoever deploys may do."""
    role = f"arn:aws:iam::{place.account}:role/{place.function}-function"
    passing = _allow("GiveItsRole", ["iam:PassRole"], role)
    passing["Condition"] = {"StringEquals": {"iam:PassedToService": "lambda.amazonaws.com"}}
    removing = _allow("RemoveItsLog", ["logs:DeleteLogGroup"], f"{place.log_arn}:*")
    return _document([_allow("MakeTheFunction", _MAKE, place.function_arn), passing, removing])


def trust() -> dict[str, Any]:
    """Who may take the function's role: Lambda."""
    statement = {"Effect": "Allow", "Principal": {"Service": "lambda.amazonaws.com"}, "Action": "sts:AssumeRole"}
    return {"Version": "2012-10-17", "Statement": [statement]}


def template(place: Place) -> dict[str, Any]:
    """A CloudFormation template of role, client's policy and log group; costs nothing by itself."""
    inside = Place(
        function=place.function, region="${AWS::Region}", account="${AWS::AccountId}", bucket=place.bucket,
        prefix=place.prefix, vpc=place.vpc,
    )  # fmt: skip
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": f"Permissions and log of the function {place.function}, which trains models for ephemeron.",
        "Resources": {
            "FunctionRole": {
                "Type": "AWS::IAM::Role",
                "Properties": {
                    "RoleName": f"{place.function}-function",
                    "AssumeRolePolicyDocument": trust(),
                    "Policies": [{"PolicyName": "runs", "PolicyDocument": _substituted(function_policy(inside))}],
                },
            },
            "ClientPolicy": {
                "Type": "AWS::IAM::ManagedPolicy",
                "Properties": {
                    "ManagedPolicyName": f"{place.function}-client",
                    "PolicyDocument": _substituted(client_policy(inside)),
                },
            },
            "Log": {
                "Type": "AWS::Logs::LogGroup",
                "DeletionPolicy": "Delete",
                "UpdateReplacePolicy": "Delete",
                "Properties": {"LogGroupName": f"/aws/lambda/{place.function}", "RetentionInDays": LOG_DAYS},
            },
        },
        "Outputs": {"Role": {"Description": "For --role.", "Value": {"Fn::GetAtt": ["FunctionRole", "Arn"]}}},
    }


def write(folder: Path, place: Place) -> list[Path]:
    """Writes all documents for review.

    Raises:
        JobError: the folder cannot be written.
    """
    documents = {
        "function-policy.json": function_policy(place), "client-policy.json": client_policy(place),
        "deployer-policy.json": deployer_policy(place), "trust.json": trust(), "template.json": template(place),
    }  # fmt: skip
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in documents.items():
            (folder / name).write_text(json.dumps(value, indent=2) + "\n")
    except OSError as e:
        raise JobError(f"cannot write to {folder}: {e.strerror}", remedy="give another folder with --out") from None
    return [folder / name for name in documents]


def _objects(place: Place) -> list[dict[str, Any]]:
    if not place.bucket:
        return []
    bucket = f"arn:aws:s3:::{place.bucket}"
    below = f"{place.prefix}/*" if place.prefix else "*"
    listing = _allow("ListRuns", ["s3:ListBucket"], bucket)
    if place.prefix:
        listing["Condition"] = {"StringLike": {"s3:prefix": below}}
    return [_allow("ReadAndWriteRuns", _OBJECTS, f"{bucket}/{below}"), listing]


def _allow(sid: str, actions: list[str], resource: str) -> dict[str, Any]:
    return {"Sid": sid, "Effect": "Allow", "Action": actions, "Resource": resource}


def _document(statements: list[dict[str, Any]]) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": statements}


def _substituted(document: dict[str, Any]) -> dict[str, Any]:
    """With CloudFormation's words put in where they stand."""
    out = []
    for statement in document["Statement"]:
        resource = statement["Resource"]
        out.append({**statement, "Resource": {"Fn::Sub": resource} if "${" in resource else resource})
    return {**document, "Statement": out}
