"""The unified dataset reader (DPFlow, section 3.3.1, UDR): decoded samples by number, for every kind of storage.

A reader is bound to one version and carries its document, so that all copies read the same samples even while newer versions
appear. It may be pickled, forked and used from many threads: reading happens on one event loop per process (`loop`), decoding in
the calling thread.

It is a map-style dataset for PyTorch: `reader[i]` is `(data, target)`, and `DataLoader` fetches a batch in one go.
"""

from __future__ import annotations

import asyncio
import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, SupportsIndex

from ephemeron.config.paths import AnyPath
from ephemeron.config.typed import near
from ephemeron.data.catalog.dataset import LATEST, Dataset
from ephemeron.data.catalog.fetcher import Fetcher, RawSample, ReadLimits, data_place
from ephemeron.data.catalog.files import Files
from ephemeron.data.catalog.loop import run, submit
from ephemeron.data.catalog.meta import SampleMeta
from ephemeron.data.catalog.store import DatasetStore
from ephemeron.data.catalog.unpack import DECODERS, Decoder
from ephemeron.data.formats.lines import one_line
from ephemeron.errors import DatasetDamaged, JobError, MissingExtra

_BATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One decoded sample."""

    index: int
    """Number of the sample within the variant."""
    key: str
    """Its readable name."""
    data: Mapping[str, Any]
    """Decoded parts by name."""
    target: Any
    extra: Mapping[str, Any]

    @property
    def value(self) -> Any:
        """The part, if there is exactly one; else all of them by name."""
        return next(iter(self.data.values())) if len(self.data) == 1 else dict(self.data)


class DatasetReader:
    """Samples of one variant of one version.

    Args:
        files: files of the store.
        dataset: version of the dataset.
        variant: name of the variant.
        limits: bounds of caches and requests.
        decoders: further decoders, or others in place of known ones, by name. Picklable ones, if the reader is pickled.
        decode: False leaves every part as it is stored (bytes, or the value of a Parquet row).

    Raises:
        DatasetNotFound: there is no such variant.
        JobError: it uses an unknown decoder.
    """

    def __init__(
        self,
        files: Files,
        dataset: Dataset,
        variant: str,
        *,
        limits: ReadLimits | None = None,
        decoders: Mapping[str, Decoder] | None = None,
        decode: bool = True,
    ) -> None:
        self.dataset = dataset
        self.variant = variant
        self._spec = dataset.variant(variant)
        self._files, self._limits, self._more = files, limits or ReadLimits(), dict(decoders or {})
        self._decode = decode
        self._decoders = {part: self._find(options) for part, options in self._spec.decoders.items()} if decode else {}
        self._fetchers: dict[int, Fetcher] = {}

    @classmethod
    def open(
        cls, name: str, variant: str, *, version: str = LATEST, store: DatasetStore | AnyPath | None = None, **options: Any
    ) -> DatasetReader:
        """Finds a dataset and opens a variant of it.

        Args:
            name: `namespace/name`.
            variant: e.g. `train`.
            version: its name, or `latest`, which is resolved now.
            store: a store or its URL; by default `datasets-store` in the home folder.
            options: further arguments of the class.
        """
        place = store if isinstance(store, DatasetStore) else DatasetStore.open(store)
        return cls(place.files, place.dataset(name, version), variant, **options)

    def _find(self, options: Mapping[str, Any]) -> Decoder:
        name, known = str(options["decoder"]), {**DECODERS, **self._more}
        if name not in known:
            raise JobError(
                f"{self.dataset}, {self.variant}: decoder {name!r} is not known",
                remedy=f"{near(name, known)} (or give it: decoders={{{name!r}: function}})",
            )
        return known[name]

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self._files, self.dataset, self.variant, self._limits, self._more, self._decode)

    def __repr__(self) -> str:
        return f"DatasetReader({str(self.dataset)!r}, {self.variant!r}, {len(self)} samples)"

    def __len__(self) -> int:
        return self._spec.samples

    @property
    def is_local(self) -> bool:
        """Whether metadata and data are in folders; false where either is in an object store."""
        data, _ = data_place(self._files, self.dataset, self.variant)
        return self._files.local and data.local

    @property
    def has_own_decoders(self) -> bool:
        """Whether it has decoders of the user, which may draw random numbers; those of the library do not."""
        return bool(self._more)

    @property
    def info(self) -> Mapping[str, Any]:
        """Metadata of all samples: names of classes, columns, …"""
        return self._spec.info

    def read(self, index: SupportsIndex) -> Sample:
        """One sample. Raises as `read_many` does."""
        return self.read_many([index])[0]

    def read_many(self, indices: Iterable[SupportsIndex]) -> list[Sample]:
        """The samples of these numbers, in this order; numbers may repeat.

        Raises:
            IndexError: a number is negative or too large.
            DatasetDamaged: a file is absent, cut short or cannot be decoded; nothing is returned.
            DatasetUnreachable: a store fails.
            MissingExtra: a decoder needs a package that is not installed.
        """
        return self._decoded(run(self._fetcher().read(self._checked(indices))))

    async def read_many_async(self, indices: Iterable[SupportsIndex]) -> list[Sample]:
        """`read_many` for use in an event loop."""
        raw = await asyncio.wrap_future(submit(self._fetcher().read(self._checked(indices))))
        return await asyncio.to_thread(self._decoded, raw)

    def metas(self, indices: Iterable[SupportsIndex]) -> list[SampleMeta]:
        """Metadata only. Raises as `read_many` does."""
        return run(self._fetcher().metas(self._checked(indices)))

    def __getitem__(self, index: SupportsIndex) -> tuple[Any, Any]:
        sample = self.read(index)
        return sample.value, sample.target

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, Any]]:
        """Samples of a batch; PyTorch's DataLoader calls it."""
        return [(sample.value, sample.target) for sample in self.read_many(indices)]

    def __iter__(self) -> Iterator[Sample]:
        return self.iterate()

    def iterate(self, start: int = 0, stop: int | None = None, *, batch: int = _BATCH) -> Iterator[Sample]:
        """The samples from `start` to `stop` in order; the next `batch` is read while one is decoded."""
        end = len(self) if stop is None else min(stop, len(self))
        ahead: Future[list[RawSample]] | None = None
        try:
            for first in range(start, end, batch):
                current = ahead or submit(self._fetcher().read(range(first, min(first + batch, end))))
                following = range(first + batch, min(first + 2 * batch, end))
                ahead = submit(self._fetcher().read(following)) if following else None
                for raw in current.result():
                    yield self._decoded([raw])[0]
        finally:
            if ahead is not None:
                ahead.cancel()

    def _checked(self, indices: Iterable[SupportsIndex]) -> list[int]:
        out = [operator.index(i) for i in indices]
        for i in out:
            if not 0 <= i < len(self):
                raise IndexError(f"{self.dataset}, {self.variant}: sample {i} of {len(self)}")
        return out

    def _fetcher(self) -> Fetcher:
        """The fetcher of this process: a forked child has its own loop, and so its own caches."""
        found = self._fetchers.get(os.getpid())
        if found is None:
            made = Fetcher(self._files, self.dataset, self.variant, self._limits)
            found = self._fetchers.setdefault(os.getpid(), made)
        return found

    def _decoded(self, raws: Iterable[RawSample]) -> list[Sample]:
        out = []
        for raw in raws:
            parts = {name: self._decode_part(raw, name) for name in raw.parts}
            target = parts.pop("target") if raw.meta.target_at is not None else raw.meta.target
            out.append(Sample(index=raw.index, key=raw.meta.key, data=parts, target=target, extra=raw.meta.extra))
        return out

    def _decode_part(self, raw: RawSample, name: str) -> Any:
        if not self._decode:
            return raw.parts[name]
        ref = raw.meta.refs()[name]
        try:
            return self._decoders[name](raw.parts[name], self._spec.decoders[name])
        except MissingExtra:
            raise
        except Exception as e:  # decoders of damaged bytes raise nearly any type, and all of them mean damage
            what = self._spec.decoders.get(name, {}).get("decoder", "none is named")
            raise DatasetDamaged(
                f"{name} of {raw.meta.key} cannot be decoded ({what}): {one_line(e)}",
                dataset=self.dataset.name,
                version=self.dataset.version,
                variant=self.variant,
                index=raw.index,
                file=f"{self._spec.root or 'data'}/{ref.path}",
            ) from e


def _rebuilt(
    files: Files, dataset: Dataset, variant: str, limits: ReadLimits, decoders: Mapping[str, Decoder], decode: bool
) -> DatasetReader:
    return DatasetReader(files, dataset, variant, limits=limits, decoders=decoders, decode=decode)
