"""Where records begin and end in a part of a text that was cut anywhere.

A reader of CSV is in one of five states: at the beginning of a record, at that of a field, in a plain field, in a quoted field, or behind a
quote in a quoted field, which ends the field unless another quote follows. Which of them it is in at a cut depends on all text before. So
each part of a file is scanned from all five states at once, without the text before it; the states at the cuts follow from these tables
alone (`resolve`). The scan is one regular expression over fields, at 200 MB/s; a part without quotes needs none.

Cells of CSV: those of a record, and which of them are numbers.

Everything in a file is text. It is a number only where the number is all that the text says: `7`, `-0.50`, `+1.`, ` 3e-5`. What would
become another text is none, though Python or NumPy read it: `007`, `1e3`, `1_000`, `٣`, `nan`, and whole numbers above 2^53, of which a
float holds only some. These are names: zip codes, article numbers, hashes.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import IO, Literal, TypeAlias

from ephemeron.data.formats.lines import mark_of
from ephemeron.errors import JobError

State: TypeAlias = Literal["record", "field", "plain", "quoted", "quote"]
STATES: tuple[State, ...] = ("record", "field", "plain", "quoted", "quote")
Ends: TypeAlias = dict[State, State]
"""State at the end of a part by the one at its beginning."""

_CLOSED = rb'[^"]*+(?:""[^"]*+)*+'
"""Text of a quoted field."""


class CsvRecords:
    """Records of CSV by RFC 4180: fields may be quoted, and quoted fields hold line ends and delimiters; a quote in them is doubled.

    Args:
        delimiter: one character.
    """

    def __init__(self, delimiter: str = ",") -> None:
        self._delimiter = delimiter.encode()
        self._fields, self._field, self._rest, self._record = _patterns(self._delimiter)

    def ends(self, data: bytes) -> Ends:
        """State at the end of a part for each at its beginning."""
        record = self.end(data, "record")
        ends: Ends = {state: self.end(data, state) for state in STATES if state not in ("record", "field")}
        return {"record": record, "field": record if data else "field", **ends}

    def end(self, data: bytes, state: State) -> State:
        """State at the end of a part that begins in `state`."""
        if data and b'"' not in data:
            last = data[-1:]
            outside: State = "record" if last == b"\n" else "field" if last == self._delimiter else "plain"
            return "quoted" if state == "quoted" else outside
        at, state = self._outside(data, state)
        if at == len(data):
            return state
        done = self._fields.match(data, at)
        end = done.end() if done else at
        if end > at:
            state = "record" if data[end - 1 : end] == b"\n" else "field"
        return state if end == len(data) else self._unfinished(data, end)

    def next_record(self, data: bytes, state: State) -> int | None:
        """Offset of the first beginning of a record in a part that begins in `state`; None: none begins in it."""
        if state == "record":
            return 0
        at, state = self._outside(data, state)
        while state == "field":
            if at == len(data):
                return None
            found = self._field.match(data, at)
            if found is None:
                return None
            at = found.end()
            if data[at - 1 : at] == b"\n":
                return at
        return at if state == "record" else None

    def spans(self, data: bytes) -> list[tuple[int, int]]:
        """Begin and end of each record of a text that begins with a record; the last one may lack its line end."""
        found, at = [], 0
        while (match := self._record.match(data, at)) is not None:
            found.append(match.span())
            at = match.end()
        return found if at == len(data) else [*found, (at, len(data))]

    def _outside(self, data: bytes, state: State) -> tuple[int, State]:
        """The first offset at which a field begins, and whether a record does; or the end and the state there."""
        at = 0
        if not data:
            return 0, state
        if state == "quote":
            if data[:1] == b'"':
                at, state = 1, "quoted"
            else:
                state = "plain"
        if state == "quoted":
            closed = re.compile(_CLOSED).match(data, at)
            assert closed is not None  # it matches the empty text
            at = closed.end()
            if at == len(data):
                return at, "quoted"
            at, state = at + 1, "plain"
            if at == len(data):
                return at, "quote"
        if state == "plain":
            rest = self._rest.match(data, at)
            if rest is None:
                return len(data), "plain"
            at = rest.end()
            state = "record" if data[at - 1 : at] == b"\n" else "field"
        return at, state

    def _unfinished(self, data: bytes, at: int) -> State:
        """State at the end of a text whose last field, which begins at `at`, has no end."""
        if data[at : at + 1] != b'"':
            return "plain"
        closed = re.compile(_CLOSED).match(data, at + 1)
        assert closed is not None
        end = closed.end()
        return "quoted" if end == len(data) else "quote" if end + 1 == len(data) else "plain"


class LineRecords:
    """Records that are lines."""

    def ends(self, data: bytes) -> Ends:
        return {state: self.end(data, state) for state in STATES}

    def end(self, data: bytes, state: State) -> State:
        return state if not data else "record" if data.endswith(b"\n") else "plain"

    def next_record(self, data: bytes, state: State) -> int | None:
        if state == "record":
            return 0
        return data.find(b"\n") + 1 or None

    def spans(self, data: bytes) -> list[tuple[int, int]]:
        ends = [found.end() for found in re.finditer(rb"\n", data)]
        if not data.endswith(b"\n") and data:
            ends.append(len(data))
        return list(zip([0, *ends], ends, strict=False))


Records: TypeAlias = CsvRecords | LineRecords


@cache
def _patterns(delimiter: bytes) -> tuple[re.Pattern[bytes], re.Pattern[bytes], re.Pattern[bytes], re.Pattern[bytes]]:
    d = re.escape(delimiter)
    body = rb'(?:"' + _CLOSED + rb'"[^' + d + rb"\n]*+|(?!\")[^" + d + rb"\n]*+)"
    field = body + rb"[" + d + rb"\n]"
    return (
        re.compile(rb"(?:" + field + rb")*+"),
        re.compile(field),
        re.compile(rb"[^" + d + rb"\n]*+[" + d + rb"\n]"),
        re.compile(rb"(?:" + body + d + rb")*+" + body + rb"\n"),
    )


def resolve(ends: Sequence[Ends]) -> list[State]:
    """States at the beginnings of parts that follow each other in a file, the first of which begins it."""
    states: list[State] = []
    state: State = "record"
    for table in ends:
        states.append(state)
        state = table[state]
    return states


# -- cells of CSV: those of a record, and which of them are numbers -----------------------------------------------


NUMBER = r"^[ \t]*[+-]?(?:(?:0|[1-9][0-9]{0,14})(?:[eE][+-][0-9]+)?|(?:(?:0|[1-9][0-9]*)\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)[ \t]*$"
"""Numbers but whole ones of more than 15 digits, for Python's and Google's regular expressions."""
LARGEST = 1 << 53
"""Up to it every whole number is a float."""
ZERO = "^[^1-9eE]*(?:[eE].*)?$"
"""Numbers that are 0, and not only too small."""
_NUMBER, _ZERO = re.compile(NUMBER.replace("$", r"\Z"), re.ASCII), re.compile(ZERO)
_WHOLE = re.compile(r"[ \t]*[+-]?(?:0|[1-9][0-9]*)[ \t]*\Z", re.ASCII)
_LONE_RETURN = re.compile(rb"\r(?!\n|\Z)")


def is_number(text: str) -> bool:
    """Whether a text is a number that a float64 holds, and says nothing else."""
    if _NUMBER.match(text):
        return math.isfinite(value := float(text)) and (value != 0 or _ZERO.match(text) is not None)
    return len(text) < 100 and _WHOLE.match(text) is not None and abs(int(text)) <= LARGEST


def is_name_of_digits(text: str) -> bool:
    """Whether a text is no number, and yet would be read as one: `007`, `1e3`, `1_000`."""
    if is_number(text) or not any(c.isdigit() for c in text):
        return False
    try:
        float(text)
    except ValueError:
        return False
    return True


def kind_of(texts: Sequence[str]) -> Literal["int", "float", "text"]:
    """What all cells of a column are. Whole numbers are Python's, of up to 4,000 digits."""
    if all(len(text) <= 4000 and _WHOLE.match(text) for text in texts):
        return "int"
    return "float" if all(map(is_number, texts)) else "text"


def has_lone_return(text: bytes) -> bool:
    """Whether there is a carriage return that ends no line."""
    return _LONE_RETURN.search(text) is not None


def rows_of(text: str, delimiter: str) -> Iterator[list[str]]:
    """The rows of a text, whose fields may be of any length; a blank line is an empty one.

    Raises:
        csv.Error: a carriage return ends no line.
    """
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # the module's own limit is 131,072
    return csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)


def cells_of(record: bytes, delimiter: str) -> list[str]:
    """The cells of a record.

    Raises:
        ValueError: says why there are none: bytes that are not UTF-8, a quote that is not closed, a carriage return alone.
    """
    if CsvRecords(delimiter).end(record, "record") == "quoted":
        raise ValueError("has a quote that is not closed")
    try:
        text = record.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None
    try:
        (cells,) = rows_of(text, delimiter)
    except ValueError:  # more rows than one
        raise ValueError("has a carriage return that is not quoted; lines end in \\n or \\r\\n") from None
    except csv.Error as e:
        raise ValueError(f"cannot be read: {e}") from None
    return cells


class CsvRows:
    """Writes rows of CSV with line ends of one newline. `cells_of` reads what was written: fields with a carriage return are quoted, too.

    Args:
        file: open for text, with `newline=""`.
        delimiter: one character.
    """

    def __init__(self, file: IO[str], delimiter: str) -> None:
        self._file = file
        self._writer = csv.writer(self, delimiter=delimiter, lineterminator="\r\n")  # the module quotes what has a character of it

    def write(self, line: str) -> None:
        """Takes a line from the module."""
        self._file.write(f"{line[:-2]}\n")

    def rows(self, rows: Iterable[Iterable[str | None]]) -> None:
        """Writes rows; None is an empty cell."""
        self._writer.writerows(rows)


def header_of(data: bytes, delimiter: str, where: str) -> tuple[list[str], int]:
    """The names in the first line of a file, as they are written, and the bytes up to the next record.

    Args:
        data: beginning of the file, with the whole header.
        delimiter: one character.
        where: name of the file, for errors.

    Raises:
        JobError: there is no header, it is blank, not UTF-8 or not closed, or has a name twice.
    """
    begin = mark_of(data, where)
    end = begin + (CsvRecords(delimiter).next_record(data[begin:], "field") or len(data) - begin)
    record = data[begin:end]
    if not record.strip(b"\r\n"):
        what = "begins with a blank line, where its header should be" if record else "has no header line"
        raise JobError(f"{where} {what}", remedy="put the names of the columns into the first line")
    if b"\0" in record:
        raise JobError(f"{where}: its header has bytes of 0", remedy="convert it to UTF-8, or mend it")
    try:
        names = cells_of(record, delimiter)
    except ValueError as e:
        raise JobError(f"{where}: its header {e}", remedy="convert its line ends and its encoding, or mend it") from None
    return names, end


def check_names(names: Sequence[str], where: str) -> None:
    """Refuses columns of one name: one of them would be lost.

    Raises:
        JobError: a name is there twice.
    """
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise JobError(f"{where} has two columns {twice[0]!r}", remedy="give each its own name")
