"""Copies of a run's folder in the channel, where the run is driven by functions whose files end with them.

A term of driving (`runs.driver_function`) has a copy of its own, which begins with what the term before has saved. So a driver whose term is
over, and which does not know it yet, changes nothing that its successor reads. `save` says so to it afterwards: what is deleted from the
store after a `save` that returned is in the copy from which the next driver goes on.

    RUN-driver.LAUNCH/files/TERM/PATH            a file as a whole
    RUN-driver.LAUNCH/files/TERM/PATH@OFFSET     what was appended to a file, from an offset on
    RUN-driver.LAUNCH/files/TERM/@complete       everything that was there when the term began is saved

The run's key is not copied: functions get it with their call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from ephemeron.communication.channels import open_channel
from ephemeron.communication.channels.base import Channel
from ephemeron.communication.channels.run_channel import RunChannel
from ephemeron.communication.signing import SigningKey
from ephemeron.errors import ChannelEmptied, EphemeronError
from ephemeron.functions.async_invoke.collector import before_deletion
from ephemeron.runs.driver_function import STEP_ASIDE, DriverRecords
from ephemeron.runs.folders import KEY_FILE, RunFolder

_log = logging.getLogger(__name__)

_COMPLETE = "@complete"
_GROWING = (".jsonl", ".txt")
"""Files to which is only appended."""
_STAYS = (KEY_FILE, "host.json", "host.log", "stop")
_FOLDERS = ("objects", "scratch", "channel", "driver")
_AT_ONCE = 16
_SAVE_EVERY_S = 2.0

T = TypeVar("T")


class TermOver(Exception):
    """Another driver has taken the next term."""


class FolderCopy:
    """The copy of one term.

    Args:
        channel: of the driver functions.
        launch: prefix of the driver functions.
        folder: of the run.
        key: of the run, which signs what is saved.
        term: that this process holds; 0: before the first.
    """

    def __init__(self, channel: Channel, launch: str, folder: RunFolder, key: SigningKey, term: int) -> None:
        self._store = RunChannel(channel, owner=f"folder-{term}", signing=key, signs=lambda _: True)
        self._records = DriverRecords(channel, launch, name=f"folder-{term}")
        self._folder, self._term = folder, term
        self._prefix = f"{launch}/files/"
        self._saved: dict[str, tuple[int, int]] = {}
        """By path: bytes that are saved, and the time of change of the file."""
        self._read: dict[str, int] = {}
        """By key: size of what was read from it."""
        self._is_complete = False
        self._saving = asyncio.Lock()

    async def restore(self) -> int:
        """Makes the folder that of the latest complete copy; returns its term.

        Raises:
            ChannelEmptied: there is none.
        """
        keys = await self._store.list(self._prefix)
        terms = [self._term_of(key) for key in keys if key.endswith(_COMPLETE)]
        if not terms:
            raise ChannelEmptied("the store has no copy of the run's folder", key=self._prefix)
        term = max(terms)
        mine = sorted(key for key in keys if self._term_of(key) == term and not key.endswith(_COMPLETE))
        fresh = [key for key in mine if "@" not in key or key not in self._read]
        found = {key: await self._store.fetch(key) for key in fresh}
        for key, data in found.items():
            path, _, offset = key.removeprefix(f"{self._prefix}{term:06d}/").partition("@")
            target = self._folder.path / PurePosixPath(path)
            if data is None or self._folder.path not in target.resolve().parents:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            if not offset:
                if not target.is_file() or target.read_bytes() != data:
                    part = target.with_name(f"{target.name}.part")
                    part.write_bytes(data)
                    part.replace(target)
                continue
            self._read[key] = len(data)
            with target.open("r+b" if target.exists() else "w+b") as file:
                file.seek(int(offset))
                file.write(data)
        return term

    async def save(self) -> None:
        """Saves what has changed since the latest time.

        Raises:
            TermOver: another driver has taken over; what was saved now is not read any more.
        """
        async with self._saving:
            changed = list(self._changed())
            for at in range(0, len(changed), _AT_ONCE):
                await asyncio.gather(*(self._put(*one) for one in changed[at : at + _AT_ONCE]))
            if not self._is_complete:
                await self._store.put(f"{self._prefix}{self._term:06d}/{_COMPLETE}", [b"."])
                self._is_complete = True
                old = [key for key in await self._store.list(self._prefix) if self._term_of(key) < self._term]
                await self._store.delete(old)
            if changed and (await self._records.look()).term > self._term:
                raise TermOver

    def _changed(self) -> Iterator[tuple[str, int, bytes, tuple[int, int]]]:
        """Path, offset (-1: the whole file), what is to be saved, and what is saved then."""
        for path in sorted(self._folder.path.rglob("*")):
            name = path.relative_to(self._folder.path).as_posix()
            if not path.is_file() or path.is_symlink() or name.partition("/")[0] in _FOLDERS or self._stays(path):
                continue
            before, changed_at = self._saved.get(name, (0, 0))
            there = path.stat()
            if (there.st_size, there.st_mtime_ns) == (before, changed_at):
                continue
            if path.suffix in _GROWING:
                with path.open("rb") as file:
                    file.seek(before)
                    data = file.read()
                if data:
                    yield name, before, data, (before + len(data), there.st_mtime_ns)
            else:
                yield name, -1, path.read_bytes(), (there.st_size, there.st_mtime_ns)

    @staticmethod
    def _stays(path: Path) -> bool:
        return path.name in _STAYS or path.suffix in (".lock", ".part", ".sock")

    async def _put(self, name: str, offset: int, data: bytes, saved: tuple[int, int]) -> None:
        key = f"{self._prefix}{self._term:06d}/{name}"
        await self._store.put(key if offset < 0 else f"{key}@{offset:012d}", [data])
        self._saved[name] = saved

    def _term_of(self, key: str) -> int:
        return int(key.removeprefix(self._prefix).partition("/")[0])


class Copying:
    """A thread that copies the folder of a run to the channel while this process drives the run, so that a busy driver does not hold it up.

    Args:
        address: of the channel of the driver functions.
        launch, folder, key, term: see `FolderCopy`.
    """

    def __init__(self, address: str, launch: str, folder: RunFolder, key: SigningKey, term: int) -> None:
        self._address, self._launch, self._folder, self._key, self._term = address, launch, folder, key, term
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="folder-copy", daemon=True)

    @contextlib.contextmanager
    def running(self, *, restored: bool) -> Iterator[None]:
        """Inside, changes are copied. With `restored`, the folder is made that of the latest copy first."""
        self._thread.start()
        opened = contextlib.AsyncExitStack()
        try:
            channel = self._wait(opened.enter_async_context(open_channel(self._address)))
            copy = FolderCopy(channel, self._launch, self._folder, self._key, self._term)
            if restored:
                self._wait(copy.restore())
            self._wait(copy.save())
            saving = asyncio.run_coroutine_threadsafe(_save_often(copy), self._loop)
            token = before_deletion.set(lambda: asyncio.wrap_future(asyncio.run_coroutine_threadsafe(copy.save(), self._loop)))
            try:
                yield
            finally:
                before_deletion.reset(token)
                saving.cancel()
                self._wait(copy.save())
        finally:
            self._wait(opened.aclose())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _save_often(copy: FolderCopy) -> None:
    while True:
        await asyncio.sleep(_SAVE_EVERY_S)
        try:
            await copy.save()
        except TermOver:
            os._exit(STEP_ASIDE)
        except EphemeronError as e:
            _log.warning("the folder of the run cannot be copied: %s", e)
