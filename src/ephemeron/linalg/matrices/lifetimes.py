"""How long matrices without a name live: what was stored without one, and results, go with the last Python object that refers to them.

Their tiles are removed by a thread, or when the process ends. Each process has a ledger of them in the home folder, which the kernel locks while it
lives. A process that is killed leaves its ledger, and the next one that computes removes what it lists, except what another run with the same
inputs would go on from.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import json
import logging
import os
import queue
import threading
import time
import uuid
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ephemeron.blocking import run as blocking
from ephemeron.config.paths import home
from ephemeron.config.typed import Typed, build, plain
from ephemeron.errors import EphemeronError
from ephemeron.linalg.matrices import tile_store
from ephemeron.linalg.matrices.stored import Tiles

_log = logging.getLogger(__name__)
_FOLDER = "matrix-owners"
Key = tuple[str, str]
"""Address of a store, and name of a matrix in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry(Typed):
    """A line of a ledger: the process has, or has no more, what is below a name."""

    store: str
    name: str
    process: int
    began: float
    """Seconds since 1970."""
    resumable: bool = False
    """Whether another process may go on from it: it stays where this one is killed."""
    gone: bool = False


class Owner:
    """What keeps a matrix: its tiles go when nothing refers to this any more."""

    def __init__(self, key: Key, *, resumable: bool) -> None:
        self.key, self.resumable = key, resumable
        self.leftovers: list[Owner] = []
        """Of computations with this matrix that failed: a later call goes on from them, as long as the matrix is there."""
        weakref.finalize(self, _wake.put, None).atexit = False

    def __reduce__(self) -> tuple[object, ...]:
        return _owner_at, (self.key,)


_owners: weakref.WeakValueDictionary[Key, Owner] = weakref.WeakValueDictionary()
_lock = threading.RLock()
_held: set[Key] = set()
"""What this process has to remove: what has an owner, and what had one until just now. Is changed under the lock."""
_wake: queue.SimpleQueue[None] = queue.SimpleQueue()
"""Wakes the thread: a last reference has gone, in any thread, at any point."""
_ledgers: dict[Path, IO[str]] = {}
_swept: set[Path] = set()
_remover: list[threading.Thread] = []


def owner_of(matrix: Tiles) -> Owner | None:
    """What keeps a matrix; None: it has a name, and stays until it is deleted."""
    return _owner_at((matrix.store, matrix.name))


def own(matrix: Tiles, *, resumable: bool = False) -> Owner | None:
    """Makes a matrix one that goes with its last object.

    Args:
        matrix: it, or a family.
        resumable: its name follows from inputs with names, so that another process may go on from it.
    """
    if matrix.store == tile_store.PLANNED:
        return None
    key = (matrix.store, matrix.name)
    with _lock:
        if (found := _owners.get(key)) is None:
            found = _owners[key] = Owner(key, resumable=resumable)
            _held.add(key)
            _note(key, resumable=resumable)
            if not _remover:
                _remover.append(threading.Thread(target=_remove_when_woken, name="matrix-removal", daemon=True))
                _remover[0].start()
                atexit.register(_end, os.getpid())
        return found


def disown(store: str, name: str) -> None:
    """What is below a name has been removed, or stays from now on."""
    with _lock:
        _owners.pop((store, name), None)
        if (store, name) in _held:
            _held.remove((store, name))
            _note((store, name), gone=True)


def settle() -> None:
    """Removes now what nothing refers to any more, so that a computation does not take it for a result that is there. The first time
    in a process, a thread removes what processes that were killed have left."""
    folder = home() / _FOLDER
    if folder not in _swept:
        _swept.add(folder)
        threading.Thread(target=remove_orphans, name="matrix-orphans", daemon=True).start()
    _remove_unused()


class Owners:
    """What a computation makes, kept until its results are."""

    def __init__(self, inputs: Iterable[Tiles]) -> None:
        self._inputs = [owner for each in inputs if (owner := owner_of(each)) is not None]
        self._made: dict[Key, Owner] = {}
        self.resumable = all(each.resumable for each in self._inputs)

    def begin(self, made: Iterable[Tiles]) -> None:
        """A program begins to make these."""
        for each in made:
            if (owner := own(each, resumable=self.resumable)) is not None:
                self._made[owner.key] = owner

    def release(self, made: Iterable[Tiles]) -> None:
        """The computation needs these no more: what nothing else refers to is removed. The same inputs give the same names, so one of them may
        be a result that the caller has."""
        for each in made:
            self._made.pop((each.store, each.name), None)
        _remove_unused()

    def fail(self) -> None:
        """What was made stays: for another process, or as long as the inputs."""
        if self.resumable:
            for store, name in self._made:
                disown(store, name)
        for each in self._inputs:
            each.leftovers += self._made.values()


