"""Parameters as one flat vector, its shards, and their messages."""

from ephemeron.training.tensors.compression import ABSENT, Compressor, GradientCodec, absent_parts, codec_by_name
from ephemeron.training.tensors.message import (
    HAND_OFF,
    HEADER_BYTES,
    RESIZE,
    STOP,
    SUCCESSOR,
    Kind,
    MessageHeader,
    bounds,
    chunk_bounds,
    pack,
    unpack,
)
from ephemeron.training.tensors.state import Arrays, decode_state, digest, encode_state

__all__ = [
    "ABSENT",
    "HAND_OFF",
    "HEADER_BYTES",
    "RESIZE",
    "STOP",
    "SUCCESSOR",
    "Arrays",
    "Compressor",
    "GradientCodec",
    "Kind",
    "MessageHeader",
    "absent_parts",
    "bounds",
    "chunk_bounds",
    "codec_by_name",
    "decode_state",
    "digest",
    "encode_state",
    "pack",
    "unpack",
]
