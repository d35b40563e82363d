"""Rows of CSV as columns of Arrow: parsed at once by pyarrow, and row by row only to find which rows are invalid."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ephemeron.data.tables.arrow import pyarrow
from ephemeron.data.tables.manifest import Column
from ephemeron.errors import JobError
from ephemeron.preparation.layout import MOSTLY, Layout, Parsed, Reject, invalid_rows
from ephemeron.preparation.records import CsvRecords

SAMPLE_BYTES = 1_000_000
_BOM = b"\xef\xbb\xbf"
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

    def parse(self, text: bytes) -> Parsed:
        """Valid rows and invalid ones. Blank lines are no rows."""
        pa = pyarrow()
        try:
            table = self._read(text)
        except pa.ArrowInvalid:
            return self._one_by_one(text)
        return Parsed(table, []) if not self._invalid(table) else self._one_by_one(text)

    def _invalid(self, table: Any) -> dict[int, tuple[str, str]]:
        return invalid_rows(table, self._columns, self._layout.label_kind)

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
                table = self._read(text[spans[low][0] : spans[high - 1][1]])
            except pa.ArrowInvalid as e:
                if high - low > 1:
                    middle = (low + high) // 2
                    waiting += [(middle, high), (low, middle)]  # the first half is next
                    continue
                column, reason = self._reason(str(e))
                rejects.append(Reject(int(lines[low]), column, reason, _shown(text, spans[low])))
                continue
            bad = self._invalid(table)
            if bad:
                rejects += [Reject(int(lines[low + n]), *bad[n], _shown(text, spans[low + n])) for n in sorted(bad)]
                table = table.filter(pa.array(np.isin(np.arange(table.num_rows), list(bad), invert=True)))
            tables.append(table)
        return Parsed(pa.concat_tables(tables), rejects)

    def _read(self, text: bytes) -> Any:
        pa, csv = _modules()
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
        )  # fmt: skip

    def _reason(self, message: str) -> tuple[str, str]:
        if found := _VALUE.search(message):
            return self._names[int(found[1])], f"{found[2]!r} is not a number"
        if found := _BYTES.search(message):
            return self._names[int(found[1])], "is not UTF-8"
        if found := _FIELDS.search(message):
            return "", f"has {found[2]} fields instead of {found[1]}"
        return "", message.partition("\n")[0]


def csv_names(data: bytes, layout: Layout, *, where: str) -> list[str]:
    """Names of the columns of a file, from its beginning.

    Raises:
        JobError: it has no header, though it should have.
    """
    if not layout.header:
        if not layout.names:
            raise JobError(
                f"{where}: files without a header need the names of their columns", remedy="give names = […]"
            )
        return list(layout.names)
    first = first_record(data, layout)
    pa, csv = _modules()
    try:
        options = csv.ReadOptions(autogenerate_column_names=True, use_threads=False)
        every = csv.ConvertOptions(check_utf8=True)
        row = csv.read_csv(
            pa.BufferReader(first), read_options=options, parse_options=_parse_options(layout), convert_options=every
        )
    except pa.ArrowInvalid:
        raise JobError(f"{where} has no header line", remedy="set header = false and give names") from None
    return [str(column[0].as_py() or "").strip() for column in row.columns]


def first_record(data: bytes, layout: Layout) -> bytes:
    """The first record of a file, without a byte-order mark."""
    data = data.removeprefix(_BOM)
    return data[: CsvRecords(layout.delimiter).next_record(data, "field") or len(data)]


def csv_sample(data: bytes, layout: Layout) -> bytes:
    """The records after the header in the beginning of a file, of which the last one may be cut and is left out."""
    records = CsvRecords(layout.delimiter)
    begin = len(first_record(data, layout)) + (len(_BOM) if data.startswith(_BOM) else 0) if layout.header else 0
    if len(data) < SAMPLE_BYTES:
        return data[begin:]
    return data[begin : max((a for a, _ in records.spans(data[begin:])), default=0) + begin]


def numeric_columns(sample: bytes, names: Sequence[str], layout: Layout) -> dict[str, bool]:
    """Whether most values of each column of a sample are numbers."""
    pa = pyarrow()
    text = [Column(name=name, kind="categorical", dtype="string") for name in names]
    table = CsvParser(layout, names, text).parse(sample).table
    number = r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*$"
    found = {}
    for name in names:
        values = table.column(name).drop_null()
        numbers = pa.compute.sum(pa.compute.match_substring_regex(values, number)).as_py() or 0
        found[name] = len(values) > 0 and numbers >= MOSTLY * len(values)
    return found


def _parse_options(layout: Layout) -> Any:
    return _modules()[1].ParseOptions(delimiter=layout.delimiter, newlines_in_values=True)


def _modules() -> tuple[Any, Any]:
    pa = pyarrow()
    from pyarrow import compute, csv  # noqa: F401 - pa.compute

    return pa, csv


def _shown(text: bytes, span: tuple[int, int]) -> str:
    return text[span[0] : span[1]].rstrip(b"\r\n").decode(errors="replace")
