"""Partitions of Parquet files as items of a durable map. The key is the file and its rows, the value what is read: the bytes of the columns that are wanted, of
files of this machine; the ETag, of objects. Files are not put together, so a file that is new or changed changes no partition of another one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ephemeron.config.paths import located
from ephemeron.config.typed import near
from ephemeron.data.catalog.files import Files
from ephemeron.data.catalog.loop import run
from ephemeron.data.catalog.open_files import find_files
from ephemeron.data.formats.records import check_names
from ephemeron.data.tables.arrow import is_index, pyarrow
from ephemeron.errors import DatasetUnreachable, JobError
from ephemeron.maps.parquet_rows import ParquetRows
from ephemeron.maps.partitions.calls import PartitionCall, PartitionItem
from ephemeron.maps.partitions.ranges import RowRange, chunks_of, has_nulls, leaves_of, ranges_of
from ephemeron.maps.partitions.rows import stored_types
from ephemeron.maps.result_table import ID_BYTES, id_of
from ephemeron.maps.sources import BLOCK_ROWS, Block, ItemColumns, Source, common_folder

PARTITION_MB = 64
"""Size of a partition in memory, about, where none is given."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.[0-9]{12}\.[0-9a-f]{16}\.parquet")
"""Names of the files that are written: file, first row, digest of the item and the version of the function."""
_ENDING = ".parquet"
_STEM = 120
"""Characters of the name of a file that are kept."""
_AT_ONCE = 16
"""Files whose metadata is read."""


@dataclass(frozen=True, slots=True)
class _File:
    """What is known of a file without reading its rows."""

    path: str
    identity: str
    schema: Any
    """`pyarrow.Schema` of the columns that are wanted, with their stored types."""
    nulls: frozenset[str]
    ranges: tuple[RowRange, ...]
    contents: tuple[bytes, ...]
    """Of each: what it depends on."""


