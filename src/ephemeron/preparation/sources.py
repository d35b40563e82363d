"""Files that are loaded: a path, a glob, a folder, or the same in an object store."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ephemeron.config.paths import AnyPath
from ephemeron.config.typed import Count
from ephemeron.data.catalog.files import FileRange, Files
from ephemeron.data.catalog.loop import run
from ephemeron.data.catalog.open_files import open_files
from ephemeron.errors import FileVersionChanged, JobError

_WILD = "*?["


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file as it was when it was listed."""

    root: str
    """URL of its folder or bucket."""
    path: str
    nbytes: Count
    identity: str

    @property
    def url(self) -> str:
        """Where it is."""
        return f"{self.root}/{self.path}"

    @property
    def name(self) -> str:
        """Its name in messages: a path of this machine, or a URL."""
        return self.url.removeprefix("file://")

    def read(self, offset: int, length: int) -> bytes:
        """Bytes of the file, fewer where it ends earlier.

        Raises:
            JobError: it is not the file that was listed.
        """
        files = open_files(self.root)
        pin = self.identity if self.identity.startswith("etag:") else None
        try:
            (data,) = run(files.fetch([FileRange(self.path, offset, length, pin)]))
        except FileNotFoundError:
            raise JobError(f"{self.name} has disappeared since the preparation began") from None
        except FileVersionChanged:
            raise JobError(
                f"{self.name} has changed since the preparation began", remedy="prepare into another folder"
            ) from None
        return data

    def check(self) -> None:
        """Refuses a file that has changed since it was listed.

        Raises:
            JobError: it has.
        """
        if identity_of(open_files(self.root), self.path) != self.identity:
            raise JobError(f"{self.name} has changed since the preparation began", remedy="prepare into another folder")


def identity_of(files: Files, path: str) -> str:
    """ETag, or time of change."""
    return run(files.identity(path)) or ""


def listed(place: AnyPath, *, endings: Sequence[str]) -> list[Source]:
    """The files of a path, a glob, a folder, or a URL of these, in the order of their names.

    Args:
        place: such as `data/*.csv`, `s3://bucket/prefix/part-*.csv`.
        endings: of the files of a folder that are wanted.

    Raises:
        JobError: there is none, or one is empty.
        DatasetUnreachable: the store fails.
    """
    root, path = _split(str(place))
    files = open_files(root)
    nbytes = None if any(c in path for c in _WILD) else run(files.size(path)) if path else None
    if nbytes is not None:
        sizes = {path: nbytes}
    else:
        wild = any(c in path for c in _WILD)
        folder = path[: min(path.find(c) for c in _WILD if c in path)].rpartition("/")[0] if wild else path
        tree = run(files.tree(folder))
        sizes = {
            name: size for name, size in tree.items()
            if (fnmatch.fnmatchcase(name, path) if wild else name.endswith(tuple(endings)))
        }  # fmt: skip
    if not sizes:
        raise JobError(
            f"{place} names no file", remedy=f"give a file, a glob, or a folder of {', '.join(endings)} files"
        )
    found = []
    for name in sorted(sizes):
        if name.endswith((".gz", ".bz2", ".zst", ".zip")):
            raise JobError(
                f"{place}: {name} is compressed, so no part of it can be read alone", remedy="unpack it first"
            )
        if not sizes[name]:
            raise JobError(f"{files.url.removeprefix('file://')}/{name} is empty")
        found.append(Source(root=files.url, path=name, nbytes=sizes[name], identity=identity_of(files, name)))
    return found


def _split(place: str) -> tuple[str, str]:
    """Root and path. The root of a local path is the folder before the first wildcard."""
    scheme, separator, rest = place.partition("://")
    if separator and scheme != "file":
        bucket, _, path = rest.partition("/")
        return f"{scheme}://{bucket}", path
    local = Path(rest if separator else place).expanduser().absolute()
    if local.is_dir():
        return str(local), ""
    parts = local.parts
    first = next((n for n, part in enumerate(parts) if any(c in part for c in _WILD)), len(parts) - 1)
    return str(Path(*parts[:first])), "/".join(parts[first:])
