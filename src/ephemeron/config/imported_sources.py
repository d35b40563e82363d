"""Sources as this process has imported them: a function elsewhere is to compute what this process would.

A file that was edited after its import is another program until the module is reloaded. What a module was imported from is known from
the first look at it on; whether the file was edited before that is found by comparing its functions with those of the file.
"""

from __future__ import annotations

import logging
import os
import pickletools
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from ephemeron.config.paths import ENVIRONMENTS, home
from ephemeron.config.user_code import place_of_loaded

_OWN = Path(__file__).resolve().parents[2]


def folder_of(module: object, otherwise: Path) -> Path:
    """Folder from which a module's top-level package is imported.

    Args:
        module: a module, or None.
        otherwise: for a module without a file.
    """
    path, name = getattr(module, "__file__", None), getattr(module, "__name__", "")
    if path is None:
        return otherwise
    file = Path(path).resolve()
    levels = name.count(".") + (file.name == "__init__.py")
    return file.parents[levels]


def is_installed(module: object) -> bool:
    """Whether functions have a module without being sent it: of the standard library, of a package, or of ephemeron."""
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    if not file:
        return True
    place = Path(file).resolve()
    return any(place.is_relative_to(root) for root in (*_installed(), _environments(str(home()))))


@cache
def _installed() -> tuple[Path, ...]:
    return (*(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")), _OWN)


def modules_in(pickled: bytes) -> list[str]:
    """Names of the imported modules that a pickle names."""
    return sorted({arg for _, arg, _ in pickletools.genops(pickled) if isinstance(arg, str)} & sys.modules.keys())


def folders_in(pickled: bytes) -> list[Path]:
    """Folders of the user's modules that a pickle names; installed ones are left out."""
    folders: dict[Path, None] = {}
    for name in modules_in(pickled):
        module = sys.modules[name]
        if name != "__main__" and getattr(module, "__file__", None) and not is_installed(module):
            folders[folder_of(module, Path.cwd())] = None
    return list(folders)


@cache
def _environments(home: str) -> Path:
    return Path(home, ENVIRONMENTS).resolve()


_log = logging.getLogger(__name__)

_seen: dict[str, tuple[ModuleSpec, bytes]] = {}
"""By file: what it was imported by, which a reload replaces, and its content then."""
_told: dict[str, bytes] = {}
"""By file: the content that was told to differ."""


def edited_since(folder: Path) -> dict[Path, bytes]:
    """Files of a folder, with their content when they were imported, that were edited since then and not reloaded."""
    inside, edited, known_folders = f"{folder.resolve()}{os.sep}", dict[Path, bytes](), dict[str, str]()
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if name == "__main__" or spec is None or type(spec.loader) is not SourceFileLoader:
            continue
        path = place_of_loaded(name, known_folders)
        if not path.startswith(inside) or is_installed(module):  # an environment is not sent, wherever it is
            continue
        try:
            now = Path(path).read_bytes()
        except OSError:
            continue  # it cannot be sent either
        known = _seen.get(path)
        if known is None or known[0] is not spec:
            _seen[path] = spec, now
            if not _is_made_from(module, now):
                _log.warning(
                    "%s seems to have changed since %s was imported, and functions run what is in the file: importlib.reload it, "
                    "so that this process does, too",
                    path,
                    name,
                )
        elif known[1] != now:
            edited[Path(path)] = known[1]
            if _told.get(path) != now:
                _told[path] = now
                _log.warning("%s was edited, and functions run it as this process has imported it: importlib.reload %s", path, name)
    return edited


def _is_made_from(module: ModuleType, source: bytes) -> bool:
    """Whether the functions of a module are among those of a source."""
    try:
        compiled = compile(source, str(module.__file__), "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    there: dict[str, set[Any]] = {}
    for code in _codes(compiled):
        there.setdefault(code.co_qualname, set()).add(_form(code))
    own = (f for f in list(vars(module).values()) if isinstance(f, FunctionType) and f.__module__ == module.__name__)
    return all(
        _form(f.__code__) in there[f.__code__.co_qualname]
        for f in own
        if f.__code__.co_filename == module.__file__ and f.__code__.co_qualname in there
    )


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _codes(const)


def _form(code: CodeType) -> tuple[Any, ...]:
    """What code does, wherever it stands in its file."""
    consts = tuple(_form(c) if isinstance(c, CodeType) else (type(c).__name__, repr(c)) for c in code.co_consts)
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, consts
