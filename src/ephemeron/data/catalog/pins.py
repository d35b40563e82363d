"""Pins: digests that tie a version to its bytes, one for each reference, taken at import and compared on reading.

    etag:…             of an object: every request carries it as `If-Match`, so the store refuses other content
    xxh3:HEX           of the stored bytes of a reference, in any store: compared with the bytes read, at 10 GB/s
    xxh3:HEX@MTIME     of a whole file of which samples are small parts (Parquet): compared when the file's modification
                       time (nanoseconds) differs from that at import; `verify` always compares

Computing `xxh3` reads all data once at import; an ETag comes with the listing. A pin detects change and does not
protect against deliberate manipulation. An object that is uploaded again with another part size gets another ETag for
the same content: import it again.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import xxhash

from ephemeron.data.catalog.files import FileRange, Files
from ephemeron.data.catalog.loop import run
from ephemeron.data.catalog.meta import DataRef, SampleMeta

_BATCH_BYTES = 64_000_000
_BATCH = 512
_PIECE = 8_000_000
_HEADS = 16
"""Largest number of objects that are queried one by one; more are listed."""


def content_pin(data: bytes) -> str:
    """The pin of these bytes."""
    return f"xxh3:{xxhash.xxh3_64_hexdigest(data)}"


def etag_of(ref: DataRef) -> str | None:
    """The pin that a request can carry."""
    return ref.pin if ref.pin is not None and ref.pin.startswith("etag:") else None


def changed(ref: DataRef, stored: bytes) -> str:
    """Difference between the bytes of a reference and its pin; empty: none, or the pin cannot tell."""
    if ref.pin is None or not ref.pin.startswith("xxh3:") or "@" in ref.pin:
        return ""
    found = content_pin(stored)
    return "" if found == ref.pin else not_imported(ref.pin, found)


def not_imported(was: str, now: str | None) -> str:
    """Message about content that differs from its pin."""
    if was.startswith("etag:"):
        return f"it is not the object that was imported: was {was}, is {now or 'absent'}"
    return f"its content is not what was imported: was {was.partition('@')[0]}, is {now}"


def file_pin(files: Files, path: str) -> str:
    """Content pin of a whole file, which is read in blocks.

    Raises:
        FileNotFoundError: it is absent.
        DatasetUnreachable: the store fails.
    """
    state, at = xxhash.xxh3_64(), 0
    while True:
        (data,) = run(files.fetch([FileRange(path, at, _PIECE)]))
        state.update(data)
        at += len(data)
        if len(data) < _PIECE:
            return f"xxh3:{state.hexdigest()}"


def taken(samples: Iterable[SampleMeta], files: Files, absent: Callable[[str], None]) -> Iterator[SampleMeta]:
    """The samples with pins on all their references.

    Args:
        samples: without pins.
        files: that their paths are relative to.
        absent: called with the path of each absent file; unless it raises, its samples are left out.

    Raises:
        DatasetUnreachable: the store fails.
    """
    if not files.local:
        yield from _with_etags(samples, files)
        return
    shared: dict[Any, str | None] = {}
    for batch in _batches(samples):
        try:
            yield from _with_content(batch, files, shared)
        except FileNotFoundError:
            for sample in batch:
                try:
                    yield from _with_content([sample], files, shared)
                except FileNotFoundError as e:
                    absent(str(e.args[0]))


def _with_etags(samples: Iterable[SampleMeta], files: Files) -> Iterator[SampleMeta]:
    known: dict[str, str | None] = {}
    listed = False
    for sample in samples:
        for ref in sample.refs().values():
            if ref.path not in known and len(known) >= _HEADS and not listed:
                known, listed = {**run(files.identities("")), **known}, True
            if ref.path not in known:
                known[ref.path] = run(files.identity(ref.path))
        yield _pinned(sample, {_key(ref): known[ref.path] for ref in sample.refs().values()})


def _with_content(batch: list[SampleMeta], files: Files, shared: dict[Any, str | None]) -> list[SampleMeta]:
    """Adds content pins to the samples. Raises FileNotFoundError if a file is absent."""
    wanted: dict[Any, DataRef] = {}
    for sample in batch:
        wanted.update((_key(ref), ref) for ref in sample.refs().values() if _key(ref) not in shared)
    pins: dict[Any, str | None] = {
        key: f"{file_pin(files, ref.path)}@{run(files.identity(ref.path))}" for key, ref in wanted.items() if ref.row
    }
    ranges = {key: stored_range(ref) for key, ref in wanted.items() if not ref.row}
    pins |= zip(ranges, map(content_pin, run(files.fetch(list(ranges.values())))), strict=True)
    shared |= {key: pins[key] for key, ref in wanted.items() if ref.row or ref.inner}
    return [_pinned(sample, ChainMap(pins, shared)) for sample in batch]


def stored_range(ref: DataRef) -> FileRange:
    """Range of the stored bytes of a reference."""
    return FileRange(ref.path) if ref.offset is None else FileRange(ref.path, ref.offset, ref.length)


def _key(ref: DataRef) -> Any:
    """Key of the stored bytes, which several references may share."""
    return ref.path if ref.row else (ref.path, ref.offset, ref.length)


def _batches(samples: Iterable[SampleMeta]) -> Iterator[list[SampleMeta]]:
    batch: list[SampleMeta] = []
    nbytes, seen = 0, set[Any]()
    for sample in samples:
        batch.append(sample)
        for ref in sample.refs().values():
            if not ref.row and _key(ref) not in seen:
                seen.add(_key(ref))
                nbytes += ref.length or 0
        if len(batch) >= _BATCH or nbytes > _BATCH_BYTES:
            yield batch
            batch, nbytes, seen = [], 0, set()
    if batch:
        yield batch


def _pinned(sample: SampleMeta, pins: Mapping[Any, str | None]) -> SampleMeta:
    data = {part: replace(ref, pin=pins[_key(ref)]) for part, ref in sample.data.items()}
    at = sample.target_at
    return replace(sample, data=data, target_at=None if at is None else replace(at, pin=pins[_key(at)]))
