"""New lines of a log that grows: each byte is read once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(slots=True)
class LogReader:
    """Reader of one file, which need not exist yet.

    Lines that are not complete are left for the next call: a writer may be in the middle of one.
    """

    path: Path
    offset: int = 0
    """Bytes that have been returned as lines."""
    size: int = 0
    """Bytes of the file, when it was last looked at."""
    replaced: bool = False
    """The file became shorter, or is another one: what was read of it is void. The caller starts again with a new reader."""
    _inode: int = 0

    def read(self, limit: int = 1 << 20) -> list[bytes]:
        """The next complete lines, of about `limit` bytes at most; empty: there are none now."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                inode, self.size = status.st_ino, status.st_size
                self._inode = self._inode or inode
                if inode != self._inode or self.size < self.offset:
                    self.replaced = True
                    return []
                if self.size == self.offset:
                    return []
                file.seek(self.offset)
                data = file.read(limit)
                if b"\n" not in data:
                    data += file.readline()
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        self.offset += end
        return data[: max(0, end - 1)].split(b"\n") if end else []

    @property
    def share(self) -> float:
        """Part of the file that has been read, 0 to 1."""
        return min(1.0, self.offset / self.size) if self.size else 1.0
