"""Sources of imports: the files below a folder or URL, the members of a tar or zip archive, or one file.

Members of archives are byte ranges of the archive, so everything that can be imported from a folder can be imported from an
archive, which stays as it is. A compressed tar has no random access and is refused.

Policies for rows that cannot be read, empty files, and absent files during an import.

fail        refuses the import and publishes nothing (the default)
skip        leaves the sample out; a list of all that was left out is stored beside the version
quarantine  the same, and a copy is kept in the dataset's folder `quarantine`, to be inspected and repaired

Only errors of single samples or files are defects. A source that is wrong as a whole (no such column, no annotations, arrays of
other shapes) is refused in any case.
"""

from __future__ import annotations

import io
import json
import logging
import struct
import tarfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, Literal, TypeAlias, cast, get_args
from urllib.parse import unquote

from ephemeron.data.catalog.dataset import DefectEntry
from ephemeron.data.catalog.files import WILD, FileRange, FileReader, Files, visible
from ephemeron.data.catalog.loop import run
from ephemeron.data.catalog.meta import DataRef
from ephemeron.data.catalog.open_files import find_files, open_files
from ephemeron.data.catalog.unpack import unpack_bytes
from ephemeron.data.formats.lines import one_line
from ephemeron.errors import JobError

_COMPRESSED_TAR = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_BUFFER = 1 << 20
_PACKED = {zipfile.ZIP_STORED: None, zipfile.ZIP_DEFLATED: "deflate"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportSource:
    """Files by path, each with the location of its bytes.

    `entries` is sorted by path and leaves out hidden files (`listing`).
    """

    url: str
    """The URL as given, for messages."""
    files: Files
    """Root of the `path` of every reference."""
    entries: dict[str, DataRef]

    def read(self, path: str) -> bytes:
        """The bytes of an entry, unpacked where it is a compressed member.

        Raises:
            JobError: the bytes are damaged, or fewer than listed before.
        """
        ref = self.entries[path]
        whole = FileRange(ref.path) if ref.offset is None else FileRange(ref.path, ref.offset, ref.length)
        (data,) = run(self.files.fetch([whole]))
        try:
            if len(data) != ref.length:
                raise ValueError(f"{len(data)} bytes instead of {ref.length}")
            return data if ref.unpack is None else unpack_bytes(ref.unpack, data)
        except ValueError as e:
            raise self.wrong(path, f"cannot be read: {e}") from None

    def stream(self, path: str) -> BinaryIO:
        """An entry as a seekable stream that reads only the requested blocks of a megabyte.

        Raises:
            JobError: it is compressed inside an archive.
        """
        ref = self.entries[path]
        if ref.unpack is not None:
            raise self.wrong(path, "is compressed inside an archive, which prevents random access", "unpack the archive")
        reader = FileReader(self.files, ref.path, offset=ref.offset or 0, length=ref.length or 0)
        return cast(BinaryIO, io.BufferedReader(reader, _BUFFER))

    def contents(self, path: str) -> tuple[bytes, DataRef]:
        """Bytes of an entry, without gzip if the name ends in `.gz`, and the reference from which parts can be cut.

        Raises:
            JobError: as in `read`, or the entry is packed twice.
        """
        data, ref = self.read(path), self.entries[path]
        if not path.endswith(".gz"):
            return data, ref
        try:
            return unpack_bytes("gzip", data), self.packed(path, "gzip")
        except ValueError as e:
            raise self.wrong(path, f"cannot be unpacked: {e}") from None

    def packed(self, path: str, how: str) -> DataRef:
        """Reference to the contents of an entry that needs unpacking.

        Raises:
            JobError: it is compressed inside an archive as well.
        """
        if self.entries[path].unpack is not None:
            raise self.wrong(path, "is packed twice", "unpack the archive around it")
        return replace(self.entries[path], unpack=how)

    def json(self, path: str) -> Any:
        """An entry's JSON.

        Raises:
            JobError: the entry is not JSON.
        """
        try:
            return json.loads(self.read(path))
        except (ValueError, RecursionError) as e:
            raise self.wrong(path, f"is not JSON: {one_line(e)}") from None

    def only(self, suffixes: Iterable[str], *, what: str) -> list[str]:
        """Paths with one of these suffixes, at least one.

        Raises:
            JobError: no path has one.
        """
        found = [path for path in self.entries if path.lower().endswith(tuple(suffixes))]
        if not found:
            raise JobError(f"{self.url} has no {what}", remedy=f"looked for {', '.join(suffixes)}")
        return found

    def wrong(self, path: str, why: str, remedy: str = "fetch it again") -> JobError:
        """An error about an entry."""
        return JobError(f"{self.url}: {path} {why}", remedy=remedy)


def open_source(url: str) -> ImportSource:
    """Lists a folder, URL, archive, file, or glob.

    Raises:
        JobError: it does not exist, is empty, or is an archive without random access.
        DatasetUnreachable: the store fails.
    """
    place = open_files(url)
    listed = run(place.tree(""))
    if listed:
        entries = {path: DataRef(path=path, length=size) for path, size in listed.items()}
        return _visible(ImportSource(url=url, files=place, entries=entries))
    if any(c in url for c in WILD):
        place, listed = find_files(url)
        if listed:
            return ImportSource(url=url, files=place, entries={path: DataRef(path=path, length=size) for path, size in listed.items()})
    folder, _, name = place.url.rpartition("/")
    name = unquote(name) if folder.startswith("file:") else name
    above = open_files(folder) if name and not folder.endswith("/") else place
    size = run(above.size(name)) if name else None
    if size is None:
        raise JobError(f"{url} does not exist or is empty", remedy="give a folder, an archive, a file or a URL")
    if name.lower().endswith(_COMPRESSED_TAR):
        raise JobError(f"{url} is a compressed tar, which has no random access", remedy="unpack it")
    whole = ImportSource(url=url, files=above, entries={name: DataRef(path=name, length=size)})
    return enter(whole, name) if name.lower().endswith((".tar", ".zip")) else whole


def enter(source: ImportSource, path: str) -> ImportSource:
    """The members of an archive: a tar if its name says so, else a zip.

    Raises:
        JobError: the archive is damaged, or has members that are not plain byte ranges.
    """
    members = _tar_members if path.lower().endswith(".tar") else _zip_members
    try:
        return _visible(replace(source, entries=members(source, path)))
    except (tarfile.TarError, zipfile.BadZipFile, struct.error, EOFError, OSError, ValueError) as e:
        raise source.wrong(path, f"is not a valid archive: {one_line(e)}") from None


def _tar_members(source: ImportSource, path: str) -> dict[str, DataRef]:
    """Regular files. Links are left out, as are members that a later one of the same name replaces."""
    whole, out = source.entries[path], {}
    with tarfile.open(fileobj=source.stream(path), mode="r:") as archive:
        for member in archive:
            if member.isreg():
                if member.issparse() or member.offset_data + member.size > (whole.length or 0):
                    raise source.wrong(path, f"ends within its member {member.name}, or that is sparse")
                out[member.name.removeprefix("./")] = whole.within(member.offset_data, member.size)
    return out


def _zip_members(source: ImportSource, path: str) -> dict[str, DataRef]:
    whole, out, stream = source.entries[path], {}, source.stream(path)
    with zipfile.ZipFile(stream) as archive:
        for member in sorted(archive.infolist(), key=lambda m: m.header_offset):
            if member.is_dir():
                continue
            packed = _PACKED.get(member.compress_type, "")
            if member.flag_bits & 1 or packed == "":
                why = f"has an encrypted or unusually compressed member {member.filename}"
                raise source.wrong(path, why, "unpack it")
            stream.seek(member.header_offset + 26)  # names and extras may differ from those in the directory
            start = member.header_offset + 30 + sum(struct.unpack("<HH", stream.read(4)))
            out[member.filename] = replace(whole.within(start, member.compress_size), unpack=packed)
    return out


def _visible(source: ImportSource) -> ImportSource:
    """The source without hidden files, sorted."""
    kept = {path: source.entries[path] for path in visible(source.entries)}
    if not kept:
        raise JobError(f"{source.url} has no files in it", remedy="give a folder, an archive, a file or a URL")
    return replace(source, entries=kept)


# -- policies for rows that cannot be read ------------------------------------------------------------------------


OnDefect: TypeAlias = Literal["fail", "skip", "quarantine"]
MOST_KEPT_BYTES = 16_000_000
"""Size up to which copies are kept."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """A sample or file that cannot be imported."""

    file: str
    """Its name in the source."""
    reason: str
    at: str = ""
    """Line, row or annotation; empty: the whole file."""
    ref: DataRef | None = None
    """Location of its bytes, if there are any."""

    def entry(self, kept: str | None = None) -> DefectEntry:
        """Its entry in the list of defects.

        Args:
            kept: path of a copy in the store; None: there is none.
        """
        return DefectEntry(file=self.file, at=self.at, reason=self.reason, kept=kept)


class Defects:
    """The defects of an import, under a policy.

    Raises:
        JobError: the policy is unknown.
    """

    def __init__(self, policy: str = "fail") -> None:
        if policy not in get_args(OnDefect):
            raise JobError(f"on_defect = {policy!r} is not known", remedy="use fail, skip or quarantine")
        self.policy = policy
        self.found: list[Defect] = []

    def caught(self, e: JobError, source: ImportSource, file: str, *, at: str = "", ref: DataRef | None = None) -> None:
        """Records an error of one sample or file.

        Raises:
            JobError: the same error, if the policy is `fail`.
        """
        if self.policy == "fail":
            raise JobError(f"{e} (to leave out what is wrong: on_defect = 'skip', or --on-defect skip)") from None
        reason = e.problem.removeprefix(source.url).removeprefix(":").lstrip().removeprefix(f"{file} ")
        _log.debug("%s %s is left out: %s", file, at, reason)
        self.found.append(Defect(file=file, reason=reason, at=at, ref=ref))
