"""Kinds with a file for every sample: folders of images, COCO, LibriSpeech."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any

from ephemeron.data.catalog.importers.base import FoundFiles, Importer, ImportRequest
from ephemeron.data.catalog.importers.source import open_source
from ephemeron.data.catalog.meta import SampleMeta
from ephemeron.data.formats.lines import text_lines
from ephemeron.errors import JobError

IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
_SPLITS = frozenset({"train", "training", "val", "valid", "validation", "test", "testing"})
AUDIO = (".flac", ".wav")
_IMAGE = {"image": {"decoder": "image", "mode": "RGB"}}


def _image_folder(request: ImportRequest) -> dict[str, FoundFiles]:
    """CLASS/…/file.jpg; classes are numbered in the order of their names. Other files are only counted."""
    source = request.source
    paths = source.only(IMAGES, what="images")
    for path in [path for path in paths if "/" not in path]:
        wrong = source.wrong(path, "is outside of a folder that names its class", "one folder per class")
        request.defects.caught(wrong, source, path, ref=source.entries[path])
        paths.remove(path)
    classes = sorted({path.partition("/")[0] for path in paths})
    if classes and _SPLITS.issuperset(name.lower() for name in classes):
        remedy = f"import {source.url}/{classes[0]} with --variant {classes[0]}, and so on"
        raise JobError(f"{source.url} has splits ({', '.join(classes)}) where classes should be", remedy=remedy)
    number = {name: i for i, name in enumerate(classes)}
    others = len(source.entries) - len(paths) - len(request.defects.found)
    info = {"classes": classes} | ({"passed_over": others} if others else {})

    def samples() -> Iterator[SampleMeta]:
        for path in paths:
            if not _is_empty(request, path):
                yield SampleMeta(key=path, data={"image": source.entries[path]}, target=number[path.partition("/")[0]])

    return request.single(FoundFiles(samples=samples(), decoders=_IMAGE, total=len(paths), info=info))


@dataclass(slots=True, kw_only=True)
class _Objects:
    """The target of an image: its annotated objects."""

    image_id: int
    boxes: list[list[float]] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    iscrowd: list[int] = field(default_factory=list)


def _coco(request: ImportRequest) -> dict[str, FoundFiles]:
    """COCO's object detection (Lin et al. 2014): images and an instances_*.json.

    Targets are `{"image_id", "boxes", "labels", "iscrowd"}`: boxes as COCO's [x, y, width, height] in pixels, labels as
    positions in `info["categories"]`, since COCO's own category ids have gaps. Segmentations are not imported.
    """
    source, where = request.source, request.options["annotations"]
    if not where:
        raise JobError("import kind 'coco' needs the option annotations", remedy="-o annotations=instances_train2017.json")
    notes = source if where in source.entries else open_source(where)
    table = notes.json(where if where in source.entries else next(iter(notes.entries)))
    try:
        ids = sorted((int(c["id"]), str(c["name"])) for c in table["categories"])
        categories = [{"id": i, "name": name} for i, name in ids]
        label = {own: i for i, (own, _) in enumerate(ids)}
        images = sorted((int(image["id"]), str(image["file_name"])) for image in table["images"])
        _once(where, "categories", ids)
        _once(where, "images", images)
        targets = {i: _Objects(image_id=i) for i, _ in images}
        annotations = list(table["annotations"])
    except (KeyError, TypeError, ValueError) as e:
        raise _no_annotations(where, e) from None
    names = dict(images)
    known = {name: source.entries[name] for name in names.values() if name in source.entries}
    for note in annotations:
        try:
            _annotate(targets, label, note)
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            owner = note.get("image_id") if isinstance(note, dict) else None
            name = names.get(owner, where) if isinstance(owner, int) else where
            at = f"annotation {note.get('id')}" if isinstance(note, dict) else "an annotation"
            if owner not in names or owner in targets:  # once for each image
                request.defects.caught(_no_annotations(where, e), source, name, at=at, ref=known.get(name))
            if isinstance(owner, int):
                targets.pop(owner, None)
    del table, annotations

    def samples() -> Iterator[SampleMeta]:
        for number, name in images:
            if number not in targets:
                continue  # one of its annotations is wrong
            if name not in source.entries:
                absent = JobError(f"{source.url} has no {name}, which {where} lists", remedy="give the folder of the images")
                request.defects.caught(absent, source, name)
                continue
            if _is_empty(request, name):
                continue
            yield SampleMeta(key=name, data={"image": source.entries[name]}, target=asdict(targets.pop(number)))

    return request.single(FoundFiles(samples=samples(), decoders=_IMAGE, total=len(images), info={"categories": categories}))


def _once(where: str, what: str, found: list[tuple[int, str]]) -> None:
    """Refuses two entries of one id, ascending: an annotation could be of either."""
    for (one, first), (other, second) in itertools.pairwise(found):
        if one == other:
            raise JobError(f"{where} has two {what} of id {one}: {first} and {second}", remedy="give each an id of its own")


def _annotate(targets: dict[int, _Objects], label: dict[int, int], note: Any) -> None:
    """Adds an annotation to its image's target, or raises and adds nothing."""
    target = targets[note["image_id"]]
    box, kind, crowd = [float(n) for n in note["bbox"]], label[note["category_id"]], int(note.get("iscrowd", 0))
    if len(box) != 4:
        raise ValueError(f"annotation {note.get('id')} has a box of {len(box)} numbers")
    target.boxes.append(box)
    target.labels.append(kind)
    target.iscrowd.append(crowd)


