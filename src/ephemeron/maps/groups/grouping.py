"""The groups of a table, beside the results: divided once, and found again while the table's content is the same.

    groups/DIGEST.json                  by-columns, columns, what it was made of; whole when all is there
    groups/DIGEST.index.parquet         a row per group: key, file, rows, digest of the rows
    groups/DIGEST.00003.parquet         rows, those of a group next to each other

DIGEST is that of the table's content and of the by-columns.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ephemeron.config.typed import build, plain
from ephemeron.data.tables.arrow import pyarrow
from ephemeron.errors import ChannelEmptied, DamagedObject, JobError
from ephemeron.maps.groups.division import POSITION, SORTED_BYTES, Division
from ephemeron.maps.groups.keys import check_by, kind_of_key
from ephemeron.maps.groups.table_data import TableData, is_kept
from ephemeron.maps.objects import Objects
from ephemeron.units import human_count, human_seconds

FOLDER = "groups"
_FORMAT = 1
_TOLD_BYTES = 256 << 20
"""Size of a table from which on a note says that it is about to be divided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptColumn:
    """A column of the groups."""

    name: str
    type: str
    """As Arrow writes it."""
    has_nulls: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a grouping is."""

    format: int = _FORMAT
    name: str
    """DIGEST."""
    data: str
    """Digest of the table's content."""
    by: tuple[str, ...]
    kinds: tuple[str, ...]
    """What the values of each by-column are."""
    columns: tuple[KeptColumn, ...]
    """Beside the by-columns."""
    rows: int
    groups: int
    files: tuple[int, ...]
    """Bytes of each."""
    index: str
    """Digest of the index."""
    used_at: float = 0.0
    """Unix time."""

    def file(self, number: int) -> str:
        """Name of a file of rows."""
        return f"{FOLDER}/{self.name}.{number:05d}.parquet"

    @property
    def index_file(self) -> str:
        """Name of the index."""
        return f"{FOLDER}/{self.name}.index.parquet"


@dataclass(frozen=True, slots=True)
class Grouping:
    """Groups of a table.

    Args:
        manifest: of them.
        index: `pyarrow.Table` with the columns of `division.group_schema`, in the order of files and rows.
        objects: where they are.
    """

    manifest: Manifest
    index: Any
    objects: Objects


def group_table(
    data: TableData,
    by: Sequence[str],
    objects: Objects,
    *,
    positions: bool = False,
    wanted: Mapping[str, str] | None = None,
    on_note: Callable[[str], None] = lambda text: None,
    sorted_bytes: int = SORTED_BYTES,
) -> Grouping:
    """Groups of a table, from an earlier call or divided now.

    Args:
        data: the table.
        by: by-columns.
        objects: where the groups are, or will be.
        positions: whether rows keep their number in the table.
        wanted: types of columns of CSV that were read before, see `TextKinds`.
        on_note: called with lines for the user.
        sorted_bytes: see `Division`.

    Raises:
        JobError: a by-column, its values or the table are refused.
        ChannelError: the store does not answer.
    """
    check_by(by, data.schema, data.name)
    kept = [name for name in data.schema.names if is_kept(name) and name not in by]
    if not kept:
        raise JobError(f"{data.name} has no column beside {', '.join(by)}", remedy="a model is fitted to what the other columns hold")
    if POSITION in data.schema.names:
        raise JobError(f"{data.name} has a column {POSITION!r}, which is the name of row numbers here", remedy="rename it")
    content = data.digest()
    wanted = dict(wanted or {}) if data.is_text else {}
    name = hashlib.blake2b(json.dumps([_FORMAT, content, list(by), positions, wanted]).encode(), digest_size=10).hexdigest()
    if (known := find_grouping(objects, name)) is not None:
        used = replace(known.manifest, used_at=time.time())
        _put_manifest(objects, used)
        return Grouping(used, known.index, objects)
    if data.nbytes > _TOLD_BYTES:
        on_note(f"{data.name} is divided into groups, which is done once")
    division = Division(by, kept, name=data.name, is_text=data.is_text, wanted=wanted, sorted_bytes=sorted_bytes)
    return _divided(data, division, objects, name=name, content=content, positions=positions, on_note=on_note)


