"""Files that are loaded: a path, a glob, a folder, or the same in an object store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from ephemeron.config.paths import AnyPath, located
from ephemeron.config.typed import Count
from ephemeron.data.catalog.files import FileRange, Files
from ephemeron.data.catalog.listing import WILD, matching, visible
from ephemeron.data.catalog.loop import run
from ephemeron.data.catalog.open_files import open_files
from ephemeron.errors import FileVersionChanged, JobError


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
        local = self.root.startswith("file://")
        return f"{unquote(self.root.removeprefix('file://'))}/{self.path}" if local else self.url

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
            raise JobError(f"{self.name} has changed since the preparation began", remedy="prepare into another folder") from None
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
    """The files of a path, a pattern, a folder, or a URL of these, in the order of their names; see `data.catalog.listing`.

    What exists under the name is that file or folder, also where the name has a `[` or a `*` in it.

    Args:
        place: such as `data/*.csv`, `s3://bucket/prefix/part-*.csv`.
        endings: of the files of a folder that are wanted.

    Raises:
        JobError: there is none, or one is empty.
        DatasetUnreachable: the store fails.
    """
    files, sizes = _sizes(located(place), tuple(endings))
    if not sizes:
        raise JobError(f"{place} names no file", remedy=f"give a file, a glob, or a folder of {', '.join(endings)} files")
    found = []
    for name in sizes:
        source = Source(root=files.url, path=name, nbytes=max(1, sizes[name]), identity=identity_of(files, name))
        if name.lower().endswith((".gz", ".bz2", ".xz", ".zst", ".zip")):
            raise JobError(f"{source.name} is compressed, so no part of it can be read alone", remedy="unpack it first")
        if not sizes[name]:
            raise JobError(f"{source.name} is empty")
        found.append(source)
    return found


def _sizes(place: str, endings: tuple[str, ...]) -> tuple[Files, dict[str, int]]:
    """Root, and bytes of each wanted file below it, sorted. The root of a local pattern is the folder before its first wildcard."""
    scheme, separator, rest = place.partition("://")
    if separator and scheme != "file":
        bucket, _, path = rest.partition("/")
        files = open_files(f"{scheme}://{bucket}")
    else:
        local = Path(unquote(rest) if separator else place)
        if local.is_dir():
            files, path = open_files(local), ""
        else:
            parts = local.parts
            wild = (n for n, part in enumerate(parts) if any(c in part for c in WILD))
            first = len(parts) - 1 if local.exists() else next(wild, len(parts) - 1)
            files, path = open_files(Path(*parts[:first])), "/".join(parts[first:])
    if path and (nbytes := run(files.size(path))) is not None:
        return files, {path: nbytes}
    tree = run(files.tree(path))
    if tree or not any(c in path for c in WILD):
        prefix = f"{path.rstrip('/')}/" if path else ""
        below = visible(name.removeprefix(prefix) for name in tree)
        return files, {prefix + name: tree[prefix + name] for name in below if name.lower().endswith(endings)}
    before = path[: min(path.find(c) for c in WILD if c in path)].rpartition("/")[0]
    tree = run(files.tree(before))
    prefix = f"{before}/" if before else ""
    chosen = matching((name.removeprefix(prefix) for name in tree), path.removeprefix(prefix))
    return files, {prefix + name: tree[prefix + name] for name in chosen}
