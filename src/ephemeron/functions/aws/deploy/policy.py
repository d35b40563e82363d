"""Policies of AWS: the minimum permissions of function, client and deployer, as documents for review.

Three policies: the function reads and writes the run's objects, invokes itself and writes its log; the client starts
functions and reads their objects and logs; the deployer makes the function. The CloudFormation template makes the first two
and the log group, so that one command removes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from ephemeron.errors import JobError
from ephemeron.functions.aws.managed_instances import QUALIFIER, ManagedInstances
from ephemeron.functions.aws.settings import AwsSettings

LOG_DAYS = 14
_INVOKE = ["lambda:InvokeFunction"]
_LOOK = [
    "lambda:GetFunctionConfiguration",
    "lambda:GetFunctionEventInvokeConfig",
    "lambda:GetFunctionRecursionConfig",
    "lambda:GetFunctionConcurrency",
]
_PULL = ("ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer")
_PUSH = (
    "ecr:BatchCheckLayerAvailability",
    "ecr:InitiateLayerUpload",
    "ecr:UploadLayerPart",
    "ecr:CompleteLayerUpload",
    "ecr:PutImage",
    "ecr:DescribeRepositories",
    "ecr:GetRepositoryPolicy",
    "ecr:SetRepositoryPolicy",
    *_PULL,
)
"""Of `image/build.sh`; Lambda writes its own right to read into the policy of the repository where that is missing."""
_KEEP = {
    "rules": [
        {
            "rulePriority": 1,
            "description": "the latest three images",
            "selection": {"tagStatus": "any", "countType": "imageCountMoreThan", "countNumber": 3},
            "action": {"type": "expire"},
        }
    ]
}
"""Rule for images of a repository, which cost $0.10 per GB and month."""
_MAKE = [
    "lambda:CreateFunction",
    "lambda:UpdateFunctionCode",
    "lambda:UpdateFunctionConfiguration",
    "lambda:DeleteFunction",
    "lambda:GetFunction",
    "lambda:GetFunctionConfiguration",
    "lambda:PutFunctionEventInvokeConfig",
    "lambda:PutFunctionRecursionConfig",
    "lambda:TagResource",
]
_NETWORK = [
    "ec2:CreateNetworkInterface",
    "ec2:DescribeNetworkInterfaces",
    "ec2:DescribeSubnets",
    "ec2:DeleteNetworkInterface",
    "ec2:AssignPrivateIpAddresses",
    "ec2:UnassignPrivateIpAddresses",
]
_OBJECTS = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One permission of a policy."""

    sid: str
    actions: tuple[str, ...]
    resource: str | tuple[str, ...]
    condition: Mapping[str, Mapping[str, str]] | None = None
    substituted: bool = False
    """CloudFormation replaces its variables in the resource."""

    def to_json(self) -> dict[str, object]:
        resource: object = (
            self._located(self.resource) if isinstance(self.resource, str) else [self._located(each) for each in self.resource]
        )
        out = {"Sid": self.sid, "Effect": "Allow", "Action": list(self.actions), "Resource": resource}
        return out if self.condition is None else {**out, "Condition": self.condition}

    def _located(self, resource: str) -> object:
        return {"Fn::Sub": resource} if self.substituted and "${" in resource else resource


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Functions, bucket and network of the policies. Account and region may be variables of CloudFormation."""

    function: str
    region: str
    account: str
    bucket: str = ""
    prefix: str = ""
    vpc: bool = False
    sizes_mb: tuple[int, ...] = ()
    """Of the deployment; one size or none: `function` alone."""
    managed: ManagedInstances | None = None
    subnets: tuple[str, ...] = ()
    """Of managed instances."""
    security_groups: tuple[str, ...] = ()

    def arn(self, service: str, resource: str) -> str:
        return f"arn:aws:{service}:{self.region}:{self.account}:{resource}"

    @property
    def functions(self) -> str | tuple[str, ...]:
        """ARNs of the functions of all sizes."""
        sizes = self.sizes_mb
        names = (self.function, *(f"{self.function}-{mb}" for mb in sizes[1:]))
        versions = ("",) if self.managed is None else ("", f":{QUALIFIER}")
        found = [self.arn("lambda", f"function:{name}{version}") for name in names for version in versions]
        return tuple(found) if len(found) > 1 else found[0]

    @property
    def log_arn(self) -> str:
        return self.arn("logs", f"log-group:/aws/lambda/{self.function}")


def place_of(settings: AwsSettings, *, account: str, channel: str, vpc: bool, sizes_mb: tuple[int, ...] = ()) -> Place:
    """From the function's settings and the channel's address.

    Raises:
        JobError: the channel is no bucket and no cache.
    """
    assert settings.region is not None
    parts = urlsplit(channel)
    if parts.scheme not in ("s3", "redis", "rediss"):
        raise JobError(
            f"channel {channel!r} is nothing that Lambda functions share", remedy="give --channel s3://bucket/prefix, or redis:// in a VPC"
        )
    s3 = parts.scheme == "s3"
    return Place(
        function=settings.function,
        region=settings.region,
        account=account,
        bucket=parts.netloc if s3 else "",
        prefix=parts.path.strip("/") if s3 else "",
        vpc=vpc,
        sizes_mb=sizes_mb,
    )


def function_policy(place: Place, *, substituted: bool = False) -> dict[str, object]:
    """Permissions of the function's role. Functions drive runs, too (`--detach`), as clients do."""
    statements = [
        *_driving(place),
        _allow("WriteItsLog", ["logs:CreateLogStream", "logs:PutLogEvents"], f"{place.log_arn}:*"),
        *_objects(place),
    ]
    if place.vpc:
        statements.append(_allow("JoinTheNetwork", _NETWORK, "*"))  # these actions know no resources
    return _document(statements, substituted=substituted)


