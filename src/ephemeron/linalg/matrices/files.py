"""Arrays in files: NPY, Zarr and Parquet, opened without reading them whole."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ephemeron.errors import JobError, MissingExtra

Shape = tuple[int, int]


def open_npy(path: str | Path) -> npt.NDArray[Any]:
    """The array of an NPY file, mapped.

    Raises:
        JobError: it cannot be read.
    """
    try:
        found: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as e:
        raise JobError(f"{path} cannot be read as an NPY file: {e}") from None
    return found


def create_npy(path: str | Path, shape: Shape, dtype: np.dtype[Any]) -> np.memmap[Any, Any]:
    """A new NPY file, mapped.

    Raises:
        JobError: it cannot be written.
    """
    try:
        file = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
        with open(path, "r+b") as reserved:  # a disk that fills up while a mapped file is written ends the process
            os.posix_fallocate(reserved.fileno(), 0, os.fstat(reserved.fileno()).st_size)
    except OSError as e:
        raise JobError(f"{path} cannot be written: {e.strerror}") from None
    return file


def open_zarr(path: str | Path) -> Any:
    """A Zarr array.

    Raises:
        JobError: there is none.
        MissingExtra: Zarr is not installed.
    """
    zarr = _imported("zarr")
    try:
        return zarr.open_array(str(path), mode="r")
    except (OSError, ValueError, KeyError) as e:
        raise JobError(f"{path} cannot be read as a Zarr array: {e}") from None


def create_zarr(path: str | Path, shape: Shape, chunk: Shape, dtype: np.dtype[Any]) -> Any:
    """A new Zarr array.

    Raises:
        JobError: it cannot be written, or is there already.
        MissingExtra: Zarr is not installed.
    """
    zarr = _imported("zarr")
    chunks = tuple(min(c, n) for c, n in zip(chunk, shape, strict=True))
    try:
        return zarr.create_array(str(path), shape=shape, chunks=chunks, dtype=dtype)
    except (OSError, ValueError) as e:
        raise JobError(f"{path} cannot be written as a Zarr array: {e}") from None


class ParquetColumns:
    """Columns of numbers of a Parquet file, read by row groups.

    Args:
        path: of the file.
        columns: names; None: all.

    Raises:
        JobError: the file cannot be read, a column is absent or has no numbers.
        MissingExtra: PyArrow is not installed.
    """

    def __init__(self, path: str | Path, columns: Sequence[str] | None = None) -> None:
        parquet, arrow = _imported("pyarrow.parquet"), _imported("pyarrow")
        self._path = path
        try:
            self._file = parquet.ParquetFile(path)
        except (OSError, arrow.ArrowInvalid) as e:
            raise JobError(f"{path} cannot be read as a Parquet file: {e}") from None
        schema = self._file.schema_arrow
        self._columns = list(columns or schema.names)
        if absent := [c for c in self._columns if c not in schema.names]:
            raise JobError(f"{path} has no column {absent[0]!r}", remedy=f"its columns are {', '.join(schema.names)}")
        kinds = []
        for name in self._columns:
            kind = schema.field(name).type
            if not (arrow.types.is_integer(kind) or arrow.types.is_floating(kind) or arrow.types.is_boolean(kind)):
                numbers = [f.name for f in schema if arrow.types.is_integer(f.type) or arrow.types.is_floating(f.type)]
                raise JobError(f"column {name!r} of {path} is {kind}, not numbers", remedy=f"choose columns among {', '.join(numbers)}")
            kinds.append(np.dtype("float32" if kind in (arrow.float32(), arrow.float16()) else "float64"))
        groups = [self._file.metadata.row_group(k).num_rows for k in range(self._file.num_row_groups)]
        self._starts = np.concatenate([[0], np.cumsum(groups)]).astype(int)
        self.dtype: np.dtype[Any] = np.result_type(*kinds)
        """float32 where all columns are, else float64."""
        self.shape: Shape = (int(self._starts[-1]), len(self._columns))
        """Rows and columns."""
        self._kept: tuple[int, int, npt.NDArray[Any]] | None = None

    def read(self, rows: slice, columns: slice) -> npt.NDArray[Any]:
        """Values of a part.

        Raises:
            JobError: there are nulls.
        """
        if self._kept is None or self._kept[:2] != (rows.start, rows.stop):
            self._kept = (rows.start, rows.stop, self._read(rows.start, rows.stop))
        return self._kept[2][:, columns]

    def _read(self, start: int, stop: int) -> npt.NDArray[Any]:
        first, last = np.searchsorted(self._starts, [start, stop - 1], side="right") - 1
        table = self._file.read_row_groups(list(range(first, last + 1)), columns=self._columns)
        table = table.slice(start - int(self._starts[first]), stop - start)
        made = np.empty((stop - start, len(self._columns)), self.dtype)
        for k, name in enumerate(self._columns):
            if table.column(name).null_count:
                raise JobError(f"column {name!r} of {self._path} has nulls in rows {start}:{stop}", remedy="fill or drop them")
            made[:, k] = table.column(name).to_numpy()
        return made


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name != module.partition(".")[0]:
            raise
        raise MissingExtra(module.partition(".")[0], "linalg-files") from None
