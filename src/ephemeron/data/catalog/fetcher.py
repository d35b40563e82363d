"""Undecoded samples by number: DPFlow's algorithm 3.1 (UDR), for many samples at once.

    calc_index   number -> shard and position in it            (line 5)
    load_meta    shard -> metadata, from the cache or the store (lines 6 to 9)
    load_data    metadata -> bytes                              (lines 10 to 12)

The algorithm as printed starts with an empty cache on every call and so never hits; its cache has no bound. Here the cache
lives as long as the reader and is bounded by bytes, a shard that several calls need is read once, and adjacent ranges are read
together. A fetcher is confined to the event loop of its process.

Least-recently-used cache bounded by bytes. Not thread-safe: used on one event loop.

Least recently used is the wrong policy for the samples of an epoch, each of which is used once; it serves metadata
shards, whose samples are read by the hundred when reading is sequential, and unpacked files.

Requests for a set of byte ranges: ranges that are close together become one.

A request costs a round trip (about 20 ms in a cloud, almost none in a folder), a gap costs its bytes. Reading through a
gap pays while `gap / bandwidth < latency`, if the requests would run one after another. Here they run concurrently,
so the gap is far below the 1.4 MB that follow from 20 ms at 70 MB/s.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ephemeron.data.catalog.dataset import Dataset, DatasetShardMeta, data_folder, digest
from ephemeron.data.catalog.files import FileRange, Files
from ephemeron.data.catalog.loop import unpackers
from ephemeron.data.catalog.meta import DataRef, SampleMeta
from ephemeron.data.catalog.open_files import open_files
from ephemeron.data.catalog.pins import changed, etag_of, file_pin, not_imported
from ephemeron.data.catalog.unpack import Table, row_group, unpack_bytes
from ephemeron.errors import DatasetDamaged, DatasetUnreachable, FileVersionChanged

_SHARDS_AT_ONCE = 16
_UNPACKED_AT_ONCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLimits:
    """Limits of a reader's memory and of its requests."""

    meta_cache_bytes: int = 64_000_000
    """Metadata shards kept."""
    unpack_cache_bytes: int = 256_000_000
    """Unpacked files and Parquet row groups kept, for datasets that have any."""
    gap_bytes: int = 64_000
    """Largest gap, in unused bytes, across which two ranges are joined into one request."""
    request_bytes: int = 8_000_000
    """Largest request made by joining."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawSample:
    """A sample, undecoded."""

    index: int
    meta: SampleMeta
    parts: Mapping[str, Any]
    """Bytes by part; of Parquet rows their values."""


def calc_index(index: int, shard_size: int) -> tuple[int, int]:
    """Shard, and position in it, of a sample (DPFlow, algorithm 3.1, CalcIndex)."""
    return divmod(index, shard_size)


def data_place(files: Files, dataset: Dataset, variant: str) -> tuple[Files, str]:
    """The files that hold the data of a variant, and the prefix of its paths there."""
    root = dataset.variant(variant).root
    return (files, f"{data_folder(dataset.name)}/") if root is None else (open_files(root), "")


class Fetcher:
    """Reads one variant.

    Args:
        files: of the metadata.
        dataset: the version.
        variant: its name.
        limits: of caches and requests.
    """

    def __init__(self, files: Files, dataset: Dataset, variant: str, limits: ReadLimits) -> None:
        self._files, self._dataset, self._name, self._limits = files, dataset, variant, limits
        self._variant = dataset.variant(variant)
        self._data, self._prefix = data_place(files, dataset, variant)
        self.shards: BoundedCache[int, DatasetShardMeta] = BoundedCache(limits.meta_cache_bytes)
        self.unpacked: BoundedCache[tuple[Any, ...], bytes | Table] = BoundedCache(limits.unpack_cache_bytes)
        self._sound: set[str] = set()
        """Files with a changed modification time and unchanged content."""
        self._loading: dict[Any, asyncio.Task[Any]] = {}
        self._slots = asyncio.Semaphore(_SHARDS_AT_ONCE)
        self._openers = asyncio.Semaphore(_UNPACKED_AT_ONCE)

    async def read(self, indices: Sequence[int]) -> list[RawSample]:
        """The samples of these numbers, in this order.

        Raises:
            DatasetDamaged: a shard or a data file is absent or not as it was imported.
            DatasetUnreachable: a store fails.
        """
        metas = await self.metas(indices)
        wanted = [(i, name, ref) for i, meta in enumerate(metas) for name, ref in meta.refs().items()]
        parts: list[dict[str, object]] = [{} for _ in metas]
        found = await self._load_data([ref for _, _, ref in wanted], [indices[i] for i, _, _ in wanted])
        for (i, name, _), part in zip(wanted, found, strict=True):
            parts[i][name] = part
        return [RawSample(index=n, meta=m, parts=p) for n, m, p in zip(indices, metas, parts, strict=True)]

    async def metas(self, indices: Sequence[int]) -> list[SampleMeta]:
        """The metadata of these samples. Raises as `read` does."""
        by_shard: dict[int, list[int]] = defaultdict(list)
        for i, index in enumerate(indices):
            by_shard[calc_index(index, self._variant.shard_size)[0]].append(i)
        out: dict[int, SampleMeta] = {}

        async def from_shard(shard: int, members: list[int]) -> None:
            try:
                async with self._slots:
                    meta = await self.load_meta(shard)
            except DatasetDamaged as e:  # the error may be of another call's sample: name this one
                raise DatasetDamaged(e.problem, file=e.file, index=indices[members[0]], **self._place()) from None
            for i in members:
                position = calc_index(indices[i], self._variant.shard_size)[1]
                try:
                    out[i] = meta.sample(position)
                except (ValueError, IndexError) as e:
                    path = self._dataset.shard_path(self._name, shard)
                    raise self._damaged(f"its metadata is wrong: {e}", self._files, path, indices[i]) from None

        await _all(*(from_shard(shard, members) for shard, members in by_shard.items()))
        return [out[i] for i in range(len(indices))]

    async def load_meta(self, shard: int) -> DatasetShardMeta:
        """One metadata shard, checked against its digest. Raises as `read` does."""
        if (kept := self.shards.get(shard)) is not None:
            return kept

        async def load() -> DatasetShardMeta:
            path = self._dataset.shard_path(self._name, shard)
            first = shard * self._variant.shard_size
            (data,) = await self._fetch(self._files, [FileRange(path)], [first])
            try:
                if digest(data) != self._variant.shards[shard]:
                    raise ValueError("its digest differs from that in the version")
                meta = DatasetShardMeta(data)
                expected = min(self._variant.shard_size, self._variant.samples - first)
                if (meta.first, meta.count) != (first, expected):
                    raise ValueError(f"it has samples from {meta.first}, {meta.count} of them, not {expected} from {first}")
            except (ValueError, KeyError, TypeError) as e:
                raise self._damaged(f"metadata shard: {e}", self._files, path, first) from None
            self.shards.put(shard, meta, meta.nbytes)
            return meta

        found: DatasetShardMeta = await self._once(("meta", shard), load)
        return found

    async def _load_data(self, refs: Sequence[DataRef], indices: Sequence[int]) -> list[Any]:
        """The parts of these references; `indices` are their samples."""
        whole = [i for i, ref in enumerate(refs) if ref.inner is None and ref.row is None]
        inner = [i for i, ref in enumerate(refs) if ref.inner is not None or ref.row is not None]
        read, *opened = await _all(
            self._whole([refs[i] for i in whole], [indices[i] for i in whole]), *(self._inside(refs[i], indices[i]) for i in inner)
        )
        out = dict(zip(whole, read, strict=True)) | dict(zip(inner, opened, strict=True))
        return [out[i] for i in range(len(refs))]

    async def _whole(self, refs: Sequence[DataRef], indices: Sequence[int]) -> list[bytes]:
        """The bytes that these references store, unpacked where they are packed."""
        found = await self._stored(refs, indices)
        packed = [i for i, ref in enumerate(refs) if ref.unpack is not None]
        thread = asyncio.get_running_loop().run_in_executor
        for i in packed:
            try:
                found[i] = await thread(unpackers(), unpack_bytes, refs[i].unpack or "", found[i])
            except ValueError as e:
                raise self._unsound(e, refs[i], indices[i]) from None
        return found

    async def _stored(self, refs: Sequence[DataRef], indices: Sequence[int]) -> list[bytes]:
        """Bytes as they are stored, with close ranges joined into one request."""
        requests: list[FileRange] = []
        served: list[list[tuple[int, int]]] = []  # per request: its references, and the start of each within it
        by_file: dict[str, list[int]] = defaultdict(list)
        for i, ref in enumerate(refs):
            by_file[ref.path].append(i)
        for path in sorted(by_file):
            for i in by_file[path]:
                if refs[i].offset is None:
                    requests.append(FileRange(self._prefix + path, pin=etag_of(refs[i])))
                    served.append([(i, 0)])
            members = [i for i in by_file[path] if refs[i].offset is not None]
            bounds = [(refs[i].offset or 0, (refs[i].offset or 0) + (refs[i].length or 0)) for i in members]
            for span in coalesce(bounds, gap=self._limits.gap_bytes, largest=self._limits.request_bytes):
                etag = etag_of(refs[members[span.members[0]]])
                requests.append(FileRange(self._prefix + path, span.start, span.stop - span.start, etag))
                served.append([(members[m], bounds[m][0] - span.start) for m in span.members])
        found = await self._fetch(self._data, requests, [indices[group[0][0]] for group in served])
        out: dict[int, bytes] = {}
        for data, group in zip(found, served, strict=True):
            for i, start in group:
                ref = refs[i]
                out[i] = data if ref.offset is None else data[start : start + (ref.length or 0)]
                if ref.length is not None and len(out[i]) != ref.length:
                    raise self._damaged(_cut_short(ref, len(data)), self._data, self._prefix + ref.path, indices[i])
                if problem := changed(ref, out[i]):
                    raise self._damaged(problem, self._data, self._prefix + ref.path, indices[i])
        return [out[i] for i in range(len(refs))]

    async def _inside(self, ref: DataRef, index: int) -> Any:
        """A part of a file or row group that is unpacked once for all its parts."""
        try:
            content = await self._unpacked(ref, index)
            if isinstance(content, Table):
                return content.pick((ref.row or (0, 0))[1], ref.column)
            start, length = ref.inner or (0, 0)
            part = content[start : start + length]
            if len(part) != length:
                raise ValueError(f"bytes {start} to {start + length} are wanted of {len(content)} unpacked")
        except ValueError as e:
            raise self._unsound(e, ref, index) from None
        except DatasetDamaged as e:
            raise DatasetDamaged(e.problem, file=e.file, index=index, **self._place()) from None
        return part

    async def _unpacked(self, ref: DataRef, index: int) -> bytes | Table:
        key = (ref.path, ref.offset, ref.unpack, ref.row and ref.row[0], ref.column)
        if (kept := self.unpacked.get(key)) is not None:
            return kept

        async def load() -> bytes | Table:
            async with self._openers:
                if ref.row is None:
                    (content,) = await self._whole([ref], [index])
                    self.unpacked.put(key, content, len(content))
                    return content
                path = self._prefix + ref.path
                size = await self._data.size(path)
                if size is None:
                    raise self._damaged("the file is absent", self._data, path, index)
                await self._check_file(ref, path, index)
                thread = asyncio.get_running_loop().run_in_executor
                table = await thread(unpackers(), row_group, self._data, ref, path, size)
                self.unpacked.put(key, table, table.nbytes)
                return table

        found: bytes | Table = await self._once(key, load)
        return found

    async def _check_file(self, ref: DataRef, path: str, index: int) -> None:
        """Checks by its identity, else by its content, that a file read in parts is the one that was imported."""
        if ref.pin is None or path in self._sound:
            return
        now = await self._data.identity(path)
        was, _, time = ref.pin.partition("@")
        if now == (time or was):
            return
        if time:
            now = await asyncio.get_running_loop().run_in_executor(unpackers(), file_pin, self._data, path)
            self._sound.update([path] if now == was else [])
        if now != was:
            raise self._damaged(not_imported(was, now), self._data, path, index)

    async def _once(self, key: Any, load: Any) -> Any:
        """The result of `load`; calls with the same key during it wait for the same result."""
        task = self._loading.get(key)
        if task is None:
            task = self._loading[key] = asyncio.ensure_future(load())
            task.add_done_callback(lambda done: (self._loading.pop(key, None), done.cancelled() or done.exception()))
        return await asyncio.shield(task)

    async def _fetch(self, files: Files, requests: Sequence[FileRange], indices: Sequence[int]) -> list[bytes]:
        if not requests:
            return []
        try:
            return await files.fetch(requests)
        except FileNotFoundError as e:
            path = str(e.args[0])
            index = next((i for r, i in zip(requests, indices, strict=True) if r.path == path), indices[0])
            raise self._damaged("the file is absent", files, path, index) from None
        except FileVersionChanged as e:
            path, was, now = e.path, e.wanted, e.found
            index = next((i for r, i in zip(requests, indices, strict=True) if r.path == path), indices[0])
            raise self._damaged(not_imported(was, now), files, path, index) from None
        except DatasetUnreachable as e:
            raise DatasetUnreachable(e.problem, file=e.file, index=indices[0], **self._place()) from e

    def _damaged(self, why: str, files: Files, path: str, index: int) -> DatasetDamaged:
        return DatasetDamaged(why, index=index, file=f"{files.url}/{path}", **self._place())

    def _unsound(self, e: ValueError, ref: DataRef, index: int) -> DatasetDamaged:
        return self._damaged(f"{ref.unpack}: {e}", self._data, self._prefix + ref.path, index)

    def _place(self) -> dict[str, str]:
        return {"dataset": self._dataset.name, "version": self._dataset.version, "variant": self._name}


async def _all(*work: Any) -> list[Any]:
    """All results; after the first error the rest is cancelled, and nothing continues in the background."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _cut_short(ref: DataRef, nbytes: int) -> str:
    if ref.offset is None:
        return f"it has {nbytes} bytes, but had {ref.length} when it was imported"
    return f"it ends before byte {ref.offset + (ref.length or 0)}, which the sample needs"


