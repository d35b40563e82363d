"""Places on this machine: the folder in which ephemeron keeps what it keeps, and paths as other processes find them.

A function of this machine has a home and a working folder of its own, so a path is made absolute where the user gives it, and only there.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote, urlsplit

from ephemeron.errors import JobError

AnyPath: TypeAlias = str | os.PathLike[str]
"""A path, absolute or relative to the folder of this process, or an address with a scheme."""
DATASETS_STORE = "EPHEMERON_DATASETS_STORE"
"""Variable that names the store of datasets; functions of this machine get that of their client."""
ENVIRONMENTS = "environments"
"""In the home folder: packages that functions of this machine have beside their client's."""


def home() -> Path:
    """The home folder, EPHEMERON_HOME or `~/.ephemeron`; made when something is first put there."""
    return Path(os.environ.get("EPHEMERON_HOME") or Path.home() / ".ephemeron")


def cores() -> int:
    """Number of cores of this machine that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def located(place: AnyPath) -> str:
    """A path as an absolute one, `~` included; an address with a scheme as it is.

    Raises:
        JobError: it is empty: of a variable that is not set, which would be the working folder.
    """
    text = os.fspath(place)
    if not text.strip():
        raise JobError("a path that was given is empty", remedy="name a file or a folder; the working folder is .")
    return text if "://" in text else str(Path(os.path.expanduser(text)).absolute())


def folder_of(url: str) -> Path:
    """The folder of a `file:///path`.

    Raises:
        JobError: it is the address of another machine, or relative; names the whole one.
    """
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path:
        whole = Path(unquote(url.partition("://")[2])).absolute().as_uri()
        raise JobError(f"{url} is not a folder on this machine", remedy=f"write {whole}, if that is meant")
    return Path(unquote(parts.path))


def replace_file(path: Path, content: str | bytes) -> None:
    """Writes a file as a whole: who reads it meanwhile sees the old content or the new one, and several may write it at once."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def present(paths: Iterable[Path]) -> Iterator[tuple[Path, os.stat_result]]:
    """Those of some files that are still there, with their statuses: another process may remove what was listed."""
    for path in paths:
        with contextlib.suppress(OSError):
            yield path, path.stat()


def statuses(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """A folder, and all files and folders below it with their statuses, as far as they are still there; links are not followed."""
    for root, _, files in os.walk(folder):
        for path in (Path(root), *(Path(root, name) for name in files)):
            with contextlib.suppress(OSError):  # whoever uses the folder has removed it since
                yield path, path.lstat()


def bytes_below(folder: Path, *, without: Path | None = None) -> int:
    """Size of the files below a folder, except those below another one."""
    return sum(
        status.st_size
        for path, status in statuses(folder)
        if not stat.S_ISDIR(status.st_mode) and (without is None or not path.is_relative_to(without))
    )


def datasets_store() -> str:
    """Folder or address of the store of datasets, where no other one is named."""
    return located(os.environ.get(DATASETS_STORE) or home() / "datasets-store")
