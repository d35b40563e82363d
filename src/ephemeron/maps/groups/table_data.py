"""A table whose rows are divided into groups: files as users have them, or a table in memory; read part by part, as often as needed.

Columns have the types that Parquet gives back. A column of CSV is of whole numbers or of numbers if all its cells are, by-columns excepted, which
stay text; this is known when all rows were read once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ephemeron.data.catalog.files import Files
from ephemeron.data.catalog.open_files import find_files
from ephemeron.data.formats.records import NUMBER, check_names
from ephemeron.data.tables.arrow import cast_columns, is_index, pyarrow
from ephemeron.data.tables.table_file import TABLES, TableFile
from ephemeron.errors import DatasetUnreachable, JobError
from ephemeron.maps.groups.row_digests import DigestedColumns, RowDigest
from ephemeron.maps.sources import ItemColumns, TableSource

EXTRA = "maps"
READ_ROWS = 65_536
"""Rows that are in memory at a time while a table is read."""
_WHOLE = r"^-?(?:0|[1-9][0-9]{0,17})$"
_OF_PARQUET, _OF_CSV = 5, 2
"""Bytes in memory for a byte of a file, about."""


class TableData(ABC):
    """A table that can be read several times.

    Args:
        name: for messages.
        schema: of its columns, `pyarrow.Schema`; of CSV: all text.
        nbytes: in memory, about.
    """

    is_text = False
    """Whether it is CSV, whose cells are text."""
    delimiter = ","

    def __init__(self, name: str, schema: Any, nbytes: int) -> None:
        self.name, self.schema, self.nbytes = name, schema, nbytes

    @abstractmethod
    def parts(self) -> Iterator[Any]:
        """All rows, as `pyarrow.Table`s of at most `READ_ROWS` rows and one or more.

        Raises:
            JobError: a file cannot be read, or has other columns than the first one; names it.
        """

    @abstractmethod
    def digest(self) -> str:
        """Of the content."""

    def close(self) -> None:
        """Deletes what was written for it."""


def open_table(data: object) -> TableData:
    """A table of files, or in memory.

    Args:
        data: path, folder, wildcard or URL of CSV or Parquet files; a pandas or Polars frame, an Arrow table, or a dict of arrays.

    Raises:
        JobError: there is nothing of that name, or it is no table.
        MissingExtra: PyArrow is not installed.
    """
    pyarrow(EXTRA)
    if not isinstance(data, str | Path):
        return MemoryTable(_as_arrow(data))
    place = str(data)
    try:
        files, sizes = find_files(place)
    except DatasetUnreachable as e:
        raise JobError(f"{place} cannot be read: {e}") from None
    if not sizes:
        raise JobError(f"there is no file {place}", remedy="give a file, a folder, or a wildcard such as 'sales/*.parquet'")
    endings = {Path(path).suffix for path in sizes}
    if len(endings) > 1 or not endings <= set(TABLES):
        raise JobError(
            f"{place} has files *{', *'.join(sorted(endings))}, which are not tables of one kind",
            remedy=f"name those of one kind: *{', *'.join(TABLES)}",
        )
    return FileTable(place, files, sizes)


class MemoryTable(TableData):
    """A table in memory.

    Args:
        table: `pyarrow.Table`.
    """

    def __init__(self, table: Any) -> None:
        check_names(table.column_names, "the table")
        schema = stored_schema(table.schema)
        super().__init__("the table", schema, table.nbytes)
        self._table = _cast(table, schema, "the table")

    def parts(self) -> Iterator[Any]:
        for first in range(0, self._table.num_rows, READ_ROWS):
            yield self._table.slice(first, READ_ROWS)

    def digest(self) -> str:
        found = RowDigest(self.schema)
        for part in self.parts():
            found.add(DigestedColumns(part), 0, part.num_rows)
        return found.digest().hex()


class FileTable(TableData):
    """CSV or Parquet files of the same columns. Those of a store are copied to this machine, one at a time.

    Args:
        place: as the user gives it.
        files: root of the files.
        sizes: bytes of each.
    """

    def __init__(self, place: str, files: Files, sizes: Mapping[str, int]) -> None:
        self._paths = list(sizes)
        self._source = TableSource(place, files, sizes, ItemColumns())
        first = self._open(self._paths[0])
        self.is_text, self.delimiter = first.is_text, first.delimiter
        super().__init__(place, stored_schema(first.schema), sum(sizes.values()) * (_OF_CSV if self.is_text else _OF_PARQUET))

    def parts(self) -> Iterator[Any]:
        for path in self._paths:
            file = self._open(path)
            shown = path if len(self._paths) > 1 else self.name
            if set(file.names) != set(self.schema.names):
                other = sorted(set(file.names) ^ set(self.schema.names))
                raise JobError(f"{shown} differs from {self._paths[0]} in its columns: {', '.join(other)}")
            for part in file.parts(READ_ROWS):
                yield _cast(part.table, self.schema, shown)

    def digest(self) -> str:
        return self._source.fingerprint()

    def close(self) -> None:
        self._source.close()

    def _open(self, path: str) -> TableFile:
        if not self._source.files.local and len(self._paths) > 1:
            self._source.close()  # the file before it
        return TableFile(self._source.local(path))


def _as_arrow(data: object) -> Any:
    pa = pyarrow(EXTRA)
    if isinstance(data, pa.Table):
        return data
    try:
        if isinstance(data, Mapping):
            return pa.table(dict(data))
        if type(data).__module__.partition(".")[0] == "pandas":
            return pa.Table.from_pandas(data)
        if hasattr(data, "to_arrow"):
            return pa.table(data.to_arrow())
        if hasattr(data, "__arrow_c_stream__"):
            return pa.table(data)
    except (pa.ArrowException, TypeError, ValueError, AttributeError) as e:
        raise JobError(f"the table cannot be read: {str(e).splitlines()[0]}") from None
    raise JobError(
        f"data is a {type(data).__name__}, which is no table",
        remedy="give a pandas or Polars frame, an Arrow table, a dict of arrays, a path or a URL",
    )


# -- types --------------------------------------------------------------------------------------------------------


def stored_schema(schema: Any) -> Any:
    """The types of columns when they come back from Parquet; those of categories are the types of their values.

    Raises:
        JobError: Parquet has no such type.
    """
    pa = pyarrow()
    from pyarrow import parquet

    fields = []
    for field in schema:
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        fields.append((field.name, pa.large_string() if str(kind) == "string_view" else kind))
    file = pa.BufferOutputStream()
    try:
        parquet.write_table(pa.schema(fields).empty_table(), file)
    except pa.ArrowException as e:
        raise JobError(f"a column cannot be kept: {str(e).splitlines()[0]}", remedy="leave it out, or convert it") from None
    return pa.schema([(f.name, f.type) for f in parquet.read_schema(pa.BufferReader(file.getvalue()))])


def _cast(table: Any, schema: Any, where: str) -> Any:
    """A table with the columns of a schema, in its order."""
    return cast_columns(table, schema, lambda name, kind, wanted, _: JobError(f"{where}: column {name} is {kind}, and was {wanted} before"))


def is_kept(name: str) -> bool:
    """Whether groups have a column: an index of pandas that has no name is none."""
    return not is_index(name)


class TextKinds:
    """What the columns of CSV are, from all their cells. Empty cells of numbers are absent.

    Args:
        names: of the columns.
        by: by-columns, which stay text.
        wanted: types, as Arrow writes them, of columns that were read before: text stays text, and whole numbers are numbers where those were.
    """

    def __init__(self, names: Sequence[str], by: Sequence[str], wanted: Mapping[str, str] | None = None) -> None:
        self._names, self._wanted = names, wanted or {}
        self._not_whole, self._not_number = set(by), set(by)
        self._filled: set[str] = set()

    def add(self, table: Any) -> None:
        """Looks at more rows."""
        pc = pyarrow().compute
        for name in self._names:
            if name in self._not_number and name in self._not_whole:
                continue
            column = table.column(name)
            filled = column.filter(pc.not_equal(column, ""))
            if len(filled):
                self._filled.add(name)
            for pattern, failed in ((_WHOLE, self._not_whole), (NUMBER, self._not_number)):
                if name not in failed and not pc.all(pc.match_substring_regex(filled, pattern), min_count=0).as_py():
                    failed.add(name)

    def schema(self) -> Any:
        """`pyarrow.Schema` of the columns."""
        pa = pyarrow()

        def kind(name: str) -> Any:
            is_text = name not in self._filled or name in self._not_whole & self._not_number
            if is_text or self._wanted.get(name) == "string":
                return pa.string()
            return pa.float64() if name in self._not_whole or self._wanted.get(name) == "double" else pa.int64()

        return pa.schema([(name, kind(name)) for name in self._names])


def with_types(table: Any, schema: Any) -> Any:
    """Columns of text as those of a schema of `TextKinds`."""
    pa = pyarrow()
    pc = pa.compute
    columns = []
    for field in schema:
        column = table.column(field.name)
        if column.type != field.type:
            text = pc.replace_substring_regex(pc.utf8_trim_whitespace(column), r"^\+", "")
            column = pc.if_else(pc.equal(text, ""), None, text).cast(field.type)
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=schema)
