"""Named arrays as safetensors, for checkpoints, initial weights and results. No pickle anywhere.

A checkpoint is arrays, and a small JSON of plain values (iteration, optimiser hyper-parameters, …) in the file's metadata.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import numpy as np
import xxhash
from safetensors import SafetensorError
from safetensors.numpy import save

from ephemeron.errors import CorruptMessage

Arrays = dict[str, np.ndarray]


def encode_state(arrays: Mapping[str, np.ndarray], meta: Mapping[str, object]) -> bytes:
    """Bytes of a safetensors file. Arrays keep their dtype and shape; 0-d arrays too."""
    ready = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()}
    notes = {"meta": dict(meta), "checksum": _checksum(ready)}
    return save(ready, metadata={"ephemeron": json.dumps(notes, separators=(",", ":"))})


def decode_state(data: memoryview | bytes, *, key: str = "") -> tuple[Arrays, dict[str, object]]:
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
        notes = json.loads(header["__metadata__"]["ephemeron"])
        meta, checksum = notes["meta"], notes["checksum"]
    except (SafetensorError, ValueError, KeyError, TypeError) as e:
        raise CorruptMessage(f"not a safetensors file of a run: {e}", key=key or None) from None
    if checksum != _checksum(arrays):
        raise CorruptMessage("checksum differs", key=key or None)
    return {name: np.array(array) for name, array in arrays.items()}, meta


def _checksum(arrays: Mapping[str, np.ndarray]) -> str:
    hashing = xxhash.xxh3_64()
    for name in sorted(arrays):
        hashing.update(name.encode())
        hashing.update(np.ascontiguousarray(arrays[name]).view(np.uint8).data if arrays[name].size else b"")
    return str(hashing.hexdigest())


def digest(arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes in name order: `weights_sha256`."""
    h = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        h.update(f"{name}|{array.dtype.str}|{list(arrays[name].shape)}|".encode())
        h.update(array.tobytes())
    return h.hexdigest()
