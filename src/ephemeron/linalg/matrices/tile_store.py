"""The client's side of a store of tiles: reads and writes many at once, framed and with retries, as functions do."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import numpy.typing as npt

from ephemeron.communication.channels import MemoryChannel, open_channel
from ephemeron.communication.channels.base import Channel
from ephemeron.communication.channels.run_channel import RunChannel
from ephemeron.config.typed import build, plain
from ephemeron.errors import DamagedObject, EphemeronError, JobError, KeyExists, NotComputed
from ephemeron.linalg.matrices.stored import StoredMatrix, TileFamily, Tiles, decode_tile, encode_tile

_AT_ONCE = 8
_PART = "matrix.json"
KEPT = "kept.json"
"""Beside the tiles of a result that stays, until it is deleted."""


PLANNED = "planned:"
"""Address of the store of matrices that are only planned: it has no tiles."""


class _PlannedStore(MemoryChannel):
    async def fetch(self, key: str) -> memoryview | None:
        raise NotComputed("a matrix that is only planned has no values")


def is_gone(address: str) -> bool:
    """Whether it is a folder of this machine that is not there."""
    return address.startswith("file:") and not folder_of(address).exists()


def folder_of(address: str) -> Path:
    """The folder at an address of a folder."""
    return Path(unquote(urlsplit(address).path))


@asynccontextmanager
async def opened(address: str) -> AsyncIterator[Channel]:
    """The store at an address."""
    if address == PLANNED:
        yield _PlannedStore()
        return
    async with open_channel(address) as store:
        yield RunChannel(store, owner=f"matrices-{uuid.uuid4().hex[:8]}", put_again=lambda key: False)


async def describe(store: Channel, matrix: Tiles) -> None:
    """Says that a matrix is whole: its description is put last.

    Raises:
        JobError: another matrix has its name.
    """
    key, data = f"{matrix.name}/{_PART}", json.dumps(plain(matrix)).encode()
    with contextlib.suppress(KeyExists):
        await store.put(key, [data], create=True)
    there = await store.fetch(key)
    if there is not None and bytes(there) != data:
        raise taken(matrix)


async def is_whole(store: Channel, matrix: Tiles) -> bool:
    """Whether it was described."""
    return await store.fetch(f"{matrix.name}/{_PART}") is not None


def taken(matrix: Tiles) -> JobError:
    """Another matrix has this name."""
    return JobError(f"{matrix.store} has another matrix {matrix.name!r}", remedy="give another name, or delete that one first")


async def described(store: Channel, address: str, name: str) -> StoredMatrix | None:
    """The matrix of that name; None: there is none, or it is not whole."""
    data = await store.fetch(f"{name}/{_PART}")
    if data is None:
        return None
    found = build(StoredMatrix, json.loads(bytes(data)), where=f"{address}/{name}/{_PART}")
    return found


async def write(store: Channel, matrix: StoredMatrix, tile: Callable[[int, int], npt.NDArray[np.generic]]) -> None:
    """Stores the tiles of a matrix, each once, and its description.

    Args:
        store: of the matrix.
        matrix: to write.
        tile: gives a tile.
    """
    if matrix.store == PLANNED:
        return
    if (there := await described(store, matrix.store, matrix.name)) is not None:
        if dataclasses.replace(there, generation=matrix.generation) != matrix:
            raise taken(matrix)
        raise JobError(f"{matrix.store} has a matrix {matrix.name!r} already", remedy="open it with BigMatrix.open, or give another name")

    async def one(i: int, j: int) -> None:
        await store.put(f"{matrix.prefix}{i}.{j}", encode_tile(tile(i, j)))

    try:
        await _limited(one(i, j) for i, j in matrix.indices() if matrix.is_stored(i, j))
        await describe(store, matrix)
    except BaseException:
        if matrix.generation:  # no other writer has these keys
            with contextlib.suppress(EphemeronError, OSError):
                await store.delete(await store.list(matrix.prefix))
        raise


async def read_tile(store: Channel, matrix: StoredMatrix, i: int, j: int) -> npt.NDArray[np.generic]:
    """One tile of a matrix or view.

    Raises:
        JobError: the store does not have it.
    """
    if not matrix.is_stored(i, j):
        return np.zeros(matrix.tile_shape(i, j), matrix.dtype)
    key = matrix.key(i, j).rpartition("#")[2]
    data = await store.fetch(key)
    if data is None:
        raise JobError(f"{matrix.store} has no tile {i}, {j} of {matrix.name!r}", remedy="compute the matrix again")
    return matrix.seen(decode_tile(data, key=key))


async def read_family_tile(store: Channel, family: TileFamily, index: tuple[int, ...]) -> npt.NDArray[np.generic]:
    """One tile of a family.

    Raises:
        JobError: the store does not have it.
    """
    key = family.key(index).rpartition("#")[2]
    data = await store.fetch(key)
    if data is None:
        raise JobError(f"{family.store} has no tile {key}", remedy="compute the matrix again")
    return decode_tile(data, key=key)


async def read(store: Channel, matrix: StoredMatrix) -> npt.NDArray[np.generic]:
    """The whole matrix."""
    found = np.zeros(matrix.shape, matrix.dtype)

    async def one(i: int, j: int) -> None:
        found[matrix.slices(i, j)] = await read_tile(store, matrix, i, j)

    await _limited(one(i, j) for i, j in matrix.indices() if matrix.is_stored(i, j))
    return found


async def mark_kept(store: Channel, name: str) -> None:
    """Says that a matrix whose name was not given stays until it is deleted."""
    await store.put(f"{name}/{KEPT}", [b"{}"])


async def not_kept(matrices: Iterable[Tiles]) -> list[Tiles]:
    """Those that nobody has said to keep."""
    found = []
    for matrix in matrices:
        async with opened(matrix.store) as store:
            if not await store.exists(f"{matrix.name}/{KEPT}"):
                found.append(matrix)
    return found


async def delete_matrix(store: Channel, matrix: StoredMatrix) -> None:
    """Removes a matrix: its description first, and its tiles. Values that were stored under its name since then stay."""
    there = None
    with contextlib.suppress(DamagedObject):
        there = await described(store, matrix.store, matrix.name)
    if there is None or there.generation == matrix.generation:
        await delete(store, matrix.name)
    elif matrix.generation:
        await store.delete(await store.list(matrix.prefix))


async def delete(store: Channel, name: str) -> None:
    """Removes everything below a name, the description of a matrix first."""
    await store.delete([f"{name}/{_PART}"])
    await store.delete(await store.list(f"{name}/"))
    store.discard_staged(f"{name}/")


async def _limited(work: Iterable[Coroutine[object, object, None]]) -> None:
    """Runs coroutines, some at once."""
    running: set[asyncio.Task[None]] = set()
    try:
        for each in work:
            running.add(asyncio.ensure_future(each))
            if len(running) >= _AT_ONCE:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        for task in list(running):
            await task
    except Exception:
        await asyncio.gather(*running, return_exceptions=True)  # a put that was sent arrives all the same
        raise
    finally:
        for task in running:
            task.cancel()
