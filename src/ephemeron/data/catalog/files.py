"""Where a dataset lies: the port through which its metadata and data are read and its metadata is written.

Two implementations: a folder (plain system calls) and any store that obstore speaks to. A folder has its own because
of what was measured on the development machine (2 cores): 64 reads of 3 kB take 7 ms through obstore's LocalStore and
0.06 ms by `pread`; and because obstore's runtime does not survive `fork`, with which PyTorch starts DataLoader workers
on Linux: there another process has to be asked (`store_process`).
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Sequence
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
    """Of an object: its `identity`, which has to be that of now."""


class Files(ABC):
    """Files by relative path. Safe to use from several threads and event loops; picklable where the store is shared.

    `create` is atomic: a path holds nothing or the whole, and of several writers exactly one is told True. Nothing
    is ever overwritten or deleted.
    """

    url: str
    """Names the place, for messages and metadata; without secrets."""
    survives_fork: bool = True
    """Whether a forked child can read, also where its parent has done so."""
    local: bool = True
    """Whether reading takes this machine's system calls alone, and no other process or network client."""

    @abstractmethod
    async def fetch(self, ranges: Sequence[FileRange]) -> list[bytes]:
        """The bytes of these ranges, in their order; fewer than asked for where a file ends before.

        Raises:
            FileNotFoundError: a file is absent; its only argument is the path.
            FileVersionChanged: an object's identity is not the one that the range names.
            DatasetUnreachable: the store fails.
        """

    @abstractmethod
    async def size(self, path: str) -> int | None:
        """Bytes of a file, or None where there is none."""

    @abstractmethod
    async def identity(self, path: str) -> str | None:
        """What changes with a file's content: an object's ETag, a local file's time of change; None where there is none."""

    async def identities(self, prefix: str) -> dict[str, str]:
        """The identities of everything below a folder, as far as a listing tells them."""
        return {}

    @abstractmethod
    async def tree(self, prefix: str) -> dict[str, int]:
        """Path and bytes of everything below the folder `prefix` ("" is everything), sorted by path."""

    @abstractmethod
    async def folders(self, prefix: str) -> list[str]:
        """Names of the folders directly below the folder `prefix`, sorted."""

    @abstractmethod
    async def create(self, path: str, data: bytes | Path) -> bool:
        """Writes a file, from memory or from a local file; False where the path is taken, which changes nothing.

        Raises:
            DatasetUnreachable: the store fails.
        """


class FileReader(io.RawIOBase):
    """One file, or a part of it, as a seekable stream, for libraries that want one (tar, zip, Parquet).

    Wrap it in `io.BufferedReader` where many small reads lie close together.
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
