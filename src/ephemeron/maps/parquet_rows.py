"""Parquet files where functions read them: on this machine, or in a store, of which only the bytes that are wanted are read."""

from __future__ import annotations

import io
from collections import OrderedDict

import numpy as np

from ephemeron.data.catalog.files import FileReader
from ephemeron.data.catalog.loop import run
from ephemeron.data.catalog.open_files import open_files
from ephemeron.data.tables.arrow import pyarrow

_MOST_OPEN = 4
"""Files."""
_PIECE = 1 << 20
"""Bytes of a column that are read at a time, where it is read piece by piece."""


class ParquetRows:
    """A Parquet file, and where its row groups begin.

    Args:
        place: path or URL.
        in_pieces: whether columns are read piece by piece, and not as a whole: of row groups that are too large for that.

    Raises:
        FileNotFoundError: it is not there.
        pyarrow.ArrowException: it is no Parquet file.
        DatasetUnreachable: the store fails.
    """

    def __init__(self, place: str, *, in_pieces: bool = False) -> None:
        from pyarrow import parquet

        self.place = place
        if "://" not in place:
            self.parquet = parquet.ParquetFile(place, buffer_size=_PIECE if in_pieces else 0, pre_buffer=False)
        else:
            root, _, name = place.rpartition("/")
            files = open_files(root)
            nbytes = run(files.size(name))
            if nbytes is None:
                raise FileNotFoundError(place)
            reader = io.BufferedReader(FileReader(files, name, length=nbytes), 1 << 20)
            self.parquet = parquet.ParquetFile(
                pyarrow().PythonFile(reader, "r"), buffer_size=_PIECE if in_pieces else 0, pre_buffer=not in_pieces
            )
        about = self.parquet.metadata
        self.begins = np.cumsum([0, *(about.row_group(n).num_rows for n in range(about.num_row_groups))])

    def row_groups(self, first: int, rows: int) -> range:
        """Numbers of the row groups that have a range of rows."""
        low = int(np.searchsorted(self.begins, first, side="right")) - 1
        return range(low, int(np.searchsorted(self.begins, first + rows, side="left")))


_open: OrderedDict[tuple[str, str, bool], ParquetRows] = OrderedDict()


def opened(place: str, identity: str = "", *, in_pieces: bool = False) -> ParquetRows:
    """A file; the latest ones stay open.

    Args:
        place: path or URL.
        identity: of its content, if that may change.
        in_pieces: see `ParquetRows`.

    Raises:
        FileNotFoundError, pyarrow.ArrowException, DatasetUnreachable: see `ParquetRows`.
    """
    key = place, identity, in_pieces
    if key not in _open:
        _open[key] = ParquetRows(place, in_pieces=in_pieces)
        while len(_open) > _MOST_OPEN:
            _open.popitem(last=False)[1].parquet.close()
    _open.move_to_end(key)
    return _open[key]
