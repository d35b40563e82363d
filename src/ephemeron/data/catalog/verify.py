"""Verification of a version's data: the checks of `check`, and a comparison of all data with their digests.

The comparison may read all data; objects with an ETag are only listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ephemeron.data.catalog.check import check_variant
from ephemeron.data.catalog.dataset import Dataset
from ephemeron.data.catalog.fetcher import Fetcher, ReadLimits, data_place
from ephemeron.data.catalog.files import FileRange, Files
from ephemeron.data.catalog.loop import run
from ephemeron.data.catalog.meta import DataRef
from ephemeron.data.catalog.pins import changed, etag_of, file_pin, not_imported
from ephemeron.data.catalog.store import DatasetStore
from ephemeron.errors import DatasetDamaged

_BATCH = 512
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
        if len(batch) >= _BATCH or nbytes > _BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch
