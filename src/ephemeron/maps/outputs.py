"""Where the results of a durable map go beside its table: a file of lines or rows in the order of the items, or an object for each item."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ephemeron.config.paths import located, replace_file
from ephemeron.data.formats.records import LARGEST, CsvRows
from ephemeron.data.tables.arrow import pyarrow
from ephemeron.data.tables.table_file import TABLES
from ephemeron.errors import JobError, UserError

RESULT = "result"
"""Column of results that are no dicts."""
_KEY = "{key}"


def open_output(path: Path) -> LineFile:
    """The file of results at a path, by its ending. It appears when it is whole."""
    return RowFile(path) if path.suffix in TABLES else LineFile(path)


class LineFile:
    """Results as JSON lines.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        is_device = path.exists() and not path.is_file()  # which is written as it is
        self._part = path if is_device else path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Inside, results can be written; afterwards the file is there.

        Raises:
            JobError: it cannot be written.
        """
        try:
            with self._writing():
                yield
            if self._part != self.path:
                self._part.replace(self.path)
        except OSError as e:
            raise JobError(f"{self.path} cannot be written: {e.strerror or e}") from None
        finally:
            if self._part != self.path:
                self._part.unlink(missing_ok=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._part.open("w", encoding="utf-8") as self._file:
            yield

    def refusal(self, value: object) -> str:
        """Why a result cannot be written; empty: it can."""
        return ""

    def write_texts(self, texts: Sequence[str | None]) -> list[tuple[int, str]]:
        """Writes results that are JSON; None for items that have none.

        Returns:
            Positions of those that cannot be written, and why not; nothing stands for them.
        """
        self._file.writelines(f"{'null' if text is None else text}\n" for text in texts)
        return []


class RowFile(LineFile):
    """Results as rows: of CSV, as they come; of Parquet, when all have come. Columns are those of the first result."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._columns: tuple[str, ...] | None = None
        self._kinds: dict[str, str] = {}
        self._floats, self._large = set[str](), set[str]()
        """Columns with numbers that are no integers, and with integers that float64 does not hold."""
        self._rows: list[Mapping[str, Any]] = []
        self._is_written = False

    @contextmanager
    def _writing(self) -> Iterator[None]:
        if self.path.suffix != ".parquet":
            with self._part.open("w", newline="", encoding="utf-8") as self._file:
                yield
                self._columns = self._columns or (RESULT,)
                self._write_csv()
            return
        pa = pyarrow("maps")
        from pyarrow import parquet

        yield
        names = self._columns or (RESULT,)
        parquet.write_table(pa.table({name: [row.get(name) for row in self._rows] for name in names}), self._part)

    def refusal(self, value: object) -> str:
        if value is None:
            return ""
        row = _row(value)
        if not row:
            return "the result is an empty dict, which is no row of a table"
        if (odd := next((text for text in (*row, *row.values()) if isinstance(text, str) and not _is_utf8(text)), None)) is not None:
            return f"{odd!r:.80} of the result has half a surrogate pair, which no table has: write *.jsonl"
        if self._columns is not None and row.keys() != set(self._columns):
            return f"the result has the columns {', '.join(row)}, and those before have {', '.join(self._columns)}"
        for name, cell in row.items():
            if cell is None:
                continue
            kind = "text" if isinstance(cell, str) else "a truth value" if isinstance(cell, bool) else "a number"
            if not isinstance(cell, str | int | float):
                return f"{name} of the result is a {type(cell).__name__}, which a table has not: write *.jsonl"
            before = self._kinds.setdefault(name, kind)
            if self.path.suffix == ".parquet" and (before != kind or (isinstance(cell, int) and abs(cell) >= 1 << 63)):
                return f"{name} of the result is {kind}, {cell!r:.80}, and was {before} before, which a column of Parquet has not"
            is_float = isinstance(cell, float)
            if self.path.suffix == ".parquet" and not isinstance(cell, str) and (is_float or abs(cell) > LARGEST):
                if name in (self._large if is_float else self._floats):
                    return f"{name} of the result, {cell!r}, is in a column of integers beyond 2^53 and fractions, which Parquet has not"
                (self._floats if is_float else self._large).add(name)
        self._columns = self._columns or tuple(row)
        return ""

    def write_texts(self, texts: Sequence[str | None]) -> list[tuple[int, str]]:
        refused = []
        for n, text in enumerate(texts):
            value = None if text is None else json.loads(text)
            if why := self.refusal(value):
                refused.append((n, why))
                value = None
            self._rows.append(_row(value))
        if self.path.suffix != ".parquet" and self._columns is not None:
            self._write_csv()
        return refused

    def _write_csv(self) -> None:
        assert self._columns is not None
        writer = CsvRows(self._file, "\t" if self.path.suffix == ".tsv" else ",")
        if not self._is_written:
            writer.rows([self._columns])
            self._is_written = True
        for row in self._rows:
            cells = (row.get(name) for name in self._columns)
            writer.rows([[cell if cell is None or isinstance(cell, str) else json.dumps(cell) for cell in cells]])
        self._rows.clear()


