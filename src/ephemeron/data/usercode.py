"""The user's code: finding `module:name` in folders, and carrying those folders to another machine.

A function starts bare. The folders in `job.code` travel as one zip: text files that code consists of, no data, no
virtual environments, nothing hidden (that is where credentials live), 20 MB at most. The same files give the same
bytes, so that a store can name the bundle by its hash.

Folders stay at the front of `sys.path`, because user code imports lazily too. When a process serves several jobs
whose folders have modules of one name (`model.py` is popular), the later job gets its own, not the cached one.
"""

from __future__ import annotations

import importlib
import io
import os
import stat
import sys
import threading
import traceback
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

from ephemeron.data.options import near
from ephemeron.errors import CorruptMessage, JobError

SUFFIXES = frozenset({".py", ".pyi", ".toml", ".json", ".txt", ".yaml", ".yml", ".ini", ".cfg"})
"""Kinds of files that travel."""
BUNDLE_LIMIT = 20_000_000
"""Bytes that the files of a bundle may have together, before compression."""

_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages"})
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_OUTPUTS = frozenset({"build", "dist"})
_EPOCH = (1980, 1, 1, 0, 0, 0)
_lock = threading.RLock()
_served: set[str] = set()


def resolve(target: str, folders: Sequence[Path]) -> Any:
    """The object that `module:name` names, looking into `folders` before anything else on `sys.path`.

    Args:
        target: `module:name`; both parts may be dotted.
        folders: put in front of `sys.path`, in this order, and left there. Doing so again changes nothing.

    Raises:
        JobError: the text is malformed, the module is not found, raises or is hidden by another, or has no such name.
    """
    module_name, colon, name = target.partition(":")
    for part in (*module_name.split("."), *name.split(".")):
        if not colon or not part.isidentifier():
            raise JobError(f"target {target!r} is not of the form module:name", remedy="write e.g. 'model:build'")
    with _lock:
        module = _import(target, module_name, [str(folder.resolve()) for folder in folders])
    value: Any = module
    for part in name.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            names = [n for n in dir(value) if not n.startswith("_")]
            remedy = near(part, names, what="it has")
            raise JobError(f"{target}: {module_name} has no name {part!r}", remedy=remedy) from None
    return value


