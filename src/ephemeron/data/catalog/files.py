"""The port through which a dataset's metadata and data are read and its metadata is written.

Two implementations: a folder (plain system calls) and any store that obstore supports. The folder has its own for two
reasons. Measured on the development machine (2 cores), 64 reads of 3 kB take 7 ms through obstore's LocalStore and
0.06 ms by `pread`. And obstore's runtime does not survive `fork`, with which PyTorch starts DataLoader workers
on Linux: a forked process reads through another process (`store_process`).

Which files of a listing are data: the one rule of hidden files and of wildcards, for `prepare` and `data import`.

Hidden is what has a name, or a folder, that begins with a dot (`.ipynb_checkpoints`, the `._` files of macOS), `__MACOSX`, and what lies in
a folder below that is a prepared dataset. What is named itself, or by a wildcard that begins with a dot, is not hidden.
"""

from __future__ import annotations

import fnmatch
import io
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ephemeron.data.catalog.loop import run

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of one file; the whole of it by default."""

    path: str
    """Relative, with `/` between its parts."""
    offset: int = 0
    length: int | None = None
    """Bytes; None: up to the end."""
    pin: str | None = None
    """Expected `identity` of an object."""


class Files(ABC):
    """Files by relative path. Safe to use from several threads and event loops; picklable where the store is shared.

    `create` is atomic: a path holds nothing or the whole file, and of several writers exactly one gets True. Nothing is
    ever overwritten or deleted.
    """

    url: str
    """URL of the root, for messages and metadata; without secrets."""
    survives_fork: bool = True
    """True if a forked child can read, also after its parent has read."""
    local: bool = True
    """True if reading needs only system calls of this machine, and no other process or network client."""

    @abstractmethod
    async def fetch(self, ranges: Sequence[FileRange]) -> list[bytes]:
        """The bytes of these ranges, in their order; fewer than requested where a file ends earlier.

        Raises:
            FileNotFoundError: a file is absent; its only argument is the path.
            FileVersionChanged: the current identity of an object differs from that of the range.
            DatasetUnreachable: the store fails.
        """

    @abstractmethod
    async def size(self, path: str) -> int | None:
        """Bytes of a file, or None if it does not exist."""

    @abstractmethod
    async def identity(self, path: str) -> str | None:
        """A value that changes with a file's content: an object's ETag, a local file's time of change; None: no such file."""

    async def identities(self, prefix: str) -> dict[str, str]:
        """Identities of all files below a folder, as far as a listing contains them."""
        return {}

    @abstractmethod
    async def tree(self, prefix: str) -> dict[str, int]:
        """Path and bytes of all files below the folder `prefix` ("" is the root), sorted by path."""

    @abstractmethod
    async def folders(self, prefix: str) -> list[str]:
        """Names of the folders directly below the folder `prefix`, sorted."""

    @abstractmethod
    async def create(self, path: str, data: bytes | Path) -> bool:
        """Writes a file, from memory or from a local file; False, without effect, where the path exists.

        Raises:
            DatasetUnreachable: the store fails.
        """


class FileReader(io.RawIOBase):
    """One file, or a part of it, as a seekable stream, for libraries that want one (tar, zip, Parquet).

    Wrap it in `io.BufferedReader` for many small reads close together.
    """

    def __init__(self, files: Files, path: str, *, offset: int = 0, length: int) -> None:
        self._files, self._path, self._offset, self._length = files, path, offset, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence])
        return self._at

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        wanted = min(len(view), max(0, self._length - self._at))
        if not wanted:
            return 0
        (data,) = run(self._files.fetch([FileRange(self._path, self._offset + self._at, wanted)]))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


# -- which files of a listing are data ----------------------------------------------------------------------------


WILD = "*?["
_ARCHIVE_OF_MACOS = "__MACOSX"


def visible(paths: Iterable[str]) -> list[str]:
    """The paths of a listing that are data, sorted.

    Args:
        paths: relative, of all files.
    """
    listed = sorted(paths)
    own = _prepared(listed)
    return [path for path in listed if not any(map(_hidden, path.split("/"))) and not any(path.startswith(folder) for folder in own)]


def matching(paths: Iterable[str], pattern: str) -> list[str]:
    """The paths of a listing that a pattern names, sorted: `*`, `?` and `[…]` within a name, `**` for any number of folders.

    Args:
        paths: relative, of all files.
        pattern: relative to the same folder.
    """
    listed = sorted(paths)
    own = _prepared(listed)
    wanted = pattern.split("/")
    return [path for path in listed if _matches(path.split("/"), wanted) and not any(path.startswith(folder) for folder in own)]


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == _ARCHIVE_OF_MACOS


def _matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not names
    if pattern[0] == "**":
        return _matches(names, pattern[1:]) or (bool(names) and not _hidden(names[0]) and _matches(names[1:], pattern))
    return (
        bool(names)
        and fnmatch.fnmatchcase(names[0], pattern[0])
        and (pattern[0].startswith((".", "_")) or not _hidden(names[0]))
        and _matches(names[1:], pattern[1:])
    )


def _prepared(paths: Sequence[str]) -> set[str]:
    """Folders with a manifest and partitions of a prepared dataset, with a slash at their ends."""
    folders = {path.removesuffix("dataset.json") for path in paths if path.endswith("/dataset.json")}
    return folders & {path.rpartition("/")[0] + "/" for path in paths if path.endswith(".arrow")}
