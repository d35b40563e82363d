"""Copies of a run's folder in the channel, where the run is driven by functions whose files end with them.

A term of driving (`runs.driver_function`) has a copy of its own, which begins with what the term before has saved. So a driver whose term is
over, and which does not know it yet, changes nothing that its successor reads. `save` says so to it afterwards: what is deleted from the
store after a `save` that returned is in the copy from which the next driver goes on.

    RUN-driver.LAUNCH/files/TERM/whole/PATH      a file as a whole; @TRIAL/PATH is one of a trial of a study, which is a run of its own
    RUN-driver.LAUNCH/files/TERM/link/PATH       a link to the folder of a trial: its name
    RUN-driver.LAUNCH/files/TERM/OFFSET/PATH     what was appended to a file, from an offset on
    RUN-driver.LAUNCH/files/TERM/complete        everything that was there when the term began is saved

Of a database, which may be in the middle of a change, it is the latest state that is whole. It is read last and saved first, so that it knows all
trials that are in the copy; results are read first and saved last, so that what a run has written before its result is in the copy, too.

The run's key is not copied: functions get it with their call, and derive those of trials from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from ephemeron.communication.channels import open_channel
from ephemeron.communication.channels.base import Channel
from ephemeron.communication.channels.run_channel import RunChannel
from ephemeron.communication.signing import SigningKey, create_key
from ephemeron.config.paths import replace_file
from ephemeron.config.typed import plain
from ephemeron.errors import ChannelEmptied, EphemeronError
from ephemeron.events import Traffic
from ephemeron.functions.async_invoke.collector import before_deletion
from ephemeron.runs.driver_function import DriverRecords
from ephemeron.runs.folders import KEY_FILE, RESULT_FILE, TRIALS, RunFolder
from ephemeron.runs.header import read_header

_log = logging.getLogger(__name__)

_COMPLETE, _WHOLE, _LINK = "complete", "whole", "link"
_ORDER = {RESULT_FILE: -1, ".db": 1}
"""Of reading, by name or kind of a file; they are saved in the order from behind."""
_WRITTEN_ONCE = (".safetensors", ".zip", ".bin", ".png")
"""Kinds of large files, which a client that only watches reads once."""
_GROWING = ("events.jsonl", "calls.jsonl")
"""Files to which is only appended; so are all texts, which are logs."""
_STAYS = (KEY_FILE, "host.json", "host.log", "stop")
_FOLDERS = ("objects", "scratch", "channel", "driver")
_AT_ONCE = 16
_LOCKED_S = 10.0
"""Longest wait for a database that is being changed."""
_SAVE_EVERY_S = 2.0

T = TypeVar("T")


async def save_now() -> None:
    """Saves the folder of the run that this process drives, if that is copied. Afterwards what is in it may be deleted elsewhere."""
    await before_deletion.get()()


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
        self._key = key
        self._trials: set[str] = set()
        """Trials whose folders are known to be."""
        self._read: set[str] = set()
        """Keys of appended parts, and of files that seldom change, that were read."""
        self._restored = -1
        """Term of the copy that was read."""
        self._is_complete = False
        self._saving = asyncio.Lock()

    @property
    def traffic(self) -> Traffic:
        """Requests so far."""
        return self._store.traffic + self._records.traffic

    async def restore(self, *, again: bool = True) -> int:
        """Makes the folder that of the latest complete copy; returns its term.

        Args:
            again: read everything once more; False: not what seldom changes.

        Raises:
            ChannelEmptied: there is none.
        """
        parts = [(self._parsed(key), key) for key in await self._store.list(self._prefix)]
        terms = [term for (term, kind, _), _ in parts if kind == _COMPLETE]
        if not terms:
            raise ChannelEmptied("the store has no copy of the run's folder", key=self._prefix)
        if max(terms) != self._restored:
            self._read.clear()
        self._restored = max(terms)
        for (term, kind, name), key in sorted(parts):
            if term != self._restored or kind == _COMPLETE or (key in self._read and not (again and kind == _WHOLE)):
                continue
            if (target := self._target(name)) is None or (data := await self._store.fetch(key)) is None:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            if kind == _LINK:
                self._link(target, bytes(data).decode())
                continue
            if kind == _WHOLE:
                if target.suffix in _WRITTEN_ONCE:
                    self._read.add(key)
                if not target.is_file() or target.read_bytes() != data:
                    part = target.with_name(f"{target.name}.part")
                    part.write_bytes(data)
                    part.replace(target)
                continue
            self._read.add(key)
            # The first part of another term's copy takes the place of all that was read from an earlier one.
            with target.open("r+b" if int(kind) and target.exists() else "w+b") as file:
                file.seek(int(kind))
                file.write(data)
        return self._restored

    def _target(self, name: str) -> Path | None:
        """The file that a path in the copy stands for; None: it is outside of this run and its trials."""
        folder = self._folder.path
        if name.startswith("@"):
            run, _, name = name[1:].partition("/")
            trial = self._trial(run)
            if trial is None:
                return None
            folder = trial.path
        root = folder.resolve()
        target = root / PurePosixPath(name)
        is_inside = root in (target.parent.resolve() / target.name).parents and (not target.is_symlink() or target.parent.name == TRIALS)
        return target if is_inside and target.name != ".." else None

    def _trial(self, run: str) -> RunFolder | None:
        """The folder of a trial, with its key; None: another run has this name."""
        folder = RunFolder(self._folder.path.parent / run)
        if run in self._trials:
            return folder
        header = read_header(folder)
        if folder.path.parent != self._folder.path.parent or run in ("", "..") or (header and header.parent != self._folder.run_id):
            return None
        folder.path.mkdir(exist_ok=True)
        if not (folder.path / KEY_FILE).exists():
            create_key(folder.path / KEY_FILE, self._key.derived(run))
        self._trials.add(run)
        return folder

    def _link(self, link: Path, run: str) -> None:
        if self._trial(run) is not None and not (link.is_symlink() and link.readlink().name == run):
            link.unlink(missing_ok=True)
            link.symlink_to(self._folder.path.parent / run, target_is_directory=True)

    async def save(self) -> None:
        """Saves what has changed since the latest time.

        Raises:
            TermOver: another driver has taken over; what was saved now is not read any more.
        """
        async with self._saving:
            changed = list(self._changed())
            for _, alike in itertools.groupby(reversed(changed), lambda one: _order(one[0])):
                of_these = list(alike)
                for at in range(0, len(of_these), _AT_ONCE):
                    await asyncio.gather(*(self._put(*one) for one in of_these[at : at + _AT_ONCE]))
            if not self._is_complete:
                await self._store.put(f"{self._prefix}{self._term:06d}/{_COMPLETE}", [b"."])
                self._is_complete = True
                old = [key for key in await self._store.list(self._prefix) if self._parsed(key)[0] < self._term]
                await self._store.delete(old)
            if changed and (await self._records.look()).term > self._term:
                raise TermOver

    def _changed(self) -> Iterator[tuple[str, int, bytes, tuple[int, int]]]:
        """Path, offset (-1: the whole file), what is to be saved, and what is saved then."""
        for name, path in sorted(self._files(), key=lambda each: (_order(each[0]), each[0])):
            if path.is_symlink():
                run = path.readlink().name
                if path.parent.name == TRIALS and self._saved.get(name) != (hash(run), 0):
                    yield name, -1, run.encode(), (hash(run), 0)
                continue
            before, changed_at = self._saved.get(name, (0, 0))
            with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
                there = path.stat()
                if (there.st_size, there.st_mtime_ns) == (before, changed_at):
                    continue
                if path.name in _GROWING or path.suffix == ".txt":
                    with path.open("rb") as file:
                        file.seek(before)
                        data = file.read()
                    if data:
                        yield name, before, data, (before + len(data), there.st_mtime_ns)
                else:
                    data = _snapshot(path) if path.suffix == ".db" else path.read_bytes()
                    yield name, -1, data, (there.st_size, there.st_mtime_ns)

    def _files(self) -> Iterator[tuple[str, Path]]:
        """Files that are copied, and links to trials, by their paths in the copy."""
        folders = {"": self._folder.path, **{f"@{each.run_id}/": each.path for each in self._linked()}}
        for prefix, folder in folders.items():
            for path in folder.rglob("*"):
                name = path.relative_to(folder).as_posix()
                if (path.is_file() or path.is_symlink()) and name.partition("/")[0] not in _FOLDERS and not self._stays(path):
                    yield prefix + name, path

    def _linked(self) -> list[RunFolder]:
        """Folders of trials."""
        links = (path for path in (self._folder.path / TRIALS).glob("*") if path.is_symlink())
        found = (self._folder.path.parent / path.readlink().name for path in links)
        return [RunFolder(path) for path in found if path.is_dir()]

    @staticmethod
    def _stays(path: Path) -> bool:
        return path.name in _STAYS or path.suffix in (".lock", ".part", ".sock", ".db-journal")

    async def _put(self, name: str, offset: int, data: bytes, saved: tuple[int, int]) -> None:
        is_link = name.startswith(f"{TRIALS}/") and name.count("/") == 1
        kind = _LINK if is_link else _WHOLE if offset < 0 else f"{offset:012d}"
        await self._store.put(f"{self._prefix}{self._term:06d}/{kind}/{name}", [data])
        self._saved[name] = saved

    def _parsed(self, key: str) -> tuple[int, str, str]:
        """Term, kind or offset, and path."""
        term, _, rest = key.removeprefix(self._prefix).partition("/")
        kind, _, name = rest.partition("/")
        return int(term), kind, name


def _order(name: str) -> int:
    path = PurePosixPath(name)
    return _ORDER.get(path.name, _ORDER.get(path.suffix, 0))


def _snapshot(path: Path) -> bytes:
    """A SQLite database as of its latest change that is whole."""
    with contextlib.closing(sqlite3.connect(path, timeout=_LOCKED_S)) as there, contextlib.closing(sqlite3.connect(":memory:")) as here:
        there.backup(here)
        return here.serialize()


class Copying:
    """A thread that copies the folder of a run to the channel while this process drives the run, so that a busy driver does not hold it up.

    Args:
        address: of the channel of the driver functions.
        launch, folder, key, term: see `FolderCopy`.
        requests: folder for a file with the number of requests; None: they are not counted.
    """

    def __init__(self, address: str, launch: str, folder: RunFolder, key: SigningKey, term: int, *, requests: Path | None = None) -> None:
        self._address, self._launch, self._folder, self._key, self._term = address, launch, folder, key, term
        self._requests = requests
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="folder-copy", daemon=True)

    @contextlib.contextmanager
    def running(self, *, restored: bool, term_over: Callable[[], None]) -> Iterator[None]:
        """Inside, changes are copied.

        Args:
            restored: make the folder that of the latest copy first.
            term_over: called in the thread if another driver has taken over, after which nothing is copied.

        Raises:
            TermOver: the same, before or after the block.
        """
        self._thread.start()
        opened = contextlib.AsyncExitStack()
        try:
            channel = self._wait(opened.enter_async_context(open_channel(self._address)))
            copy = FolderCopy(channel, self._launch, self._folder, self._key, self._term)
            if restored:
                self._wait(copy.restore())
            self._wait(self._save(copy))
            saving = asyncio.run_coroutine_threadsafe(self._save_often(copy, term_over), self._loop)
            token = before_deletion.set(lambda: asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._save(copy), self._loop)))
            try:
                yield
            finally:
                before_deletion.reset(token)
                saving.cancel()
                self._wait(self._save(copy))
        finally:
            self._wait(opened.aclose())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _save(self, copy: FolderCopy) -> None:
        try:
            await copy.save()
        finally:
            if self._requests is not None:
                replace_file(self._requests / f"requests-{os.getpid()}.json", json.dumps(plain(copy.traffic)).encode())

    async def _save_often(self, copy: FolderCopy, term_over: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(_SAVE_EVERY_S)
            try:
                await self._save(copy)
            except TermOver:
                term_over()
                return
            except (EphemeronError, OSError) as e:
                _log.warning("the folder of the run cannot be copied: %s", e)
