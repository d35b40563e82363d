"""Checks of a single call against the limits, the same for sender and receiver."""

from __future__ import annotations

import json

from ephemeron.errors import InvocationRefused
from ephemeron.functions.async_invoke.sizes import not_deployed, sizes_text
from ephemeron.functions.base import Call, Limits


def check_call(call: Call, limits: Limits) -> None:
    """Checks memory, time limit and size. Concurrency is counted by the platform.

    Raises:
        InvocationRefused: names the value and the limit.
    """
    low, high, step = limits.memory_min_mb, limits.memory_max_mb, limits.memory_step_mb
    if not limits.sizes_mb and not low <= call.memory_mb <= high:
        raise InvocationRefused(f"memory of {call.memory_mb} MB is outside {low} to {high} MB", binding="memory")
    if limits.sizes_mb and call.memory_mb not in limits.sizes_mb:
        raise InvocationRefused(
            f"no function of {call.memory_mb} MB is deployed, only of {sizes_text(limits.sizes_mb)}; "
            f"{not_deployed(limits.sizes_mb, call.memory_mb, limits.deploy)}",
            binding="memory",
        )
    if not limits.sizes_mb and (call.memory_mb - low) % step:
        raise InvocationRefused(f"memory of {call.memory_mb} MB is not on a step of {step} MB from {low} MB", binding="memory")
    if not 0 < call.lifetime_s <= limits.lifetime_s:
        raise InvocationRefused(f"lifetime of {call.lifetime_s:g} s is not above 0 and up to {limits.lifetime_s:g} s", binding="lifetime")
    size = len(json.dumps(call.to_payload()).encode())
    if size > limits.payload_bytes:
        raise InvocationRefused(f"payload of {size} bytes exceeds {limits.payload_bytes} bytes", binding="payload")
