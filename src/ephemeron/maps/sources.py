"""Items of a durable map as users have them, each with a key and a digest of its value; read block by block, as often as needed.

    JSON lines        a value per line
    tables            rows of CSV, TSV and Parquet, each a dict by column
    files             each file that a folder or a wildcard names; the item is its path or URL
    iterables         values of Python

Of an item without a key of its own the digest is the key, so items of the same value are one item.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pickle
import shutil
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ephemeron.config.paths import located
from ephemeron.config.typed import near
from ephemeron.data.catalog.files import WILD, FileReader, Files
from ephemeron.data.catalog.loop import run
from ephemeron.data.catalog.open_files import find_files
from ephemeron.data.formats.lines import mark_of
from ephemeron.data.tables.table_file import TABLES, TableFile
from ephemeron.errors import DatasetUnreachable, JobError
from ephemeron.functions.shipped_code import dumps
from ephemeron.maps.result_table import ID_BYTES, id_of
from ephemeron.user_code import unpickled

LINES = (".jsonl", ".ndjson")
"""Endings of JSON lines."""
BLOCK_ROWS = 10_000
_BLOCK_BYTES = 4 << 20
_KEY_CHARACTERS = 1000


@dataclass(frozen=True, slots=True)
class Block:
    """Some items."""

    first: int
    """Number of the first one, from 0."""
    keys: Sequence[str]
    """Empty: their ids are their keys."""
    ids: NDArray[Any]
    items: Sequence[str]
    """Digest of each value, 16 hexadecimal digits."""
    costs: Sequence[float]
    """Of the column of costs; empty: there is none."""
    value: Callable[[int], Any]
    """Value by position in the block."""

    def key(self, n: int) -> str:
        """Key of an item by position in the block."""
        return self.keys[n] if self.keys else hex_of(self.ids[n])


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemColumns:
    """Which parts of an item have a meaning of their own."""

    key: str | None = None
    cost: str | None = None
    needed: tuple[str, ...] = ()
    """Arguments of the function that take parts of an item by their names."""


class Source(ABC):
    """Items that can be read several times.

    Args:
        name: for messages.
        columns: of each item.
    """

    def __init__(self, name: str, columns: ItemColumns) -> None:
        self.name, self.columns = name, columns

    @abstractmethod
    def blocks(self, wanted: NDArray[np.bool_] | None = None) -> Iterator[Block]:
        """All items.

        Args:
            wanted: by number of the item; blocks without one of these are left out. None: all are wanted.

        Raises:
            JobError: one cannot be read, or has no such key; names it.
        """

    def fingerprint(self) -> str:
        """A digest of the content and of how it is read; empty: it is not known without reading the items."""
        return ""

    def told(self, number: int) -> str:
        """Name of an item for messages, by its number from 0."""
        return f"item {number + 1}"

    def close(self) -> None:
        """Deletes what was written for it."""

    def _block(
        self, first: int, count: int, encoded: Callable[[int], bytes], value: Callable[[int], Any], where: Callable[[int], str]
    ) -> Block:
        c = self.columns
        keys: list[str] = []
        costs: list[float] = []
        ids, items = bytearray(), []
        if c.key is not None or c.cost is not None or c.needed:
            for n in range(count):
                item = value(n)
                if c.key is not None:
                    keys.append(_key_of(item, c.key, where(n)))
                if c.cost is not None:
                    costs.append(_cost_of(item, c.cost, where(n)))
                for name in c.needed:
                    if not isinstance(item, Mapping) or name not in item:
                        raise _absent(item, name, where(n), "the function wants it as an argument")
        for n in range(count):
            content = encoded(n)
            ids += id_of(keys[n].encode("utf-8", "surrogatepass") if keys else b"", content)
            items.append(hashlib.blake2b(content, digest_size=8).hexdigest())
        return Block(first, keys, np.frombuffer(bytes(ids), f"S{ID_BYTES}"), items, costs, value)


@dataclass(slots=True)
class Scan:
    """What is known of all items after they were read once."""

    ids: NDArray[Any]
    is_first: NDArray[np.bool_]
    """False for items that are there already, of the same value."""
    has_costs: bool

    @property
    def items(self) -> int:
        """Number of items."""
        return len(self.ids)


def scan(source: Source) -> Scan:
    """Reads all items once.

    Raises:
        JobError: an item cannot be read, or two items have the same key; names them.
    """
    ids, keys = [], []
    has_costs = False
    for block in source.blocks():
        ids.append(block.ids)
        has_costs = has_costs or bool(block.costs)
        if block.keys:
            keys.append(np.frombuffer(b"".join(id_of(key.encode("utf-8", "surrogatepass"), b"") for key in block.keys), f"S{ID_BYTES}"))
    if not ids or not sum(map(len, ids)):
        raise JobError(f"{source.name} has no items", remedy="write one JSON value per line, or a row per item")
    every = np.concatenate(ids)
    if keys:
        _check_keys(source, np.concatenate(keys))
    _, first = np.unique(every, return_index=True)
    is_first = np.zeros(len(every), bool)
    is_first[first] = True
    return Scan(every, is_first, has_costs)


def _check_keys(source: Source, digests: NDArray[Any]) -> None:
    order = np.argsort(digests, kind="stable")
    same = np.flatnonzero(digests[order[1:]] == digests[order[:-1]])
    if not len(same):
        return
    first, second = int(order[same[0]]), int(order[same[0] + 1])
    key = next(block.keys[first - block.first] for block in source.blocks() if block.first <= first < block.first + len(block.keys))
    more = f"; {len(same)} keys are taken" if len(same) > 1 else ""
    raise JobError(
        f"{source.name}: items {first + 1} and {second + 1} have the same key {key!r:.80}{more}",
        remedy="name a column that tells the items apart, or leave --key out: then equal items are one",
    )


def hex_of(id: Any) -> str:
    """An id as text."""
    return bytes(id).ljust(ID_BYTES, b"\0").hex()


# -- from what users give -----------------------------------------------------------------------------------------


def open_source(items: object, columns: ItemColumns, *, each_file: bool = False) -> Source:
    """Items from a path, a wildcard, a URL, or a Python iterable.

    Args:
        items: `-` is standard input, as JSON lines.
        columns: of each item.
        each_file: each file is an item, also where it is a table.

    Raises:
        JobError: there is nothing of that name, or it is no source of items.
    """
    if not isinstance(items, (str, Path)):
        if not isinstance(items, Iterable):
            raise JobError(f"items = {items!r:.80} is no iterable", remedy="give a list, a path or a URL")
        return IterableSource(items, columns)
    place = str(items)
    if place == "-":
        return _spooled_lines(sys.stdin.buffer, columns)
    try:
        files, sizes = find_files(place)
    except DatasetUnreachable as e:
        raise JobError(f"items {place} cannot be read: {e}") from None
    if not sizes:
        raise JobError(f"there is no file {place}", remedy="give a file, a folder, or a wildcard such as 'scans/*.tiff'")
    endings = {Path(path).suffix.lower() for path in sizes}
    if not each_file and endings <= {*TABLES, *LINES} and len(endings) == 1:
        kind: type[_FilesOfItems] = LineSource if endings <= {*LINES} else TableSource
        return kind(place, files, sizes, columns)
    is_one = len(sizes) == 1 and not any(c in place for c in WILD) and not located(place).endswith("/") and not Path(place).is_dir()
    if is_one and not each_file:
        return LineSource(place, files, sizes, columns)
    if columns.key is not None or columns.cost is not None or columns.needed:
        raise JobError(f"items of {place} are files, which have no columns", remedy="leave --key and --cost-column out")
    return FileSource(place, files, sizes, columns)


class _FilesOfItems(Source):
    """Files that hold items."""

    def __init__(self, name: str, files: Files, sizes: Mapping[str, int], columns: ItemColumns) -> None:
        super().__init__(f"items {name}", columns)
        self.files, self.sizes = files, sizes
        self._spool: tempfile.TemporaryDirectory[str] | None = None
        self._local: dict[str, Path] = {}

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(f"{type(self).__name__}{self.columns}".encode(), digest_size=16)
        listed = {} if self.files.local else run(self.files.identities(common_folder(self.sizes)))
        for path, nbytes in self.sizes.items():
            digest.update(f"\0{path if len(self.sizes) > 1 else ''}\0{nbytes}\0".encode())
            if self.files.local:
                with self.local(path).open("rb") as file:
                    digest.update(hashlib.file_digest(file, "blake2b").digest())
            else:
                digest.update(str(listed.get(path) or run(self.files.identity(path))).encode())
        return digest.hexdigest()

    def local(self, path: str) -> Path:
        """A file, on this machine."""
        if self.files.local:
            return Path(getattr(self.files, "root", "")) / path
        if path not in self._local:
            self._spool = self._spool or tempfile.TemporaryDirectory(prefix="ephemeron-items-")
            place = Path(self._spool.name) / f"{len(self._local)}{Path(path).suffix}"
            with place.open("wb") as file:
                shutil.copyfileobj(FileReader(self.files, path, length=self.sizes[path]), file, 8 << 20)
            self._local[path] = place
        return self._local[path]

    def close(self) -> None:
        if self._spool is not None:
            self._spool.cleanup()
            self._spool, self._local = None, {}


class LineSource(_FilesOfItems):
    """JSON lines. A line ends in a line feed and nowhere else; blank ones are left out."""

    def blocks(self, wanted: NDArray[np.bool_] | None = None) -> Iterator[Block]:
        first = 0
        for path in self.sizes:
            shown = f"items {path}" if len(self.sizes) > 1 else self.name
            for numbers, texts in _lines(self.local(path), shown):
                if not _has_wanted(wanted, first, len(texts)):
                    first += len(texts)
                    continue
                values = [_parsed(text, f"{shown}, line {number}") for number, text in zip(numbers, texts, strict=True)]
                yield self._block(
                    first,
                    len(texts),
                    lambda n, texts=texts: texts[n],  # type: ignore[misc]
                    lambda n, values=values: values[n],  # type: ignore[misc]
                    lambda n, numbers=numbers, shown=shown: f"{shown}, line {numbers[n]}",  # type: ignore[misc]
                )
                first += len(texts)


def _lines(path: Path, shown: str) -> Iterator[tuple[list[int], list[bytes]]]:
    """Numbers, from 1, and texts of the lines that are not blank, some thousand at a time."""
    try:
        with path.open("rb") as file:
            number, rest, begins = 0, b"", True
            while data := file.read(_BLOCK_BYTES):
                if begins:
                    data, begins = data[mark_of(data, shown) :], False
                *lines, rest = (rest + data).split(b"\n")
                yield from _numbered(lines, number)
                number += len(lines)
            if rest:
                yield from _numbered([rest], number)
    except OSError as e:
        raise JobError(f"{shown} cannot be read: {e.strerror}") from None


def _numbered(lines: Sequence[bytes], before: int) -> Iterator[tuple[list[int], list[bytes]]]:
    for at in range(0, len(lines), BLOCK_ROWS):
        found = [(before + at + n, text) for n, line in enumerate(lines[at : at + BLOCK_ROWS], start=1) if (text := line.strip(b" \t\r"))]
        if found:
            yield [number for number, _ in found], [text for _, text in found]


def _parsed(text: bytes, where: str) -> Any:
    try:
        return json.loads(text.decode())
    except UnicodeDecodeError as e:
        raise JobError(
            f"{where} is not UTF-8: {e.reason} at byte {e.start}", remedy="convert it, such as: iconv -f LATIN1 -t UTF-8 FILE"
        ) from None
    except (ValueError, RecursionError) as e:
        raise JobError(f"{where} is no JSON: {e}", remedy="write one JSON value per line") from None


class TableSource(_FilesOfItems):
    """Rows of tables."""

    def blocks(self, wanted: NDArray[np.bool_] | None = None) -> Iterator[Block]:
        first, names = 0, None
        for path in self.sizes:
            file = TableFile(self.local(path))
            shown = f"items {path}" if len(self.sizes) > 1 else self.name
            for column in (self.columns.key, self.columns.cost, *self.columns.needed):
                if column is not None and column not in file.names:
                    raise JobError(f"{shown} has no column {column!r}", remedy=near(column, file.names, what="its columns"))
            if names is not None and file.names != names:
                raise JobError(f"{shown} has the columns {', '.join(file.names)}, and the file before it has {', '.join(names)}")
            names = file.names
            for part in file.parts(BLOCK_ROWS):
                if not _has_wanted(wanted, first, part.table.num_rows):
                    first += part.table.num_rows
                    continue
                rows = part.table.to_pylist()
                yield self._block(
                    first,
                    len(rows),
                    lambda n, rows=rows: _encoded(rows[n]),  # type: ignore[misc]
                    lambda n, rows=rows: rows[n],  # type: ignore[misc]
                    lambda n, at=part.first, shown=shown: f"{shown}, row {at + n + 1}",  # type: ignore[misc]
                )
                first += len(rows)


class FileSource(_FilesOfItems):
    """Files, each of which is an item: the path of one on this machine, the URL of another one."""

    def fingerprint(self) -> str:
        return ""  # the listing is all that has to be read

    def blocks(self, wanted: NDArray[np.bool_] | None = None) -> Iterator[Block]:
        root = common_folder(self.sizes)
        listed = {} if self.files.local else run(self.files.identities(root))
        paths = list(self.sizes)
        place = str(getattr(self.files, "root", "")) if self.files.local else self.files.url.rstrip("/")
        for first in range(0, len(paths), BLOCK_ROWS):
            part = paths[first : first + BLOCK_ROWS]
            contents = [f"{self.sizes[path]} {listed.get(path) or run(self.files.identity(path))}".encode() for path in part]
            keys = [path.removeprefix(f"{root}/") for path in part]
            ids = b"".join(id_of(key.encode(), content) for key, content in zip(keys, contents, strict=True))
            items = [hashlib.blake2b(content, digest_size=8).hexdigest() for content in contents]
            yield Block(first, keys, np.frombuffer(ids, f"S{ID_BYTES}"), items, (), lambda n, part=part: f"{place}/{part[n]}")  # type: ignore[misc]


class IterableSource(Source):
    """Values of Python. What is no sequence is read once, and kept in a temporary file."""

    def __init__(self, values: Iterable[Any], columns: ItemColumns) -> None:
        super().__init__("items", columns)
        self._values = values if isinstance(values, Sequence) else None
        self._spool: IO[bytes] | None = None
        if self._values is None:
            self._spool = tempfile.TemporaryFile()  # noqa: SIM115 - until `close`
            for value in values:
                data = dumps(value, what="an item")
                self._spool.write(len(data).to_bytes(8, "big") + data)

    def blocks(self, wanted: NDArray[np.bool_] | None = None) -> Iterator[Block]:
        first = 0
        for part in self._parts():
            if not _has_wanted(wanted, first, len(part)):
                first += len(part)
                continue
            yield self._block(
                first,
                len(part),
                lambda n, part=part: _encoded(part[n]),  # type: ignore[misc]
                lambda n, part=part: part[n],  # type: ignore[misc]
                lambda n, first=first: f"item {first + n + 1}",  # type: ignore[misc]
            )
            first += len(part)

    def _parts(self) -> Iterator[Sequence[Any]]:
        if self._values is not None:
            yield from (self._values[at : at + BLOCK_ROWS] for at in range(0, len(self._values), BLOCK_ROWS))
            return
        assert self._spool is not None
        self._spool.seek(0)
        part: list[Any] = []
        while head := self._spool.read(8):
            part.append(unpickled(self._spool.read(int.from_bytes(head, "big"))))
            if len(part) == BLOCK_ROWS:
                yield part
                part = []
        if part:
            yield part

    def close(self) -> None:
        if self._spool is not None:
            self._spool.close()


class _Spooled(LineSource):
    def __init__(self, path: Path, spool: tempfile.TemporaryDirectory[str], columns: ItemColumns) -> None:
        from ephemeron.data.catalog.open_files import open_files

        super().__init__("of standard input", open_files(path.parent), {path.name: path.stat().st_size}, columns)
        self._spool = spool


def _spooled_lines(stream: IO[bytes], columns: ItemColumns) -> Source:
    spool = tempfile.TemporaryDirectory(prefix="ephemeron-items-")
    path = Path(spool.name) / "items.jsonl"
    with path.open("wb") as file:
        shutil.copyfileobj(stream, file)
    return _Spooled(path, spool, columns)


def _has_wanted(wanted: NDArray[np.bool_] | None, first: int, count: int) -> bool:
    """Whether one of so many items from the first one on is wanted."""
    return wanted is None or bool(wanted[first : first + count].any())


# -- parts of items -----------------------------------------------------------------------------------------------


def _key_of(item: Any, name: str, where: str) -> str:
    if not isinstance(item, Mapping) or name not in item:
        raise _absent(item, name, where, "it is to be the key")
    value = item[name]
    if value is None or value == "":
        raise JobError(f"{where} has no value of {name!r}, which is to be its key", remedy="give it one, or name another --key")
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    if len(text) > _KEY_CHARACTERS:
        raise JobError(f"{where}: its key {text[:60]!r}… has {len(text):,} characters", remedy=f"use at most {_KEY_CHARACTERS:,}")
    return text


def _cost_of(item: Any, name: str, where: str) -> float:
    if not isinstance(item, Mapping) or name not in item:
        raise _absent(item, name, where, "it is to be the cost")
    cost = np.nan
    with contextlib.suppress(TypeError, ValueError):
        cost = float(item[name])
    if not 0 <= cost < np.inf:
        raise JobError(f"{where}: {item[name]!r:.60} of {name!r} is no cost", remedy="use numbers from 0")
    return cost


def _absent(item: Any, name: str, where: str, why: str) -> JobError:
    if isinstance(item, Mapping):
        return JobError(f"{where} has no {name!r}: {why}", remedy=near(name, map(str, item), what="its keys"))
    return JobError(f"{where} is no object with a {name!r}, but {item!r:.60}: {why}")


def _encoded(value: Any) -> bytes:
    """A value in a form that is equal for equal values."""
    try:
        return json.dumps(value, ensure_ascii=False, default=_typed).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, RecursionError):
        return pickle.dumps(value, protocol=5) if isinstance(value, (bytes, bytearray)) else dumps(value, what="an item")


def _typed(value: Any) -> Any:
    if type(value).__module__ in ("datetime", "decimal"):
        return [type(value).__name__, str(value)]
    if isinstance(value, bytes):
        return ["bytes", hashlib.blake2b(value, digest_size=16).hexdigest()]
    raise TypeError(type(value).__name__)


def common_folder(paths: Iterable[str]) -> str:
    """The deepest folder of all paths."""
    folders = [path.rpartition("/")[0].split("/") for path in paths]
    shared = []
    for parts in zip(*folders, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return "/".join(shared)
