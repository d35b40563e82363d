"""The metadata of one sample: where its data is stored, and its target.

DPFlow, section 3.3.1 keeps one `path` per sample (algorithm 3.1, line 11), which fits a folder of images. Here a sample
has one or more named data parts, each of which may be a whole file, a range of bytes (a record of CIFAR, a row of an
array, a line of a table, a member of a tar or zip archive), such a range inside a packed file
(gzip, deflate, CIFAR's pickles), or a row of a Parquet file. Originals stay unchanged.

A `SampleMeta` is one line of JSON in a metadata shard; empty fields are left out. Lines are read once per sample that is loaded,
so their reader is written by hand: `config.typed` takes several times as long.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

_NONE: Mapping[str, str] = {}
UNPACKERS = ("gzip", "deflate", "cifar-python", "parquet")
"""Values of `DataRef.unpack`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRef:
    """Reference to the bytes of a data part.

    Raises:
        ValueError: the fields contradict each other, or the path leaves its root.
    """

    path: str
    """Path of the file, relative to the root of the variant."""
    offset: int | None = None
    """First byte; None: the part is the whole file."""
    length: int | None = None
    """Bytes as stored. For a whole file the size at the time of import, which reveals truncation."""
    unpack: str | None = None
    """Format of the stored bytes, one of `UNPACKERS`; None: they are the part."""
    inner: tuple[int, int] | None = None
    """First byte and number of bytes of the part within the unpacked bytes; None: all of them."""
    row: tuple[int, int] | None = None
    """Parquet: row group, and row within it."""
    column: str | None = None
    """Parquet: the column that is the part, with dots for fields of structures; None: the whole row."""
    pin: str | None = None
    """Detects a change of the stored bytes (`pins`); None: only a change of their number is detected."""

    def __post_init__(self) -> None:
        parts = self.path.split("/")
        if not self.path or "\0" in self.path or any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"path {self.path!r} is not a plain relative path")
        if self.unpack is not None and self.unpack not in UNPACKERS:
            raise ValueError(f"unpack = {self.unpack!r} is not one of {', '.join(UNPACKERS)}")
        if (self.offset or 0) < 0 or (self.length or 0) < 0 or (self.offset is not None and self.length is None):
            raise ValueError(f"offset {self.offset} with length {self.length}")
        if (self.unpack == "parquet") != (self.row is not None) or (self.inner is not None and self.unpack is None):
            raise ValueError("`row` goes with parquet, `inner` with what is unpacked")
        if self.pin is not None and not self.pin.startswith(("etag:", "xxh3:")):
            raise ValueError(f"pin = {self.pin!r} is neither an etag nor an xxh3")
        for pair in (self.inner, self.row):
            if pair is not None and min(pair) < 0:
                raise ValueError(f"negative position {pair}")

    @property
    def nbytes(self) -> int:
        """Size of the part, if the metadata has it; else the size of the bytes read for it; else 0."""
        return self.inner[1] if self.inner is not None else self.length or 0

    def within(self, start: int, length: int) -> DataRef:
        """A range of bytes inside this part."""
        if self.unpack is not None:
            return replace(self, inner=((self.inner or (0, 0))[0] + start, length))
        return replace(self, offset=(self.offset or 0) + start, length=length)

    def to_json(self, shared_pins: Mapping[str, str] = _NONE) -> dict[str, object]:
        """The reference as in a shard.

        Args:
            shared_pins: pins by path that the shard's header has.
        """
        out: dict[str, object] = {"path": self.path}
        for name in ("offset", "length", "unpack", "column", "pin"):
            if (value := getattr(self, name)) is not None and not (name == "pin" and self.path in shared_pins):
                out[name] = value
        for name in ("inner", "row"):
            if (pair := getattr(self, name)) is not None:
                out[name] = list(pair)
        return out

    @classmethod
    def from_json(cls, value: Any) -> DataRef:
        """The inverse of `to_json`. Raises ValueError for other values."""
        fields = {name: typed(value, name, kind, None) for name, kind in _REF_FIELDS.items()}
        unknown = set(value) - set(fields)
        if unknown:
            raise ValueError(f"unknown field {sorted(unknown)[0]!r}")
        for name in ("inner", "row"):
            pair = fields[name]
            if pair is not None:
                if len(pair) != 2 or not all(type(n) is int for n in pair):
                    raise ValueError(f"{name} = {pair!r} is not a pair of whole numbers")
                fields[name] = tuple(pair)
        typed(value, "path", str)
        return cls(**fields)


