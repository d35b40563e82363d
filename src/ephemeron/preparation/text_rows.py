"""Rows of text. Those of CSV as columns of Arrow: parsed at once by pyarrow, and row by row only to find which rows are invalid.

pyarrow reads `007` and `1e3` as numbers, and a carriage return as the end of a row. Both are looked for in the bytes, which is quick, and
only where they occur, rows are compared with their texts.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ephemeron.data.formats.lines import mark_of
from ephemeron.data.formats.records import (
    LARGEST,
    NUMBER,
    ZERO,
    CsvRecords,
    cells_of,
    has_lone_return,
    header_of,
    is_name_of_digits,
    is_number,
)
from ephemeron.data.tables.arrow import INDICES, VALUES, beyond_float32, pyarrow
from ephemeron.data.tables.manifest import Column
from ephemeron.errors import JobError
from ephemeron.preparation.load_plan import MOSTLY, LabelKind, Layout, Parsed, Reject, invalid_rows
from ephemeron.preparation.values import NUMBER as LIBSVM_NUMBER

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


# -- rows of LIBSVM text ------------------------------------------------------------------------------------------


FEATURES, LABEL = "features", "label"
LARGEST_WIDTH = 1 << 31
_COMMENT = re.compile(rb"#[^\n]*")
_ZERO = re.compile(rb"[^:]*:[+-]?[0.]+(?![1-9.0])")
"""From the beginning of an entry on: its value is 0."""


class LibsvmParser:
    """Parses whole lines.

    Args:
        label_kind: which labels are allowed; binary ones may be -1 and 1, too.
        zero_based: whether indices begin at 0.
        n_features: indices are below it; None: any.
    """

    def __init__(self, label_kind: LabelKind, *, zero_based: bool = False, n_features: int | None = None) -> None:
        self._kind: LabelKind = label_kind
        self._first, self._width = 0 if zero_based else 1, n_features or LARGEST_WIDTH

    def parse(self, text: bytes) -> Parsed:
        """Valid rows and invalid ones. Blank lines and comments are no rows."""
        if b"#" in text:
            text = _COMMENT.sub(b"", text)
        found = self._read(text)
        if found is not None:
            return Parsed(_table(*found), [], _width(found[2]))
        lines = text.split(b"\n")
        reasons = {n: self._reason(line) for n, line in enumerate(lines) if line.strip()}
        rejects = [Reject(n, *reason, lines[n].decode(errors="replace")) for n, reason in reasons.items() if reason]
        good = self._read(b"\n".join(lines[n] for n, reason in reasons.items() if not reason))
        assert good is not None, "valid line by line, and not together"
        return Parsed(_table(*good), rejects, _width(good[2]))

    def _read(self, text: bytes) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]] | None:
        """Labels, offsets, indices and values; None: something is invalid."""
        empty = np.empty(0)
        if not text.strip():
            return empty, np.zeros(1, np.int64), empty.astype(np.int64), empty
        data = np.frombuffer(text, np.uint8)
        space = (data == 32) | ((data >= 9) & (data <= 13))
        begins = ~space & np.concatenate([[True], space[:-1]])
        words = np.cumsum(begins)
        colons = np.flatnonzero(data == 58)
        breaks = np.flatnonzero(data == 10)
        edges = np.concatenate([[0], words[breaks], words[-1:]])
        per_line = np.diff(edges)
        rows = edges[:-1][per_line > 0]  # number of the first word of each row
        counts = per_line[per_line > 0] - 1
        of_word = np.bincount(words[colons] - 1, minlength=int(words[-1]))
        expected = np.ones(int(words[-1]), np.int64)
        expected[rows] = 0
        if not np.array_equal(of_word, expected):
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)  # older NumPy warns where others raise
            try:
                numbers = np.fromstring(text.replace(b":", b" ").decode("latin-1"), np.float64, sep=" ")
            except (ValueError, DeprecationWarning):
                return None
        if len(numbers) != len(rows) + 2 * int(counts.sum()):
            return None
        indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        at = np.arange(len(rows)) + 2 * indptr[:-1]
        labels, pairs = numbers[at], np.delete(numbers, at).reshape(-1, 2)
        indices = pairs[:, 0] - self._first
        whole = np.array_equal(indices, np.floor(indices)) and bool(np.all((indices >= 0) & (indices < self._width)))
        rising = np.diff(indices) > 0
        rising[indptr[1:-1][(indptr[1:-1] > 0) & (indptr[1:-1] < len(indices))] - 1] = True
        labels = self._labels(labels)
        if not (whole and rising.all() and np.isfinite(labels).all()) or beyond_float32(pairs[:, 1]).any():
            return None
        zeros = np.flatnonzero(pairs[:, 1] == 0)
        if len(zeros):  # of which some may be written as numbers that float64 makes 0
            of_entry = np.flatnonzero(begins)[np.delete(np.arange(len(expected)), rows)]
            if any(not _ZERO.match(text, at) for at in of_entry[zeros].tolist()):
                return None
        return labels, indptr, indices.astype(np.int64), pairs[:, 1]

    def _labels(self, labels: NDArray[np.float64]) -> NDArray[np.float64]:
        """Labels as they are stored; NaN: not allowed."""
        if self._kind == "binary":
            return np.where(labels == -1, 0.0, np.where((labels == 0) | (labels == 1), labels, np.nan))
        if self._kind == "class":
            return np.where((labels >= 0) & (labels == np.floor(labels)) & (labels < 2**31), labels, np.nan)
        return labels

    def _reason(self, line: bytes) -> tuple[str, str] | None:
        """Column and reason of an invalid line."""
        label, *entries = (word.decode(errors="replace") for word in line.split())  # only ASCII's spaces part words
        number = _number(label)
        if number is None:
            return LABEL, f"{label!r} is not a number"
        if not np.isfinite(self._labels(np.array([number])))[0]:
            allowed = {"binary": "no binary label: 0 or 1, or -1 or 1", "class": "no class: a whole number from 0"}
            return LABEL, f"{label} is {allowed.get(self._kind, 'infinite')}"
        before = self._first - 1.0
        for entry in entries:
            index, colon, value = entry.partition(":")
            at, number = _number(index), _number(value)
            if not colon or at is None or not math.isfinite(at) or at != math.floor(at):
                return FEATURES, f"{entry!r} is no INDEX:VALUE"
            if number is None:
                return FEATURES, f"{value!r} is not a number"
            if beyond_float32(np.array([number]))[0] or (number == 0 and not _ZERO.match(f":{value}".encode())):
                return FEATURES, f"{value} is beyond float32"
            if at < self._first:
                return FEATURES, f"index {index} is below {self._first}"
            if at - self._first >= self._width:
                return FEATURES, f"index {index} is above {self._width - 1 + self._first}, the last of n_features"
            if at <= before:
                return FEATURES, f"index {index} comes after {before:g}: indices should rise"
            before = at
        return None


def _number(text: str) -> float | None:
    return float(text) if LIBSVM_NUMBER.fullmatch(text) else None


def _width(indices: NDArray[np.int64]) -> int:
    return int(indices.max()) + 1 if len(indices) else 1


def _table(labels: NDArray[Any], indptr: NDArray[Any], indices: NDArray[Any], values: NDArray[Any]) -> Any:
    pa = pyarrow()
    offsets = pa.array(indptr.astype(np.int32))
    return pa.table(
        {
            LABEL: labels,
            FEATURES + INDICES: pa.ListArray.from_arrays(offsets, pa.array(indices)),
            FEATURES + VALUES: pa.ListArray.from_arrays(offsets, pa.array(values.astype(np.float32))),
        }
    )
