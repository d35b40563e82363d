"""CIFAR-10 and CIFAR-100 as a job's samples: from a folder or the published .tar.gz.

An archive is read member by member in memory; nothing is extracted. All batches must be present: training on four fifths of the
data because a download was interrupted should not look like a result.

Peak memory is about 1 GB for either, in the process that loads, not in a function.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterable, Set
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ephemeron.data.formats.cifar import FORMS, CifarForm, find_form, labels_of, read_batch
from ephemeron.data.formats.one_line import one_line
from ephemeron.data.samples import Array, Samples
from ephemeron.data.sources.options import need_path, read_options
from ephemeron.data.spec import DataSpec
from ephemeron.errors import JobError

_LARGEST_MEMBER = 2**29


@dataclass(frozen=True, slots=True, kw_only=True)
class CifarOptions:
    """Options of `cifar10`."""

    normalise: bool = True
    """Whether channels get mean 0 and standard deviation 1 over the training set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cifar100Options(CifarOptions):
    """Options of `cifar100`."""

    labels: str = "fine"
    """`fine` (100 classes) or `coarse` (20)."""


def read(spec: DataSpec) -> tuple[Samples, Samples]:
    """Training and test samples. Options: `normalise` (default true) and, for CIFAR-100, `labels` ("fine", "coarse").

    Returns:
        Inputs float32 (N, 3, 32, 32) in [0, 1], or, normalised, with mean 0 and standard deviation 1 per channel
        over the training set; targets int64.

    Raises:
        JobError: a file is absent, damaged or unsafe, or an option is wrong.
    """
    options = read_options(spec, Cifar100Options if spec.source == "cifar100" else CifarOptions)
    name = options.labels if isinstance(options, Cifar100Options) else ""
    labels = labels_of(spec.source, name, "data.options.labels")
    path = need_path(spec, f"the folder {FORMS[spec.source][0].folder} or the published .tar.gz")
    form, place, files = _open(spec.source, path)
    train = [read_batch(place / name, files[name], form, labels) for name in form.train]
    test = read_batch(place / form.test, files[form.test], form, labels)
    pixels = np.concatenate([batch.inputs for batch in train])
    targets = np.concatenate([batch.targets for batch in train])
    scale = _channel_statistics(pixels) if options.normalise else None
    return Samples(_scaled(pixels, scale), targets), Samples(_scaled(test.inputs, scale), test.targets)


def _open(kind: str, path: Path) -> tuple[CifarForm, Path, dict[str, bytes]]:
    """The form that is there, the folder or archive that holds it, and the contents of all its files."""
    forms = FORMS[kind]
    wanted = {name for form in forms for name in form.names}
    if not path.is_dir():
        places = {path: _from_archive(path, wanted)}
    else:
        folders = [path / form.folder for form in forms if (path / form.folder).is_dir()]
        places = {folder: _from_folder(folder, wanted) for folder in [*folders, path]}
    for place, files in places.items():
        if (form := find_form(kind, files, place)) is not None:
            return form, place, files
    expected = " or ".join(f"{form.train[0]} ({form.folder})" for form in forms)
    raise JobError(f"{path} has no {expected}", remedy="give the unpacked folder or the published .tar.gz")


def _from_folder(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    try:
        return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
    except OSError as e:
        raise JobError(f"{folder} cannot be read: {one_line(e)}") from None


def _from_archive(path: Path, wanted: Set[str]) -> dict[str, bytes]:
    """Contents of the regular members of these names. Links and paths are of no consequence: nothing is written."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                name = member.name.rpartition("/")[2]
                if not member.isfile() or name not in wanted:
                    continue
                if name in found or member.size > _LARGEST_MEMBER:
                    raise JobError(f"{path} has a second or oversized {member.name}", remedy="fetch the archive again")
                stream = archive.extractfile(member)
                found[name] = stream.read() if stream is not None else b""
            _drain(archive)
    except (tarfile.TarError, OSError, EOFError, zlib.error) as e:
        raise JobError(f"{path} is not a valid tar archive: {one_line(e)}", remedy="fetch the archive again") from None
    return found


def _drain(archive: tarfile.TarFile) -> None:
    """Reads to the end: tar stops before it, and gzip's checksum comes last."""
    while archive.fileobj is not None and archive.fileobj.read(2**20):
        pass


def _channel_statistics(pixels: Array) -> tuple[Array, Array]:
    """Mean and standard deviation per channel of bytes scaled to [0, 1], exactly: from counts of the 256 values."""
    counts = np.zeros((3, 256), dtype=np.int64)
    for start in range(0, len(pixels), 1024):
        for channel in range(3):
            counts[channel] += np.bincount(pixels[start : start + 1024, channel].ravel(), minlength=256)
    values = np.arange(256) / 255
    weights = counts / counts.sum(axis=1, keepdims=True)
    mean = weights @ values
    deviation = np.sqrt((weights * (values - mean[:, np.newaxis]) ** 2).sum(axis=1))
    return mean, np.where(deviation > 0, deviation, 1.0)


def _scaled(pixels: Array, scale: tuple[Array, Array] | None) -> Array:
    values = pixels.astype(np.float32)
    values /= 255
    if scale is not None:
        mean, deviation = (s.astype(np.float32).reshape(1, 3, 1, 1) for s in scale)
        values -= mean
        values /= deviation
    return values
