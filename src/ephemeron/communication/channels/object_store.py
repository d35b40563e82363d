"""Objects in S3, Google Cloud Storage, Azure or a folder: the channel that is always there.

Nothing runs between jobs and nothing is paid but requests and bytes, so this is the default. The price is
latency (tens of milliseconds a request in a cloud) and that a reader has to poll; where functions wait for each
other many times a second, a cache or a parameter server is cheaper.

All four stores go through obstore. Puts are one request, never multipart, so an object is there whole or not at
all; a folder writes beside and renames, which gives its readers the same. Create-only rests on `If-None-Match`,
or on a hard link in a folder. Every method is one request, never repeated here: `channels.retrying` does that, and
resolves create-only puts whose answer was lost.

In a folder the first part of a key is a directory and the rest of it one file name with `+` for `/`. Directories
would otherwise pile up, one or more for every iteration; removing them when empty is no remedy, because a put
that has just made sure of its directory fails if a delete takes it away.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore

from ephemeron.blocking import in_real_time
from ephemeron.communication.channels.base import Buffer, Channel, SupportsSizes, Traits, flat, joined
from ephemeron.communication.channels.stores import cloud_store, error_of, explain, is_conflict, is_missing_bucket
from ephemeron.communication.channels.wrappers import size_of
from ephemeron.config.paths import folder_of
from ephemeron.errors import ChannelUnreachable, KeyExists

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_FAILURES = (BaseError, OSError)
_LARGE = 256 * 1024
"""Bytes from which an object is handed over buffer by buffer: a copy of it would cost more than that."""


class ObjectsChannel(Channel, SupportsSizes):
    """A channel over an obstore store. Usually made with `ObjectsChannel.open`.

    Args:
        store: any obstore store, with its prefix set.
        url: how errors name it; no secrets.
    """

    def __init__(self, store: ObjectStore, *, url: str) -> None:
        self.url = url
        self._store: Any = store
        self._local = isinstance(store, LocalStore)
        self.traits = Traits(service="objects", waits=False, shared=True, latency_s=0.0005 if self._local else 0.02)

    @classmethod
    def open(cls, url: str) -> ObjectsChannel:
        """Opens `file:///abs/path`, `s3://bucket/prefix`, `gs://bucket/prefix` or `az://container/prefix`.

        A folder is created if need be; a bucket is not, and is first asked for when something is put or read.
        Credentials, region and endpoint come from each cloud's usual environment variables, among them
        `AWS_ENDPOINT_URL_S3` and `AWS_ENDPOINT_URL` for other stores with the S3 protocol.

        Raises:
            JobError: no URL of these kinds.
            ChannelUnreachable: the folder cannot be created.
        """
        return cls.folder(folder_of(url)) if url.startswith("file://") else cls(cloud_store(url), url=url)

    @classmethod
    def folder(cls, path: str | Path) -> ObjectsChannel:
        """Opens a folder, made if need be.

        Raises:
            ChannelUnreachable: it cannot be made.
        """
        where = Path(path).absolute()
        try:
            where.mkdir(parents=True, exist_ok=True)
            return cls(LocalStore(where), url=where.as_uri())
        except _FAILURES as e:
            raise ChannelUnreachable(f"cannot use the folder {where}: {explain(e)}") from e

    def __repr__(self) -> str:
        return f"ObjectsChannel({self.url!r})"

    async def put(self, key: str, buffers: Sequence[Buffer], *, create: bool = False) -> None:
        try:
            with in_real_time():
                await obstore.put_async(
                    self._store,
                    self._path(key),
                    flat(buffers) if size_of(buffers) >= _LARGE else joined(buffers),
                    mode="create" if create else "overwrite",
                    use_multipart=False,
                )
        except AlreadyExistsError as e:
            if is_conflict(e):
                raise self._unreachable(e, key) from e
            raise KeyExists("the key is taken", key=key) from e
        except _FAILURES as e:
            raise self._unreachable(e, key) from e

    async def fetch(self, key: str) -> memoryview | None:
        try:
            with in_real_time():
                found = await obstore.get_async(self._store, self._path(key))
                return memoryview(await found.bytes_async())
        except _FAILURES as e:
            if _is_absent(e):
                return None
            raise self._unreachable(e, key) from e

    async def exists(self, key: str) -> bool:
        try:
            with in_real_time():
                await obstore.head_async(self._store, self._path(key))
        except _FAILURES as e:
            if _is_absent(e):
                return False
            raise self._unreachable(e, key) from e
        return True

    async def delete(self, keys: Iterable[str]) -> None:
        paths = [self._path(key) for key in keys]
        if not paths:
            return
        try:
            with in_real_time():
                await obstore.delete_async(self._store, paths)
        except _FAILURES as e:
            if not _is_absent(e):
                raise self._unreachable(e, None) from e
            # Stores without a lenient bulk delete stop at the first absent key: go on one by one.
            for path in paths:
                await self._delete_one(path)

    def discard_staged(self, prefix: str) -> None:
        # A folder's put writes to KEY#1, or the next free number, and renames. Listings of obstore leave these files out.
        if not self._local:
            return
        head, slash, rest = self._path(prefix).partition("/")
        root = Path(unquote(urlsplit(self.url).path))
        for folder in (root / head,) if slash else (path for path in root.glob(f"{glob.escape(head)}*") if path.is_dir()):
            for path in folder.glob(f"{glob.escape(rest)}*#*"):
                if path.name.rpartition("#")[2].isdigit():
                    path.unlink(missing_ok=True)

    async def list(self, prefix: str) -> list[str]:
        return list(await self.sizes(prefix))

    async def sizes(self, prefix: str) -> dict[str, int]:
        # Stores list by whole parts of a key (and a folder in no order); prefixes here may end anywhere.
        folder = prefix.rpartition("/")[0]
        if self._local:
            folder = folder.partition("/")[0]
        try:
            with in_real_time():
                found = await obstore.list(self._store, folder or None).collect_async()
        except _FAILURES as e:
            raise self._unreachable(e, None) from e
        known = {self._key(str(meta["path"])): int(meta["size"]) for meta in found}
        return {key: known[key] for key in sorted(known) if key.startswith(prefix)}

    async def _delete_one(self, path: str) -> None:
        try:
            with in_real_time():
                await obstore.delete_async(self._store, path)
        except _FAILURES as e:
            if not _is_absent(e):
                raise self._unreachable(e, self._key(path)) from e

    def _path(self, key: str) -> str:
        if not self._local:
            return key
        head, slash, rest = key.partition("/")
        return head + slash + rest.replace("/", "+")

    def _key(self, path: str) -> str:
        return path.replace("+", "/") if self._local else path

    def _unreachable(self, e: Exception, key: str | None) -> ChannelUnreachable:
        return error_of(e, local=self._local)(f"{self.url}: {explain(e)}", key=key)


def _is_absent(e: Exception) -> bool:
    return isinstance(e, FileNotFoundError) and not is_missing_bucket(e)
