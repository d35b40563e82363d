"""One item of a durable map in a function: how it is called, and what is recorded of it.

The result is made JSON here, so that a result that cannot be stored costs one call, and not all the tries of its task.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ephemeron.config.own_processes import peak_mb


class ItemOutcome(NamedTuple):
    """What is known of a call that returned. It travels as a plain tuple."""

    text: str
    """The result as JSON; empty where it is bytes, or cannot be stored."""
    data: bytes | None
    """The result, if it is bytes; or bytes beside it, see `WithData`."""
    refused: str
    """Why the result cannot be stored; empty: it can."""
    replaced: int
    """NaN and infinite values that null stands for."""
    cpu_s: float
    memory_mb: float
    """Largest of its process so far, MiB."""


class WithData(NamedTuple):
    """What a function returns whose result is JSON and bytes beside it."""

    value: object
    data: bytes


_last_began: dict[float, float] = {}
"""By interval: when this process has begun its latest call."""


def call_item(
    function: Callable[..., object], name: str, arguments: Sequence[Any], named: Mapping[str, Any], *, seed: int | None, interval_s: float
) -> ItemOutcome:
    """Calls a function with one item. What it raises is raised.

    Args:
        function: the user's.
        name: of the item, 32 hexadecimal digits.
        arguments, named: of the function.
        seed: of its argument `rng`; None: it has none.
        interval_s: between the beginnings of two calls in this process, at least.
    """
    if interval_s:
        wait_s = _last_began.get(interval_s, -math.inf) + interval_s - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        _last_began[interval_s] = time.monotonic()
    if seed is not None:
        named = {**named, "rng": generator(seed, name)}
    began = time.process_time()
    value = function(*arguments, **named)
    cpu_s, memory_mb = time.process_time() - began, _memory_mb()
    if isinstance(value, bytes):
        return ItemOutcome("", value, "", 0, cpu_s, memory_mb)
    data = None
    if isinstance(value, WithData):
        value, data = value
    try:
        text, replaced = as_json(value)
    except (TypeError, ValueError, RecursionError) as e:
        return ItemOutcome("", None, f"the result is no JSON: {e}", 0, cpu_s, memory_mb)
    return ItemOutcome(text, data, "", replaced, cpu_s, memory_mb)


_LOOK_S = 0.05
_looked: list[float] = [-math.inf, 0.0]
"""When the memory of this process was looked at, and what it was: a look takes as long as a small item."""


def _memory_mb() -> float:
    now = time.monotonic()
    if now - _looked[0] > _LOOK_S:
        _looked[:] = [now, peak_mb()]
    return _looked[1]


def generator(seed: int, name: str) -> Any:
    """The `numpy.random.Generator` of an item: of the seed and the item alone.

    Args:
        seed: of the map.
        name: of the item, hexadecimal.
    """
    import numpy as np

    return np.random.default_rng(np.random.SeedSequence([seed, *(int(name[at : at + 8], 16) for at in range(0, len(name), 8))]))


def as_json(value: object) -> tuple[str, int]:
    """A value as JSON, and how many numbers in it are NaN or infinite, for which null stands.

    Raises:
        TypeError: JSON has no such value.
        ValueError: it contains itself.
    """
    try:
        return json.dumps(value, allow_nan=False, default=_plain), 0
    except ValueError as e:
        if "Circular" in str(e):
            raise
    replaced = [0]
    return json.dumps(_finite(value, replaced), allow_nan=False, default=lambda v: _finite(_plain(v), replaced)), replaced[0]


def _plain(value: object) -> object:
    """NumPy's numbers and arrays as those of Python."""
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _finite(value: object, replaced: list[int]) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        replaced[0] += 1
        return None
    if isinstance(value, Mapping):
        return {key: _finite(each, replaced) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_finite(each, replaced) for each in value]
    return value
