"""Lambda Managed Instances: the function on EC2 instances of one's own account, which Lambda manages.

An execution environment runs several calls at once, each in a Python process of its own, which share its memory and CPUs. Calls run
for up to 90 minutes, if they are asynchronous. Lambda bills instances, not calls, also while nothing runs. Functions are invoked as the
version that was published last, and their logs are JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ephemeron.errors import JobError

TIMEOUT_S = 5_400
"""Longest asynchronous invocation."""
MEMORY_MB = 32_768
"""Largest environment."""
GIB_PER_VCPU = (2.0, 8.0)
MOST_CALLS = 1_600
QUALIFIER = "$LATEST.PUBLISHED"
"""The version that was published last."""
PUBLISH_TO = "LATEST_PUBLISHED"
VCPUS = "EPHEMERON_VCPUS"
"""Variable of the function: CPUs of one call. Only functions on managed instances have it."""
OPERATOR_POLICY = "arn:${AWS::Partition}:iam::aws:policy/AWSLambdaManagedEC2ResourceOperator"


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedInstances:
    """Where and how a function runs on instances."""

    provider: str
    """Name of the capacity provider."""
    calls: int = 1
    """Calls that share an execution environment."""
    gib_per_vcpu: float = 2.0
    max_vcpus: int = 32
    """Of all instances of the provider."""
    instance_types: tuple[str, ...] = ()
    """EC2 instance types that may be used; none: any that fits."""

    def __post_init__(self) -> None:
        low, high = GIB_PER_VCPU
        if not low <= self.gib_per_vcpu <= high:
            raise JobError(f"{self.gib_per_vcpu:g} GiB per vCPU are outside {low:g} to {high:g}")
        if not 1 <= self.calls <= MOST_CALLS:
            raise JobError(f"{self.calls} calls in an environment are outside 1 to {MOST_CALLS}")
        if not 2 <= self.max_vcpus <= 15_000:
            raise JobError(f"{self.max_vcpus} vCPUs are outside 2 to 15,000")

    def environment_mb(self, memory_mb: int) -> int:
        """Memory of an environment whose calls have so much each.

        Raises:
            JobError: it is more than an environment can have.
        """
        size = memory_mb * self.calls
        if size > MEMORY_MB:
            raise JobError(
                f"{self.calls} calls of {memory_mb} MB are {size} MB, an environment has {MEMORY_MB} MB at most",
                remedy="use fewer calls for each environment, or less memory",
            )
        return size

    def vcpus(self, memory_mb: int) -> float:
        """CPUs of a call with so much memory."""
        return memory_mb / 1024 / self.gib_per_vcpu

    def config(self, region: str, account: str) -> dict[str, object]:
        """`CapacityProviderConfig` of the function."""
        return {
            "LambdaManagedInstancesCapacityProviderConfig": {
                "CapacityProviderArn": f"arn:aws:lambda:{region}:{account}:capacity-provider:{self.provider}",
                "PerExecutionEnvironmentMaxConcurrency": self.calls,
                "ExecutionEnvironmentMemoryGiBPerVCpu": self.gib_per_vcpu,
            }
        }

    def resources(self, subnets: tuple[str, ...], security_groups: tuple[str, ...]) -> dict[str, object]:
        """Resources of a CloudFormation template: the capacity provider, and the role by which Lambda manages instances.

        Raises:
            JobError: there is no network for the instances.
        """
        if not subnets or not security_groups:
            raise JobError("instances need a network", remedy="give --subnet and --security-group, from which the channel is reached")
        trust = {"Effect": "Allow", "Principal": {"Service": "lambda.amazonaws.com"}, "Action": "sts:AssumeRole"}
        wanted: dict[str, object] = {"AllowedInstanceTypes": list(self.instance_types)} if self.instance_types else {}
        return {
            "OperatorRole": {
                "Type": "AWS::IAM::Role",
                "Properties": {
                    "RoleName": f"{self.provider}-operator",
                    "AssumeRolePolicyDocument": {"Version": "2012-10-17", "Statement": [trust]},
                    "ManagedPolicyArns": [{"Fn::Sub": OPERATOR_POLICY}],
                },
            },
            "CapacityProvider": {
                "Type": "AWS::Lambda::CapacityProvider",
                "Properties": {
                    "CapacityProviderName": self.provider,
                    "VpcConfig": {"SubnetIds": list(subnets), "SecurityGroupIds": list(security_groups)},
                    "PermissionsConfig": {"CapacityProviderOperatorRoleArn": {"Fn::GetAtt": ["OperatorRole", "Arn"]}},
                    "InstanceRequirements": {"Architectures": ["x86_64"], **wanted},
                    "CapacityProviderScalingConfig": {"MaxVCpuCount": self.max_vcpus, "ScalingMode": "Auto"},
                },
            },
        }


def of_function(configuration: Mapping[str, Any]) -> ManagedInstances | None:
    """Managed instances of a deployed function, from its configuration; None: it runs on Lambda's own capacity."""
    found = configuration.get("CapacityProviderConfig", {}).get("LambdaManagedInstancesCapacityProviderConfig")
    if not found:
        return None
    return ManagedInstances(
        provider=str(found["CapacityProviderArn"]).rpartition(":")[2],
        calls=int(found.get("PerExecutionEnvironmentMaxConcurrency", 1)),
        gib_per_vcpu=float(found.get("ExecutionEnvironmentMemoryGiBPerVCpu", GIB_PER_VCPU[0])),
    )
