"""A published dataset: one JSON document per version, never changed.

DPFlow, section 3.3.1, Dataset: version, list of variants, number of samples, shard size. A version names its metadata
shards by digest, so it is small (ImageNet: 1,281 shards, 45 kB) and may share them with the previous version.

Metadata in shards, so that reading one sample does not take the index of the whole dataset.

A shard is a JSON file with one sample per line (DPFlow, section 3.3.1, DatasetShardMeta; file names
`ms-{shard_no}` as there). It is kept as those bytes, and a line is parsed when its sample is requested: an epoch
of Python objects would take about eight times the memory, and an access to one sample would parse a thousand.

Names contain a digest of the content. So versions share the files of equal shards, a new
version of a dataset costs the shards that changed, and damage is detected before a shard is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from ephemeron.config.typed import build, plain
from ephemeron.data.catalog.meta import SampleMeta, typed
from ephemeron.errors import DatasetNotFound, JobError

FORMAT = 1
LATEST = "latest"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DefectList:
    """The list of samples that an import left out."""

    count: int
    file: str
    """Path of the list in the metadata folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DefectEntry:
    """A sample that an import left out, as it is listed."""

    file: str
    """Its file, as the source names it."""
    at: str
    """Line, row or annotation; empty: the whole file."""
    reason: str
    kept: str | None = None
    """Path of a copy in the store, in quarantine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A split or another selection of a dataset: train, val, test, small, …"""

    samples: int
    """Number of samples."""
    shard_size: int
    """Samples per metadata shard; the last may have fewer."""
    shards: tuple[str, ...]
    """Digests of the shards, in order."""
    decoders: Mapping[str, Mapping[str, Any]]
    """Part -> `{"decoder": name, …options}`."""
    root: str | None = None
    """URL that data paths are relative to; None: the dataset's own `data` folder."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Metadata of all samples: names of classes, columns, …"""
    source: Mapping[str, Any] = field(default_factory=dict)
    """Source and options of the import."""
    defects: DefectList | None = None
    """Samples that were left out of it; None: none were."""

    def to_json(self) -> dict[str, object]:
        """Part of the document of its version."""
        out: dict[str, object] = {"samples": self.samples, "shard_size": self.shard_size, "root": self.root}
        decoders = {name: dict(options) for name, options in self.decoders.items()}
        out |= {"decoders": decoders, "info": self.info, "source": self.source}
        return out | ({"defects": plain(self.defects)} if self.defects else {}) | {"shards": list(self.shards)}

    @classmethod
    def from_json(cls, value: Any) -> Variant:
        """The inverse of `to_json`. Raises ValueError for other documents."""
        samples, size, shards = (typed(value, n, k) for n, k in (("samples", int), ("shard_size", int), ("shards", list)))
        if samples < 1 or size < 1 or len(shards) != -(-samples // size):
            raise ValueError(f"{samples} samples do not fit into {len(shards)} shards of {size}")
        if not all(isinstance(d, str) and len(d) == DIGEST_CHARACTERS and d.isalnum() for d in shards):
            raise ValueError("shards are not a list of digests")
        decoders = typed(value, "decoders", dict)
        for options in decoders.values():
            typed(options, "decoder", str)
        root = value.get("root")
        if root is not None and not isinstance(root, str):
            raise ValueError(f"root = {root!r} is not a URL")
        info, source = typed(value, "info", dict, {}), typed(value, "source", dict, {})
        raw = typed(value, "defects", dict, {})
        try:
            defects = build(DefectList, raw, where="defects") if raw else None
        except JobError as e:
            raise ValueError(str(e)) from None
        return cls(
            samples=samples, shard_size=size, shards=tuple(shards), decoders=decoders, root=root, info=info, source=source, defects=defects
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """One version of a dataset."""

    name: str
    """`namespace/name`."""
    version: str
    number: int
    """1 for the first version that was published, 2 for the second, …"""
    variants: Mapping[str, Variant]
    history: Mapping[str, int]
    """Version -> number, of this version and all earlier ones."""

    def __str__(self) -> str:
        return f"{self.name} version {self.version}"

    def variant(self, name: str) -> Variant:
        """The variant of this name.

        Raises:
            DatasetNotFound: the dataset has no such variant.
        """
        if name not in self.variants:
            raise DatasetNotFound(f"{self} has no variant {name!r}, only {', '.join(self.variants)}")
        return self.variants[name]

    def shard_path(self, variant: str, shard: int) -> str:
        """Path of a metadata shard in the store (DPFlow: `meta/ms-{shard_no}.json`)."""
        return f"{meta_folder(self.name)}/{shard_file(variant, shard, self.variants[variant].shards[shard])}"

    def to_json(self) -> dict[str, object]:
        """The document."""
        head: dict[str, object] = {"format": FORMAT, "dataset": self.name, "version": self.version, "number": self.number}
        variants = {name: variant.to_json() for name, variant in self.variants.items()}
        return head | {"history": dict(self.history), "variants": variants}

    @classmethod
    def from_json(cls, value: Any) -> Dataset:
        """The inverse of `to_json`. Raises ValueError for other documents."""
        if (version := typed(value, "format", int)) > FORMAT:
            raise ValueError(f"document of format {version}; this version of ephemeron reads {FORMAT}")
        variants = {name: Variant.from_json(v) for name, v in typed(value, "variants", dict).items()}
        history = typed(value, "history", dict)
        name, version, number = (typed(value, n, k) for n, k in (("dataset", str), ("version", str), ("number", int)))
        if not all(type(n) is int for n in history.values()) or history.get(version) != number or not variants:
            raise ValueError("history and variants do not fit the version")
        return cls(name=name, version=version, number=number, variants=variants, history=history)


def check_id(name: str) -> str:
    """Checks a name of the form `namespace/name`, with characters that every store and file system keeps.

    Raises:
        JobError: the name has another form.
    """
    parts = name.split("/")
    if len(parts) != 2 or not all(_NAME.fullmatch(part) for part in parts):
        raise JobError(f"dataset {name!r} is not of the form namespace/name", remedy="write e.g. core/mscoco")
    return name


def check_name(what: str, name: str) -> str:
    """Checks the name of a version or variant.

    Raises:
        JobError: it has characters other than letters, digits, `.`, `_` and `-`, or is reserved.
    """
    if not _NAME.fullmatch(name) or name == LATEST:
        raise JobError(f"{what} {name!r} is not a valid name", remedy="use letters, digits, '.', '_' and '-', and not 'latest'")
    return name


def dataset_folder(name: str) -> str:
    """`datasets/NAMESPACE/NAME`."""
    return f"datasets/{name}"


def data_folder(name: str) -> str:
    """Folder of originals that are stored with the dataset."""
    return f"{dataset_folder(name)}/data"


def meta_folder(name: str) -> str:
    """Folder of its metadata."""
    return f"{dataset_folder(name)}/meta"


def version_path(name: str, number: int) -> str:
    """The document of a version."""
    return f"{meta_folder(name)}/versions/{number:06d}.json"


def shard_file(variant: str, shard: int, digest: str) -> str:
    """A shard's name within the metadata folder."""
    return f"{variant}/ms-{shard}.{digest}.json"


# -- metadata in shards -------------------------------------------------------------------------------------------


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
