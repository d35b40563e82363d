"""Payload of the run hook: the call, and what must be neither in the image nor in the store."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ephemeron.communication.channels import credentials
from ephemeron.config.typed import build
from ephemeron.errors import CorruptMessage, JobError
from ephemeron.functions.async_invoke.records import InvokeRequest
from ephemeron.functions.aws_microvm.api import LaunchSpec
from ephemeron.functions.passed_on import SERVICES

PAYLOAD_BYTES = 4_096
"""Limit of botocore's model. The documentation says 16 KB."""
SECRETS = (
    "EPHEMERON_CHANNEL_USER",
    "EPHEMERON_CHANNEL_PASSWORD",
    "EPHEMERON_CHANNEL_TOKEN",
    "EPHEMERON_RENDEZVOUS",
    "EPHEMERON_RENDEZVOUS_TOKEN",
    *SERVICES,
)
"""Variables of the sender that functions get."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPayload:
    """Arguments of a MicroVM."""

    request: Mapping[str, object]
    """An `InvokeRequest`."""
    launch: LaunchSpec
    """What the successors of the call are started with."""
    variables: Mapping[str, str]
    """Secrets, for the function's environment."""

    @property
    def envelope(self) -> InvokeRequest:
        """The call and how to report about it.

        Raises:
            CorruptMessage: it is none.
        """
        return InvokeRequest.from_event(dict(self.request))

    def to_text(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> RunPayload:
        """The inverse.

        Raises:
            CorruptMessage: it is not the payload of a call.
        """
        try:
            return build(cls, json.loads(text), where="payload of a MicroVM")
        except (ValueError, RecursionError, JobError) as e:
            raise CorruptMessage(f"not a payload of ephemeron: {e}") from None


def own_secrets() -> dict[str, str]:
    """Variables of the caller that functions get."""
    found = {name: credentials.variable(name) for name in SECRETS}
    return {name: value for name, value in found.items() if value}
