"""Rows of CSV and Parquet files as users have them, part by part, and such files that are written. Texts of CSV stay as they are written."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ephemeron.data.formats.records import CsvRecords, CsvRows, cells_of, check_names, has_lone_return, header_of, rows_of
from ephemeron.data.tables.arrow import pyarrow
from ephemeron.errors import JobError

TABLES = (".csv", ".tsv", ".parquet")
"""Endings of tables."""
_END = b"\n"
_HEADER = _BLOCK = 1 << 22
_LONGEST = 1 << 26
"""Bytes of a record, at most."""


class TablePart(NamedTuple):
    """Some rows of a file."""

    first: int
    """Number of the first one, from 0."""
    table: Any
    """`pyarrow.Table`; of CSV: of texts, as they are written."""


class TableFile:
    """A CSV file with a header, or a Parquet file, which is read part by part.

    Args:
        path: `.csv`, `.tsv` or `.parquet`.
        delimiter: of CSV.

    Raises:
        JobError: it cannot be read, or has no columns.
    """

    def __init__(self, path: Path, *, delimiter: str = ",") -> None:
        pa = pyarrow()
        self.path, self.delimiter = path, "\t" if path.suffix == ".tsv" else delimiter
        self.is_text = path.suffix != ".parquet"
        try:
            if self.is_text:
                self.names, self._begin = self._header()
                self.schema = pa.schema([(name, pa.string()) for name in self.names])
            else:
                from pyarrow import parquet

                with parquet.ParquetFile(path) as file:
                    self.schema = file.schema_arrow
                self.names, self._begin = self.schema.names, 0
        except OSError as e:
            raise JobError(f"{path} cannot be read: {e.strerror or e}") from None
        except pa.ArrowInvalid as e:
            raise JobError(f"{path} is no Parquet file: {str(e).splitlines()[0]}") from None
        check_names(self.names, str(path))

    def parts(self, rows: int) -> Iterator[TablePart]:
        """All rows, so many at a time at most.

        Raises:
            JobError: a row of CSV is invalid; names its line.
        """
        first = 0
        for table in self._tables(rows):
            for at in range(0, table.num_rows, rows):
                part = table.slice(at, rows)
                yield TablePart(first, part)
                first += part.num_rows

    def _tables(self, rows: int) -> Iterator[Any]:
        pa = pyarrow()
        if self.is_text:
            yield from self._texts()
            return
        from pyarrow import parquet

        with parquet.ParquetFile(self.path) as file:
            for batch in file.iter_batches(batch_size=rows):
                yield pa.Table.from_batches([batch])

    def _header(self) -> tuple[list[str], int]:
        with self.path.open("rb") as file:
            data = file.read(_HEADER)
        return header_of(data, self.delimiter, str(self.path))

    def _texts(self) -> Iterator[Any]:
        records = CsvRecords(self.delimiter)
        with self.path.open("rb") as file:
            line = file.read(self._begin).count(b"\n") + 1
            rest, more = b"", True
            while more:
                block = file.read(_BLOCK)
                rest, more = rest + block, bool(block)
                spans = records.spans(rest)
                end = len(rest) if not more else max((a for a, _ in spans), default=0)  # the last one may go on
                text, rest = rest[:end], rest[end:]
                if len(rest) > _LONGEST:
                    raise JobError(f"{self.path}, line {line + text.count(_END)}: a quote is not closed", remedy="close it, or double it")
                if text.strip(b"\r\n"):
                    yield self._table([text[a:b] for a, b in spans if a < end], line)
                line += text.count(b"\n")

    def _table(self, found: Sequence[bytes], line: int) -> Any:
        pa = pyarrow()
        rows = self._at_once(found) or self._one_by_one(found, line)
        columns = zip(*rows, strict=True) if rows else [()] * len(self.names)
        return pa.Table.from_arrays([pa.array(column, pa.string()) for column in columns], schema=self.schema)

    def _at_once(self, found: Sequence[bytes]) -> list[list[str]] | None:
        """Cells of all records, if none is wrong: several times as quick."""
        text = b"".join(found)
        if has_lone_return(text) or CsvRecords(self.delimiter).end(found[-1], "record") == "quoted":
            return None
        try:
            rows = [row for row in rows_of(text.decode(), self.delimiter) if row]
        except (UnicodeDecodeError, csv.Error):
            return None
        whole = sum(1 for record in found if record.strip(b"\r\n"))
        return rows if len(rows) == whole and all(len(row) == len(self.names) for row in rows) else None

    def _one_by_one(self, found: Sequence[bytes], line: int) -> list[list[str]]:
        rows = []
        for record in found:
            if record.strip(b"\r\n"):
                try:
                    cells = cells_of(record, self.delimiter)
                    if len(cells) != len(self.names):
                        raise ValueError(f"has {len(cells)} fields instead of {len(self.names)}")
                except ValueError as e:
                    raise JobError(f"{self.path}, line {line}: {e}", remedy="mend it") from None
                rows.append(cells)
            line += record.count(b"\n")
        return rows


class TableOut:
    """A CSV or Parquet file that is written part by part. It appears when it is whole.

    Args:
        path: `.csv`, `.tsv` or `.parquet`.
        delimiter: of `.csv`.
    """

    def __init__(self, path: Path, *, delimiter: str = ",") -> None:
        self._path, self._delimiter = path, delimiter
        self._part = path.with_name(f".{path.name}.part")
        self._file: Any = None
        self._writer: Any = None

    def write(self, table: Any) -> None:
        """Appends rows."""
        pa = pyarrow()
        if self._path.suffix == ".parquet":
            from pyarrow import parquet

            self._writer = self._writer or parquet.ParquetWriter(self._part, table.schema)
            self._writer.write_table(table)
            return
        if self._file is None:
            self._file = self._part.open("w", newline="", encoding="utf-8")
            delimiter = "\t" if self._path.suffix == ".tsv" else self._delimiter
            self._writer = CsvRows(self._file, delimiter)
            self._writer.rows([table.column_names])
        texts = []
        for name in table.column_names:
            column = table.column(name)
            try:
                texts.append((column if pa.types.is_string(column.type) else column.cast(pa.string())).to_pylist())
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                raise JobError(f"column {name} is {column.type}, which CSV has not", remedy="name a file *.parquet") from None
        self._writer.rows(zip(*texts, strict=True))

    def finish(self) -> None:
        """Closes it, and gives it its name."""
        self.close()
        os.replace(self._part, self._path)

    def close(self) -> None:
        """Closes it."""
        for each in (self._file, self._writer):
            if hasattr(each, "close"):
                each.close()

    def abandon(self) -> None:
        """Removes it."""
        self.close()
        self._part.unlink(missing_ok=True)


@contextmanager
def table_written(path: Path, *, delimiter: str = ",") -> Iterator[TableOut]:
    """A table to write; see `TableOut`. Its file is not there if an error leaves the block."""
    made = TableOut(path, delimiter=delimiter)
    try:
        yield made
    except BaseException:
        made.abandon()
        raise
    made.finish()
