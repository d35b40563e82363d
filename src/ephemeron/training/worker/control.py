"""Requests of the user during a run: the object `RUN/control`, which clients write and rank 0 reads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TypeAlias

from ephemeron.config.typed import build, plain
from ephemeron.errors import CorruptMessage, JobError
from ephemeron.training.job.generation import Resize

_STOP = b"stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequest:
    """The run stops at a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeRequest:
    """The functions of the run change."""

    name: str
    """Of the request; each has another one."""
    resize: Resize


ControlRequest: TypeAlias = StopRequest | ResizeRequest


def encode_control(request: ControlRequest) -> bytes:
    """The request as the bytes of an object."""
    return _STOP if isinstance(request, StopRequest) else json.dumps(plain(request)).encode()


def decode_control(data: memoryview | bytes, *, key: str) -> ControlRequest:
    """The inverse of `encode_control`.

    Raises:
        CorruptMessage: it is no request.
    """
    if bytes(data) == _STOP:
        return StopRequest()
    try:
        return build(ResizeRequest, json.loads(bytes(data)), where=key)
    except (ValueError, JobError) as e:
        raise CorruptMessage(f"not a request of this release: {e}", key=key) from None
