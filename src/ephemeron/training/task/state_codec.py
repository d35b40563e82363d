"""States of any object with `state_dict()` as named arrays and plain JSON values, without pickle.

Tensors and arrays become arrays whose names are their paths; everything else keeps its type: keys of mappings that are no
strings, tuples, sets, counters and deques are marked. What cannot be written, such as a function, is refused by its path.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ephemeron.errors import CorruptMessage, JobError
from ephemeron.training.task.tensors import to_array, to_tensor

_MARK = "$"
"""Key of a marked value; its value is a pair of kind and content."""
_SEQUENCES = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}


def pack(value: object, path: str, arrays: dict[str, np.ndarray]) -> object:
    """A value as plain JSON; its tensors and arrays are added to `arrays`.

    Args:
        path: prefix of the names of its arrays.

    Raises:
        JobError: it holds something that is no plain value; names its path.
    """
    if isinstance(value, torch.Tensor):
        arrays[path] = to_array(value)
        return {_MARK: ["bf16" if value.dtype == torch.bfloat16 else "tensor", path]}
    if isinstance(value, np.ndarray) and value.dtype != object:
        arrays[path] = value.copy()
        return {_MARK: ["array", path]}
    if isinstance(value, np.generic):
        arrays[path] = np.asarray(value)
        return {_MARK: ["scalar", path]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, complex):
        return {_MARK: ["complex", [value.real, value.imag]]}
    if isinstance(value, list):
        return [pack(v, f"{path}/{i}", arrays) for i, v in enumerate(value)]
    name = next((name for name, cls in _SEQUENCES.items() if type(value) is cls), None)
    if name is not None:
        items: list[object] = list(value)  # type: ignore[call-overload]
        items = sorted(items, key=repr) if name.endswith("set") else items
        return {_MARK: [name, [pack(v, f"{path}/{i}", arrays) for i, v in enumerate(items)]]}
    if isinstance(value, Mapping) and type(value) in (dict, OrderedDict, Counter, defaultdict):
        if type(value) is not Counter and all(isinstance(key, str) for key in value) and _MARK not in value:
            return {key: pack(v, f"{path}/{key}", arrays) for key, v in value.items()}
        kind = "counter" if type(value) is Counter else "mapping"
        return {
            _MARK: [kind, [[pack(k, f"{path}/key{i}", arrays), pack(v, f"{path}/{k}", arrays)] for i, (k, v) in enumerate(value.items())]]
        }
    raise JobError(
        f"the state {path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved",
        remedy="leave it out of state_dict(), or save numbers, strings, tensors, lists and mappings of them",
    )


def unpack(value: object, arrays: Mapping[str, np.ndarray]) -> Any:
    """The inverse of `pack`. Tensors are copies.

    Raises:
        CorruptMessage: an array is missing, or a mark is unknown.
    """
    if isinstance(value, list):
        return [unpack(v, arrays) for v in value]
    if not isinstance(value, Mapping):
        return value
    if _MARK not in value:
        return {key: unpack(v, arrays) for key, v in value.items()}
    kind, content = value[_MARK]
    if kind in ("tensor", "bf16", "array", "scalar"):
        if content not in arrays:
            raise CorruptMessage(f"state without its array {content!r}")
        if kind in ("tensor", "bf16"):
            return to_tensor(arrays[content], kind == "bf16")
        return arrays[content].copy() if kind == "array" else arrays[content][()]
    if kind == "complex":
        return complex(*content)
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](unpack(v, arrays) for v in content)
    if kind in ("mapping", "counter"):
        pairs = {unpack(k, arrays): unpack(v, arrays) for k, v in content}
        return Counter(pairs) if kind == "counter" else pairs
    raise CorruptMessage(f"state of an unknown kind {kind!r}")
