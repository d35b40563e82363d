"""One pass over a table that brings the rows of each group together, in memory that does not grow with the table or with its largest group.

    parts of the table ──hash of the key──▶ spilled files ──sorted in memory, one at a time──▶ Parquet files of groups

A spilled file that is too large to be sorted in memory is spread again, by another hash, until it is small, or of one group alone, whose rows are
in order already and pass through. In a Parquet file larger groups come first, so neighbours take about the same time; small ones share a row group,
and large ones have several of their own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ephemeron.data.tables.arrow import pyarrow
from ephemeron.maps.groups.keys import Codes, codes_of, key_texts
from ephemeron.maps.groups.row_digests import DigestedColumns, RowDigest
from ephemeron.maps.groups.table_data import READ_ROWS, TextKinds, with_types

SORTED_BYTES = 64 << 20
"""Bytes of rows that are sorted in memory. All that is held is about four times as much."""
_MOST_SPILLED = 128
"""Files that rows are spread over."""
_PACK_ROWS, _PACK_BYTES = 16_384, 2 << 20
"""Of small groups that share a row group, which is read as a whole."""
POSITION = "__ephemeron_row__"
"""Column with the number of each row in the table, from 0, where it is wanted."""


@dataclass(frozen=True, slots=True)
class DividedFile:
    """A Parquet file of whole groups, each of whose rows follow each other."""

    path: Path
    rows: int
    groups: Any
    """`pyarrow.Table` with `GROUP_FIELDS`, in the order of the file; `file` is not set."""


def group_schema() -> Any:
    """What is known of a group: columns of the index."""
    pa = pyarrow()
    return pa.schema(
        [
            ("key", pa.string()),
            ("file", pa.int32()),
            ("first", pa.int64()),
            ("rows", pa.int64()),
            ("nbytes", pa.int64()),
            ("cost", pa.float64()),
            ("digest", pa.binary(16)),
        ]
    )


class Division:
    """Divides a table into groups.

    Args:
        by: by-columns.
        kept: columns of a group beside them.
        name: of the table, for messages.
        is_text: whether cells are text whose kinds are found here.
        wanted: see `TextKinds`.
        sorted_bytes: rows that are sorted in memory.
    """

    def __init__(
        self,
        by: Sequence[str],
        kept: Sequence[str],
        *,
        name: str,
        is_text: bool = False,
        wanted: Mapping[str, str] | None = None,
        sorted_bytes: int = SORTED_BYTES,
    ) -> None:
        self.by, self.kept, self._name, self._sorted_bytes = tuple(by), tuple(kept), name, sorted_bytes
        self._kinds = TextKinds(kept, by, wanted) if is_text else None
        self.schema: Any = None
        """Of the columns that are kept, once all rows were read."""
        self.nulls: set[str] = set()
        """Columns that are null somewhere."""
        self.rows = 0

    def files(self, parts: Iterable[Any], *, nbytes: int) -> Iterator[DividedFile]:
        """Files of groups, one after the other; each is gone when the next one is taken.

        Args:
            parts: of the table, each `pyarrow.Table`.
            nbytes: of all of them in memory, about.

        Raises:
            JobError: a number that is to be a key is NaN or infinite.
        """
        with tempfile.TemporaryDirectory(prefix="ephemeron-groups-") as place:
            folder = Path(place)
            of = max(1, min(_MOST_SPILLED, -(-nbytes // self._sorted_bytes)))
            spilled = self._spread(self._checked(parts), folder / "0", of=of, depth=0)
            if self._kinds is not None:
                self.schema = self._kinds.schema()
            elif spilled:
                self.schema = pyarrow().schema([spilled[0].schema.field(name) for name in self.kept])
            for one in spilled:
                yield from self._settled(one, depth=1)

    def _checked(self, parts: Iterable[Any]) -> Iterator[Any]:
        for part in parts:
            self.rows += part.num_rows
            if self._kinds is not None:
                self._kinds.add(part)
            yield part

    # -- spreading ---------------------------------------------------------------------------------------------

    def _spread(self, parts: Iterable[Any], folder: Path, *, of: int, depth: int) -> list[Spilled]:
        """Spreads rows over files by the hash of their key."""
        folder.mkdir()
        files: dict[int, Spilled] = {}
        first_row = 0
        for part in parts:
            found = codes_of(part, self.by, where=self._name, first_row=first_row)
            first_row += part.num_rows
            hashes = [xxhash.xxh3_64_intdigest(text.encode(), seed=depth) for text in self._keys(part, found)]
            places = np.array([each % of for each in hashes], np.int64)[found.codes]
            order = np.argsort(places, kind="stable")
            moved, ends = part.take(order), np.searchsorted(places[order], np.arange(of + 1))
            for place in np.unique(places).tolist():
                low, high = ends[place], ends[place + 1]
                if place not in files:
                    files[place] = Spilled(folder / f"{place}.arrow", part.schema)
                keys = {hashes[code] for code in np.unique(found.codes[order[low:high]]).tolist()}
                files[place].add(moved.slice(low, high - low), keys)
        for file in files.values():
            file.finish()
        return [files[place] for place in sorted(files)]

    def _keys(self, part: Any, found: Codes) -> list[str]:
        return key_texts(part.select(list(self.by)).take(found.first), self.by)

    def _settled(self, spilled: Spilled, *, depth: int) -> Iterator[DividedFile]:
        """Files of groups of what was spilled."""
        out = spilled.path.with_suffix(".parquet")
        if spilled.is_one_group and spilled.nbytes > self._sorted_bytes:
            yield self._passed(spilled, out)
        elif spilled.nbytes <= self._sorted_bytes:
            yield self._sorted(pyarrow().concat_tables(spilled.parts()).combine_chunks(), out)
        else:
            of = min(_MOST_SPILLED, 2 * -(-spilled.nbytes // self._sorted_bytes))
            again = self._spread(_joined(spilled.parts()), spilled.path.with_suffix(""), of=of, depth=depth)
            spilled.path.unlink()
            for one in again:
                yield from self._settled(one, depth=depth + 1)
            return
        spilled.path.unlink()
        out.unlink()

    # -- files of groups ---------------------------------------------------------------------------------------

    def _typed(self, table: Any) -> Any:
        """Rows with the types that columns have in a group."""
        pa = pyarrow()
        if self._kinds is not None:
            kept = with_types(table, self.schema)
            others = [name for name in table.column_names if name not in self.kept]
            table = pa.table({**{name: table.column(name) for name in others}, **{name: kept.column(name) for name in self.kept}})
        self.nulls.update(name for name in self.kept if table.column(name).null_count)
        return table

    def _sorted(self, table: Any, out: Path) -> DividedFile:
        """A file of a table, sorted by group: large ones first, and in the order of their first rows."""
        found = codes_of(table, self.by, where=self._name)
        sizes = np.bincount(found.codes)
        groups = np.lexsort((found.first, -sizes))
        rank = np.empty(len(groups), np.int64)
        rank[groups] = np.arange(len(groups))
        keys = self._keys(table, found)
        table = self._typed(table.take(np.argsort(rank[found.codes], kind="stable")))
        columns, schema = DigestedColumns(table.select(list(self.kept))), table.select(list(self.kept)).schema
        ends = np.cumsum(sizes[groups])
        firsts = ends - sizes[groups]
        nbytes = [columns.nbytes(first, end) for first, end in zip(firsts.tolist(), ends.tolist(), strict=True)]
        digests = [RowDigest(schema).add(columns, first, end).digest() for first, end in zip(firsts.tolist(), ends.tolist(), strict=True)]
        costs = np.empty(len(groups))
        with _writer(out, table.schema) as writer:
            for low, high in _packs(sizes[groups].tolist(), nbytes):
                first, rows = int(firsts[low]), int(ends[high - 1] - firsts[low])
                writer.write_table(table.slice(first, rows), row_group_size=READ_ROWS)
                costs[low:high] = rows / (high - low)
        return DividedFile(out, table.num_rows, _index([keys[n] for n in groups], firsts, sizes[groups], nbytes, costs, digests))

    def _passed(self, spilled: Spilled, out: Path) -> DividedFile:
        """A file of one group, whose rows are never in memory together."""
        digest: RowDigest | None = None
        key, rows, nbytes = "", 0, 0
        with _writer(out, self._file_schema(spilled.schema)) as writer:
            for part in _joined(spilled.parts()):
                key = key or key_texts(part.slice(0, 1), self.by)[0]
                typed = self._typed(part)
                kept = typed.select(list(self.kept))
                columns, digest = DigestedColumns(kept), digest or RowDigest(kept.schema)
                digest.add(columns, 0, kept.num_rows)
                nbytes += columns.nbytes(0, kept.num_rows)
                rows += kept.num_rows
                writer.write_table(typed, row_group_size=READ_ROWS)
        assert digest is not None
        return DividedFile(out, rows, _index([key], np.zeros(1, np.int64), np.array([rows]), [nbytes], np.array([rows]), [digest.digest()]))

    def _file_schema(self, schema: Any) -> Any:
        pa = pyarrow()
        if self._kinds is None:
            return schema
        others = [schema.field(name) for name in schema.names if name not in self.kept]
        return pa.schema([*others, *self.schema])


class Spilled:
    """Rows in a file of this machine, in the order in which they came."""

    def __init__(self, path: Path, schema: Any) -> None:
        self.path, self.schema = path, schema
        self.nbytes = 0
        self._keys: set[int] = set()
        ipc = pyarrow().ipc
        self._file = pyarrow().OSFile(str(path), "wb")
        self._writer = ipc.new_stream(self._file, schema, options=ipc.IpcWriteOptions(compression="lz4"))

    @property
    def is_one_group(self) -> bool:
        """Whether all rows are of one group."""
        return len(self._keys) == 1

    def add(self, rows: Any, keys: set[int]) -> None:
        """Appends rows of some keys, which are given by their hashes."""
        if len(self._keys) < 2:
            self._keys |= keys
        self.nbytes += rows.nbytes
        self._writer.write_table(rows.combine_chunks())

    def finish(self) -> None:
        """Ends writing."""
        self._writer.close()
        self._file.close()

    def parts(self) -> Iterator[Any]:
        """All rows, as they were added."""
        pa = pyarrow()
        with pa.OSFile(str(self.path), "rb") as file, pa.ipc.open_stream(file) as reader:
            for batch in reader:
                yield pa.Table.from_batches([batch])


def _joined(parts: Iterator[Any]) -> Iterator[Any]:
    """Small parts as larger ones, of `READ_ROWS` rows at most."""
    held: list[Any] = []
    for part in parts:
        if held and sum(each.num_rows for each in held) + part.num_rows > READ_ROWS:
            yield pyarrow().concat_tables(held).combine_chunks()
            held = []
        held.append(part)
    if held:
        yield pyarrow().concat_tables(held).combine_chunks()


def _packs(rows: Sequence[int], nbytes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges of groups that are written together; a large one is alone."""
    low, held_rows, held_bytes = 0, 0, 0
    for n in range(len(rows)):
        if n > low and (held_rows + rows[n] > _PACK_ROWS or held_bytes + nbytes[n] > _PACK_BYTES):
            yield low, n
            low, held_rows, held_bytes = n, 0, 0
        held_rows += rows[n]
        held_bytes += nbytes[n]
    yield low, len(rows)


def _writer(path: Path, schema: Any) -> Any:
    from pyarrow import parquet

    return parquet.ParquetWriter(path, schema, compression="zstd", compression_level=1, use_dictionary=True)


def _index(keys: Sequence[str], firsts: Any, rows: Any, nbytes: Sequence[int], costs: Any, digests: Sequence[bytes]) -> Any:
    pa = pyarrow()
    schema = group_schema()
    columns = (keys, np.zeros(len(keys), np.int32), firsts, rows, nbytes, costs, digests)
    return pa.table([pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema)