class Partitions:
    """Partitions of a table of Parquet files.

    Args:
        place: path, folder, wildcard or URL; of a folder those that end in .parquet, and do not begin with `_`.
        columns: those that are read; None: all.
        partition_mb: of a partition in memory, about.

    Raises:
        JobError: a file cannot be read, or has other columns than the others; names it.
    """

    def __init__(self, place: str, *, columns: Sequence[str] | None, partition_mb: int) -> None:
        if partition_mb < 1:
            raise JobError(f"partition_mb = {partition_mb} is below 1")
        self.place, self._columns, self._most_bytes = place, columns, partition_mb << 20
        self.files, sizes = _found(place)
        listed = {} if self.files.local else run(self.files.identities(common_folder(sizes)))
        with ThreadPoolExecutor(1 if self.files.local else _AT_ONCE) as pool:
            self._read = list(pool.map(lambda path: self._file(path, listed.get(path)), sizes))
        self.schema = self._schema()
        types = pyarrow().types
        self.nulls = tuple(
            field.name
            for field in self.schema
            if (types.is_integer(field.type) or types.is_boolean(field.type)) and any(field.name in each.nulls for each in self._read)
        )
        self.ranges = [(n, k) for n, file in enumerate(self._read) for k in range(len(file.ranges))]
        """Number of the file and of the range in it, of each partition."""
        if not self.ranges:
            raise JobError(f"{place} has no rows")

    @property
    def paths(self) -> list[str]:
        """Paths or URLs of all files."""
        return [self.file_of(each.path) for each in self._read]

    def file_of(self, path: str) -> str:
        """Path or URL of a file."""
        root = str(getattr(self.files, "root", "")) if self.files.local else self.files.url.rstrip("/")
        return f"{root}/{path}"

    def key(self, number: int) -> str:
        """File and rows of a partition, such as `day-01.parquet:0-250000`."""
        file, found = self.get(number)
        return f"{file.path}:{found.first}-{found.first + found.rows}"

    def get(self, number: int) -> tuple[_File, RowRange]:
        """A partition, and its file."""
        n, k = self.ranges[number]
        return self._read[n], self._read[n].ranges[k]

    def content(self, number: int) -> bytes:
        """What a partition depends on, but for how the function is called."""
        n, k = self.ranges[number]
        return self._read[n].contents[k]

    def _file(self, path: str, identity: str | None) -> _File:
        pa = pyarrow()
        place = self.file_of(path)
        try:
            identity = identity or run(self.files.identity(path)) or ""
            rows = ParquetRows(place)
            metadata, schema = rows.parquet.metadata, rows.parquet.schema_arrow
            check_names(schema.names, place)
            every = [name for name in schema.names if not is_index(name)]
            names = every if self._columns is None else list(dict.fromkeys(self._columns))
            for name in names:
                if name not in every:
                    raise JobError(f"{place} has no column {name!r}", remedy=near(name, every, what="its columns"))
            if not names:
                raise JobError(f"{place} has no columns")
            leaves = leaves_of(schema, names)
            wanted = [leaf for name in names for leaf in leaves[name]]
            found = tuple(ranges_of(metadata, wanted, most_bytes=self._most_bytes))
            nulls = frozenset(name for name in names if any(has_nulls(metadata, leaf) for leaf in leaves[name]))
            contents = _digests(Path(place), metadata, found, wanted) if self.files.local else [identity.encode()] * len(found)
            rows.parquet.close()
        except FileNotFoundError:
            raise JobError(f"there is no file {place}") from None
        except DatasetUnreachable as e:
            raise JobError(f"{place} cannot be read: {e}") from None
        except (OSError, pa.ArrowException) as e:
            raise JobError(f"{place} is no Parquet file, or is damaged: {str(e).splitlines()[0]}") from None
        return _File(path, identity, stored_types(pa.schema([schema.field(name) for name in names])), nulls, found, tuple(contents))

    def _schema(self) -> Any:
        pa = pyarrow()
        first = self._read[0]
        schema = first.schema
        for file in self._read[1:]:
            if other := sorted(set(file.schema.names) ^ set(schema.names)):
                raise JobError(
                    f"{file.path} differs from {first.path} in its columns: {', '.join(other)}", remedy="name columns that all files have"
                )
            try:
                schema = pa.unify_schemas([schema, file.schema], promote_options="permissive")
            except pa.ArrowException:
                name = next(name for name in schema.names if not _fit(schema.field(name), file.schema.field(name)))
                raise JobError(
                    f"column {name!r} of {file.path} is {file.schema.field(name).type}, and {schema.field(name).type} in files before",
                    remedy="convert it, or leave it out of the columns",
                ) from None
        return schema


def _fit(a: Any, b: Any) -> bool:
    pa = pyarrow()
    try:
        pa.unify_schemas([pa.schema([a]), pa.schema([b])], promote_options="permissive")
    except pa.ArrowException:
        return False
    return True


def _found(place: str) -> tuple[Files, dict[str, int]]:
    try:
        files, sizes = find_files(place)
    except DatasetUnreachable as e:
        raise JobError(f"{place} cannot be read: {e}") from None
    if not sizes:
        raise JobError(f"there is no file {place}", remedy="give a Parquet file, a folder, or a wildcard such as 'days/*.parquet'")
    if len(sizes) > 1:
        kept = {
            path: n for path, n in sizes.items() if path.endswith(_ENDING) and not any(part.startswith("_") for part in path.split("/"))
        }
        if not kept:
            other = next(iter(sizes))
            raise JobError(f"{place} has no file *{_ENDING}, but such as {other}", remedy="convert them to Parquet")
        return files, kept
    return files, sizes


def _digests(path: Path, metadata: Any, found: Sequence[RowRange], leaves: Sequence[int]) -> list[bytes]:
    """Of all that each partition is read from; parts of the same row group share it."""
    made: dict[tuple[int, int], bytes] = {}
    with path.open("rb") as file:
        for each in found:
            if (each.group, each.groups) not in made:
                digest = hashlib.blake2b(digest_size=16)
                for offset, nbytes in chunks_of(metadata, each, leaves):
                    _add(digest, file, offset, nbytes)
                made[each.group, each.groups] = digest.digest()
    return [made[each.group, each.groups] for each in found]


