"""Kinds with a file for every sample: folders of images, COCO, LibriSpeech."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from ephemeron.data.catalog.importers.base import Found, Importer, Request
from ephemeron.data.catalog.importers.source import Source, open_source
from ephemeron.data.catalog.meta import SampleMeta
from ephemeron.errors import JobError

IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
_SPLITS = frozenset({"train", "training", "val", "valid", "validation", "test", "testing"})
AUDIO = (".flac", ".wav")
_IMAGE = {"image": {"decoder": "image", "mode": "RGB"}}


def _image_folder(request: Request) -> dict[str, Found]:
    """CLASS/…/file.jpg; classes are numbered in the order of their names. Files that are no images are counted only."""
    source = request.source
    paths = source.only(IMAGES, what="images")
    loose = [path for path in paths if "/" not in path]
    if loose:
        raise source.wrong(loose[0], "lies outside of a folder that names its class", "one folder per class")
    classes = sorted({path.partition("/")[0] for path in paths})
    if _SPLITS.issuperset(name.lower() for name in classes):
        remedy = f"import {source.url}/{classes[0]} with --variant {classes[0]}, and so on"
        raise JobError(f"{source.url} has splits ({', '.join(classes)}) where classes should be", remedy=remedy)
    number = {name: i for i, name in enumerate(classes)}
    others = len(source.entries) - len(paths)
    info = {"classes": classes} | ({"passed_over": others} if others else {})

    def samples() -> Iterator[SampleMeta]:
        for path in paths:
            _check_not_empty(source, path)
            yield SampleMeta(key=path, data={"image": source.entries[path]}, target=number[path.partition("/")[0]])

    return request.single(Found(samples=samples(), decoders=_IMAGE, total=len(paths), info=info))


def _coco(request: Request) -> dict[str, Found]:
    """COCO's object detection (Lin et al. 2014): images and an instances_*.json.

    Targets are `{"image_id", "boxes", "labels", "iscrowd"}`: boxes as COCO's [x, y, width, height] in pixels, labels as
    positions in `info["categories"]`, which COCO's own category ids, having gaps, are not. Segmentations stay behind.
    """
    source, where = request.source, request.options["annotations"]
    if not where:
        raise JobError(
            "import kind 'coco' needs the option annotations", remedy="-o annotations=instances_train2017.json"
        )
    notes = source if where in source.entries else open_source(where)
    table = notes.json(where if where in source.entries else next(iter(notes.entries)))
    try:
        ids = sorted((int(c["id"]), str(c["name"])) for c in table["categories"])
        categories = [{"id": i, "name": name} for i, name in ids]
        label = {own: i for i, (own, _) in enumerate(ids)}
        images = sorted((int(image["id"]), str(image["file_name"])) for image in table["images"])
        targets: dict[int, dict[str, Any]] = {
            i: {"image_id": i, "boxes": [], "labels": [], "iscrowd": []} for i, _ in images
        }
        for note in table["annotations"]:
            target = targets[note["image_id"]]
            target["boxes"].append([float(n) for n in note["bbox"]])
            target["labels"].append(label[note["category_id"]])
            target["iscrowd"].append(int(note.get("iscrowd", 0)))
            if len(note["bbox"]) != 4:
                raise ValueError(f"annotation {note.get('id')} has a box of {len(note['bbox'])} numbers")
    except (KeyError, TypeError, ValueError) as e:
        what = f"{e.args[0]!r} is missing or unknown" if isinstance(e, KeyError) else str(e)
        raise JobError(f"{where} is no COCO annotation file: {what}", remedy="give an instances_*.json") from None
    del table

    def samples() -> Iterator[SampleMeta]:
        for number, name in images:
            if name not in source.entries:
                raise JobError(
                    f"{source.url} has no {name}, which {where} lists", remedy="give the folder of the images"
                )
            _check_not_empty(source, name)
            yield SampleMeta(key=name, data={"image": source.entries[name]}, target=targets.pop(number))

    return request.single(Found(samples=samples(), decoders=_IMAGE, total=len(images), info={"categories": categories}))


def _librispeech(request: Request) -> dict[str, Found]:
    """SPEAKER/CHAPTER/SPEAKER-CHAPTER-NUMBER.flac and .trans.txt beside them (Panayotov et al. 2015). Targets are texts."""
    source = request.source
    transcripts = source.only([".trans.txt"], what="transcripts")
    audio = {path.rpartition(".")[0]: path for path in source.only(AUDIO, what="audio")}

    def samples() -> Iterator[SampleMeta]:
        for path in transcripts:
            folder = str(PurePosixPath(path).parent)
            for line in _lines(source, path):
                name, _, text = line.partition(" ")
                stem = name if folder == "." else f"{folder}/{name}"
                if stem not in audio or not text.strip():
                    what = "no audio" if stem not in audio else "no text"
                    raise source.wrong(path, f"has {what} for utterance {name!r}")
                at = audio.pop(stem)
                _check_not_empty(source, at)
                speaker, chapter = (*name.split("-"), "", "")[:2]
                extra = {"speaker": speaker, "chapter": chapter}
                yield SampleMeta(key=name, data={"audio": source.entries[at]}, target=text.strip(), extra=extra)
        if audio:
            raise source.wrong(next(iter(audio.values())), "is in no transcript")

    return request.single(Found(samples=samples(), decoders={"audio": {"decoder": "audio"}}, total=len(audio)))


def _lines(source: Source, path: str) -> list[str]:
    try:
        return [line for line in source.read(path).decode().splitlines() if line.strip()]
    except UnicodeDecodeError as e:
        raise source.wrong(path, f"is no UTF-8 text: {e}") from None


def _check_not_empty(source: Source, path: str) -> None:
    if not source.entries[path].length:
        raise source.wrong(path, "is empty")


IMPORTERS = (
    Importer(kind="images", find=_image_folder),
    Importer(kind="coco", find=_coco, options={"annotations": ""}),
    Importer(kind="librispeech", find=_librispeech),
)
