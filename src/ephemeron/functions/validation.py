"""Checks of a single call against the limits, the same for sender and receiver."""

from __future__ import annotations

import json

from ephemeron.errors import InvocationRefused
from ephemeron.functions.base import Call, Limits


def check_call(call: Call, limits: Limits) -> None:
    """Checks memory, time limit and size. Concurrency is counted by the platform.

    Raises:
        InvocationRefused: names the value and the limit.
    """
    low, high, step = limits.memory_min_mb, limits.memory_max_mb, limits.memory_step_mb
    if not low <= call.memory_mb <= high:
        raise InvocationRefused(f"memory of {call.memory_mb} MB is outside {low} to {high} MB", binding="memory")
    if (call.memory_mb - low) % step:
        raise InvocationRefused(
            f"memory of {call.memory_mb} MB is not on a step of {step} MB from {low} MB", binding="memory"
        )
    if not 0 < call.lifetime_s <= limits.lifetime_s:
        raise InvocationRefused(
            f"lifetime of {call.lifetime_s:g} s is not above 0 and up to {limits.lifetime_s:g} s", binding="lifetime"
        )
    size = len(json.dumps(call.to_payload()).encode())
    if size > limits.payload_bytes:
        raise InvocationRefused(f"payload of {size} bytes exceeds {limits.payload_bytes} bytes", binding="payload")
