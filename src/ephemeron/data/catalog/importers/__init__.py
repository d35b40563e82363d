"""Importers: from existing files to metadata. `import_dataset` is the entry point.

source            folder, URL, archive or file, as entries with references
base              the port of importers
files_per_sample  images, coco, librispeech
records           cifar10, cifar100, idx, npz
tables            csv, parquet
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import PurePosixPath
from urllib.parse import unquote

from ephemeron.config.paths import AnyPath
from ephemeron.config.typed import near
from ephemeron.data.catalog.dataset import Dataset, DefectEntry, check_id, data_folder, dataset_folder, digest
from ephemeron.data.catalog.files import FileRange
from ephemeron.data.catalog.importers import files_per_sample, records
from ephemeron.data.catalog.importers.base import FoundFiles, Importer, ImportRequest, Tell, counted
from ephemeron.data.catalog.importers.source import MOST_KEPT_BYTES, Defects, ImportSource, open_source
from ephemeron.data.catalog.loop import run
from ephemeron.data.catalog.meta import DataRef, SampleMeta
from ephemeron.data.catalog.open_files import FolderFiles, MemoryFiles, open_files
from ephemeron.data.catalog.pins import stored_range, taken
from ephemeron.data.catalog.reader import DatasetReader
from ephemeron.data.catalog.store import SHARD_SIZE, DatasetStore, NewVariant
from ephemeron.data.catalog.unpack import unpack_bytes
from ephemeron.errors import JobError

__all__ = ["KINDS", "FoundFiles", "ImportRequest", "ImportSource", "Importer", "Tell", "import_dataset", "open_source", "read_in_place"]

KINDS: Mapping[str, Importer] = {
    importer.kind: importer for importer in (*files_per_sample.IMPORTERS, *records.IMPORTERS, *records.TABLE_IMPORTERS)
}
"""Importers by kind."""
_log = logging.getLogger(__name__)


def import_dataset(
    kind: str,
    source: AnyPath,
    name: str,
    store: DatasetStore,
    *,
    variant: str | None = None,
    version: str | None = None,
    options: Mapping[str, str] | None = None,
    keep: bool = True,
    copy: bool = False,
    shard_size: int = SHARD_SIZE,
    digests: bool = True,
    on_defect: str = "fail",
    tell: Tell | None = None,
) -> Dataset:
    """Describes a source and publishes the description as a new version. Data is not moved, unless it is copied.

    Args:
        kind: one of `KINDS`.
        source: folder, archive, file or URL.
        name: `namespace/name`.
        store: store of the metadata.
        variant: e.g. `train`; by default `train`, or all splits of the source.
        version: its name; by default the next whole number.
        options: options of the kind.
        keep: keep variants of the previous version.
        copy: copy the source's files into the dataset's own `data` folder first.
        shard_size: samples per metadata shard.
        digests: whether to pin the content (`pins`): local data is read once for it, objects are pinned by their ETags.
        on_defect: what to do with a row that cannot be read, an empty file or one that is absent: `fail`, `skip`, or
            `quarantine`, which keeps a copy. `DatasetStore.defects` lists what was left out.
        tell: called with the progress.

    Raises:
        JobError: a name, an option or the source is wrong; no version is published.
        MissingExtra: the kind needs a package that is not installed.
        DatasetUnreachable: a store fails.
    """
    check_id(name)
    source = os.fspath(source)
    if kind not in KINDS:
        raise JobError(f"import kind {kind!r} is not known", remedy=near(kind, KINDS, what="known kinds"))
    importer = KINDS[kind]
    filled = importer.filled(options or {})
    defects = Defects(on_defect)
    root, prefix = None, ""
    place = open_source(source)
    if copy:
        prefix = f"{PurePosixPath(unquote(place.files.url)).name}/" if open_files(source).url == place.files.url else ""
    elif (f"{place.files.url}/").startswith(own := f"{store.files.url}/{data_folder(name)}/"):
        prefix = f"{place.files.url}/".removeprefix(own)
    else:
        root = place.files.url
    found = importer.find(ImportRequest(source=place, variant=variant, options=filled, defects=defects))
    if copy:
        _copy(place, store, f"{data_folder(name)}/{prefix}", tell)
    _log.info("import of %s as %s (%s) begins: %s", source, name, kind, ", ".join(found))
    origin = {"kind": kind, "url": source, "options": dict(options or {})}
    new = {
        part: NewVariant(
            samples=_moved(_taken(counted(one, part, tell), place, digests, defects), prefix),
            decoders=one.decoders,
            root=root,
            info=one.info,
            source=origin,
            defects=partial(_listed, defects, place, store, name),
        )
        for part, one in found.items()
    }
    return store.publish(name, new, version=version, keep=keep, shard_size=shard_size)


def read_in_place(source: AnyPath, endings: Mapping[str, Iterable[str]], *, where: str, target: str | None = None) -> DatasetReader:
    """A reader of files that are described where they are read: nothing is stored. Its samples are `(value, target)`.

    Args:
        source: folder, archive, file, glob or URL.
        endings: kind -> endings of its files, by which the kind is found.
        where: name of the source in messages.
        target: column of the targets, of tables; None: samples are rows without a target.

    Raises:
        JobError: there are no such files, files of several kinds, or no such column.
        MissingExtra: the kind needs a package that is not installed.
        DatasetUnreachable: a store fails.
    """
    names = open_source(os.fspath(source)).entries
    found = [kind for kind, last in endings.items() if any(name.lower().endswith(tuple(last)) for name in names)]
    if len(found) != 1:
        listed = f"files of several kinds: {', '.join(found)}" if found else f"no files that end in {', '.join(chain(*endings.values()))}"
        raise JobError(f"{where}: {source} has {listed}", remedy="name files of one kind, for example by a glob")
    (kind,) = found
    if target is not None and "target" not in KINDS[kind].options:
        raise JobError(f"{where}: {kind} take no target {target!r}", remedy="leave target out: their folders name their classes")
    store = DatasetStore(MemoryFiles())
    options = {} if target is None else {"target": target}
    dataset = import_dataset(kind, source, f"files/{kind}", store, variant="train", options=options, digests=False)
    return DatasetReader(store.files, dataset, "train")


def _taken(samples: Iterable[SampleMeta], place: ImportSource, digests: bool, defects: Defects) -> Iterable[SampleMeta]:
    def absent(path: str) -> None:
        defects.caught(place.wrong(path, "was removed during the import"), place, path)

    return taken(samples, place.files, absent) if digests else samples


def _listed(defects: Defects, place: ImportSource, store: DatasetStore, name: str) -> list[DefectEntry]:
    """Entries of the samples that were left out; in quarantine, each with a copy."""
    out = []
    for defect in defects.found:
        kept, ref = None, defect.ref
        if defects.policy == "quarantine" and ref is not None and 0 < (ref.length or 0) <= MOST_KEPT_BYTES:
            (data,) = run(place.files.fetch([stored_range(ref)]))
            if ref.unpack is not None and ref.inner is not None:
                start, length = ref.inner
                data = unpack_bytes(ref.unpack, data)[start : start + length]
            suffix = PurePosixPath(defect.file).suffix
            kept = f"{dataset_folder(name)}/quarantine/{digest(data)}{suffix}"
            run(store.files.create(kept, data))
        out.append(defect.entry(kept))
    return out


def _moved(samples: Iterable[SampleMeta], prefix: str) -> Iterator[SampleMeta]:
    """The samples with their files below `prefix`."""

    def moved(ref: DataRef) -> DataRef:
        return replace(ref, path=prefix + ref.path)

    for sample in samples:
        if prefix:
            at = None if sample.target_at is None else moved(sample.target_at)
            sample = replace(sample, data={part: moved(ref) for part, ref in sample.data.items()}, target_at=at)
        yield sample


def _copy(place: ImportSource, store: DatasetStore, folder: str, tell: Tell | None) -> None:
    """Copies the files of a source, whether or not samples use them; an existing file has to be the same."""
    if not isinstance(place.files, FolderFiles):
        raise JobError(
            f"{place.url} is not on this machine, and only local files are copied",
            remedy="leave --copy out, or copy with your cloud's own tool into the dataset's data folder",
        )
    paths = sorted({ref.path for ref in place.entries.values()})
    for done, path in enumerate(paths, 1):
        local, target = place.files.root / path, folder + path
        if not run(store.files.create(target, local)):
            there = run(store.files.fetch([FileRange(target)]))
            if there != [local.read_bytes()]:
                raise JobError(f"{store.files.url}/{target} exists and differs from {local}", remedy="rename the source")
        if tell is not None and (done % 100 == 0 or done == len(paths)):
            tell("copying", done, len(paths))
