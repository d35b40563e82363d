"""Files in S3, Google Cloud Storage, Azure, or any other store of obstore's."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

from ephemeron.communication.channels.stores import cloud_store, explain, is_missing_bucket
from ephemeron.data.catalog.files import FileRange, Files
from ephemeron.data.catalog.store_process import call
from ephemeron.errors import DatasetError, DatasetUnreachable, FileVersionChanged, JobError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_FAILURES = (BaseError, OSError)
_REQUESTS = 32
_LARGEST_PUT = 5 * 10**9

_first_used_by = 0
"""Id of the process that used an object store first: its forked children cannot, and call another process."""
_SCHEMES = ("s3", "gs", "az")


class ObjectFiles(Files):
    """Objects below the prefix of a store. Usually made with `open_files`.

    Args:
        store: any obstore store, with its prefix set.
        url: its name in metadata and messages; `open_objects` opens it on unpickling.
        requests: most concurrent requests per call.
    """

    local = False

    def __init__(self, store: ObjectStore, *, url: str, requests: int = _REQUESTS) -> None:
        self.url = url
        self.survives_fork = urlsplit(url).scheme in _SCHEMES
        """True if a process that was never forked (`store_process`) can open the same store, and read for forked ones."""
        self._store: Any = store
        self._requests = requests

    def __repr__(self) -> str:
        return f"ObjectFiles({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return open_objects, (self.url,)

    async def fetch(self, ranges: Sequence[FileRange]) -> list[bytes]:
        if self._is_forked():
            return list(await call(self.url, "fetch", list(ranges)))
        slots = asyncio.Semaphore(self._requests)

        async def one(wanted: FileRange) -> bytes:
            async with slots:
                return await self._fetch(wanted)

        return list(await asyncio.gather(*map(one, ranges)))

    async def _fetch(self, wanted: FileRange) -> bytes:
        try:
            if wanted.length is None and not wanted.offset:
                found = await obstore.get_async(self._store, wanted.path, options=_if_match(wanted))
                return bytes(await found.bytes_async())
            end = await self._end(wanted) if wanted.length is None else wanted.offset + wanted.length
            if end <= wanted.offset:
                return b""
            if wanted.pin is None:
                return bytes(await obstore.get_range_async(self._store, wanted.path, start=wanted.offset, end=end))
            options: Any = {**_if_match(wanted), "range": (wanted.offset, end)}
            found = await obstore.get_async(self._store, wanted.path, options=options)
            return bytes(await found.bytes_async())
        except PreconditionError:
            raise FileVersionChanged(wanted.path, wanted.pin or "", await self.identity(wanted.path)) from None
        except _FAILURES as e:
            if _is_absent(e):
                raise FileNotFoundError(wanted.path) from None
            # Stores refuse a range that begins behind the end of the object, each with its own error.
            size = await self.size(wanted.path)
            if size is not None and size <= wanted.offset:
                return b""
            raise self._unreachable(e, wanted.path) from e

    async def _end(self, wanted: FileRange) -> int:
        size = await self.size(wanted.path)
        if size is None:
            raise FileNotFoundError(wanted.path)
        return size

    async def size(self, path: str) -> int | None:
        if self._is_forked():
            answer: int | None = await call(self.url, "size", path)
            return answer
        try:
            return int((await obstore.head_async(self._store, path))["size"])
        except _FAILURES as e:
            if _is_absent(e):
                return None
            raise self._unreachable(e, path) from e

    async def identity(self, path: str) -> str | None:
        if self._is_forked():
            answer: str | None = await call(self.url, "identity", path)
            return answer
        try:
            return _identity(await obstore.head_async(self._store, path))
        except _FAILURES as e:
            if _is_absent(e):
                return None
            raise self._unreachable(e, path) from e

    async def identities(self, prefix: str) -> dict[str, str]:
        if self._is_forked():
            answer: dict[str, str] = await call(self.url, "identities", prefix)
            return answer
        try:
            found = await obstore.list(self._store, prefix.strip("/") or None).collect_async()
        except _FAILURES as e:
            raise self._unreachable(e, prefix) from e
        return {str(meta["path"]): pin for meta in found if (pin := _identity(meta)) is not None}

    async def tree(self, prefix: str) -> dict[str, int]:
        if self._is_forked():
            answer: dict[str, int] = await call(self.url, "tree", prefix)
            return answer
        try:
            found = await obstore.list(self._store, prefix.strip("/") or None).collect_async()
        except _FAILURES as e:
            raise self._unreachable(e, prefix) from e
        return dict(sorted((str(meta["path"]), int(meta["size"])) for meta in found))

    async def folders(self, prefix: str) -> list[str]:
        if self._is_forked():
            answer: list[str] = await call(self.url, "folders", prefix)
            return answer
        try:
            found = await obstore.list_with_delimiter_async(self._store, prefix.strip("/") or None)
        except _FAILURES as e:
            raise self._unreachable(e, prefix) from e
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found["common_prefixes"])

    async def create(self, path: str, data: bytes | Path) -> bool:
        if self._is_forked():
            answer: bool = await call(self.url, "create", path, data)
            return answer
        if isinstance(data, Path) and data.stat().st_size > _LARGEST_PUT:
            raise JobError(
                f"{data} has more than 5 GB, the most that stores take create-only",
                remedy="upload it with your cloud's own tool and import it from its URL",
            )
        try:
            await obstore.put_async(self._store, path, data, mode="create", use_multipart=False)
        except AlreadyExistsError:
            return False
        except _FAILURES as e:
            raise self._unreachable(e, path) from e
        return True

    def _is_forked(self) -> bool:
        """Whether obstore's threads were lost by a fork, so that a call would wait for ever.

        Raises:
            DatasetError: in such a child, if no other process can open this store.
        """
        global _first_used_by
        _first_used_by = _first_used_by or os.getpid()
        if not is_forked():
            return False
        if not self.survives_fork:
            raise DatasetError(
                f"{self.url} cannot be read in a process forked after object stores were used; start workers otherwise, "
                "e.g. DataLoader(multiprocessing_context='forkserver')"
            )
        return True

    def _unreachable(self, e: Exception, path: str) -> DatasetUnreachable:
        return DatasetUnreachable(explain(e), file=f"{self.url}/{path}".rstrip("/"))


def open_objects(url: str) -> ObjectFiles:
    """The objects below `s3://bucket/prefix`, `gs://…` or `az://…`. Connects on first use.

    Raises:
        JobError: the URL has another scheme.
    """
    return ObjectFiles(cloud_store(url), url=url.rstrip("/"))


def _identity(meta: Any) -> str | None:
    return None if meta["e_tag"] is None else f"etag:{meta['e_tag']}"


def _if_match(wanted: FileRange) -> Any:
    return {} if wanted.pin is None else {"if_match": wanted.pin.removeprefix("etag:")}


def is_forked() -> bool:
    """True if this process was forked from one that had used an object store."""
    return _first_used_by not in (0, os.getpid())


def _is_absent(e: Exception) -> bool:
    return isinstance(e, FileNotFoundError) and not is_missing_bucket(e)
