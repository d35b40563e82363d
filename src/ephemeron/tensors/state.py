"""Named arrays as safetensors, for checkpoints, initial weights and results. No pickle anywhere.

A checkpoint is arrays plus a small JSON of plain values (iteration, optimiser hyper-parameters, …) that
travels in the file's metadata.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save

from ephemeron.errors import CorruptMessage

Arrays = dict[str, np.ndarray]


def encode_state(arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> bytes:
    """Bytes of a safetensors file. Arrays keep their dtype and shape; 0-d arrays too."""
    ready = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()}
    return save(ready, metadata={"meta": json.dumps(dict(meta), separators=(",", ":"))})


def decode_state(data: memoryview | bytes, *, key: str = "") -> tuple[Arrays, dict[str, Any]]:
    """The inverse of `encode_state`. The arrays are copies and may be changed.

    Raises:
        CorruptMessage: not such a file, or cut short.
    """
    from safetensors.numpy import load

    raw = bytes(data)
    try:
        arrays = load(raw)
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + size])
        meta = json.loads(header.get("__metadata__", {}).get("meta", "{}"))
    except (SafetensorError, ValueError) as e:
        raise CorruptMessage(f"not a state of ours: {e}", key=key or None) from None
    return {name: np.array(array) for name, array in arrays.items()}, meta


def digest(arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes in name order: `weights_sha256`."""
    h = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        h.update(f"{name}|{array.dtype.str}|{list(arrays[name].shape)}|".encode())
        h.update(array.tobytes())
    return h.hexdigest()
