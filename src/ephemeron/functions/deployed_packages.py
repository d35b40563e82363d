"""Packages that code needs and functions of a deployment do not have: named before anything is started.

A deployment says which packages were added to it (`Limits.packages`). What a module needs is what it imports when it is imported, and what
the modules of the user and of ephemeron do that it imports; an import inside a function or a `try` may never be made, and does not count.
A package brings what it requires, as its copy on this machine says.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

from ephemeron.config.imported_sources import is_installed
from ephemeron.errors import JobError
from ephemeron.functions.base import Limits
from ephemeron.functions.source_bundle import REQUIREMENTS, TRAINING, extra_requirements, name_of

_OWN = "ephemeron"
_OF_PLATFORMS = {"aws": ("boto3",), "aws-microvm": ("boto3", "websockets")}


def check_extra(extra: str, limits: Limits, platform: str, *, what: str) -> None:
    """Refuses what needs an extra of this package that functions do not have. A deployment that does not say what it has is trusted.

    Args:
        extra: its name.
        limits: of the platform, as it has admitted the run.
        platform: its name.
        what: needs the extra, in words.

    Raises:
        JobError: names the packages, and the command that adds them.
    """
    there = _packages_there(limits, platform)
    if there is not None and (missing := sorted({name_of(line) for line in extra_requirements(extra)} - there)):
        raise JobError(
            f"{what} needs {' and '.join(missing)}, which functions on {platform} do not have",
            remedy=f"run: ephemeron cloud deploy {platform} … --extra {extra}",
        )


def check_modules(names: Iterable[str], limits: Limits, platform: str) -> None:
    """Refuses modules that functions could not import, for want of a package.

    Args:
        names: of modules that are imported here.
        limits, platform: see `check_extra`.

    Raises:
        JobError: names the package, the module that imports it, and the command that adds it.
    """
    there = _packages_there(limits, platform)
    if there is None:
        return
    for package, importer in _needed(names):
        found = _distributions().get(package, ())
        if found and not there.intersection(map(name_of, found)):
            raise JobError(
                f"{importer} imports {package}, which functions on {platform} do not have",
                remedy=f"put {found[0]} into a file of requirements, and run: ephemeron cloud deploy {platform} … --requirements FILE",
            )


def check_requirements(place: str, lines: Iterable[str], limits: Limits, platform: str) -> None:
    """Refuses requirements that functions of a deployment do not have. A deployment that does not say what it has is trusted, if it can be deployed with more.

    Args:
        place: their file.
        lines: requirements.
        limits, platform: see `check_extra`.

    Raises:
        JobError: names the packages, and the command that adds them.
    """
    if platform not in _DEPLOYED:
        raise JobError(
            f"functions on {platform} have the packages of the machines on which they run, and not those of {place}",
            remedy="install them there, and leave --requirements out",
        )
    there = _packages_there(limits, platform)
    missing = [] if there is None else sorted({name_of(line) for line in lines if "://" not in line} - there)
    if missing:
        raise JobError(
            f"{place} names {', '.join(missing)}, which functions on {platform} do not have",
            remedy=f"run: ephemeron cloud deploy {platform} … --requirements {place}",
        )


_DEPLOYED = ("aws", "aws-microvm", "openfaas")
"""Platforms whose functions have what `cloud deploy --requirements` gives them."""
_MISSING = re.compile(r"ModuleNotFoundError: No module named '([^']+)'")
_OTHER_NAMES = {
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "dotenv": "python-dotenv",
    "faiss": "faiss-cpu",
    "fitz": "pymupdf",
    "git": "gitpython",
    "google.cloud.storage": "google-cloud-storage",
    "jwt": "pyjwt",
    "magic": "python-magic",
    "MySQLdb": "mysqlclient",
    "OpenSSL": "pyopenssl",
    "PIL": "pillow",
    "psycopg2": "psycopg2-binary",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "snappy": "python-snappy",
    "umap": "umap-learn",
    "yaml": "pyyaml",
}
"""Distributions whose modules have other names, and that may not be installed here."""


def missing_module_remedy(error: str, platform: str) -> str:
    """How functions get a module that user code has not found; empty: that is not the error.

    Args:
        error: of user code, as text.
        platform: of the functions.
    """
    found = _MISSING.search(error)
    return "" if found is None else _remedy(found[1], platform, str(Path.cwd()))


@cache
def _remedy(module: str, platform: str, folder: str) -> str:
    top = module.partition(".")[0]
    if top == _OWN:
        return ""
    if any(Path(folder, name).exists() for name in (f"{top}.py", top)):
        return f"{top} is in {folder}: --code {folder} sends it"
    line = requirement_of(module)
    if platform in _DEPLOYED:
        return f"put {line} into a file of requirements, and run: ephemeron cloud deploy {platform} … --requirements FILE"
    if platform in ("local", "simulated"):
        return f"put {line} into a file of requirements, and give --requirements FILE"
    return f"install {line} where functions on {platform} run"


def requirement_of(module: str) -> str:
    """The requirement that brings a module, with the version that this machine has, if it has one."""
    from importlib.metadata import version

    top = module.partition(".")[0]
    installed = set(_distributions().get(top, ()))
    if len(installed) == 1:
        name = installed.pop()
        return f"{name_of(name)}=={version(name).partition('+')[0]}"
    return _OTHER_NAMES.get(module) or _OTHER_NAMES.get(top) or top.replace("_", "-")


def _packages_there(limits: Limits, platform: str) -> frozenset[str] | None:
    """Packages that functions have; None: not known, or not how they depend on each other."""
    if limits.packages is None:
        return None
    named = [*(name_of(line) for line in (*REQUIREMENTS, *TRAINING)), *_OF_PLATFORMS.get(platform, ()), *limits.packages]
    there: set[str] = set()
    for name in named:
        brought = _brought(name)
        if name in limits.packages and not brought:
            return None
        there |= {name, *brought}
    return frozenset(there)


@cache
def _brought(name: str) -> frozenset[str]:
    """A package and what it requires, as its copy on this machine says; empty: there is no copy."""
    from importlib.metadata import PackageNotFoundError, requires

    found, waiting = set[str](), [name]
    while waiting:
        one = waiting.pop()
        if one in found:
            continue
        try:
            lines = requires(one) or []
        except PackageNotFoundError:
            continue
        found.add(one)
        waiting += [name_of(line) for line in lines if "extra ==" not in line]
    return frozenset(found)


@cache
def _distributions() -> dict[str, list[str]]:
    """By top-level package, the distributions that have it."""
    from importlib.metadata import packages_distributions

    return dict(packages_distributions())


def _needed(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Top-level packages of others that modules need, each with the module that imports it."""
    seen, waiting = set[str](), list(names)
    while waiting:
        name = waiting.pop()
        module = sys.modules.get(name)
        if module is None or name in seen:
            continue
        seen.add(name)
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names:
            continue
        if top != _OWN and is_installed(module):
            yield top, name
            continue
        for imported in _imports(module):
            top = imported.partition(".")[0]
            if top in sys.stdlib_module_names:
                continue
            if top == _OWN or top not in sys.modules or not is_installed(sys.modules[top]):
                parts = imported.split(".")
                waiting += [".".join(parts[: n + 1]) for n in range(len(parts))]
            else:
                yield top, name


def _imports(module: ModuleType) -> list[str]:
    """Names that a module imports whenever it is imported; of `from a import b` both `a` and `a.b`, which may be a module."""
    path = getattr(module, "__file__", None)
    if not path or not path.endswith(".py"):
        return []
    package = module.__name__ if Path(path).name == "__init__.py" else module.__name__.rpartition(".")[0]
    return [name if not level else _absolute(name, level, package) for name, level in _statements(path, Path(path).stat().st_mtime_ns)]


def _absolute(name: str, level: int, package: str) -> str:
    parts = package.split(".")
    return ".".join([*parts[: len(parts) - level + 1], *([name] if name else [])])


@cache
def _statements(path: str, changed_ns: int) -> tuple[tuple[str, int], ...]:
    try:
        body = ast.parse(Path(path).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return ()
    found: list[tuple[str, int]] = []
    for node in body:
        if isinstance(node, ast.Import):
            found += [(alias.name, 0) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            found += [(base, node.level), *((f"{base}.{alias.name}" if base else alias.name, node.level) for alias in node.names)]
    return tuple(found)
