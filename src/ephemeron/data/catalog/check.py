"""Check of a dataset against its metadata: shards complete, ranges within files, samples decodable.

Defects are values, collected to the end: repairing a dataset takes the whole list. A change of the bytes of raw arrays that keeps
their number is not found, since no decoder can notice it (`verify` does).

Verification of a version's data: the checks of `check`, and a comparison of all data with their digests.

The comparison may read all data; objects with an ETag are only listed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ephemeron.data.catalog.dataset import Dataset, meta_folder
from ephemeron.data.catalog.fetcher import Fetcher, ReadLimits, data_place
from ephemeron.data.catalog.files import FileRange, Files
from ephemeron.data.catalog.loop import run
from ephemeron.data.catalog.meta import DataRef
from ephemeron.data.catalog.pins import changed, etag_of, file_pin, not_imported
from ephemeron.data.catalog.reader import DatasetReader
from ephemeron.data.catalog.store import DatasetStore
from ephemeron.errors import DatasetDamaged

_BATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantCheck:
    """Result for one variant."""

    variant: str
    samples: int
    """Samples according to the metadata."""
    files: int
    """Data files that the samples refer to."""
    nbytes: int
    """Stored bytes that the samples refer to; a range that several share counts once for each."""
    decoded: int
    """Samples that were read and decoded."""
    defects: tuple[str, ...]
    """Defects, one line each."""


def check_variant(
    store: DatasetStore,
    dataset: Dataset,
    variant: str,
    *,
    decode: int | None = 100,
    seed: int = 0,
    tell: Callable[[str, int, int | None], None] | None = None,
) -> VariantCheck:
    """Checks every shard and range, and decodes some samples.

    Args:
        store: where it is.
        dataset: the version.
        variant: its name.
        decode: how many samples to decode, chosen at random; None: all.
        seed: of that choice.
        tell: called with `(what, done, total)` now and then.

    Raises:
        DatasetUnreachable: a store fails.
        MissingExtra: a decoder needs a package that is not installed.
    """
    spec = dataset.variant(variant)
    fetcher = Fetcher(store.files, dataset, variant, ReadLimits(meta_cache_bytes=0))
    files, prefix = data_place(store.files, dataset, variant)
    sizes = run(files.tree(prefix))
    defects: list[str] = []
    paths: set[str] = set()
    nbytes, good = 0, []
    for shard in range(len(spec.shards)):
        try:
            metas = run(fetcher.load_meta(shard))
        except DatasetDamaged as e:
            defects.append(str(e))
            continue
        for position in range(len(metas)):
            index = metas.first + position
            try:
                refs = list(metas.sample(position).refs().values())
                problems = [p for ref in refs if (p := _range_defect(ref, sizes.get(prefix + ref.path)))]
            except ValueError as e:
                refs, problems = [], [f"its metadata is wrong: {e}"]
            paths.update(ref.path for ref in refs)
            nbytes += sum(ref.length or 0 for ref in refs)
            defects += [f"{dataset}, {variant}, sample {index}: {problem}" for problem in problems]
            if not problems:
                good.append(index)
        if tell is not None:
            tell(f"{variant}: metadata", metas.first + len(metas), spec.samples)
    chosen = good if decode is None or decode >= len(good) else sorted(random.Random(seed).sample(good, decode))
    reader = DatasetReader(store.files, dataset, variant)
    damaged: list[str] = []
    for start in range(0, len(chosen), _BATCH):
        batch = chosen[start : start + _BATCH]
        damaged += _undecodable(reader, batch)
        if tell is not None:
            tell(f"{variant}: decoding", start + len(batch), len(chosen))
    return VariantCheck(
        variant=variant,
        samples=spec.samples,
        files=len(paths),
        nbytes=nbytes,
        decoded=len(chosen) - len(damaged),
        defects=(*defects, *damaged),
    )


def unreferenced(store: DatasetStore, name: str) -> dict[str, int]:
    """Metadata shards that no version names, with their bytes: from imports that died, or are running."""
    latest = store.dataset(name)
    versions = [latest if v == latest.version else store.dataset(name, v) for v in latest.history]
    named = {v.shard_path(variant, i) for v in versions for variant, s in v.variants.items() for i in range(len(s.shards))}
    named |= {f"{meta_folder(name)}/{s.defects.file}" for v in versions for s in v.variants.values() if s.defects}
    found = run(store.files.tree(meta_folder(name)))
    return {path: n for path, n in found.items() if path not in named and not path.startswith(f"{meta_folder(name)}/versions/")}


def _range_defect(ref: DataRef, size: int | None) -> str:
    if size is None:
        return f"{ref.path} is absent"
    if ref.offset is None and ref.length is not None and size != ref.length:
        return f"{ref.path} has {size} bytes, but had {ref.length} when it was imported"
    if ref.offset is not None and ref.offset + (ref.length or 0) > size:
        return f"{ref.path} has {size} bytes, but bytes {ref.offset} to {ref.offset + (ref.length or 0)} are wanted"
    return ""


def _undecodable(reader: DatasetReader, indices: list[int]) -> Iterator[str]:
    try:
        reader.read_many(indices)
    except DatasetDamaged as e:
        if len(indices) == 1:
            yield str(e)
            return
        half = len(indices) // 2
        yield from _undecodable(reader, indices[:half])
        yield from _undecodable(reader, indices[half:])


# -- verification of a version's data -----------------------------------------------------------------------------


_READ_BATCH = 512
_BATCH_BYTES = 64_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantVerification:
    """Result for one variant."""

    variant: str
    samples: int
    """Samples according to the metadata."""
    files: int
    """Data files that their references name."""
    stored_bytes: int
    """Stored bytes that they reference; a range shared by several samples counts once for each."""
    decoded: int
    """Samples that were read and decoded."""
    pinned: int
    """Samples all bytes of which were compared."""
    unpinned: int
    """Samples without a digest in the metadata."""
    nbytes: int
    """Bytes read for the comparison."""
    defects: tuple[str, ...]
    """Defects, one line each."""


def verify_variant(
    store: DatasetStore,
    dataset: Dataset,
    variant: str,
    *,
    decode: int | None = 0,
    digests: bool = True,
    tell: Callable[[str, int, int | None], None] | None = None,
) -> VariantVerification:
    """Checks every shard, range and pin, and decodes some samples.

    Args:
        store: store of the dataset.
        dataset: version of the dataset.
        variant: name of the variant.
        decode: number of samples to decode, chosen at random; None: all. Samples with changed content are not decoded.
        digests: compare content with its digests.
        tell: `(what, done, total)`, called at intervals.

    Raises:
        DatasetUnreachable: a store fails.
        MissingExtra: a decoder needs a package that is not installed.
    """
    spec, comparing = dataset.variant(variant), _Comparing(*data_place(store.files, dataset, variant))
    fetcher = Fetcher(store.files, dataset, variant, ReadLimits(meta_cache_bytes=0))
    changes, pinned, unpinned = list[str](), 0, 0
    for shard in range(len(spec.shards) if digests else 0):
        try:
            metas = run(fetcher.load_meta(shard))
        except DatasetDamaged:
            continue  # `check_variant` reports it
        wanted: list[tuple[int, DataRef]] = []
        for position in range(len(metas)):
            try:
                refs = list(metas.sample(position).refs().values())
            except ValueError:
                continue
            whole = all(ref.pin is not None for ref in refs)
            pinned, unpinned = pinned + whole, unpinned + (not whole)
            wanted += [(metas.first + position, ref) for ref in refs if ref.pin is not None]
        for index, problem in comparing.problems(wanted):
            changes.append(f"{dataset}, {variant}, sample {index}: {problem}")
        if tell is not None:
            tell(f"{variant}: content", metas.first + len(metas), spec.samples)
    checked = check_variant(store, dataset, variant, decode=0 if changes else decode, tell=tell)
    return VariantVerification(
        variant=variant,
        samples=spec.samples,
        files=checked.files,
        stored_bytes=checked.nbytes,
        decoded=checked.decoded,
        pinned=pinned,
        unpinned=unpinned,
        nbytes=comparing.nbytes,
        defects=(*checked.defects, *changes),
    )


class _Comparing:
    """Compares pins of references with the stored bytes; bytes that several references share are read and reported once."""

    def __init__(self, files: Files, prefix: str) -> None:
        self.nbytes = 0
        self._files, self._prefix = files, prefix
        self._sizes = run(files.tree(prefix))
        self._etags: dict[str, str] | None = None
        self._seen: set[tuple[str, int | None, int | None]] = set()

    def problems(self, wanted: list[tuple[int, DataRef]]) -> Iterator[tuple[int, str]]:
        """Sample and problem of each new difference. Absent and truncated files are left to `check`."""
        ranges: list[tuple[int, DataRef]] = []
        for index, ref in wanted:
            shared = etag_of(ref) is not None or ref.row is not None
            key = (ref.path, None, None) if shared else (ref.path, ref.offset, ref.length)
            size = self._sizes.get(self._prefix + ref.path)
            if key in self._seen or size is None or size < (ref.offset or 0) + (ref.length or 0):
                continue
            self._seen.add(key)
            if not shared:
                ranges.append((index, ref))
            elif problem := self._of_file(ref, size):
                yield index, f"{ref.path}: {problem}"
        for batch in _batches(ranges):
            found = run(self._files.fetch([self._range(ref) for _, ref in batch]))
            self.nbytes += sum(map(len, found))
            for (index, ref), data in zip(batch, found, strict=True):
                if problem := changed(ref, data):
                    yield index, f"{ref.path}: {problem}"

    def _of_file(self, ref: DataRef, size: int) -> str:
        path, was = self._prefix + ref.path, ref.pin or ""
        if etag_of(ref) is not None:
            if self._etags is None:
                self._etags = run(self._files.identities(self._prefix))
            now = self._etags.get(path)
        else:
            now = file_pin(self._files, path)
            self.nbytes += size
        return "" if now == was.partition("@")[0] else not_imported(was, now)

    def _range(self, ref: DataRef) -> FileRange:
        path = self._prefix + ref.path
        return FileRange(path) if ref.offset is None else FileRange(path, ref.offset, ref.length)


def _batches(wanted: list[tuple[int, DataRef]]) -> Iterator[list[tuple[int, DataRef]]]:
    batch: list[tuple[int, DataRef]] = []
    nbytes = 0
    for index, ref in wanted:
        batch.append((index, ref))
        nbytes += ref.length or 0
        if len(batch) >= _READ_BATCH or nbytes > _BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch
