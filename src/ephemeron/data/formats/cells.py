"""Cells of CSV: those of a record, and which of them are numbers.

Everything in a file is text. It is a number only where the number is all that the text says: `7`, `-0.50`, `+1.`, ` 3e-5`. What would
become another text is none, though Python or NumPy read it: `007`, `1e3`, `1_000`, `٣`, `nan`, and whole numbers above 2^53, of which a
float holds only some. These are names: zip codes, article numbers, hashes.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from typing import Literal

from ephemeron.data.formats.lines import mark_of
from ephemeron.data.formats.records import CsvRecords
from ephemeron.errors import JobError

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
        (cells,) = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    except ValueError:  # more rows than one
        raise ValueError("has a carriage return that is not quoted; lines end in \\n or \\r\\n") from None
    except csv.Error as e:
        raise ValueError(f"cannot be read: {e}") from None
    return cells


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
