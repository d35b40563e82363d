"""Files below a URL: in a folder of this machine, or in an object store."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote

import xxhash

from ephemeron.config.paths import AnyPath, folder_of, located
from ephemeron.data.catalog.files import WILD, FileRange, Files, matching, visible
from ephemeron.data.catalog.loop import run
from ephemeron.errors import DatasetUnreachable


def open_files(url: AnyPath) -> Files:
    """Opens a folder (a path or `file:///path`), `s3://bucket/prefix`, `gs://…` or `az://…`. Connects on first use.

    Raises:
        JobError: the URL has another scheme.
    """
    url = located(url)
    if "://" not in url:
        return FolderFiles(Path(url))
    if url.startswith("file://"):
        return FolderFiles(folder_of(url))
    from ephemeron.data.catalog.objects import open_objects  # imports obstore

    return open_objects(url)


def find_files(place: AnyPath, endings: tuple[str, ...] = ("",)) -> tuple[Files, dict[str, int]]:
    """Root, and bytes of each file of a path, a glob, a folder, or a URL of these below it, sorted; none where nothing is there.

    What exists under the name is that file or folder, also where the name has a `[` or a `*` in it. The root of a local glob is the
    folder before its first wildcard.

    Args:
        place: such as `data/*.csv`, `s3://bucket/prefix/part-*.csv`.
        endings: of the files of a folder that are wanted.

    Raises:
        DatasetUnreachable: the store fails.
    """
    place = located(place)
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


# -- files in a folder of this machine, a mounted NAS included ----------------------------------------------------


_THREADS = 4
_PART = ".part-"


class FolderFiles(Files):
    """A folder, created on first write. Writing needs a file system with hard links.

    Args:
        root: absolute path.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = root.as_uri()

    def __repr__(self) -> str:
        return f"FolderFiles({str(self.root)!r})"

    async def fetch(self, ranges: Sequence[FileRange]) -> list[bytes]:
        # A few threads hide the latency of a NAS; on a disk they cost almost nothing.
        share = max(16, -(-len(ranges) // _THREADS))
        parts = [ranges[i : i + share] for i in range(0, len(ranges), share)]
        return [data for part in await asyncio.gather(*map(self._in_thread, parts)) for data in part]

    async def _in_thread(self, ranges: Sequence[FileRange]) -> list[bytes]:
        return await asyncio.to_thread(self._read, ranges)

    def _read(self, ranges: Sequence[FileRange]) -> list[bytes]:
        out: list[bytes] = []
        path, fd = "", -1
        try:
            for wanted in ranges:
                if wanted.path != path:
                    if fd >= 0:
                        os.close(fd)
                    path, fd = wanted.path, -1
                    fd = os.open(self.root / path, os.O_RDONLY | os.O_CLOEXEC)
                out.append(_read_range(fd, wanted))
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(path) from None
        except OSError as e:
            raise self._unreachable(e, path) from e
        finally:
            if fd >= 0:
                os.close(fd)
        return out

    async def size(self, path: str) -> int | None:
        return await asyncio.to_thread(self._size, path)

    def _size(self, path: str) -> int | None:
        where = self.root / path
        try:
            return where.stat().st_size if where.is_file() else None
        except OSError as e:
            raise self._unreachable(e, path) from e

    async def identity(self, path: str) -> str | None:
        def of() -> str | None:
            try:
                return str((self.root / path).stat().st_mtime_ns)
            except FileNotFoundError:
                return None

        return await asyncio.to_thread(of)

    async def tree(self, prefix: str) -> dict[str, int]:
        return await asyncio.to_thread(lambda: dict(sorted(self._walk(prefix))))

    def _walk(self, prefix: str) -> Iterator[tuple[str, int]]:
        seen: set[str] = set()
        try:
            for place, inner, names in os.walk(self.root / prefix, onerror=_raise, followlinks=True):
                real = os.path.realpath(place)
                if real in seen:  # a link to a folder above it
                    inner.clear()
                    continue
                seen.add(real)
                for name in names:
                    path = Path(place, name)
                    if not name.startswith(_PART) and path.is_file():
                        yield path.relative_to(self.root).as_posix(), path.stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as e:
            raise self._unreachable(e, prefix) from e

    async def folders(self, prefix: str) -> list[str]:
        return await asyncio.to_thread(self._folders, prefix)

    def _folders(self, prefix: str) -> list[str]:
        try:
            return sorted(entry.name for entry in os.scandir(self.root / prefix) if entry.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as e:
            raise self._unreachable(e, prefix) from e

    async def create(self, path: str, data: bytes | Path) -> bool:
        return await asyncio.to_thread(self._create, path, data)

    def _create(self, path: str, data: bytes | Path) -> bool:
        """Writes a temporary file and links it: a link fails where the name exists, a rename would replace it."""
        target = self.root / path
        part = target.with_name(f"{_PART}{secrets.token_hex(8)}")
        try:
            if target.exists():
                return False
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                if isinstance(data, Path):
                    shutil.copyfile(data, part)
                else:
                    part.write_bytes(data)
                os.link(part, target)
            finally:
                part.unlink(missing_ok=True)
        except FileExistsError:
            return False
        except OSError as e:
            raise self._unreachable(e, path) from e
        return True

    def _unreachable(self, e: OSError, path: str) -> DatasetUnreachable:
        return DatasetUnreachable(e.strerror or str(e), file=(self.root / path).as_uri())


def _read_range(fd: int, wanted: FileRange) -> bytes:
    length = os.fstat(fd).st_size - wanted.offset if wanted.length is None else wanted.length
    data = os.pread(fd, max(0, length), wanted.offset)
    while len(data) < length:  # the kernel stops at 2 GB, and a NAS may stop anywhere
        more = os.pread(fd, length - len(data), wanted.offset + len(data))
        if not more:
            break
        data += more
    return data


def _raise(error: OSError) -> None:
    raise error


# -- files in memory ----------------------------------------------------------------------------------------------


class MemoryFiles(Files):
    """Files of this process: of a dataset that is described where it is read, and stored nowhere."""

    url = "memory:"

    def __init__(self) -> None:
        self._contents: dict[str, bytes] = {}

    async def fetch(self, ranges: Sequence[FileRange]) -> list[bytes]:
        found = []
        for each in ranges:
            if each.path not in self._contents:
                raise FileNotFoundError(each.path)
            end = None if each.length is None else each.offset + each.length
            found.append(self._contents[each.path][each.offset : end])
        return found

    async def size(self, path: str) -> int | None:
        return len(self._contents[path]) if path in self._contents else None

    async def identity(self, path: str) -> str | None:
        return xxhash.xxh3_128_hexdigest(self._contents[path]) if path in self._contents else None

    async def tree(self, prefix: str) -> dict[str, int]:
        below = f"{prefix}/" if prefix else ""
        return {path: len(data) for path, data in sorted(self._contents.items()) if path.startswith(below)}

    async def folders(self, prefix: str) -> list[str]:
        below = f"{prefix}/" if prefix else ""
        rest = [path.removeprefix(below) for path in self._contents if path.startswith(below)]
        return sorted({path.partition("/")[0] for path in rest if "/" in path})

    async def create(self, path: str, data: bytes | Path) -> bool:
        contents = data if isinstance(data, bytes) else data.read_bytes()
        return self._contents.setdefault(path, contents) is contents
