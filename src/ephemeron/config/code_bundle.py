"""Bundles of the user's code: folders as one zip, which functions unpack.

A bundle holds the files of the folders in `job.code` that the code may read: sources, text, and other kinds such as initial weights.
Virtual environments, caches and hidden files (where credentials are kept) are left out. So are data: tables, arrays and archives, unless a
source names them; what `prepare` has written; and what is neither source nor text in folders that hold data or results. Data and large texts
for which there is no room are left out with a warning. A job adds files with `code_include` and removes some with `code_exclude`, or with a file `.ephemeronignore` in a folder. The same files give the
same bytes, so that a store can name the bundle by its hash.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import stat
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Literal

from ephemeron.errors import CorruptMessage, JobError

_log = logging.getLogger(__name__)

SUFFIXES = frozenset({".py", ".pyi", ".toml", ".json", ".txt", ".yaml", ".yml", ".ini", ".cfg"})
"""Kinds of files that code consists of."""
BUNDLE_LIMIT = 20_000_000
"""Bytes that the files of a bundle may have together, before compression."""
INCLUDED_LIMIT = 250_000_000
"""Bytes of the files that the job includes by name: they come on top."""

_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages"})
_OUTPUTS = frozenset({"build", "dist"})
_NO_CODE = frozenset(
    {"data", "datasets", "checkpoints", "logs", "lightning_logs", "mlruns", "out", "output", "outputs", "results", "runs"} | {"wandb"}
)
"""Folders in which only code and text is taken for what functions need."""
_JUNK = frozenset({".pyc", ".pyo", ".log", ".swp", ".tmp"})
_DATA = frozenset(
    {".csv", ".tsv", ".parquet", ".arrow", ".feather", ".orc", ".avro", ".jsonl", ".ndjson", ".npy", ".npz", ".h5", ".hdf5", ".mat"}
    | {".svm", ".libsvm", ".tfrecord", ".db", ".sqlite", ".sqlite3", ".lmdb", ".zip", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".zst"}
)
"""Kinds of files that hold data."""
_TEXT = frozenset({".json", ".txt"})
_LARGE_TEXT = 1_000_000
"""Bytes from which on they may be data."""
_PREPARED = "dataset.json"
"""In folders that `prepare` and `ephemeron data` write."""
IGNORE_FILE = ".ephemeronignore"
_EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Files to add to a bundle, and files to leave out."""

    include: tuple[str, ...] = ()
    """Patterns of file names or of paths below a folder, such as `*.pt` or `data/labels.csv`."""
    exclude: tuple[str, ...] = ()
    """The same; the name of a folder excludes everything in it. `include` takes precedence. Folders add the lines of `.ephemeronignore`."""
    apart: tuple[Path, ...] = ()
    """Files and folders that are sent in another way, such as training samples. Sources in them are bundled all the same."""
    closed: tuple[Path, ...] = ()
    """Folders of which nothing is bundled."""


def bundle(
    folders: Sequence[Path], selection: Selection = Selection(), *, limit: int = BUNDLE_LIMIT, instead: Mapping[Path, bytes] = {}
) -> bytes:
    """Code in these folders as a zip, each folder under its index (`0/…`, `1/…`).

    The same files give the same bytes: sorted, without timestamps or permissions.

    Args:
        limit: bytes that the files may have together, before compression; those included by name come on top.
        instead: other contents of files, by their resolved paths.

    Raises:
        JobError: a folder does not exist, a file cannot be read, there is too much, or a pattern to include fits nothing.
    """
    files, named = _collect(folders, selection, limit)
    _check_sizes({n: p for n, p in files.items() if n not in named}, limit)
    _check_sizes({n: p for n, p in files.items() if n in named}, INCLUDED_LIMIT)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for index in range(len(folders)):
            archive.writestr(_entry(f"{index}/"), b"")
        for name in sorted(files):
            text = files[name].suffix in SUFFIXES
            data = instead.get(files[name].resolve()) if instead else None
            archive.writestr(
                _entry(name), _read(files[name]) if data is None else data, zipfile.ZIP_DEFLATED if text else zipfile.ZIP_STORED, 6
            )
    return buffer.getvalue()


def fitting(folders: Sequence[Path], patterns: Sequence[str]) -> tuple[str, ...]:
    """Those of the patterns to include that fit a file of these folders."""
    files = [entry.inner for entry in _walk(folders, Selection(include=tuple(patterns)))] if patterns else []
    return tuple(pattern for pattern in patterns if any(_fits(file, pattern) for file in files))


def state_of(folder: Path, selection: Selection = Selection()) -> tuple[tuple[str, int, int], ...]:
    """Names, times and sizes of the files of a folder that may be bundled: something else once one of them has changed."""
    found = []
    for entry in _walk([folder], selection):
        with contextlib.suppress(OSError):  # it is gone again
            status = entry.path.stat()
            found.append((entry.name, status.st_mtime_ns, status.st_size))
    return tuple(found)


