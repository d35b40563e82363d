"""Metadata in shards, so that reading one sample does not take the index of the whole dataset.

A shard is a JSON file with one sample per line (DPFlow, section 3.3.1, DatasetShardMeta; file names
`ms-{shard_no}` as there). It is kept as those bytes, and a line is parsed when its sample is requested: an epoch
of Python objects would take about eight times the memory, and an access to one sample would parse a thousand.

Names contain a digest of the content. So versions share the files of equal shards, a new
version of a dataset costs the shards that changed, and damage is detected before a shard is used.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import xxhash

from ephemeron.config.typed import build
from ephemeron.data.catalog.meta import SampleMeta
from ephemeron.errors import JobError

SHARD_FORMAT = 1
DIGEST_CHARACTERS = 32
_END = b"]}\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardHeader:
    """The first line of a shard."""

    format: int
    dataset: str
    variant: str
    shard: int
    first: int
    """Number of the first sample within the variant."""
    pins: dict[str, str] = field(default_factory=dict)
    """Pins of files by path that several references have in common."""
    samples: tuple[object, ...] = ()
    """Empty: samples are the lines that follow."""


class DatasetShardMeta:
    """Metadata of consecutive samples of a variant.

    Args:
        data: the file's bytes, a result of `encode_shard`.

    Raises:
        ValueError: the bytes are malformed.
    """

    __slots__ = ("_data", "_ends", "count", "first", "header", "nbytes")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._ends = np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == ord("\n"))
        if len(self._ends) < 2 or not data.endswith(b"\n" + _END):
            raise ValueError("not a metadata shard, or truncated")
        raw = json.loads(data[: int(self._ends[0])] + _END)
        if raw.get("format") != SHARD_FORMAT:
            raise ValueError(f"shard of format {raw.get('format')!r}; this version reads {SHARD_FORMAT}")
        try:
            self.header = build(ShardHeader, raw, where="header")
        except JobError as e:
            raise ValueError(str(e)) from None
        self.first = self.header.first
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
        return SampleMeta.from_json(json.loads(line.removesuffix(b",")), self.header.pins)


def encode_shard(samples: Iterable[SampleMeta], *, dataset: str, variant: str, shard: int, first: int) -> bytes:
    """The file of a shard. The same samples give the same bytes.

    Raises:
        ValueError: a value in a sample cannot be written as JSON, or is not finite.
    """
    kept = list(samples)
    pins = _shared_pins(kept)
    header: dict[str, object] = {"format": SHARD_FORMAT, "dataset": dataset, "variant": variant, "shard": shard, "first": first}
    if pins:
        header["pins"] = pins
    lines = [_compact(sample.to_json(pins)) for sample in kept]
    return (_compact(header)[:-1] + ',"samples":[\n' + ",\n".join(lines) + "\n").encode() + _END


def _shared_pins(samples: list[SampleMeta]) -> dict[str, str]:
    """Pins by path of files to which several references have the same pin."""
    by_path: dict[str, list[str | None]] = {}
    for sample in samples:
        for ref in (*sample.data.values(), *([] if sample.target_at is None else [sample.target_at])):
            by_path.setdefault(ref.path, []).append(ref.pin)
    return {path: pins[0] for path, pins in by_path.items() if pins[0] is not None and len(pins) > 1 and len(set(pins)) == 1}


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


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