# -- least-recently-used cache bounded by bytes -------------------------------------------------------------------


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """A cache of at most `limit` bytes.

    Args:
        limit: bytes; a single larger value is not kept.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        """Bytes held now."""
        self.hits = 0
        self.misses = 0
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """The value of a key, or None; counts as use."""
        found = self._entries.get(key)
        if found is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return found[0]

    def put(self, key: K, value: V, nbytes: int) -> None:
        """Keeps a value and evicts the least recently used ones beyond the limit."""
        if key in self._entries:
            self.nbytes -= self._entries.pop(key)[1]
        if nbytes > self.limit:
            return
        self._entries[key] = (value, nbytes)
        self.nbytes += nbytes
        while self.nbytes > self.limit:
            self.nbytes -= self._entries.popitem(last=False)[1][1]


# -- requests for a set of byte ranges ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A request, and the ranges that it serves."""

    start: int
    stop: int
    members: tuple[int, ...]


def coalesce(ranges: Sequence[tuple[int, int]], *, gap: int, largest: int) -> list[ByteRange]:
    """Spans that together contain every range whole, each range in exactly one span.

    Args:
        ranges: (start, stop) in bytes, in any order; they may overlap.
        gap: most unused bytes read between two ranges.
        largest: longest span made by joining; a single longer range stays whole.
    """
    spans: list[ByteRange] = []
    start = stop = 0
    members: list[int] = []
    for i in sorted(range(len(ranges)), key=lambda i: ranges[i]):
        a, b = ranges[i]
        if members and a - stop <= gap and max(stop, b) - start <= largest:
            stop = max(stop, b)
            members.append(i)
            continue
        if members:
            spans.append(ByteRange(start, stop, tuple(members)))
        start, stop, members = a, b, [i]
    if members:
        spans.append(ByteRange(start, stop, tuple(members)))
    return spans
