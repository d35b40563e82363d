"""Lines of UTF-8 text of users: the one rule of where they end, for tables, lists of items and transcripts.

A line ends in a line feed, with or without a carriage return before it, and nowhere else: U+2028, U+2029, NEL, form feeds and carriage
returns alone are text, unlike for `str.splitlines`. A byte-order mark is taken off.
"""

from __future__ import annotations

from ephemeron.errors import JobError
from ephemeron.user_code import line_of, raised_by

_UTF8 = b"\xef\xbb\xbf"
_OTHERS = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


def mark_of(data: bytes, where: str) -> int:
    """Length of the byte-order mark with which a text begins.

    Args:
        data: its beginning.
        where: name of the file, for errors.

    Raises:
        JobError: it is the mark of UTF-16 or UTF-32.
    """
    for mark, name in _OTHERS.items():
        if data.startswith(mark):
            raise JobError(f"{where} is {name}, and only UTF-8 is read", remedy=f"iconv -f {name} -t UTF-8 FILE")
    return len(_UTF8) if data.startswith(_UTF8) else 0


def text_lines(data: bytes, where: str) -> list[tuple[int, str]]:
    """The lines of a text that are not blank, with their numbers from 1.

    Raises:
        JobError: it is not UTF-8; names the line.
    """
    lines = []
    for number, line in enumerate(data[mark_of(data, where) :].split(b"\n"), start=1):
        try:
            text = line.removesuffix(b"\r").decode()
        except UnicodeDecodeError as e:
            raise JobError(
                f"{where}, line {number} is not UTF-8: {e.reason} at byte {e.start}",
                remedy="convert it, such as: iconv -f LATIN1 -t UTF-8 FILE",
            ) from None
        if text.strip():
            lines.append((number, text))
    return lines


# -- errors of libraries as one line of text ----------------------------------------------------------------------


def one_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where it has none. Never raises."""
    try:
        lines = str(raised_by(error)).strip().splitlines()
    except Exception:  # noqa: BLE001 - the error's own code
        return line_of(error)
    return lines[0].rstrip(":") if lines else line_of(error)