def bundled_files(folders: Sequence[Path], selection: Selection = Selection()) -> list[Path]:
    """Files that a bundle of these folders holds.

    Raises:
        JobError: as for `bundle`.
    """
    return sorted(_collect(folders, selection, BUNDLE_LIMIT)[0].values())


def left_out(folders: Sequence[Path], selection: Selection = Selection()) -> list[Path]:
    """Files below these folders that a bundle leaves out, except hidden files, caches and environments."""
    taken = set(_collect(folders, selection, BUNDLE_LIMIT)[0].values())
    return [entry.path for entry in _walk(folders, selection) if entry.path not in taken]


def unbundle(data: bytes, folder: Path) -> list[Path]:
    """Unpacks a bundle into a folder of the caller, which is created if absent.

    Returns:
        The folders to put on `sys.path`, in the order given to `bundle`.

    Raises:
        CorruptMessage: it is no bundle, or an entry would be written outside of `folder`.
    """
    folder = folder.resolve()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            known: dict[PurePosixPath, Path] = {}
            places = {entry: _place(entry, folder, known) for entry in entries}
            for parent in {place if entry.is_dir() else place.parent for entry, place in places.items()}:
                parent.mkdir(parents=True, exist_ok=True)
            for entry, place in places.items():
                if not entry.is_dir():
                    place.write_bytes(archive.read(entry))
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError) as e:
        raise CorruptMessage(f"code bundle of {len(data)} bytes is damaged: {e}") from None
    indices = {int(PurePosixPath(entry.filename).parts[0]) for entry in entries}
    return [folder / str(index) for index in sorted(indices)]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A file that may be bundled."""

    name: str
    """In the bundle."""
    path: Path
    kind: Literal["code", "large text", "data", "other"]
    """Bundled; bundled if it fits; bundled if a source names it and it fits; left out."""

    @property
    def inner(self) -> PurePosixPath:
        """Path below its folder."""
        return PurePosixPath(*PurePosixPath(self.name).parts[1:])


def _collect(folders: Sequence[Path], selection: Selection, limit: int) -> tuple[dict[str, Path], frozenset[str]]:
    """Files by name in the bundle, and the names of those that `include` names."""
    apart = [path.resolve() for path in selection.apart]
    ignored = [(*selection.exclude, *_ignored(folder)) for folder in folders]
    found: dict[str, Path] = {}
    texts: dict[str, Path] = {}
    data: dict[str, Path] = {}
    named = set()
    fitted: set[str] = set()
    for entry in _walk(folders, selection):
        wanted = [p for p in selection.include if _fits(entry.inner, p)]
        if wanted:
            fitted.update(wanted)
            named.add(entry.name)
            found[entry.name] = entry.path
            continue
        exclude = ignored[int(entry.name.partition("/")[0])]
        is_apart = entry.path.suffix not in SUFFIXES and _is_below(entry.path, apart)
        if entry.kind != "other" and not is_apart and not any(_fits(entry.inner, p) for p in exclude):
            (found if entry.kind == "code" else texts if entry.kind == "large text" else data)[entry.name] = entry.path
    for pattern in selection.include:
        if pattern not in fitted:
            raise fits_nothing(pattern, folders)
    if wishes := texts | (_named(data, found) if data else {}):
        found |= _that_fit(wishes, limit - sum(_size(p) for n, p in found.items() if n not in named))
    return found, frozenset(named)


def fits_nothing(pattern: str, folders: Sequence[Path]) -> JobError:
    """The error for a pattern to include that fits no file of these folders."""
    return JobError(
        f"code_include has {pattern!r}, and no file in {', '.join(map(str, folders)) or 'no folder'} is like that",
        remedy="name files relative to the folders in 'code'",
    )


def _ignored(folder: Path) -> list[str]:
    """Patterns in the file `.ephemeronignore` of a folder.

    Raises:
        JobError: it cannot be read, or has a pattern of another kind.
    """
    path = folder / IGNORE_FILE
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as e:
        raise JobError(f"{path} cannot be read: {e}") from None
    for number, line in enumerate(lines, 1):
        if line.startswith("!"):
            raise JobError(f"{path}, line {number}: {line!r} adds files", remedy="name them in code_include")
    return [line.lstrip("/") for line in lines if line and not line.startswith("#")]


def _named(data: Mapping[str, Path], found: Mapping[str, Path]) -> dict[str, Path]:
    """Of data files, those whose name is in one of the sources."""
    sources = "\n".join(path.read_text(errors="replace") for path in found.values() if path.suffix == ".py" and path.is_file())
    return {name: path for name, path in data.items() if path.name in sources}


_told: set[Path] = set()
"""Files that were named in a warning."""


def _that_fit(files: Mapping[str, Path], room: int) -> dict[str, Path]:
    """The smallest files that have room together; the others are named in a warning."""
    kept: dict[str, Path] = {}
    for name in sorted(files, key=lambda n: (_size(files[n]), n)):
        room -= _size(files[name])
        if room >= 0:
            kept[name] = files[name]
        elif (path := files[name].resolve()) not in _told:
            _told.add(path)
            _log.warning(
                "%s (%.1f MB) is not sent with the code beside it; functions that read it need code_include", path, _size(path) / 1e6
            )
    return kept


def _fits(path: PurePosixPath, pattern: str) -> bool:
    """Whether a pattern matches the name, the whole path, or a folder of the path."""
    own = pattern.rstrip("/")
    return fnmatch(path.name, own) or any(fnmatch(str(p), own) for p in (path, *path.parents[:-1]))


def _is_below(path: Path, folders: Sequence[Path]) -> bool:
    place = path.resolve()
    return any(place.is_relative_to(folder) for folder in folders)


def _walk(folders: Sequence[Path], selection: Selection) -> Iterator[_Entry]:
    closed = {path.resolve() for path in selection.closed}
    for index, folder in enumerate(folders):
        if not folder.is_dir():
            raise JobError(f"code folder {folder} does not exist", remedy="give a folder with Python files")
        for place, inner, names in os.walk(folder):
            if is_dataset := Path(place) != folder and (place.endswith(".zarr") or _PREPARED in names):
                inner[:] = inner if selection.include else []
                names = names if selection.include else []
            inner[:] = sorted(n for n in inner if _is_entered(Path(place, n)) and Path(place, n).resolve() not in closed)
            parts = Path(place).relative_to(folder).parts
            for name in sorted(names):
                path = Path(place, name)
                if not name.startswith(".") and path.is_file():
                    kind = "other" if is_dataset else _kind(path, parts)
                    yield _Entry(f"{index}/{path.relative_to(folder).as_posix()}", path, kind)


def _kind(path: Path, parts: Sequence[str]) -> Literal["code", "large text", "data", "other"]:
    if path.suffix in SUFFIXES:
        return "large text" if path.suffix in _TEXT and _is_large(path) else "code"
    if path.suffix in _JUNK or _NO_CODE.intersection(parts):
        return "other"
    return "data" if path.suffix in _DATA else "code"


def _is_entered(folder: Path) -> bool:
    name = folder.name
    if name.startswith(".") or name in _SKIPPED or name.endswith(".egg-info"):
        return False
    if name in _OUTPUTS and not (folder / "__init__.py").exists():
        return False
    return not (folder / "pyvenv.cfg").exists()


def _is_large(path: Path) -> bool:
    try:
        return path.stat().st_size >= _LARGE_TEXT
    except OSError:  # it is gone again
        return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as e:
        raise JobError(f"code file {path} cannot be read: {e}") from None


def _check_sizes(files: Mapping[str, Path], limit: int) -> None:
    sizes = {name: _size(path) for name, path in files.items()}
    if sum(sizes.values()) > limit:
        largest = sorted(sizes, key=lambda name: (-sizes[name], name))[:3]
        listed = ", ".join(f"{files[name]} ({sizes[name] / 1e6:.1f} MB)" for name in largest)
        raise JobError(
            f"code has {sum(sizes.values()) / 1e6:.1f} MB, the limit is {limit / 1e6:.1f} MB; largest: {listed}",
            remedy=f'keep data elsewhere, or leave it out with code_exclude = ["…"] or a line in {IGNORE_FILE}; what functions have to read may be '
            f"larger if code_include names it, up to {INCLUDED_LIMIT / 1e6:.0f} MB",
        )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as e:
        raise JobError(f"code file {path} cannot be read: {e}") from None


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, date_time=_EPOCH)
    entry.create_system = 3
    entry.external_attr = (stat.S_IFDIR | 0o755 if name.endswith("/") else stat.S_IFREG | 0o644) << 16
    return entry


def _place(entry: zipfile.ZipInfo, folder: Path, known: dict[PurePosixPath, Path]) -> Path:
    """Path of an entry, inside `folder`.

    Args:
        known: resolved folders. A bundle has hundreds of files, in few folders.
    """
    path = PurePosixPath(entry.filename)
    inside = not path.is_absolute() and ".." not in path.parts and not any(c in entry.filename for c in "\\\0")
    place = folder
    if inside:
        if path.parent not in known:
            known[path.parent] = (folder / path.parent).resolve()
        place = known[path.parent] / path.name
        if place.is_symlink():
            place = place.resolve()
    if not inside or not place.is_relative_to(folder) or not path.parts or not path.parts[0].isdecimal():
        raise CorruptMessage(f"code bundle has an entry {entry.filename!r}, which is not inside a numbered folder")
    if stat.S_ISLNK(entry.external_attr >> 16):
        raise CorruptMessage(f"code bundle has a link {entry.filename!r}")
    return place
