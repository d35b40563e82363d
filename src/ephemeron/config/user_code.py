"""The user's code: import of `module:name` from folders.

Folders stay at the front of `sys.path`, because user code imports lazily too. When a process serves several jobs
whose folders have modules of one name (`model.py` is popular), the later job gets its own, not the cached one.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from ephemeron.config.typed import near
from ephemeron.errors import JobError
from ephemeron.user_code import guarded, where_raised

_INSTALLED = frozenset({"site-packages", "dist-packages"})
_lock = threading.RLock()
_alone = threading.Lock()
_served: set[str] = set()
_places: dict[str, tuple[ModuleSpec, str]] = {}
"""Files of loaded modules, by name: there are thousands, and each search asks for all of them."""


def resolve(target: str, folders: Sequence[Path]) -> Any:
    """The object named `module:name`, searched in `folders` before the rest of `sys.path`.

    Args:
        target: `module:name`; both parts may be dotted.
        folders: put in front of `sys.path`, in this order, and left there. Idempotent.

    Raises:
        JobError: the text is malformed, the module is not found, raises or is hidden by another, or has no such name.
    """
    module_name, colon, name = target.partition(":")
    for part in (*module_name.split("."), *name.split(".")):
        if not colon or not part.isidentifier() or module_name.endswith(".py"):
            meant = f"{module_name.removesuffix('.py').replace('/', '.')}:{name or 'build'}"
            example = meant if ".py" in module_name else "model:build"
            raise JobError(f"target {target!r} is not of the form module:name", remedy=f"write e.g. {example!r}")
    if module_name == "__main__":
        raise JobError(
            f"target {target!r} is in the program that runs here, which functions do not have",
            remedy="put it into a file beside the job and name that",
        )
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


def put_in_front(folders: Sequence[Path]) -> None:
    """Puts folders in front of `sys.path` for a script, and drops loaded modules of other jobs that these folders have, too."""
    with _lock:
        wanted = [str(folder.resolve()) for folder in folders]
        _forget_other_jobs("", wanted, "script")
        _put_in_front(wanted)


def _import(target: str, module_name: str, folders: list[str]) -> ModuleType:
    _forget_other_jobs(module_name.partition(".")[0], folders, target)
    _put_in_front(folders)
    try:
        with guarded():
            return importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        if e.name is None or not f"{module_name}.".startswith(f"{e.name}."):
            raise JobError(f"{target}: importing {module_name} raised {_raised(e, folders)}") from e
        searched = ", ".join(folders) or "no folders"
        raise JobError(f"{target}: there is no module {e.name!r} in {searched}", remedy="add its folder to 'code'") from None
    except Exception as e:
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
    known: dict[str, str] = {}
    for name in [name for name in sys.modules if "." not in name]:
        loaded = place_of_loaded(name, known)
        if name == "ephemeron" or not (name == top or _root(loaded) in _served):
            continue
        ours = PathFinder.find_spec(name, folders)
        place = _place_of(ours, known)
        if ours is None or place == loaded or (ours.origin is None and not os.path.isdir(loaded)):
            continue
        if name in sys.stdlib_module_names or _INSTALLED.intersection(Path(loaded).parts):
            raise JobError(f"{target}: {place} is hidden by the module {name!r} of {loaded}", remedy="rename the file")
        for stale in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
            del sys.modules[stale]
    _served.update(folders)


def place_of_loaded(name: str, known: dict[str, str]) -> str:
    """`_place_of` a loaded module, whose file is looked up once."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    if name in _places and _places[name][0] is spec:
        return _places[name][1]
    place = _place_of(spec, known)
    if spec is not None and spec.has_location:  # others have folders that change with `sys.path`
        _places[name] = spec, place
    return place


def _place_of(spec: ModuleSpec | None, known: dict[str, str]) -> str:
    """The file of a module, or the first folder of a namespace package; empty if it has neither.

    Args:
        spec: of the module.
        known: resolved folders. A process has thousands of modules, in few folders.
    """
    if spec is None:
        return ""
    if spec.has_location and spec.origin:
        return _resolved(spec.origin, known)
    folders = list(spec.submodule_search_locations or ())
    return _resolved(folders[0], known) if folders else ""


def _resolved(path: str, known: dict[str, str]) -> str:
    """`os.path.realpath`, which resolves each folder once."""
    folder, name = os.path.split(path)
    if name in ("", os.curdir, os.pardir):
        return os.path.realpath(path)
    if folder not in known:
        known[folder] = os.path.realpath(folder)
    place = os.path.join(known[folder], name)
    return os.path.realpath(place) if os.path.islink(place) else place


def _root(place: str) -> str:
    """The entry of `sys.path` from which a top-level module or package came."""
    folder, name = os.path.split(place)
    return os.path.dirname(folder) if name == "__init__.py" else folder


@contextmanager
def isolated(folder: Path, *, hidden: Sequence[Path] = ()) -> Iterator[None]:
    """Conditions of a function: an empty working folder, and no access to modules of other folders.

    Modules that are imported from below `folder` meanwhile are dropped afterwards, and those that they displaced are restored.

    Args:
        folder: a folder of the caller, which holds the code.
        hidden: folders whose modules must not be found.
    """
    with _alone:
        path, modules, served = list(sys.path), dict(sys.modules), set(_served)
        here = Path.cwd()
        out_of_reach = {str(f.resolve()) for f in (*hidden, here)} | {""}
        roots = [f.resolve() for f in (folder, *hidden)]
        empty = folder / "cwd"
        empty.mkdir()
        try:
            sys.path[:] = [entry for entry in path if os.path.realpath(entry or here) not in out_of_reach and entry]
            _forget_below(roots)
            os.chdir(empty)
            yield
        finally:
            os.chdir(here)
            _forget_below(roots)
            sys.modules.update({name: m for name, m in modules.items() if name not in sys.modules})
            sys.path[:] = path
            _served.clear()
            _served.update(served)
            importlib.invalidate_caches()


def _forget_below(roots: Sequence[Path]) -> None:
    known: dict[str, str] = {}
    inside = tuple(str(root).rstrip(os.sep) + os.sep for root in roots)
    for name in list(sys.modules):
        place = place_of_loaded(name, known)
        if place and name != "__main__" and f"{place}{os.sep}".startswith(inside):
            del sys.modules[name]
