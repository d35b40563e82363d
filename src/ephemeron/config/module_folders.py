"""Folders of the user's modules: what has to be bundled so that functions can import them."""

from __future__ import annotations

import pickletools
import sys
import sysconfig
from functools import cache
from pathlib import Path

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
    file = getattr(module, "__file__", None)
    if not file:
        return True
    place = Path(file).resolve()
    return any(place.is_relative_to(root) for root in _installed())


@cache
def _installed() -> tuple[Path, ...]:
    return (*(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")), _OWN)


def folders_in(pickled: bytes) -> list[Path]:
    """Folders of the user's modules that a pickle names; installed ones are left out."""
    names = {arg for _, arg, _ in pickletools.genops(pickled) if isinstance(arg, str)}
    folders: dict[Path, None] = {}
    for name in sorted(names & sys.modules.keys()):
        module = sys.modules[name]
        if name != "__main__" and getattr(module, "__file__", None) and not is_installed(module):
            folders[folder_of(module, Path.cwd())] = None
    return list(folders)
