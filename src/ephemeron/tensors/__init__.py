"""Parameters as one flat vector, shards of it, and bytes on the wire."""

from ephemeron.tensors.absence import ABSENT, absent_parts
from ephemeron.tensors.compression import Codec, Compressor, codec_by_name
from ephemeron.tensors.shards import bounds, chunk_bounds
from ephemeron.tensors.state import Arrays, decode_state, digest, encode_state
from ephemeron.tensors.wire import HEADER_BYTES, RELAY, STOP, Envelope, pack, unpack

__all__ = [
    "ABSENT",
    "HEADER_BYTES",
    "RELAY",
    "STOP",
    "Arrays",
    "Codec",
    "Compressor",
    "Envelope",
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