def _add(digest: Any, file: BinaryIO, offset: int, nbytes: int) -> None:
    file.seek(offset)
    while nbytes > 0:
        data = file.read(min(nbytes, 8 << 20))
        if not data:
            raise OSError("it ends early")
        digest.update(data)
        nbytes -= len(data)


class PartitionSource(Source):
    """Partitions as items, in their order.

    Args:
        partitions: of the table.
        call: how the function is called.
    """

    def __init__(self, partitions: Partitions, call: PartitionCall) -> None:
        super().__init__(partitions.place, ItemColumns(cost="nbytes"))
        self.partitions, self.call = partitions, call
        schema = partitions.schema
        self._schema = schema.serialize().to_pybytes()
        types = "\0".join(f"{field.name}\0{field.type}" for field in schema)
        nulls = "\0".join(call.nulls) if call.frame in ("pandas", "numpy") else ""
        self._given = hashlib.blake2b(f"{types}\0\0{nulls}".encode(), digest_size=16).digest()
        """Of the types that the function is given: an integer is none any more where another partition has a null."""

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(self._given, digest_size=16)
        for number in range(len(self.partitions.ranges)):
            digest.update(f"\0{self.partitions.key(number)}\0".encode() + self.partitions.content(number))
        return digest.hexdigest()

    def told(self, number: int) -> str:
        return f"partition {self.partitions.key(number)}"

    def blocks(self, wanted: NDArray[np.bool_] | None = None) -> Iterator[Block]:
        for first in range(0, len(self.partitions.ranges), BLOCK_ROWS):
            count = min(BLOCK_ROWS, len(self.partitions.ranges) - first)
            if wanted is None or wanted[first : first + count].any():
                yield self._block_of(first, count)

    def names(self) -> list[str]:
        """Names of the files that are written, of all partitions."""
        return [self._name(number, self._id(number)) for number in range(len(self.partitions.ranges))]

    def _block_of(self, first: int, count: int) -> Block:
        every = range(first, first + count)
        keys, ids = [self.partitions.key(number) for number in every], [self._id(number) for number in every]
        items = [self._content(number)[:8].hex() for number in every]
        costs = [float(self.partitions.get(number)[1].nbytes) for number in every]
        return Block(first, keys, np.frombuffer(b"".join(ids), f"S{ID_BYTES}"), items, costs, lambda n: self._value(first + n, ids[n]))

    def _content(self, number: int) -> bytes:
        return hashlib.blake2b(self.partitions.content(number) + self._given, digest_size=16).digest()

    def _id(self, number: int) -> bytes:
        return id_of(self.partitions.key(number).encode(), self._content(number))

    def _name(self, number: int, id: bytes) -> str:
        file, found = self.partitions.get(number)
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", file.path.removesuffix(_ENDING)).lstrip("._-")[:_STEM] or "part"
        return f"{stem}.{found.first:012d}.{hashlib.blake2b(id + self.call.code.encode(), digest_size=8).hexdigest()}{_ENDING}"

    def _value(self, number: int, id: bytes) -> tuple[Any, ...]:
        file, found = self.partitions.get(number)
        return tuple(
            PartitionItem(
                self.partitions.key(number),
                self.partitions.file_of(file.path),
                file.identity,
                found.first,
                found.rows,
                found.group,
                found.groups,
                found.is_part,
                self._name(number, id),
                b"" if file.schema.equals(self.partitions.schema) else self._schema,
                tuple(self.call),
            )
        )


def partition_of(name: str) -> str:
    """What the names of the files of a partition have in common, whatever it and the function were like."""
    return name.rsplit(".", 2)[0]


def is_below(place: str, folder: str) -> bool:
    """Whether a path or a URL is that of a folder, or of something in it."""
    return f"{located(place).rstrip('/')}/".startswith(f"{located(folder).rstrip('/')}/")