def where_raised(error: BaseException, folders: Sequence[Path] = ()) -> str:
    """`ValueError: text (model.py, line 12)`: the innermost line in the user's folders, or the innermost at all."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
    if isinstance(error, SyntaxError) and error.filename:
        return f"SyntaxError: {error.msg} ({Path(error.filename).name}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    roots = [folder.resolve() for folder in folders]
    own = [f for f in frames if any(Path(f.filename).is_relative_to(root) for root in roots)]
    if not frames:
        return text
    frame = (own or list(frames))[-1]
    return f"{text} ({Path(frame.filename).name}, line {frame.lineno})"


def bundle(folders: Sequence[Path], *, limit: int = BUNDLE_LIMIT) -> bytes:
    """The code in these folders as a zip, each folder under its index (`0/…`, `1/…`).

    The same files give the same bytes: sorted, without timestamps or permissions.

    Args:
        limit: bytes that the files may have together, before compression.

    Raises:
        JobError: a folder does not exist, a file cannot be read, or there is too much.
    """
    files = dict(_collect(folders))
    sizes = {name: _size(path) for name, path in files.items()}
    if sum(sizes.values()) > limit:
        largest = sorted(sizes, key=lambda name: (-sizes[name], name))[:3]
        listed = ", ".join(f"{files[name]} ({sizes[name] / 1e6:.1f} MB)" for name in largest)
        raise JobError(
            f"code has {sum(sizes.values()) / 1e6:.1f} MB, the limit is {limit / 1e6:.1f} MB; largest: {listed}",
            remedy="name only the folders with code in 'code', and keep data elsewhere",
        )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for index in range(len(folders)):
            archive.writestr(_entry(f"{index}/"), b"")
        for name in sorted(files):
            archive.writestr(_entry(name), _read(files[name]), zipfile.ZIP_DEFLATED, 6)
    return buffer.getvalue()


def unbundle(data: bytes, folder: Path) -> list[Path]:
    """Unpacks a bundle into a folder of the caller's own, which is created if need be.

    Returns:
        The folders to put on `sys.path`, in the order given to `bundle`.

    Raises:
        CorruptMessage: it is no bundle, or an entry would be written outside of `folder`.
    """
    folder = folder.resolve()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            places = {entry: _place(entry, folder) for entry in entries}
            for entry, place in places.items():
                if entry.is_dir():
                    place.mkdir(parents=True, exist_ok=True)
                else:
                    place.parent.mkdir(parents=True, exist_ok=True)
                    place.write_bytes(archive.read(entry))
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError) as e:
        raise CorruptMessage(f"code bundle of {len(data)} bytes is damaged: {e}") from None
    indices = {int(PurePosixPath(entry.filename).parts[0]) for entry in entries}
    return [folder / str(index) for index in sorted(indices)]


def _import(target: str, module_name: str, folders: list[str]) -> ModuleType:
    _forget_other_jobs(module_name.partition(".")[0], folders, target)
    _put_in_front(folders)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        if e.name is None or not f"{module_name}.".startswith(f"{e.name}."):
            raise JobError(f"{target}: importing {module_name} raised {_raised(e, folders)}") from e
        searched = ", ".join(folders) or "no folders"
        raise JobError(
            f"{target}: there is no module {e.name!r} in {searched}", remedy="add its folder to 'code'"
        ) from None
    except (Exception, SystemExit) as e:
        raise JobError(f"{target}: importing {module_name} raised {_raised(e, folders)}") from e


def _raised(error: BaseException, folders: list[str]) -> str:
    return where_raised(error, [Path(folder) for folder in folders])


def _put_in_front(folders: list[str]) -> None:
    wanted = [*folders, *(path for path in sys.path if path not in folders)]
    if sys.path != wanted:
        sys.path[:] = wanted
    importlib.invalidate_caches()


def _forget_other_jobs(top: str, folders: list[str], target: str) -> None:
    """Drops loaded modules that came from elsewhere and that these folders have too, so that theirs are imported.

    That concerns the module asked for, and all that came from folders of another job. Installed packages stay.

    Raises:
        JobError: the module asked for is in the folders, but the interpreter or a package has one of that name.
    """
    for name in [name for name in sys.modules if "." not in name]:
        loaded = _place_of(getattr(sys.modules[name], "__spec__", None))
        if name == "ephemeron" or not (name == top or _root(loaded) in _served):
            continue
        ours = PathFinder.find_spec(name, folders)
        place = _place_of(ours)
        if ours is None or place == loaded or (ours.origin is None and not os.path.isdir(loaded)):
            continue
        if name in sys.stdlib_module_names or _INSTALLED.intersection(Path(loaded).parts):
            raise JobError(f"{target}: {place} is hidden by the module {name!r} of {loaded}", remedy="rename the file")
        for stale in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
            del sys.modules[stale]
    _served.update(folders)


def _place_of(spec: ModuleSpec | None) -> str:
    """The file of a module, or the first folder of a namespace package; empty if it has neither."""
    if spec is None:
        return ""
    if spec.has_location and spec.origin:
        return os.path.realpath(spec.origin)
    folders = list(spec.submodule_search_locations or ())
    return os.path.realpath(folders[0]) if folders else ""


def _root(place: str) -> str:
    """The entry of `sys.path` from which a top-level module or package came."""
    folder, name = os.path.split(place)
    return os.path.dirname(folder) if name == "__init__.py" else folder


def _collect(folders: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    for index, folder in enumerate(folders):
        if not folder.is_dir():
            raise JobError(f"code folder {folder} does not exist", remedy="give a folder with Python files")
        for place, inner, names in os.walk(folder):
            inner[:] = sorted(name for name in inner if _travels(Path(place, name)))
            for name in sorted(names):
                path = Path(place, name)
                if path.suffix in SUFFIXES and not name.startswith(".") and path.is_file():
                    yield f"{index}/{path.relative_to(folder).as_posix()}", path


def _travels(folder: Path) -> bool:
    name = folder.name
    if name.startswith(".") or name in _SKIPPED or name.endswith(".egg-info"):
        return False
    if name in _OUTPUTS and not (folder / "__init__.py").exists():
        return False
    return not (folder / "pyvenv.cfg").exists()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as e:
        raise JobError(f"code file {path} cannot be read: {e}") from None


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


def _place(entry: zipfile.ZipInfo, folder: Path) -> Path:
    """Where an entry goes, inside `folder`."""
    path = PurePosixPath(entry.filename)
    inside = not path.is_absolute() and ".." not in path.parts and not any(c in entry.filename for c in "\\\0")
    place = (folder / entry.filename).resolve() if inside else folder
    if not inside or not place.is_relative_to(folder) or not path.parts or not path.parts[0].isdecimal():
        raise CorruptMessage(f"code bundle has an entry {entry.filename!r}, which is not inside a numbered folder")
    if stat.S_ISLNK(entry.external_attr >> 16):
        raise CorruptMessage(f"code bundle has a link {entry.filename!r}")
    return place
