"""The manifest of a prepared dataset: `dataset.json`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import xxhash

from ephemeron.config.typed import AtLeast, Count, build, plain
from ephemeron.errors import DatasetDamaged, JobError

FORMAT = 1
MANIFEST, PIPELINE = "dataset.json", "pipeline.json"

Kind = Literal["numeric", "categorical", "ordinal", "vector", "sparse", "label"]
Dtype = Literal["float64", "float32", "int64", "int32", "string"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table."""

    name: str
    kind: Kind
    dtype: Dtype
    """Of its values: `string` for categories, `int32` for ordinal codes, `float32` for the values of vectors and sparse features."""
    width: Count = 1
    """Sparse: the number of features; indices are below it. Ordinal: the number of codes; codes are below it. Vector: entries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """One object of rows."""

    file: str
    """Path relative to the dataset."""
    rows: Annotated[int, AtLeast(0)]
    nbytes: Annotated[int, AtLeast(0)]
    xxh3: str
    """Digest of the object, 16 hexadecimal digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file from which a dataset was loaded."""

    url: str
    nbytes: Annotated[int, AtLeast(0)]
    identity: str
    """ETag, or time of change of a local file (nanoseconds)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Description of a prepared dataset."""

    name: str
    schema: tuple[Column, ...]
    partitions: tuple[Partition, ...]
    rows: Annotated[int, AtLeast(0)]
    version: str
    """Digest of the schema, of all partitions in their order, and of the pipeline."""
    source: tuple[SourceFile, ...] = ()
    pipeline: str | None = None
    """File of the fitted pipeline; None: the rows are as they were loaded."""
    rejected: Annotated[int, AtLeast(0)] = 0
    """Rows of the source that were left out because they are invalid."""
    dropped: Annotated[int, AtLeast(0)] = 0
    """Rows that a step of the pipeline drops."""
    delimiter: str = ","
    """Of the CSV that was loaded."""
    missing: tuple[str, ...] | None = None
    """Texts of absent values in the CSV that was loaded; None: the usual ones."""
    format: int = FORMAT


def manifest_of(
    name: str,
    schema: Sequence[Column],
    partitions: Sequence[Partition],
    *,
    source: Sequence[SourceFile] = (),
    pipeline: bytes | None = None,
    rejected: int = 0,
    dropped: int = 0,
    delimiter: str = ",",
    missing: tuple[str, ...] | None = None,
) -> Manifest:
    """The manifest of partitions that are stored.

    Args:
        name: of the dataset, for people.
        schema: columns.
        partitions: in order.
        source: files that were loaded.
        pipeline: content of `pipeline.json`; None: there is none.
        rejected: rows that were left out.
        dropped: rows that a step drops.
        delimiter, missing: of the CSV that was loaded.
    """
    digest = xxhash.xxh3_128()
    digest.update(json.dumps(plain(tuple(schema)), sort_keys=True).encode())
    for partition in partitions:
        digest.update(f"{partition.rows} {partition.xxh3};".encode())
    digest.update(pipeline or b"")
    return Manifest(
        name=name,
        schema=tuple(schema),
        partitions=tuple(partitions),
        rows=sum(p.rows for p in partitions),
        version=digest.hexdigest(),
        source=tuple(source),
        pipeline=None if pipeline is None else PIPELINE,
        rejected=rejected,
        dropped=dropped,
        delimiter=delimiter,
        missing=missing,
    )


def encode(manifest: Manifest) -> bytes:
    """The manifest as a file."""
    return json.dumps(plain(manifest), indent=1).encode() + b"\n"


def decode(data: bytes, *, where: str) -> Manifest:
    """The manifest in a file.

    Args:
        data: its content.
        where: URL of the file, for errors.

    Raises:
        DatasetDamaged: it is no manifest of this format.
    """
    try:
        manifest = build(Manifest, json.loads(data), where="dataset.json")
    except (ValueError, JobError) as e:
        raise DatasetDamaged(f"it is no manifest: {e}", file=where) from None
    if manifest.format != FORMAT:
        raise DatasetDamaged(f"its format is {manifest.format}, and this version reads format {FORMAT}; update ephemeron", file=where)
    return manifest
