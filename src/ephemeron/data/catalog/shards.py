"""Metadata in shards, so that access to one sample does not read the index of the whole dataset.

A shard is a JSON file with one sample per line (DPFlow, section 3.3.1, DatasetShardMeta; file names
`ms-{shard_no}` as there). It is kept as those bytes, and a line is parsed when its sample is requested: an epoch
of Python objects would take about eight times the memory, and an access to one sample would parse a thousand.

Names contain a digest of the content. So versions share the files of equal shards, a new
version of a dataset costs the shards that changed, and damage is detected before a shard is used.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import xxhash

from ephemeron.data.catalog.meta import SampleMeta

SHARD_FORMAT = 1
DIGEST_CHARACTERS = 32
_END = b"]}\n"


class DatasetShardMeta:
    """Metadata of consecutive samples of a variant.

    Args:
        data: the file's bytes, a result of `encode_shard`.

    Raises:
        ValueError: the bytes are malformed.
    """

    __slots__ = ("_data", "_ends", "_pins", "count", "first", "header", "nbytes")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._ends = np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == ord("\n"))
        if len(self._ends) < 2 or not data.endswith(b"\n" + _END):
            raise ValueError("no metadata shard, or cut short")
        self.header: dict[str, Any] = json.loads(data[: int(self._ends[0])] + _END)
        if self.header.get("format") != SHARD_FORMAT:
            raise ValueError(f"shard of format {self.header.get('format')!r}; this version reads {SHARD_FORMAT}")
        pins = self.header.get("pins", {})
        if not isinstance(pins, dict):
            raise ValueError("pins are no table")
        self._pins: dict[str, str] = pins
        self.first = int(self.header["first"])
        """Number of its first sample within the variant."""
        self.count = len(self._ends) - 2
        """Number of samples in it."""
        self.nbytes = len(data) + self._ends.nbytes
        """Memory in bytes."""

    def __len__(self) -> int:
        return self.count

    def sample(self, position: int) -> SampleMeta:
        """The sample at this position of the shard.

        Raises:
            IndexError: the position is out of range.
            ValueError: its line is malformed.
        """
        if not 0 <= position < self.count:
            raise IndexError(f"position {position} in a shard of {self.count} samples")
        line = self._data[int(self._ends[position]) + 1 : int(self._ends[position + 1])]
        return SampleMeta.from_json(json.loads(line.removesuffix(b",")), self._pins)


def encode_shard(samples: Iterable[SampleMeta], *, dataset: str, variant: str, shard: int, first: int) -> bytes:
    """The file of a shard. The same samples give the same bytes.

    Raises:
        ValueError: a value in a sample cannot be written as JSON, or is not finite.
    """
    header: dict[str, Any] = {
        "format": SHARD_FORMAT,
        "dataset": dataset,
        "variant": variant,
        "shard": shard,
        "first": first,
    }
    rows = [sample.to_json() for sample in samples]
    if pins := _hoisted(rows):
        header["pins"] = pins
    lines = [_compact(row) for row in rows]
    return (_compact(header)[:-1] + ',"samples":[\n' + ",\n".join(lines) + "\n").encode() + _END


def _hoisted(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Moves pins shared by several references to one file out of them, so that each is stored once."""
    refs = [ref for row in rows for ref in (*row["data"].values(), row.get("target_at")) if ref is not None]
    by_path: dict[str, list[dict[str, Any]]] = {}
    for ref in refs:
        by_path.setdefault(ref["path"], []).append(ref)
    out = {}
    for path, its in by_path.items():
        pins = {ref.get("pin") for ref in its}
        if len(its) > 1 and len(pins) == 1 and None not in pins:
            out[path] = its[0]["pin"]
            for ref in its:
                del ref["pin"]
    return out


def digest(data: bytes) -> str:
    """Hex xxh3-128 of a shard's bytes: detects damage and equality, not deliberate manipulation."""
    return str(xxhash.xxh3_128_hexdigest(data))


def cut(samples: Iterable[SampleMeta], size: int) -> Iterator[list[SampleMeta]]:
    """Lists of `size` consecutive samples; the last may be shorter."""
    chunk: list[SampleMeta] = []
    for sample in samples:
        chunk.append(sample)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
