"""Files of requirements: those of pip, `uv.lock`, `pylock.toml` and `pyproject.toml`, as lines for pip.

A file of pip is flattened: files that it names are part of it, and paths in it are absolute, so that the lines mean the same wherever they are given.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ephemeron.config.paths import statuses
from ephemeron.errors import JobError

BESIDE = ("uv.lock", "pylock.toml", "requirements.txt", "pyproject.toml")
"""Names of files that are found beside a function, in the order in which they count."""
_NESTED = re.compile(r"(?:-r|--requirement)(?:\s+|=|(?=\S))(.+)")
_CONSTRAINTS = re.compile(r"(?:-c|--constraint)(?:\s+|=|(?=\S))(.+)")
_EDITABLE = re.compile(r"(?:-e|--editable)(?:\s+|=|(?=\S))(.+)")
_LINKS = re.compile(r"(?:-f|--find-links)(?:\s+|=|(?=\S))(.+)")
_EXTRAS = re.compile(r"(.*?)(\[[^\]]*\])?")
_UV_S = 120.0
_PYPI = "https://pypi.org/simple"


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a file names."""

    place: str
    """The file, for messages."""
    lines: tuple[str, ...]
    """Requirements, a line each, with their hashes."""
    options: tuple[str, ...] = ()
    """Of pip, a line each: where packages are."""
    constraints: tuple[str, ...] = ()
    """Versions that packages have if they are installed."""

    @property
    def version(self) -> str:
        """Digest of what is named, wherever it is installed from: other requirements may give other results."""
        return _digest("\n".join(sorted({*self.lines, *(f"-c {line}" for line in self.constraints)})))

    def files(self) -> dict[str, str]:
        """As files of pip, by name: `requirements.txt`, and what it names."""
        text = "\n".join((*self.options, *self.lines, ""))
        if not self.constraints:
            return {"requirements.txt": text}
        return {"requirements.txt": f"-c constraints.txt\n{text}", "constraints.txt": "\n".join((*self.constraints, ""))}

    def state(self) -> str:
        """Digest of all that decides what is installed, files of this machine that it names included."""
        parts = [*self.options, "", *self.lines, "", *self.constraints]
        for path in filter(None, (_local_path(line) for line in (*self.lines, *self.options))):
            found = [(path, path.stat())] if path.is_file() else [each for each in statuses(path) if "/." not in str(each[0])]
            parts += [f"{each} {status.st_size} {status.st_mtime_ns}" for each, status in sorted(found, key=lambda one: one[0])]
        return _digest("\n".join(parts))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=12).hexdigest()


def read_requirements(path: str | Path) -> Requirements:
    """What a file names.

    Args:
        path: in the format of pip; or `uv.lock`, `pylock.toml`, `pyproject.toml` by their names.

    Raises:
        JobError: it cannot be read, names nothing, or names what is not there; with the line.
    """
    place = Path(path)
    if place.name == "uv.lock":
        made = _pip_lines(_exported(place), place, place.parent)
    elif place.name == "pyproject.toml":
        made = Requirements(str(place), _of_project(place))
    elif re.fullmatch(r"pylock(\.[^.]+)?\.toml", place.name):
        made = Requirements(str(place), _of_pylock(place))
    else:
        made = _pip_lines(_text_of(place), place, place.parent)
    if not made.lines:
        raise JobError(f"requirements {place} name no package", remedy="write a line for each, such as scikit-learn>=1.5")
    return made


def beside(folder: Path) -> Path | None:
    """The file of requirements in a folder; None: there is none that names a package."""
    for name in BESIDE:
        path = folder / name
        if not path.is_file() or (name == "uv.lock" and shutil.which("uv") is None):
            continue
        if name == "pyproject.toml" and not _of_project(path):
            continue
        return path
    return None


