"""Parameters as one flat vector, shards of it, and bytes on the wire."""

from ephemeron.tensors.compression import Codec, Compressor, codec_by_name
from ephemeron.tensors.shards import bounds, chunk_bounds
from ephemeron.tensors.state import Arrays, decode_state, digest, encode_state
from ephemeron.tensors.wire import HEADER_BYTES, RELAY, STOP, Envelope, pack, run_hash, unpack

__all__ = [
    "HEADER_BYTES",
    "RELAY",
    "STOP",
    "Arrays",
    "Codec",
    "Compressor",
    "Envelope",
    "bounds",
    "chunk_bounds",
    "codec_by_name",
    "decode_state",
    "digest",
    "encode_state",
    "pack",
    "run_hash",
    "unpack",
]
