"""`cloud deploy aws` and `cloud remove aws`: creation and removal of the function on AWS Lambda."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ephemeron.communication.channels.tls import for_functions
from ephemeron.communication.direct.transport import listening_variables
from ephemeron.errors import JobError
from ephemeron.functions.async_invoke.provider import ACCOUNT, Deployer, Deployment, Tell, account_of, again, outcome
from ephemeron.functions.aws.deploy import function as functions
from ephemeron.functions.aws.deploy import package, policy
from ephemeron.functions.aws.managed_instances import ManagedInstances
from ephemeron.functions.aws.preflight import COMMAND
from ephemeron.functions.aws.settings import AwsSettings, client, delete_if_there, refused
from ephemeron.functions.passed_on import SERVICES

_PASSED_ON = (
    "EPHEMERON_CHANNEL_USER",
    "EPHEMERON_CHANNEL_PASSWORD",
    "EPHEMERON_ENTRIES",
    "EPHEMERON_RENDEZVOUS",
    "EPHEMERON_RENDEZVOUS_TOKEN",
    "EPHEMERON_DIRECT_TLS",
    *SERVICES,
)


class AwsDeployer(Deployer[AwsSettings]):
    settings, range_mb = AwsSettings, (128, 10_240)

    def deploy(self, settings: AwsSettings, wanted: Deployment, options: Mapping[str, Any], tell: Tell) -> None:
        role, image, subnets, groups = (options[name] for name in ("role", "image", "subnets", "security_groups"))
        managed = _managed(options)
        vpc = bool(subnets) and managed is None  # instances are in the network of their provider
        place = policy.place_of(settings, account=account_of(role), channel=wanted.store, vpc=vpc, sizes_mb=wanted.sizes_mb)
        place = dataclasses.replace(place, managed=managed, subnets=subnets, security_groups=groups)
        for path in (
            *policy.write(wanted.out, place, wanted.labels),
            *package.write_image_recipe(wanted.out / "image", wanted.environment),
        ):
            tell(f"wrote {path}")
        tell(f"functions have {wanted.environment}")
        if role is None:
            return tell(_next_steps(place, wanted, options))
        data = b""
        if options["as_zip"]:
            needed = () if options["no_dependencies"] else (*package.REQUIREMENTS, *wanted.environment.packages)
            data = package.build_zip(wanted.out, requirements=needed, python=wanted.environment.version)
            (wanted.out / "function.zip").write_bytes(data)
            tell(f"wrote {wanted.out / 'function.zip'} ({len(data) / 2**20:.1f} MB of {package.ZIPPED_MB})")
        spec = functions.LambdaSpec(
            role=role,
            memory_mb=wanted.sizes_mb[0],
            timeout_s=options["function_timeout_s"],
            image=image or "",
            zipped=data,
            python=wanted.environment.version,
            layers=options["layers"],
            subnets=subnets,
            security_groups=groups,
            tags=wanted.labels,
            digest=wanted.environment.release,
            managed=managed,
            variables={
                **{name: os.environ[name] for name in _PASSED_ON if name in os.environ},
                **for_functions(),
                **(listening_variables(wanted.channel) if subnets else {}),
            },
        )
        sizes = wanted.sizes_mb
        for name, done in functions.deploy_sizes(client(settings, "lambda", tries=5), settings, spec, sizes).items():
            size = wanted.size_of(name, settings.function)
            what = f": {size} MB, {spec.timeout_s} s, no retries" if done != "deleted" else ", whose size is not wanted"
            tell(f"{done} function {name} in {settings.region}{what}")
        costs = "they cost nothing while they do not" if len(sizes) > 1 else "it costs nothing while it does not"
        if managed is not None:
            costs = "Lambda keeps instances up, which are billed also while nothing runs: the function does not"
        tell(f"{costs} run" + ("; the image costs $0.10 per GB and month in ECR" if image else "") + ", and nothing else was made")
        tell(f"train with: ephemeron train JOB --platform aws --channel {wanted.channel} --workers 4")

    def describe(self, settings: AwsSettings) -> str:
        return f"function {settings.function} in {settings.region}, in all its sizes, and its log"

    def remove(self, settings: AwsSettings, tell: Tell) -> None:
        api = client(settings, "lambda", tries=5)
        for name in functions.functions_of(api, settings) or [settings.function]:
            tell(outcome(f"function {name}", functions.delete(api, dataclasses.replace(settings, function=name))))
        tell(delete_log(settings.log_group, settings, partial(refused, settings=settings)))
        tell("not touched: the stack of template.json with the image in ECR, objects of runs in the bucket (ephemeron runs clean --all)")


def delete_log(group: str, settings: AwsSettings, refuse: Callable[..., Exception]) -> str:
    """Deletes a log group of CloudWatch; returns a line about it.

    Args:
        group: its name.
        settings: located.
        refuse: the error to raise, of one of AWS and of `doing`.
    """
    api = client(settings, "logs", tries=5)
    request, action = partial(api.delete_log_group, logGroupName=group), partial(refuse, doing="logs:DeleteLogGroup")
    return outcome(f"log {group}", delete_if_there(request, action))


def _managed(options: Mapping[str, Any]) -> ManagedInstances | None:
    calls, types = options["calls_per_environment"], options["instance_types"]
    if options["managed_instances"] is not None:
        return ManagedInstances(
            provider=options["managed_instances"],
            calls=calls,
            gib_per_vcpu=options["gib_per_vcpu"],
            max_vcpus=options["max_vcpus"],
            instance_types=types,
        )
    if calls > 1 or types:
        raise JobError(
            "several calls in an environment, and instance types, are for managed instances", remedy="give --managed-instances NAME"
        )
    return None


def _next_steps(place: policy.Place, wanted: Deployment, options: Mapping[str, Any]) -> str:
    function, region, out = place.function, place.region, wanted.out
    named = "" if function == AwsSettings().function else function
    instances = ("managed_instances", "calls_per_environment", "gib_per_vcpu", "max_vcpus") if options["managed_instances"] else ()
    command = again(
        COMMAND,
        wanted,
        function=named,
        region=region,
        function_timeout_s=options["function_timeout_s"],
        subnet=options["subnets"],
        security_group=options["security_groups"],
        instance_type=options["instance_types"],
        **{name: options[name] for name in instances},
    )
    tags = "".join(f" {shlex.quote(f'{name}={value}')}" for name, value in wanted.labels.items())
    return f"""
nothing was sent to AWS. Read these files, then:
  aws cloudformation deploy --region {region} --stack-name {function} --template-file {out}/template.json \\
      --capabilities CAPABILITY_NAMED_IAM{f" --tags{tags}" if tags else ""}
  {out}/image/build.sh {ACCOUNT}.dkr.ecr.{region}.amazonaws.com/{function}:1
  {command} --role arn:aws:iam::{ACCOUNT}:role/{function}-function \\
      --image {ACCOUNT}.dkr.ecr.{region}.amazonaws.com/{function}:1"""