def _text_of(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise JobError(f"requirements {path} cannot be read: {getattr(e, 'strerror', None) or e}") from None


def _pip_lines(text: str, path: Path, folder: Path, seen: Sequence[Path] = ()) -> Requirements:
    lines: list[str] = []
    options: list[str] = []
    constraints: list[str] = []
    for number, line in _logical(text):
        where = f"requirements {path}, line {number}"
        if nested := _NESTED.fullmatch(line) or _CONSTRAINTS.fullmatch(line):
            other = folder / nested[1].strip()
            if other in seen or other == path:
                raise JobError(f"{where}: {other} names itself")
            found = _pip_lines(_text_of(other), other, other.parent, (*seen, path))
            options += found.options
            constraints += found.constraints
            (constraints if line.startswith(("-c", "--c")) else lines).extend(found.lines)
        elif links := _LINKS.fullmatch(line):
            options.append(f"--find-links {_absolute(links[1].strip(), folder)}")
        elif line.startswith("-") and not _EDITABLE.fullmatch(line):
            options.append(line)
        else:
            lines.append(_requirement(line, folder, where))
    return Requirements(str(path), tuple(dict.fromkeys(lines)), tuple(dict.fromkeys(options)), tuple(dict.fromkeys(constraints)))


def _logical(text: str) -> Iterator[tuple[int, str]]:
    """Number and text of each line that says something; one that ends in a backslash goes on in the next."""
    begun, first = "", 0
    for number, line in enumerate(text.split("\n"), 1):
        line = re.split(r"(?:^|\s)#", line)[0].rstrip()
        first = first or number
        if line.endswith("\\"):
            begun += f"{line[:-1]} "
            continue
        if whole := f"{begun}{line}".strip():
            yield first, whole
        begun, first = "", 0


def _absolute(text: str, folder: Path) -> str:
    """A path below a folder, or below the working one; what is no path of a folder or file that is there stays."""
    if "://" in text:
        return text
    return next((str(place.resolve()) for place in (folder / Path(text).expanduser(), Path(text)) if place.exists()), text)


def _requirement(line: str, folder: Path, where: str) -> str:
    editable = _EDITABLE.fullmatch(line)
    text = editable[1].strip() if editable else line
    if "://" in text or " @ " in text:
        return text
    path, extras = (part or "" for part in _EXTRAS.fullmatch(text.split(";")[0].strip()).groups())  # type: ignore[union-attr]
    if not (editable or path.startswith((".", "/", "~")) or path.endswith((".whl", ".tar.gz", ".zip"))):
        return text
    found = Path(_absolute(path, folder))
    if not found.exists():
        raise JobError(f"{where}: there is no {path}")
    return f"{found}{extras}"  # a function's process cannot see an edit, so what is editable is installed as it is now


def _local_path(line: str) -> Path | None:
    text = line.removeprefix("--find-links ").split(";")[0].strip()
    path = Path(_EXTRAS.fullmatch(text)[1])  # type: ignore[index]
    return path if text.startswith("/") and path.exists() else None


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_text_of(path))
    except tomllib.TOMLDecodeError as e:
        raise JobError(f"requirements {path} are no TOML: {e}") from None


def _of_project(path: Path) -> tuple[str, ...]:
    """Dependencies of a project, without its extras and groups."""
    found = _parsed(path).get("project", {})
    dependencies = found.get("dependencies", ()) if isinstance(found, dict) else ()
    return tuple(line for line in dependencies if isinstance(line, str))


def _of_pylock(path: Path) -> tuple[str, ...]:
    """Packages of a lock file (PEP 751), with their hashes if all of them have some."""
    lines: list[tuple[str, list[str]]] = []
    for package in _parsed(path).get("packages", ()):
        name, version, marker = package.get("name", ""), package.get("version"), package.get("marker")
        files = [*package.get("wheels", ()), *([package["sdist"]] if "sdist" in package else [])]
        hashes = [f"--hash={kind}:{value}" for file in files for kind, value in file.get("hashes", {}).items()]
        if version is None or not files:
            raise JobError(f"requirements {path}: {name} is of no index", remedy="name it in a requirements.txt")
        lines.append((f"{name}=={version}{f' ; {marker}' if marker else ''}", hashes))
    are_all = all(hashes for _, hashes in lines)
    return tuple(" ".join([line, *hashes]) if are_all else line for line, hashes in lines)


def _exported(path: Path) -> str:
    """A `uv.lock` as uv writes it for pip."""
    if not path.is_file():
        raise JobError(f"requirements {path} cannot be read: No such file or directory")
    uv = shutil.which("uv")
    if uv is None:
        raise JobError(f"requirements {path} are read by uv, which is not installed", remedy="run: pip install uv")
    command = [uv, "export", "--frozen", "--no-dev", "--no-emit-project", "--no-header", "--directory", str(path.absolute().parent)]
    try:
        done = subprocess.run([*command, "--format", "requirements-txt"], capture_output=True, text=True, timeout=_UV_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise JobError(f"requirements {path}: uv does not read them: {e}") from None
    if done.returncode:
        said = [line for line in done.stderr.split("\n") if line.strip()]
        raise JobError(f"requirements {path}: {said[-1].strip() if said else 'uv has failed'}")
    return "".join([*(f"{line}\n" for line in _indexes_of(path)), done.stdout])


def _indexes_of(path: Path) -> list[str]:
    """Where a `uv.lock` has its packages from, as options of pip: uv does not write them."""
    found: dict[str, None] = {}
    for package in _parsed(path).get("package", ()):
        place = package.get("source", {}).get("registry", _PYPI)
        if place != _PYPI:
            found[f"--extra-index-url {place}" if "://" in place else f"--find-links {place}"] = None
    return list(found)
