"""Rows of CSV as columns of Arrow: parsed at once by pyarrow, and row by row only to find which rows are invalid.

pyarrow reads `007` and `1e3` as numbers, and a carriage return as the end of a row. Both are looked for in the bytes, which is quick, and
only where they occur, rows are compared with their texts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ephemeron.data.formats.cells import LARGEST, NUMBER, ZERO, cells_of, has_lone_return, header_of, is_name_of_digits, is_number
from ephemeron.data.formats.lines import mark_of
from ephemeron.data.formats.records import CsvRecords
from ephemeron.data.tables.arrow import pyarrow
from ephemeron.data.tables.manifest import Column
from ephemeron.errors import JobError
from ephemeron.preparation.layout import MOSTLY, Layout, Parsed, Reject, invalid_rows

SAMPLE_BYTES = 1_000_000
_NOT_AS_WRITTEN = re.compile(rb"(?<![0-9.])0[0-9]|[0-9][eE][0-9]|[eE]-[0-9]{3}")
"""Where there may be a name of digits, or a number that is too small for float64."""
_VALUE = re.compile(r"In CSV column #(\d+):.*invalid value '(.*)'", re.DOTALL)
_BYTES = re.compile(r"In CSV column #(\d+):.*invalid UTF8")
_FIELDS = re.compile(r"Expected (\d+) columns, got (\d+)")


class CsvParser:
    """Parses whole records.

    Args:
        layout: how to read them.
        names: of all columns, in order.
        columns: that are wanted.
    """

    def __init__(self, layout: Layout, names: Sequence[str], columns: Sequence[Column]) -> None:
        self._layout, self._names, self._columns = layout, list(names), list(columns)
        self._records = CsvRecords(layout.delimiter)
        self._numeric = [column.name for column in columns if column.kind == "numeric"]

    def parse(self, text: bytes) -> Parsed:
        """Valid rows and invalid ones. Blank lines are no rows."""
        pa = pyarrow()
        if has_lone_return(text):
            return self._one_by_one(text)
        try:
            table = self._read(text)
        except pa.ArrowInvalid:
            return self._one_by_one(text)
        return Parsed(table, []) if not self._invalid(table, text) else self._one_by_one(text)

    def _invalid(self, table: Any, text: bytes) -> dict[int, tuple[str, str]]:
        """Column and reason of invalid rows of a text."""
        pa = pyarrow()
        found: dict[int, tuple[str, str]] = {}
        for column in self._columns:  # words for NaN that do not stand for absent values
            if column.kind in ("numeric", "label"):
                nans = pa.compute.is_nan(table.column(column.name)).fill_null(False)
                found |= dict.fromkeys(np.flatnonzero(nans.to_numpy()).tolist(), (column.name, "is not a number"))
        return invalid_rows(table, self._columns, self._layout.label_kind) | self._not_as_written(table, text) | found

    def _not_as_written(self, table: Any, text: bytes) -> dict[int, tuple[str, str]]:
        """Rows with a number that says something else than its text."""
        pa = pyarrow()
        compute = pa.compute
        large = (compute.max(compute.abs(table.column(name))).as_py() or 0 for name in self._numeric)
        if not (self._numeric and (_NOT_AS_WRITTEN.search(text) or any(value >= LARGEST for value in large))):
            return {}
        texts = self._read(text, dict.fromkeys(self._numeric, pa.string()))
        found: dict[int, tuple[str, str]] = {}
        for name in self._numeric:
            values, numbers = texts.column(name), table.column(name)
            if _digits_alone(values):
                continue
            tiny = compute.and_(compute.equal(numbers, 0), compute.invert(compute.match_substring_regex(values, ZERO)))
            for row in np.flatnonzero(tiny.fill_null(False).to_numpy()).tolist():
                found[row] = name, f"{values[row].as_py()!r} is too small for float64"
            if name in self._layout.columns:  # the user says what it is
                continue
            others = compute.invert(compute.match_substring_regex(values, NUMBER)).fill_null(False)
            for row in np.flatnonzero(others.to_numpy()).tolist():
                if not is_number(value := values[row].as_py()):
                    why = f"{value!r} would be read as {numbers[row].as_py()}"
                    found[row] = name, f'{why}; set the kind of the column: "categorical" or "numeric"'
        return found

    def _one_by_one(self, text: bytes) -> Parsed:
        """Halves the rows until those that pyarrow refuses are alone."""
        pa = pyarrow()
        spans = [(a, b) for a, b in self._records.spans(text) if text[a:b].strip(b"\r\n")]
        breaks = np.flatnonzero(np.frombuffer(text, np.uint8) == 10)
        lines = np.searchsorted(breaks, [a for a, _ in spans])
        tables, rejects, waiting = [self._read(b"")], [], [(0, len(spans))]
        while waiting:
            low, high = waiting.pop()
            if low == high:
                continue
            try:
                some = text[spans[low][0] : spans[high - 1][1]]
                table = self._read(some)
                if table.num_rows != high - low:
                    raise pa.ArrowInvalid("a carriage return within a row")
            except pa.ArrowInvalid as e:
                if high - low > 1:
                    middle = (low + high) // 2
                    waiting += [(middle, high), (low, middle)]  # the first half is next
                    continue
                column, reason = self._reason(str(e), some)
                rejects.append(Reject(int(lines[low]), column, reason, _shown(text, spans[low])))
                continue
            bad = self._invalid(table, some)
            if bad:
                rejects += [Reject(int(lines[low + n]), *bad[n], _shown(text, spans[low + n])) for n in sorted(bad)]
                table = table.filter(pa.array(np.isin(np.arange(table.num_rows), list(bad), invert=True)))
            tables.append(table)
        return Parsed(pa.concat_tables(tables), rejects)

    def _read(self, text: bytes, types: Mapping[str, Any] | None = None) -> Any:
        """All columns, or those of other types than their kinds'."""
        pa, csv = _modules()
        if types is None:
            types = {c.name: pa.string() if c.kind == "categorical" else pa.float64() for c in self._columns}
        if not text.strip(b"\r\n"):
            return pa.schema(types.items()).empty_table()
        return csv.read_csv(
            pa.BufferReader(text),
            read_options=csv.ReadOptions(column_names=self._names, use_threads=False, block_size=len(text) + 1),
            parse_options=_parse_options(self._layout),
            convert_options=csv.ConvertOptions(
                column_types=types, include_columns=list(types), null_values=list(self._layout.missing), strings_can_be_null=True
            ),
        )

    def _reason(self, message: str, record: bytes) -> tuple[str, str]:
        """Column and reason for which pyarrow refuses a record."""
        if has_lone_return(record):
            try:
                cells_of(record, self._layout.delimiter)
            except ValueError as e:
                return "", str(e)
        if found := _VALUE.search(message):
            return self._names[int(found[1])], f"{found[2]!r} is not a number"
        if found := _BYTES.search(message):
            return self._names[int(found[1])], "is not UTF-8"
        if found := _FIELDS.search(message):
            return "", f"has {found[2]} fields instead of {found[1]}"
        return "", message.partition("\n")[0]


