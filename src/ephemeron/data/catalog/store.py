"""A collection of datasets in a folder or an object store: `datasets/NAMESPACE/NAME/{data,meta}`.

    data/…                                originals, if they are stored here (they may be at any URL)
    meta/versions/000001.json             one document per version
    meta/VARIANT/ms-0.DIGEST.json, …      the shards these documents name

Everything is written create-only and nothing is changed, so importers cannot disturb each other or a reader. Shards are written
first and are not read until a document names them: an import that dies leaves files that are never read. Documents are numbered
without gaps, and the importer that creates number n has read all before: so version names are unique, and of two concurrent
importers the second keeps what the first has published.

DPFlow, section 3.3.1 lists a store's datasets in one JSON file and increments a version in place. Two concurrent
importers cannot overwrite either without losing an update; here the store is listed instead.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ephemeron.config.paths import AnyPath, datasets_store
from ephemeron.config.typed import build, plain
from ephemeron.data.catalog.dataset import (
    LATEST,
    Dataset,
    DefectEntry,
    DefectList,
    Variant,
    check_id,
    check_name,
    cut,
    digest,
    encode_shard,
    meta_folder,
    shard_file,
    version_path,
)
from ephemeron.data.catalog.files import FileRange, Files
from ephemeron.data.catalog.loop import run
from ephemeron.data.catalog.meta import SampleMeta
from ephemeron.data.catalog.open_files import open_files
from ephemeron.errors import DatasetDamaged, DatasetNotFound, DatasetUnreachable, JobError

SHARD_SIZE = 1000
"""Samples per shard: 80 to 200 kB for a classification set; a store delivers that about as fast as one byte."""

_DOCUMENT = re.compile(r"(\d{6,})\.json")
_ATTEMPTS = 100
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewVariant:
    """A variant to be published."""

    samples: Iterable[SampleMeta]
    """Iterated once, shard by shard."""
    decoders: Mapping[str, Mapping[str, Any]]
    root: str | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)
    defects: Callable[[], Sequence[DefectEntry]] = list
    """The samples that were left out; called when all samples were read."""


class DatasetStore:
    """The datasets below one URL. Blocking; safe to use from several threads."""

    def __init__(self, files: Files) -> None:
        self.files = files

    @classmethod
    def open(cls, url: AnyPath | None = None) -> DatasetStore:
        """Opens a folder or a URL, by default EPHEMERON_DATASETS_STORE, or `datasets-store` in the home folder. Connects on first use.

        Raises:
            JobError: the URL has an unknown scheme.
        """
        return cls(open_files(url or datasets_store()))

    def __repr__(self) -> str:
        return f"DatasetStore({self.files.url!r})"

    def names(self) -> list[str]:
        """All datasets with a published version, sorted."""
        found = [f"{space}/{name}" for space in self._folders("datasets") for name in self._folders(f"datasets/{space}")]
        return [name for name in found if self._numbers(name)]

    def _folders(self, prefix: str) -> list[str]:
        return run(self.files.folders(prefix))

    def dataset(self, name: str, version: str = LATEST) -> Dataset:
        """One version of a dataset; `latest` is the one published last.

        Raises:
            JobError: the name is malformed.
            DatasetNotFound: there is no such dataset or version.
            DatasetDamaged: a document is absent or malformed.
            DatasetUnreachable: the store fails.
        """
        numbers = self._numbers(check_id(name))
        if not numbers:
            raise DatasetNotFound(f"dataset {name} is not in {self.files.url}; see: ephemeron data ls")
        latest = self._document(name, numbers[-1])
        if version in (LATEST, latest.version):
            return latest
        if version not in latest.history:
            known = ", ".join(latest.history)
            raise DatasetNotFound(f"dataset {name} has no version {version!r}, only {known}")
        return self._document(name, latest.history[version])

    def defects(self, dataset: Dataset, variant: str) -> list[DefectEntry]:
        """The samples that were left out of a variant when it was imported.

        Raises:
            DatasetDamaged: the list is absent or malformed.
            DatasetUnreachable: the store fails.
        """
        named = dataset.variant(variant).defects
        if not named:
            return []
        path = f"{meta_folder(dataset.name)}/{named.file}"
        try:
            (data,) = run(self.files.fetch([FileRange(path)]))
            found = json.loads(data)["defects"]
            return [build(DefectEntry, entry, where="defects") for entry in found]
        except (FileNotFoundError, ValueError, KeyError, TypeError, JobError) as e:
            why = "is absent" if isinstance(e, FileNotFoundError) else f"is not a list of defects: {e}"
            raise DatasetDamaged(why, dataset=dataset.name, file=f"{self.files.url}/{path}") from None

    def publish(
        self, name: str, variants: Mapping[str, NewVariant], *, version: str | None = None, keep: bool = True, shard_size: int = SHARD_SIZE
    ) -> Dataset:
        """Writes the metadata of these variants and publishes them as a new version.

        Args:
            name: `namespace/name`.
            variants: read one after the other; an error in one publishes none.
            version: its name; by default the next free whole number.
            keep: keep variants of the previous version that are not given, sharing its shards.
            shard_size: samples per metadata shard.

        Raises:
            JobError: a name is malformed, the version exists, a variant is empty, or a sample is not JSON.
            DatasetUnreachable: the store fails.
        """
        check_id(name)
        if shard_size < 1:
            raise JobError(f"shard size {shard_size} is not positive")
        if not variants:
            raise JobError(f"{name}: there is no variant to publish")
        for variant in variants:
            check_name("variant", variant)
        if version is not None:
            check_name("version", version)
            self._next(name, version, {}, keep=keep)
        written = {variant: self._write(name, variant, new, shard_size) for variant, new in variants.items()}
        for _ in range(_ATTEMPTS):
            document = self._next(name, version, written, keep=keep)
            if self._create(document):
                _log.info("%s is published in %s", document, self.files.url)
                return document
            _log.info("another version of %s was published first; the next number is tried", name)
        raise DatasetUnreachable(f"{_ATTEMPTS} other imports published first; try again", dataset=name)

    def _write(self, name: str, variant: str, new: NewVariant, shard_size: int) -> Variant:
        digests: list[str] = []
        samples = 0
        for shard, chunk in enumerate(cut(new.samples, shard_size)):
            try:
                data = encode_shard(chunk, dataset=name, variant=variant, shard=shard, first=samples)
            except (TypeError, ValueError) as e:
                raise JobError(f"{name}, {variant}, samples {samples} to {samples + len(chunk) - 1}: {e}") from None
            digests.append(digest(data))
            run(self.files.create(f"{meta_folder(name)}/{shard_file(variant, shard, digests[-1])}", data))
            samples += len(chunk)
        defects = new.defects()
        if not samples:
            more = f", but {len(defects)} defects, first: {defects[0].file} {defects[0].reason}" if defects else ""
            raise JobError(f"{name}, {variant}: there are no samples{more}", remedy="check the source")
        listed = None
        if defects:
            lines = ",\n".join(json.dumps(_entry(defect), ensure_ascii=False) for defect in defects)
            data = f'{{"dataset": "{name}", "variant": "{variant}", "defects": [\n{lines}\n]}}\n'.encode()
            listed = DefectList(count=len(defects), file=f"{variant}/defects.{digest(data)}.json")
            run(self.files.create(f"{meta_folder(name)}/{listed.file}", data))
        return Variant(
            samples=samples,
            shard_size=shard_size,
            shards=tuple(digests),
            decoders=new.decoders,
            root=new.root,
            info=new.info,
            source=new.source,
            defects=listed,
        )

    def _next(self, name: str, version: str | None, written: Mapping[str, Variant], *, keep: bool) -> Dataset:
        """The version after the latest one, with these variants."""
        numbers = self._numbers(name)
        latest = self._document(name, numbers[-1]) if numbers else None
        history = dict(latest.history) if latest else {}
        number = numbers[-1] + 1 if numbers else 1
        chosen = version or next(str(n) for n in range(number, 2 * number + 1) if str(n) not in history)
        if chosen in history:
            raise JobError(f"version {chosen!r} of {name} is published, and versions do not change", remedy="choose another name, or none")
        variants = {**(latest.variants if latest and keep else {}), **written}
        return Dataset(name=name, version=chosen, number=number, variants=variants, history=history | {chosen: number})

    def _create(self, document: Dataset) -> bool:
        data = (json.dumps(document.to_json(), indent=1, ensure_ascii=False) + "\n").encode()
        path = version_path(document.name, document.number)
        # After a create-only put whose answer was lost was repeated, the existing document is our own.
        return run(self.files.create(path, data)) or run(self.files.fetch([FileRange(path)])) == [data]

    def _numbers(self, name: str) -> list[int]:
        folder = f"{meta_folder(name)}/versions"
        matches = (_DOCUMENT.fullmatch(path.rpartition("/")[2]) for path in run(self.files.tree(folder)))
        return sorted(int(match[1]) for match in matches if match)

    def _document(self, name: str, number: int) -> Dataset:
        path = version_path(name, number)
        try:
            (data,) = run(self.files.fetch([FileRange(path)]))
            found = Dataset.from_json(json.loads(data))
            if found.name != name or found.number != number:
                raise ValueError(f"it describes {found.name}, number {found.number}")
        except (FileNotFoundError, ValueError, RecursionError) as e:
            why = "is absent" if isinstance(e, FileNotFoundError) else f"is not a version of a dataset: {e}"
            raise DatasetDamaged(why, dataset=name, file=f"{self.files.url}/{path}") from None
        return found


def _entry(defect: DefectEntry) -> dict[str, object]:
    """A defect as JSON; without `kept` where there is no copy."""
    return {name: value for name, value in plain(defect).items() if value is not None}