def _no_annotations(where: str, e: Exception) -> JobError:
    what = f"{e.args[0]!r} is missing or unknown" if isinstance(e, KeyError) else str(e)
    return JobError(f"{where} is not a COCO annotation file: {what}", remedy="give an instances_*.json")


def _librispeech(request: ImportRequest) -> dict[str, FoundFiles]:
    """SPEAKER/CHAPTER/SPEAKER-CHAPTER-NUMBER.flac and .trans.txt beside them (Panayotov et al. 2015). Targets are texts."""
    source = request.source
    transcripts = source.only([".trans.txt"], what="transcripts")
    audio = {path.rpartition(".")[0]: path for path in source.only(AUDIO, what="audio")}

    def samples() -> Iterator[SampleMeta]:
        for path in transcripts:
            folder = str(PurePosixPath(path).parent)
            for number, line in _lines(request, path):
                name, _, text = line.partition(" ")
                stem = name if folder == "." else f"{folder}/{name}"
                at = audio.pop(stem, None)
                if at is None or not text.strip():
                    what = "no audio" if at is None else "no text"
                    wrong = source.wrong(path, f"has {what} for utterance {name!r}")
                    request.defects.caught(wrong, source, path, at=f"line {number}")
                    continue
                if _is_empty(request, at):
                    continue
                speaker, chapter = (*name.split("-"), "", "")[:2]
                extra = {"speaker": speaker, "chapter": chapter}
                yield SampleMeta(key=name, data={"audio": source.entries[at]}, target=text.strip(), extra=extra)
        for path in audio.values():
            request.defects.caught(source.wrong(path, "has no transcript"), source, path, ref=source.entries[path])

    return request.single(FoundFiles(samples=samples(), decoders={"audio": {"decoder": "audio"}}, total=len(audio)))


def _lines(request: ImportRequest, path: str) -> list[tuple[int, str]]:
    """Non-empty lines, numbered from 1; none for a file that is not UTF-8 text."""
    source = request.source
    try:
        return text_lines(source.read(path), f"{source.url}: {path}")
    except JobError as e:
        request.defects.caught(e, source, path, ref=source.entries[path])
        return []


def _is_empty(request: ImportRequest, path: str) -> bool:
    """True for a file without bytes, which is a defect."""
    if request.source.entries[path].length:
        return False
    request.defects.caught(request.source.wrong(path, "is empty"), request.source, path)
    return True


IMPORTERS = (
    Importer(kind="images", find=_image_folder),
    Importer(kind="coco", find=_coco, options={"annotations": ""}),
    Importer(kind="librispeech", find=_librispeech),
)