def csv_names(data: bytes, layout: Layout, *, where: str) -> list[str]:
    """Names of the columns of a file, from its beginning, as they are written there.

    Raises:
        JobError: it has no header, though it should have, or one that cannot be read.
    """
    if layout.header:
        return header_of(data, layout.delimiter, where)[0]
    if not layout.names:
        raise JobError(f"{where}: files without a header need the names of their columns", remedy="give names = […]")
    return list(layout.names)


def begin_of_rows(data: bytes, layout: Layout, *, where: str) -> int:
    """Bytes before the first row of a file: its byte-order mark and its header; raises as `csv_names` does."""
    return header_of(data, layout.delimiter, where)[1] if layout.header else mark_of(data, where)


def csv_sample(data: bytes, layout: Layout, *, where: str) -> bytes:
    """The records after the header in the beginning of a file, of which the last one may be cut and is left out."""
    rows = data[begin_of_rows(data, layout, where=where) :]
    if len(data) < SAMPLE_BYTES:
        return rows
    return rows[: max((a for a, _ in CsvRecords(layout.delimiter).spans(rows)), default=0)]


def numeric_columns(sample: bytes, names: Sequence[str], layout: Layout) -> dict[str, bool]:
    """Whether the values of each column of a sample are numbers: most of them, and none that would become another text (`MOSTLY`)."""
    pa = pyarrow()
    text = [Column(name=name, kind="categorical", dtype="string") for name in names]
    table = CsvParser(layout, names, text).parse(sample).table
    found = {}
    for name in names:
        values = table.column(name).drop_null()
        numbers = pa.compute.match_substring_regex(values, NUMBER)
        others = values.filter(pa.compute.invert(numbers)).to_pylist()
        count = len(values) - sum(not is_number(text) for text in others)
        found[name] = count > 0 and count >= MOSTLY * len(values) and not any(map(is_name_of_digits, others))
    return found


def _digits_alone(values: Any) -> bool:
    """Whether the texts of numbers have nothing but digits, signs and points, few digits, and no zero before another digit: twenty times as
    quick as an expression, for the columns that most tables have."""
    for chunk in values.chunks:
        _, offsets, data = chunk.buffers()
        ends = np.frombuffer(offsets, np.int32)[chunk.offset : chunk.offset + len(chunk) + 1]
        begins, ends = ends[:-1], ends[1:]
        text = np.frombuffer(data or b"", np.uint8)
        used = text[begins[0] : ends[-1]] if len(begins) else text[:0]
        if not len(used):
            continue
        if used.max() > ord("9") or used.min() < ord("+") or (ends - begins).max() > 15:
            return False
        text = np.append(text, [0, 0, 0])  # behind empty texts at the end
        begins = begins + (text[begins] < ord("."))  # a sign
        if ((text[begins] == ord("0")) & (text[begins + 1] >= ord("0")) & (begins + 1 < ends)).any():
            return False
    return True


def _parse_options(layout: Layout) -> Any:
    return _modules()[1].ParseOptions(delimiter=layout.delimiter, newlines_in_values=True)


def _modules() -> tuple[Any, Any]:
    pa = pyarrow()
    from pyarrow import compute, csv  # noqa: F401 - pa.compute

    return pa, csv


def _shown(text: bytes, span: tuple[int, int]) -> str:
    return text[span[0] : span[1]].rstrip(b"\r\n").decode(errors="replace")