def ledgers() -> Iterator[tuple[Path, bool, list[LedgerEntry]]]:
    """Each ledger of this user: its path, whether its process lives, and what it has."""
    for path in sorted((home() / _FOLDER).glob("*.jsonl")):
        with contextlib.suppress(OSError), path.open() as file:
            lives = path in _ledgers
            if not lives:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except OSError:
                    lives = True
            yield path, lives, _entries(file)


def remove_orphans() -> int:
    """Removes what processes that were killed have left, but not what another run may go on from.

    Returns:
        Number of matrices and temporary matrices.
    """
    known = list(ledgers())
    held = {(e.store, e.name) for _, lives, entries in known if lives for e in entries}
    removed = 0
    for path, lives, entries in known:
        keys = [(e.store, e.name) for e in entries if not e.resumable]
        if not lives and not _delete([key for key in keys if key not in held]):
            removed += len(keys)
            with contextlib.suppress(OSError):
                path.unlink()
    return removed


def _owner_at(key: Key) -> Owner | None:
    return _owners.get(key)


def _remove_when_woken() -> None:
    while True:
        _wake.get()
        _remove_unused()


def _remove_unused() -> None:
    """Removes what nothing refers to, neither here nor in another process. What a store without an answer has stays in the ledger."""
    with _lock:
        unused = [key for key in _held if key not in _owners]
        if not unused:
            return
        others = {(e.store, e.name) for path, lives, e_ in ledgers() if lives and path not in _ledgers for e in e_}
        failed = _delete([key for key in unused if key not in others])
        _held.difference_update(unused)
        for key in unused:
            if key not in failed:
                _note(key, gone=True)


def _delete(keys: Iterable[Key]) -> list[Key]:
    """Removes tiles; returns those of stores that did not answer."""
    failed: list[Key] = []
    by_store: dict[str, list[Key]] = {}
    for key in keys:
        by_store.setdefault(key[0], []).append(key)

    async def remove(store: str, of: Iterable[Key]) -> None:
        async with tile_store.opened(store) as channel:
            for _, name in of:
                await tile_store.delete(channel, name)

    for store, of in by_store.items():
        if tile_store.is_gone(store):
            continue
        try:
            blocking(lambda interrupts, store=store, of=of: remove(store, of))  # type: ignore[misc]
        except (EphemeronError, OSError, RuntimeError, asyncio.CancelledError) as error:
            _log.info("matrices in %s stay: %s", store, error)
            failed += of
    return failed


def _note(key: Key, *, resumable: bool = False, gone: bool = False) -> None:
    """Writes a line into the ledger of this process. Without a home folder that can be written, nothing is known of it after a kill."""
    folder = home() / _FOLDER
    entry = LedgerEntry(store=key[0], name=key[1], process=os.getpid(), began=time.time(), resumable=resumable, gone=gone)
    try:
        path = next((p for p in _ledgers if p.parent == folder and p.exists()), None)
        while path is None:
            folder.mkdir(parents=True, exist_ok=True)
            new = folder / f"{uuid.uuid4().hex}.jsonl"
            file = new.open("w")
            fcntl.flock(file, fcntl.LOCK_EX)
            if new.exists():  # nobody has taken it for one of a process that was killed, before it was locked
                path, _ledgers[new] = new, file
        print(json.dumps(plain(entry)), file=_ledgers[path], flush=True)
    except OSError as error:
        _log.debug("no ledger in %s: %s", folder, error)


def _entries(file: IO[str]) -> list[LedgerEntry]:
    """What a process has; a last line that was cut off is left out."""
    found: dict[Key, LedgerEntry] = {}
    for line in file:
        with contextlib.suppress(ValueError, EphemeronError):
            entry = build(LedgerEntry, json.loads(line), where="ledger")
            if entry.gone:
                found.pop((entry.store, entry.name), None)
            else:
                found[entry.store, entry.name] = entry
    return list(found.values())


def _forked() -> None:
    """A process that was forked off has nothing of its parent's, and neither its lock nor its thread."""
    global _lock, _wake
    _lock, _wake = threading.RLock(), queue.SimpleQueue()
    for each in (_owners, _held, _ledgers, _remover):
        each.clear()


os.register_at_fork(after_in_child=_forked)


def _end(process: int) -> None:
    """Removes everything that is left when this process ends; a process that was forked off has nothing."""
    if os.getpid() != process:
        return
    with _lock:
        _owners.clear()
        _remove_unused()
        for path, file in _ledgers.items():
            with contextlib.suppress(OSError, ValueError):
                if not _entries(path.open()):
                    path.unlink()
            file.close()
        _ledgers.clear()
