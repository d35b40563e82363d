"""Which files of a listing are data: the one rule of hidden files and of wildcards, for `prepare` and `data import`.

Hidden is what has a name, or a folder, that begins with a dot (`.ipynb_checkpoints`, the `._` files of macOS), `__MACOSX`, and what lies in
a folder below that is a prepared dataset. What is named itself, or by a wildcard that begins with a dot, is not hidden.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence

WILD = "*?["
_ARCHIVE_OF_MACOS = "__MACOSX"


def visible(paths: Iterable[str]) -> list[str]:
    """The paths of a listing that are data, sorted.

    Args:
        paths: relative, of all files.
    """
    listed = sorted(paths)
    own = _prepared(listed)
    return [path for path in listed if not any(map(_hidden, path.split("/"))) and not any(path.startswith(folder) for folder in own)]


def matching(paths: Iterable[str], pattern: str) -> list[str]:
    """The paths of a listing that a pattern names, sorted: `*`, `?` and `[…]` within a name, `**` for any number of folders.

    Args:
        paths: relative, of all files.
        pattern: relative to the same folder.
    """
    listed = sorted(paths)
    own = _prepared(listed)
    wanted = pattern.split("/")
    return [path for path in listed if _matches(path.split("/"), wanted) and not any(path.startswith(folder) for folder in own)]


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == _ARCHIVE_OF_MACOS


def _matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not names
    if pattern[0] == "**":
        return _matches(names, pattern[1:]) or (bool(names) and not _hidden(names[0]) and _matches(names[1:], pattern))
    return (
        bool(names)
        and fnmatch.fnmatchcase(names[0], pattern[0])
        and (pattern[0].startswith((".", "_")) or not _hidden(names[0]))
        and _matches(names[1:], pattern[1:])
    )


def _prepared(paths: Sequence[str]) -> set[str]:
    """Folders with a manifest and partitions of a prepared dataset, with a slash at their ends."""
    folders = {path.removesuffix("dataset.json") for path in paths if path.endswith("/dataset.json")}
    return folders & {path.rpartition("/")[0] + "/" for path in paths if path.endswith(".arrow")}