def client_policy(place: Place, *, substituted: bool = False) -> dict[str, object]:
    """Permissions of the client."""
    return _document([*_driving(place), *_objects(place)], substituted=substituted)


def _driving(place: Place) -> list[Statement]:
    """Permissions of whoever drives a run."""
    return [
        _allow("StartFunctions", [*_INVOKE, *_LOOK], place.functions),
        _allow("ReadTheQuota", ["lambda:GetAccountSettings"], "*"),
        _allow("ReadTheLog", ["logs:FilterLogEvents"], f"{place.log_arn}:*"),
    ]


def deployer_policy(place: Place) -> dict[str, object]:
    """Permissions of the deployer."""
    role = f"arn:aws:iam::{place.account}:role/{place.function}-function"
    passing = _allow("GiveItsRole", ["iam:PassRole"], role, {"StringEquals": {"iam:PassedToService": "lambda.amazonaws.com"}})
    removing = _allow("RemoveItsLog", ["logs:DeleteLogGroup"], f"{place.log_arn}:*")
    pushing = [
        _allow("LogInToTheRegistry", ["ecr:GetAuthorizationToken"], "*"),  # this action knows no resources
        _allow("PushTheImage", _PUSH, place.arn("ecr", f"repository/{place.function}")),
    ]
    statements = [_allow("MakeTheFunction", _MAKE, place.functions), passing, removing, *pushing]
    if place.managed is not None:
        provider = place.arn("lambda", f"capacity-provider:{place.managed.provider}")
        statements.append(_allow("UseTheInstances", ["lambda:PassCapacityProvider"], provider))
    return _document(statements)


def trust() -> dict[str, object]:
    """Trust policy of the function's role: Lambda assumes it."""
    statement = {"Effect": "Allow", "Principal": {"Service": "lambda.amazonaws.com"}, "Action": "sts:AssumeRole"}
    return {"Version": "2012-10-17", "Statement": [statement]}


