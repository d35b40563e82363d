"""The operations on MicroVMs that are used here, with typed answers. Requests are made in threads; each is made once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from ephemeron.config.typed import build
from ephemeron.functions.async_invoke.sizes import function_of
from ephemeron.functions.aws.settings import code_of

State = Literal["PENDING", "RUNNING", "SUSPENDING", "SUSPENDED", "TERMINATING", "TERMINATED"]
ENDED: tuple[State, ...] = ("TERMINATING", "TERMINATED")
SUSPENDED: tuple[State, ...] = ("SUSPENDING", "SUSPENDED")
LONGEST_S = 28_800
"""Longest life of a MicroVM, suspended or not."""
_PAGE = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrovmInfo:
    """One MicroVM, as the service describes it."""

    id: str
    state: State
    started_at: float
    """Unix time."""
    terminated_at: float | None = None
    reason: str = ""
    maximum_s: int = LONGEST_S
    endpoint: str = ""
    """URL of its endpoint; empty in lists."""

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> MicrovmInfo:
        """An answer of the service, or an item of a list."""
        given = {
            "id": value["microvmId"],
            "state": value["state"],
            "started_at": _unix(value["startedAt"]),
            "terminated_at": _unix(value.get("terminatedAt")),
            "reason": value.get("stateReason", ""),
            "maximum_s": value.get("maximumDurationInSeconds", LONGEST_S),
            "endpoint": value.get("endpoint", ""),
        }
        return build(cls, given, where="answer of AWS Lambda MicroVMs")

    @property
    def lived_s(self) -> float:
        """Seconds between its start and its end; 0 while it has not ended."""
        return 0.0 if self.terminated_at is None else max(0.0, self.terminated_at - self.started_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """What MicroVMs of a deployment are started with."""

    image_arn: str
    """ARN of the first image; those of other memory sizes have their MB after it."""
    sizes_mb: tuple[int, ...]
    """Baselines, one image for each; the first is for runs that name none."""
    versions: tuple[str, ...]
    """Version of each image."""
    role: str
    """ARN of the role that they run as."""
    egress: tuple[str, ...]
    """ARNs of network connectors."""
    ingress: tuple[str, ...]
    """ARNs of network connectors; none: the service's default, which lets in who has a token."""
    log_group: str

    def image_for(self, memory_mb: int) -> tuple[str, str]:
        """ARN and version of the image of a memory size; of a size that is not deployed, the first one's."""
        arn = function_of(self.image_arn, self.sizes_mb, memory_mb)
        return arn, self.versions[self.sizes_mb.index(memory_mb) if memory_mb in self.sizes_mb else 0]

    @property
    def region(self) -> str:
        """Region of the images."""
        return self.image_arn.split(":")[3]

    @property
    def image_arns(self) -> tuple[str, ...]:
        """ARNs of all images."""
        return tuple(self.image_for(memory_mb)[0] for memory_mb in self.sizes_mb)


class MicrovmApi:
    """MicroVMs of a deployment.

    Args:
        client: of boto3, for `lambda-microvms`.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    async def run(self, spec: LaunchSpec, memory_mb: int, *, payload: str, token: str, maximum_s: int = LONGEST_S) -> str:
        """Starts a MicroVM, and returns its id; the same one for the same token.

        Args:
            spec: what it is started from.
            memory_mb: its baseline.
            payload: of its run hook.
            token: client token.
            maximum_s: after which the service terminates it.
        """
        arn, version = spec.image_for(memory_mb)
        ingress = {"ingressNetworkConnectors": list(spec.ingress)} if spec.ingress else {}
        answer = await asyncio.to_thread(
            self._client.run_microvm,
            imageIdentifier=arn,
            imageVersion=version,
            executionRoleArn=spec.role,
            runHookPayload=payload,
            clientToken=token,
            maximumDurationInSeconds=maximum_s,
            egressNetworkConnectors=list(spec.egress),
            logging={"cloudWatch": {"logGroup": spec.log_group}},
            **ingress,
        )
        return str(answer["microvmId"])

    async def get(self, id: str) -> MicrovmInfo | None:
        """A MicroVM; None: the service does not know it (any more)."""
        try:
            return MicrovmInfo.of(await asyncio.to_thread(self._client.get_microvm, microvmIdentifier=id))
        except Exception as e:
            if code_of(e) == "ResourceNotFoundException":
                return None
            raise

    async def list(self, image_arn: str) -> AsyncIterator[MicrovmInfo]:
        """All MicroVMs of an image, those that have ended lately included."""
        token: dict[str, str] = {}
        while True:
            page = await asyncio.to_thread(self._client.list_microvms, imageIdentifier=image_arn, maxResults=_PAGE, **token)
            for item in page["items"]:
                yield MicrovmInfo.of(item)
            if not page.get("nextToken"):
                return
            token = {"nextToken": page["nextToken"]}

    async def states(self, image_arns: Sequence[str], ids: Sequence[str]) -> dict[str, State]:
        """State of each of these MicroVMs of some images; those that are not listed have ended."""
        wanted, found = set(ids), dict[str, State]()
        for image_arn in image_arns:
            if len(found) == len(wanted):
                break
            async for microvm in self.list(image_arn):
                if microvm.id in wanted:
                    found[microvm.id] = microvm.state
        return {id: found.get(id, "TERMINATED") for id in ids}

    async def token(self, id: str, port: int, *, minutes: int) -> dict[str, str]:
        """Headers that let requests through the endpoint of a MicroVM, to one port of it."""
        answer = await asyncio.to_thread(
            self._client.create_microvm_auth_token, microvmIdentifier=id, expirationInMinutes=minutes, allowedPorts=[{"port": port}]
        )
        return {str(name): str(value) for name, value in answer["authToken"].items()}

    async def suspend(self, id: str) -> None:
        """Suspends a running MicroVM."""
        await asyncio.to_thread(self._client.suspend_microvm, microvmIdentifier=id)

    async def resume(self, id: str) -> None:
        """Resumes a suspended MicroVM."""
        await asyncio.to_thread(self._client.resume_microvm, microvmIdentifier=id)

    async def terminate(self, id: str) -> None:
        """Ends a MicroVM. Harmless when it has ended already."""
        try:
            await asyncio.to_thread(self._client.terminate_microvm, microvmIdentifier=id)
        except Exception as e:
            if code_of(e) != "ResourceNotFoundException":
                raise


def _unix(value: datetime | None) -> float | None:
    return None if value is None else value.timestamp()