def _row(value: object) -> Mapping[str, Any]:
    """A result as a row of a table."""
    if value is None:
        return {}
    return {str(name): cell for name, cell in value.items()} if isinstance(value, dict) else {RESULT: value}


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_file(out: Path) -> None:
    """Refuses a file that cannot be written.

    Raises:
        JobError: names why.
    """
    if not out.absolute().parent.is_dir():
        raise JobError(f"there is no folder {out.absolute().parent}", remedy="make it, or name another --out")
    if not os.access(out if out.exists() else out.absolute().parent, os.W_OK) or out.is_dir():
        raise JobError(f"{out} cannot be written", remedy="name another --out")


# -- an object for each item --------------------------------------------------------------------------------------


def is_template(out: str) -> bool:
    """Whether a destination names an object for each item."""
    return "{" in out


class ItemObjects:
    """An object for each item, `PLACE/{key}ENDING`, in a folder or a bucket.

    Args:
        template: with `{key}` in its last part, or in its last parts.

    Raises:
        JobError: it has no `{key}`, or more than that in braces.
    """

    def __init__(self, template: str) -> None:
        if template.count("{") != 1 or _KEY not in template:
            raise JobError(f"--out {template} is no template", remedy=f"write {_KEY} once, such as 'thumbs/{_KEY}.png'")
        self.template = located(template)
        self.root = self.template[: self.template.index(_KEY)].rpartition("/")[0]
        self._store: Any = None

    def stored(self, key: str, text: str | None, data: bytes | None) -> tuple[str | None, bytes | None]:
        """Stores the result of an item; returns what is recorded in its place.

        Args:
            key: of the item.
            text: the result as JSON; None: it is bytes.
            data: the bytes.

        Raises:
            UserError: see `put`.
        """
        return json.dumps(self.put(key, (text or "").encode() if data is None else data)), None

    def put(self, key: str, content: bytes) -> str:
        """Stores what an item has become; what was there is replaced.

        Returns:
            Its path or URL.

        Raises:
            UserError: the key cannot be a part of a path, or it cannot be written.
        """
        parts = [quote(part, safe=" ._-+=@,()~") for part in key.split("/")]
        if any(part in ("", ".", "..") for part in parts):
            raise UserError(f"key {key!r:.80} cannot be a part of a path")
        place = self.template.replace(_KEY, "/".join(parts))
        if "://" not in place:
            path = Path(place)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(path, content)
            except OSError as e:
                raise UserError(f"{place} cannot be written: {e.strerror}") from None
            return place
        import obstore
        from obstore.exceptions import BaseError

        from ephemeron.communication.channels.stores import cloud_store, explain

        scheme, _, rest = place.partition("://")
        bucket, _, path_in = rest.partition("/")
        self._store = self._store or cloud_store(f"{scheme}://{bucket}")
        try:
            obstore.put(self._store, path_in, content, use_multipart=False)
        except (BaseError, OSError) as e:
            raise UserError(f"{place} cannot be written: {explain(e)}") from None
        return place


def table_place(out: str | None, otherwise: str) -> str:
    """Address of the table of results of a destination: beside a file, in a folder or bucket, beside the folder of a template.

    Args:
        out: as the user gives it; None: there is none.
        otherwise: its folder then.
    """
    if out is None:
        return Path(otherwise).absolute().as_uri()
    if is_template(out):
        place = f"{ItemObjects(out).root}.results"
    elif is_folder(out):
        place = located(out).rstrip("/")
    else:
        place = f"{located(out)}.results"
    return place if "://" in place else Path(place).as_uri()


def is_folder(out: str) -> bool:
    """Whether a destination is a folder or the prefix of a bucket, and not a file."""
    place = located(out)
    ending = Path(place.rpartition("/")[2]).suffix
    if "://" in place:
        if ending in (*TABLES, ".jsonl", ".ndjson", ".json"):
            raise JobError(
                f"--out {out} is a file in a bucket", remedy="name a prefix, in which the table of results will be, or a local file"
            )
        return True
    return out.endswith("/") or Path(place).is_dir()
