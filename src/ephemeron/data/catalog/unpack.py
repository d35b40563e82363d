"""Unpacking of files whose parts are samples: gzip, deflate, CIFAR's pickles, Parquet row groups.

Unpacking a file for each of its samples would cost the whole file each time, so the reader keeps unpacked files.
"""

from __future__ import annotations

import gzip
import zlib
from typing import Any

from ephemeron.data.catalog.files import FileReader, Files
from ephemeron.data.catalog.meta import DataRef
from ephemeron.errors import MissingExtra


class Table:
    """Some rows of a Parquet file."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self.nbytes = int(table.nbytes)

    def pick(self, row: int, column: str | None) -> Any:
        """A row as a table of plain values, or the value of one of its columns.

        Raises:
            ValueError: the row or the column does not exist.
        """
        if not 0 <= row < self._table.num_rows:
            raise ValueError(f"row {row} of a row group with {self._table.num_rows}")
        value: Any = self._table.slice(row, 1).to_pylist()[0]
        for name in column.split(".") if column else ():
            if not isinstance(value, dict) or name not in value:
                raise ValueError(f"row {row} has no column {column!r}")
            value = value[name]
        return value


def unpack_bytes(how: str, data: bytes) -> bytes:
    """The unpacked bytes.

    Raises:
        ValueError: they are damaged or cut short.
    """
    try:
        if how == "gzip":
            return gzip.decompress(data)
        if how == "deflate":
            stream = zlib.decompressobj(-zlib.MAX_WBITS)
            out = stream.decompress(data)
            if not stream.eof:
                raise EOFError("the deflated data ends early")
            return out
        if how == "cifar-python":
            from ephemeron.data.formats.cifar import pickled_pixels
            from ephemeron.errors import PickleRefused

            try:
                return pickled_pixels(data).tobytes()
            except PickleRefused as e:
                raise ValueError(str(e)) from None
    except (OSError, EOFError, zlib.error) as e:
        raise ValueError(str(e)) from None
    raise ValueError(f"{how!r} is not a packing of bytes")


def parquet_file(files: Files, path: str, nbytes: int) -> Any:
    """An open `pyarrow.parquet.ParquetFile`.

    Raises:
        MissingExtra: pyarrow is not installed.
        ValueError: it is not a Parquet file.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise MissingExtra("pyarrow", "data") from None
    try:
        return pq.ParquetFile(pa.PythonFile(FileReader(files, path, length=nbytes), mode="r"), pre_buffer=True)
    except (pa.ArrowException, OSError) as e:
        raise ValueError(str(e)) from None


def row_group(files: Files, ref: DataRef, path: str, nbytes: int) -> Table:
    """The row group that a reference names; only its column, if it names one.

    Raises:
        MissingExtra: pyarrow is not installed.
        ValueError: the file is damaged, or has no such group or column.
    """
    opened = parquet_file(files, path, nbytes)
    import pyarrow as pa

    group = (ref.row or (0, 0))[0]
    if group >= opened.num_row_groups:
        raise ValueError(f"row group {group} of a file with {opened.num_row_groups}")
    try:
        return Table(opened.read_row_group(group, columns=[ref.column] if ref.column else None))
    except (pa.ArrowException, OSError) as e:
        raise ValueError(str(e)) from None
