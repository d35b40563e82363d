"""Files that a program writes into its function's own folder, where they are deleted with the function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

_SHOWN = 3
_CODE = "code"
_LIBRARIES = ("tmp", "torch", "ephemeron-", "pymp-", "triton", "numba", "wandb", "mlruns", "matplotlib")
"""Beginnings of the names of what libraries leave in HOME and TMPDIR, which are the same folder."""


def lost_files(scratch: Path) -> Callable[[], list[str]]:
    """From now on: a function that names the files which have been written since, as the program has named them."""
    before = set(_files(scratch))
    return lambda: [path for path in _files(scratch) if path not in before]


def lost_text(found: list[str], *, program: str, rank: int, remedy: str) -> str:
    """A warning of such files."""
    named = ", ".join(found[:_SHOWN]) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
    many = len(found) > 1
    return (
        f"{program} wrote {named} on rank {rank}, which {'are' if many else 'is'} deleted with the function: "
        f"write {'them' if many else 'it'} below {remedy}"
    )


def _files(scratch: Path) -> list[str]:
    found = []
    for path in sorted(scratch.rglob("*")):
        parts = path.relative_to(scratch).parts
        if path.is_file() and not (_is_library(parts[0]) or any(p.startswith(".") or p == "__pycache__" for p in parts)):
            found.append("/".join(parts[2:] if parts[0] == _CODE and len(parts) > 2 else parts))
    return found


def _is_library(name: str) -> bool:
    return name.startswith(_LIBRARIES)
