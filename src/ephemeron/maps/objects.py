"""Objects beside a table of results: in a folder of this machine, or below a prefix of a bucket."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TypeVar

from ephemeron import blocking
from ephemeron.communication.channels import open_channel, public_address
from ephemeron.communication.channels.base import Channel, SupportsSizes
from ephemeron.communication.channels.retrying import Retrying, RetryPolicy
from ephemeron.config.paths import folder_of
from ephemeron.errors import JobError

T = TypeVar("T")
_RETRY = RetryPolicy(total_s=60.0)
_SCHEMES = ("file", "s3", "gs", "az")


def check_folder(address: str) -> bool:
    """Whether the folder of an address may be there; of a bucket: yes.

    Raises:
        JobError: it is not, and cannot be made; names why.
    """
    if not address.startswith("file://") or (folder := folder_of(address)).is_dir():
        return True
    above = next(each for each in (folder, *folder.parents) if each.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        why = "cannot be written to" if above.is_dir() else "is no folder"
        raise JobError(f"nothing can be kept in {folder}: {above} {why}", remedy="name another --out or --results")
    return False


class Objects:
    """Objects by name.

    Args:
        address: of a folder or a prefix.

    Raises:
        JobError: functions read no objects there.
    """

    def __init__(self, address: str) -> None:
        if address.partition("://")[0] not in _SCHEMES:
            raise JobError(
                f"--out {public_address(address)[0]} is neither a folder nor a bucket", remedy="name a folder, or s3://bucket/prefix"
            )
        self.address = address

    @property
    def is_local(self) -> bool:
        """Whether they are on this machine."""
        return self.address.startswith("file://")

    def place(self, name: str) -> str:
        """Path or URL of an object, as functions read it."""
        return str(folder_of(self.address) / name) if self.is_local else f"{public_address(self.address)[0].rstrip('/')}/{name}"

    def put(self, name: str, content: bytes | Path) -> None:
        """Stores an object, of bytes or of a file; what was there is replaced."""
        if isinstance(content, bytes) or not content.stat().st_size:
            data = content if isinstance(content, bytes) else b""
            return self._call(lambda channel: channel.put(name, [data]))
        with content.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            view = memoryview(mapped)
            try:
                self._call(lambda channel: channel.put(name, [view]))
            finally:
                view.release()

    def fetch(self, name: str) -> bytes | None:
        """An object; None: there is none."""
        found = self._call(lambda channel: channel.fetch(name))
        return None if found is None else bytes(found)

    def sizes(self, prefix: str) -> dict[str, int]:
        """Bytes of each object whose name begins with a prefix."""

        async def read(channel: Channel) -> dict[str, int]:
            inner = channel.inner if isinstance(channel, Retrying) else channel
            assert isinstance(inner, SupportsSizes)
            return await inner.sizes(prefix)

        return self._call(read)

    def delete(self, names: Iterable[str]) -> None:
        """Removes objects that are there."""
        self._call(lambda channel: channel.delete(list(names)))

    def _call(self, operation: Callable[[Channel], Awaitable[T]]) -> T:
        async def run() -> T:
            async with Retrying(open_channel(self.address), policy=_RETRY, rng=random.Random()) as channel:
                return await operation(channel)

        return blocking.run(lambda _: run())
