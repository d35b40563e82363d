"""The environment of an executor's functions: what a file of requirements names, and where it is to be found.

Functions of this machine run in a virtual environment (`functions.environments`). A deployment has what it was deployed with, so there the file is
compared with that. The simulator's functions are in this process, which finds what it lacks in the environment.
"""

from __future__ import annotations

import ast
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ephemeron.config.imported_sources import folder_of, is_installed
from ephemeron.functions.base import Limits
from ephemeron.functions.deployed_packages import check_requirements
from ephemeron.functions.environments.local_environment import interpreter, seen_here
from ephemeron.functions.environments.requirement_files import beside, read_requirements
from ephemeron.functions.registry import CLOUDS

_log = logging.getLogger(__name__)


def python_of(requirements: str | Path | None, platform: str, limits: Limits, *, is_taken_over: bool = False) -> str:
    """The interpreter of functions; empty: the client's, or that of a deployment.

    Args:
        requirements: file of them; None: there is none.
        platform, limits: of the functions, as the platform has admitted the run.
        is_taken_over: whether another process has begun the run, and has compared it with the deployment.

    Raises:
        JobError: the file is refused, a package cannot be installed, or a deployment does not have it.
    """
    if requirements is None:
        return ""
    found = read_requirements(requirements)
    if platform in CLOUDS:
        if not is_taken_over:
            check_requirements(found.place, found.lines, limits, platform)
        return ""
    python = interpreter(found, _log.info)
    if platform == "simulated":
        seen_here(python)
        return ""
    return python


def seen_by_client(requirements: str | Path | None, platform: str) -> None:
    """Has this process import what functions of this machine can.

    Args:
        requirements: file of what they have; None: there is none.
        platform: of the functions.

    Raises:
        JobError: see `python_of`.
    """
    if requirements is not None and platform not in CLOUDS:
        seen_here(interpreter(read_requirements(requirements), _log.info))


def with_environment(
    function: Callable[..., Any] | str, executor: Mapping[str, Any], on_note: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Options of an executor whose functions have what a function needs; this process can import it then, too.

    Without `requirements` among them, the file beside the function's module is used, if what the module imports is not installed.

    Args:
        function: that is to be sent, or its name.
        executor: options of `FunctionExecutor`.
        on_note: told what takes time, and which file was found.

    Raises:
        JobError: see `python_of`.
    """
    given, platform = executor.get("requirements"), executor.get("platform") or "local"
    folder, missing = _missing(function, [Path.cwd(), *map(Path, executor.get("code", ()))])
    path = given
    if given is None and missing and folder is not None and platform not in CLOUDS:
        path = beside(folder)
        if path is not None:
            on_note(f"{missing[0]} is not installed here: functions get what {path} names")
    if path is not None and (missing or platform not in CLOUDS):
        seen_here(interpreter(read_requirements(path), on_note))
    return {**executor, "requirements": path} if path is not None else dict(executor)


def version_of(requirements: str | Path | None) -> str:
    """Digest of what a file that the user names requires; empty: none is named."""
    return "" if requirements is None else read_requirements(requirements).version


def _missing(function: Callable[..., Any] | str, roots: Sequence[Path]) -> tuple[Path | None, list[str]]:
    """Folder of the module of a function, and top-level packages that it and the user's modules that it imports import, and that are not here.

    Imports in a `try` may fail, and do not count.
    """
    name = function.partition(":")[0] if isinstance(function, str) else str(getattr(function, "__module__", None) or "")
    module = None if isinstance(function, str) else sys.modules.get(name)
    if module is not None:
        place = getattr(module, "__file__", None)
        if not place or not place.endswith(".py") or is_installed(module):
            return None, []
        file, root = Path(place), folder_of(module, Path.cwd())
    else:
        found = _file_of(name, roots)
        if found is None:
            return None, []
        file, root = found
    missing, waiting, seen = list[str](), [file], {file}
    while waiting:
        for imported in _imports(waiting.pop()):
            top = imported.partition(".")[0]
            if (own := _file_of(imported, [root, *roots]) or _file_of(top, [root, *roots])) is not None:
                if own[0] not in seen:
                    seen.add(own[0])
                    waiting.append(own[0])
            elif top not in sys.stdlib_module_names and top not in missing and not _is_here(top):
                missing.append(top)
    return root, missing


def _is_here(top: str) -> bool:
    try:
        return top in sys.modules or importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return True


def _file_of(name: str, roots: Sequence[Path]) -> tuple[Path, Path] | None:
    """Source of a module of the user's, and the folder from which it is imported."""
    for root in roots:
        place = root.joinpath(*name.split("."))
        for path in (place / "__init__.py", place.with_name(f"{place.name}.py")):
            if path.is_file():
                return path, root
    return None


def _imports(path: Path) -> Iterator[str]:
    try:
        waiting: list[ast.AST] = [ast.parse(path.read_bytes())]
    except (OSError, SyntaxError, ValueError):
        return
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
        elif not isinstance(node, (ast.Try, ast.TryStar)) and not _is_for_types(node):
            waiting += ast.iter_child_nodes(node)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