def _divided(
    data: TableData, division: Division, objects: Objects, *, name: str, content: str, positions: bool, on_note: Callable[[str], None]
) -> Grouping:
    pa = pyarrow()
    from pyarrow import parquet

    began = time.monotonic()
    sizes: list[int] = []
    indices: list[Any] = []
    objects.put(_manifest_file(name), json.dumps({"used_at": time.time()}).encode())  # it is being made
    for file in division.files(_wanted(data.parts(), [*division.by, *division.kept], positions=positions), nbytes=data.nbytes):
        number = pa.array([len(sizes)] * file.groups.num_rows, pa.int32())
        indices.append(file.groups.set_column(file.groups.column_names.index("file"), "file", number))
        objects.put(f"{FOLDER}/{name}.{len(sizes):05d}.parquet", file.path)
        sizes.append(file.path.stat().st_size)
    if not indices:
        raise JobError(f"{data.name} has no rows")
    index = pa.concat_tables(indices).combine_chunks()
    stored = io.BytesIO()
    parquet.write_table(index, stored, compression="zstd")
    manifest = Manifest(
        name=name,
        data=content,
        by=division.by,
        kinds=tuple(kind_of_key(data.schema.field(column).type) for column in division.by),
        columns=tuple(KeptColumn(name=f.name, type=str(f.type), has_nulls=f.name in division.nulls) for f in division.schema),
        rows=division.rows,
        groups=index.num_rows,
        files=tuple(sizes),
        index=_digest(stored.getvalue()),
        used_at=time.time(),
    )
    objects.put(manifest.index_file, stored.getvalue())
    _put_manifest(objects, manifest)
    on_note(
        f"{human_count(manifest.rows, 'row', grouped=True)} of {data.name} in {human_count(manifest.groups, 'group', grouped=True)}, "
        f"divided in {human_seconds(time.monotonic() - began)}"
    )
    return Grouping(manifest, index, objects)


def _wanted(parts: Iterator[Any], columns: Sequence[str], *, positions: bool) -> Iterator[Any]:
    pa = pyarrow()
    first = 0
    for part in parts:
        wanted = part.select(columns)
        if positions:
            wanted = wanted.append_column(POSITION, pa.array(np.arange(first, first + part.num_rows)))
        first += part.num_rows
        yield wanted


def find_grouping(objects: Objects, name: str) -> Grouping | None:
    """A grouping by its name; None: there is none, or one of its files is not whole."""
    data = objects.fetch(_manifest_file(name))
    if data is None:
        return None
    try:
        manifest = build(Manifest, json.loads(data), where=_manifest_file(name))
    except (ValueError, JobError):
        return None
    there = objects.sizes(f"{FOLDER}/{name}.")
    if manifest.format != _FORMAT or any(there.get(manifest.file(n)) != nbytes for n, nbytes in enumerate(manifest.files)):
        return None
    index = objects.fetch(manifest.index_file)
    if index is None or _digest(index) != manifest.index:
        return None
    from pyarrow import parquet

    return Grouping(manifest, parquet.read_table(io.BytesIO(index)), objects)


def read_keys(objects: Objects, name: str) -> tuple[Manifest, Any]:
    """Manifest and index of a grouping whose rows may be gone.

    Raises:
        ChannelEmptied, DamagedObject: it cannot be read; names the object.
    """
    from pyarrow import parquet

    place = _manifest_file(name)
    data = objects.fetch(place)
    if data is None:
        raise ChannelEmptied(f"{objects.place(place)} is gone: fit the groups again", key=place)
    try:
        manifest = build(Manifest, json.loads(data), where=place)
        index = objects.fetch(manifest.index_file)
        if index is None:
            raise ChannelEmptied(f"{objects.place(manifest.index_file)} is gone: fit the groups again", key=manifest.index_file)
        if _digest(index) != manifest.index:
            raise DamagedObject(f"{objects.place(manifest.index_file)} is damaged: fit the groups again", key=manifest.index_file)
    except (ValueError, JobError):
        raise DamagedObject(f"{objects.place(place)} is damaged: fit the groups again", key=place) from None
    return manifest, parquet.read_table(io.BytesIO(index))


def remove_others(objects: Objects, kept: Manifest) -> None:
    """Deletes groupings that were used before one was, and are needed no more."""
    every = objects.sizes(f"{FOLDER}/")
    for name in {place.partition("/")[2].partition(".")[0] for place in every} - {kept.name}:
        data = objects.fetch(_manifest_file(name))
        used_at = 0.0
        with contextlib.suppress(ValueError, KeyError, TypeError):
            used_at = 0.0 if data is None else float(json.loads(data)["used_at"])
        if used_at < kept.used_at:
            objects.delete([place for place in every if place.startswith(f"{FOLDER}/{name}.")])


def _manifest_file(name: str) -> str:
    return f"{FOLDER}/{name}.json"


def _put_manifest(objects: Objects, manifest: Manifest) -> None:
    objects.put(_manifest_file(manifest.name), json.dumps(plain(manifest)).encode())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