_REF_FIELDS: dict[str, type] = {
    "path": str,
    "offset": int,
    "length": int,
    "unpack": str,
    "inner": list,
    "row": list,
    "column": str,
    "pin": str,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleMeta:
    """One sample, undecoded."""

    key: str
    """Readable name of the sample: a path, an archive's member, an utterance, a record's number."""
    data: Mapping[str, DataRef]
    """Its parts by name, at least one; `Variant.decoders` says how each is decoded."""
    target: Any = None
    """Small targets themselves, as JSON: a class number, boxes, a transcript."""
    target_at: DataRef | None = None
    """Reference to a target that is too large for that; decoded as the part `target`."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further metadata, as JSON."""

    def to_json(self, shared_pins: Mapping[str, str] = _NONE) -> dict[str, object]:
        """The sample as in a shard. See `DataRef.to_json`."""
        data = {name: ref.to_json(shared_pins) for name, ref in self.data.items()}
        out: dict[str, object] = {"key": self.key, "data": data}
        if self.target_at is not None:
            out["target_at"] = self.target_at.to_json(shared_pins)
        elif self.target is not None:
            out["target"] = self.target
        if self.extra:
            out["extra"] = dict(self.extra)
        return out

    @classmethod
    def from_json(cls, value: Any, pins: Mapping[str, str] = _NONE) -> SampleMeta:
        """The sample of a line.

        Args:
            value: JSON value of the line.
            pins: pins shared by several samples, by path.

        Raises:
            ValueError: the value is malformed.
        """
        if pins:
            value = _with_pins(value, pins)
        parts = typed(value, "data", dict)
        if not parts:
            raise ValueError("it has no data")
        at = value.get("target_at")
        return cls(
            key=typed(value, "key", str),
            data={name: DataRef.from_json(ref) for name, ref in parts.items()},
            target=value.get("target"),
            target_at=None if at is None else DataRef.from_json(at),
            extra=typed(value, "extra", dict, {}),
        )

    def refs(self) -> dict[str, DataRef]:
        """All references, by part; that of a stored target is the part `target`."""
        return dict(self.data) if self.target_at is None else {**self.data, "target": self.target_at}


def _with_pins(value: Any, pins: Mapping[str, str]) -> Any:
    def filled(ref: Any) -> Any:
        known = pins.get(str(ref.get("path"))) if isinstance(ref, dict) and "pin" not in ref else None
        return ref if known is None else {**ref, "pin": known}

    if not isinstance(value, dict) or not isinstance(value.get("data"), dict):
        return value
    out = {**value, "data": {name: filled(ref) for name, ref in value["data"].items()}}
    return out | {"target_at": filled(value["target_at"])} if value.get("target_at") is not None else out


_REQUIRED = object()


def typed(table: Any, name: str, kind: type, default: Any = _REQUIRED) -> Any:
    """`table[name]`, checked to be of this type (a bool is not an int).

    Raises:
        ValueError: `table` is not a table, or the value is absent without a default, or has another type.
    """
    if not isinstance(table, dict):
        raise ValueError(f"{type(table).__name__} instead of a table")
    value = table.get(name, default)
    if value is _REQUIRED:
        raise ValueError(f"{name!r} is missing")
    if name in table and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise ValueError(f"{name} = {value!r} is not of type {kind.__name__}")
    return value
