"""Parameters as one flat vector, shards of it, and bytes on the wire."""

from ephemeron.training.tensors.absence import ABSENT, absent_parts
from ephemeron.training.tensors.compression import Compressor, GradientCodec, codec_by_name
from ephemeron.training.tensors.message import HEADER_BYTES, RELAY, STOP, Kind, MessageHeader, pack, unpack
from ephemeron.training.tensors.shards import bounds, chunk_bounds
from ephemeron.training.tensors.state import Arrays, decode_state, digest, encode_state

__all__ = [
    "ABSENT",
    "HEADER_BYTES",
    "RELAY",
    "STOP",
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
