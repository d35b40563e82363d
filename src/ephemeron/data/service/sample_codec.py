"""Samples as pickles with their memory beside them; and a batch of them in one frame.

Arrays and tensors are out of band, so that their bytes are sent from where they are and received to where they stay. In a frame the
first buffers of all samples are adjacent, then the second ones, and so on: a batch of them is already stacked.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from ephemeron.communication.rpc import BufferPool
from ephemeron.data.flow.pickle_socket import TensorPickler
from ephemeron.data.service.shard_state import SerializedSample

LEAST_BYTES = 512
"""Size below which arrays are inside the pickle."""


def pack(sample: Any, *, cost_s: float = 0.0, failed: bool = False) -> SerializedSample:
    """Serializes a sample. Its arrays are not copied: do not change them before it was sent.

    Raises:
        PicklingError, TypeError, AttributeError: it cannot be pickled.
    """
    buffers: list[Any] = []

    def outside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < LEAST_BYTES:
            return True
        buffers.append(raw)
        return False

    head = io.BytesIO()
    TensorPickler(head, protocol=5, buffer_callback=outside).dump(sample)
    buffers.insert(0, head.getbuffer())
    return SerializedSample(buffers=tuple(buffers), nbytes=sum(memoryview(b).nbytes for b in buffers), cost_s=cost_s, failed=failed)


def unpack(buffers: Sequence[Any]) -> Any:
    """Deserializes a sample; its arrays are views of the received memory."""
    return pickle.loads(buffers[0], buffers=buffers[1:])


def owned(packed: SerializedSample, pool: BufferPool) -> SerializedSample:
    """A copy in memory of its own, so that it does not keep the frame that it arrived in."""
    copies: list[Any] = []
    for buffer in packed.buffers:
        view = memoryview(buffer).cast("B")
        if view.nbytes < 1 << 16:
            copies.append(bytes(view))
        else:
            lent = pool.lend(view.nbytes)
            np.copyto(np.frombuffer(lent, np.uint8), np.frombuffer(view, np.uint8))  # does not hold the interpreter
            copies.append(lent)
    return SerializedSample(buffers=tuple(copies), nbytes=packed.nbytes, cost_s=packed.cost_s, failed=packed.failed)


def layout(samples: Sequence[SerializedSample]) -> tuple[list[int], list[Any]]:
    """A frame of samples: the number of buffers of each, and all buffers, the first ones of all samples first."""
    counts = [len(sample.buffers) for sample in samples]
    most = max(counts, default=0)
    return counts, [s.buffers[level] for level in range(most) for s in samples if level < len(s.buffers)]


def samples_in(counts: Sequence[int], buffers: Sequence[Any]) -> list[list[Any]]:
    """The inverse of `layout`: the buffers of each sample."""
    out: list[list[Any]] = [[] for _ in counts]
    at = 0
    for level in range(max(counts, default=0)):
        for place, count in enumerate(counts):
            if level < count:
                out[place].append(buffers[at])
                at += 1
    return out