def template(place: Place, tags: Mapping[str, str] = {}) -> dict[str, object]:
    """A CloudFormation template of role, client's policy, log group and the image's repository; costs nothing by itself.

    Args:
        place: of the functions.
        tags: of everything that can have some.
    """
    tagged = {"Tags": [{"Key": name, "Value": value} for name, value in tags.items()]} if tags else {}
    inside = Place(
        function=place.function,
        region="${AWS::Region}",
        account="${AWS::AccountId}",
        bucket=place.bucket,
        prefix=place.prefix,
        vpc=place.vpc,
        sizes_mb=place.sizes_mb,
        managed=place.managed,
    )
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": f"Permissions and log of the function {place.function}, which trains models for ephemeron.",
        "Resources": {
            "FunctionRole": {
                "Type": "AWS::IAM::Role",
                "Properties": {
                    "RoleName": f"{place.function}-function",
                    "AssumeRolePolicyDocument": trust(),
                    "Policies": [{"PolicyName": "runs", "PolicyDocument": function_policy(inside, substituted=True)}],
                    **tagged,
                },
            },
            "ClientPolicy": {
                "Type": "AWS::IAM::ManagedPolicy",
                "Properties": {"ManagedPolicyName": f"{place.function}-client", "PolicyDocument": client_policy(inside, substituted=True)},
            },
            "Log": {
                "Type": "AWS::Logs::LogGroup",
                "DeletionPolicy": "Delete",
                "UpdateReplacePolicy": "Delete",
                "Properties": {"LogGroupName": f"/aws/lambda/{place.function}", "RetentionInDays": LOG_DAYS, **tagged},
            },
            "Repository": {
                "Type": "AWS::ECR::Repository",
                "Properties": {
                    "RepositoryName": place.function,
                    "EmptyOnDelete": True,
                    "LifecyclePolicy": {"LifecyclePolicyText": json.dumps(_KEEP)},
                    "RepositoryPolicyText": _pulled_by_lambda(),
                    **tagged,
                },
            },
            **({} if place.managed is None else place.managed.resources(place.subnets, place.security_groups)),
        },
        "Outputs": {
            "Role": {"Description": "For --role.", "Value": {"Fn::GetAtt": ["FunctionRole", "Arn"]}},
            "Repository": {"Description": "For image/build.sh.", "Value": {"Fn::GetAtt": ["Repository", "RepositoryUri"]}},
        },
    }


def write(folder: Path, place: Place, tags: Mapping[str, str] = {}) -> list[Path]:
    """Writes all documents for review.

    Args:
        folder: made if it is not there.
        place, tags: see `template`.

    Raises:
        JobError: the folder cannot be written.
    """
    documents = {
        "function-policy.json": function_policy(place),
        "client-policy.json": client_policy(place),
        "deployer-policy.json": deployer_policy(place),
        "trust.json": trust(),
        "template.json": template(place, tags),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in documents.items():
            (folder / name).write_text(json.dumps(value, indent=2) + "\n")
    except OSError as e:
        raise JobError(f"cannot write to {folder}: {e.strerror}", remedy="give another folder with --out") from None
    return [folder / name for name in documents]


def _pulled_by_lambda() -> dict[str, object]:
    """Policy of the repository: Lambda reads the image."""
    statement = {"Sid": "ReadTheImage", "Effect": "Allow", "Principal": {"Service": "lambda.amazonaws.com"}, "Action": list(_PULL)}
    return {"Version": "2012-10-17", "Statement": [statement]}


def _objects(place: Place) -> list[Statement]:
    if not place.bucket:
        return []
    bucket = f"arn:aws:s3:::{place.bucket}"
    below = f"{place.prefix}/*" if place.prefix else "*"
    only = {"StringLike": {"s3:prefix": below}} if place.prefix else None
    listing = _allow("ListRuns", ["s3:ListBucket"], bucket, only)
    return [_allow("ReadAndWriteRuns", _OBJECTS, f"{bucket}/{below}"), listing]


def _allow(
    sid: str, actions: Sequence[str], resource: str | tuple[str, ...], condition: Mapping[str, Mapping[str, str]] | None = None
) -> Statement:
    return Statement(sid=sid, actions=tuple(actions), resource=resource, condition=condition)


def _document(statements: Sequence[Statement], *, substituted: bool = False) -> dict[str, object]:
    made = [replace(statement, substituted=substituted).to_json() for statement in statements]
    return {"Version": "2012-10-17", "Statement": made}
