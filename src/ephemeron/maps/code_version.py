"""The version of a function: a digest of what can change its results, as far as sources tell it.

Of a function of a module: the sources of its module and of those of the user's modules that they import, comments left out, and the
files that the user has sent with them (`code_include`). Of a function of a notebook or a main program: its byte code and what it names. Other
files, installed packages and the Python version do not count.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import io
import sys
import tokenize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from ephemeron.config.code_bundle import Selection, bundled_files, fits_nothing, fitting
from ephemeron.config.imported_sources import folder_of, is_installed
from ephemeron.functions.shipped_code import dumps

_CHARACTERS = 24
EVERYTHING = Selection()
"""What is sent by itself."""


def code_version(
    function: Callable[..., Any], *, code: Sequence[Path] = (), selection: Selection = EVERYTHING, also: str = "", given: str = ""
) -> str:
    """The version of a function, as text of letters and digits.

    Args:
        function: as it is sent.
        code: folders that are sent along, in which its modules may be, too.
        selection: files that are sent, and those that are not.
        also: what else its results depend on.
        given: by the user, in place of the sources.

    Raises:
        JobError: a pattern fits no file.
    """
    digest = hashlib.blake2b(also.encode(), digest_size=_CHARACTERS // 2)
    if given:
        digest.update(f"given {given}".encode())
        return digest.hexdigest()
    inner = inspect.unwrap(getattr(function, "func", function))
    module = sys.modules.get(getattr(inner, "__module__", "") or "")
    if module is None or module.__name__ == "__main__" or "<locals>" in getattr(inner, "__qualname__", "") or not _source_of(module):
        for part in _value_parts(function, set()):
            digest.update(part)
        return digest.hexdigest()
    digest.update(f"{inner.__module__}:{getattr(inner, '__qualname__', inner)}".encode())
    if function is not inner and hasattr(function, "func"):  # a partial: its arguments count
        digest.update(dumps((function.args, sorted(function.keywords.items())), what="the function's arguments"))  # type: ignore[attr-defined]
    roots = list(
        dict.fromkeys([*([] if is_installed(module) else [folder_of(module, Path.cwd())]), *(folder.resolve() for folder in code)])
    )
    for name, text in sorted(_sources(module, roots).items()):
        digest.update(f"\0{name}\0".encode() + _without_comments(text))
    for path in _included(roots, selection):
        digest.update(f"\0{path.name}\0".encode() + hashlib.blake2b(path.read_bytes()).digest())
    return digest.hexdigest()


def _included(roots: Sequence[Path], selection: Selection) -> list[Path]:
    """Files that are sent since the user names them. What the sources name may be what they write, and does not count."""
    if not selection.include or not roots:
        return []
    fitted = fitting(roots, selection.include)
    for pattern in selection.include:
        if pattern not in fitted:
            raise fits_nothing(pattern, roots)
    return sorted(set(bundled_files(roots, selection)) - set(bundled_files(roots, replace(selection, include=()))))


# -- functions of modules -----------------------------------------------------------------------------------------


def _source_of(module: ModuleType) -> Path | None:
    path = getattr(module, "__file__", None)
    return Path(path) if path and path.endswith(".py") and Path(path).is_file() else None


def _sources(module: ModuleType, roots: Sequence[Path]) -> dict[str, bytes]:
    """Sources of the user's modules that a module imports, itself included, by name."""
    found: dict[str, bytes] = {}
    if is_installed(module):
        return found
    waiting = [(module.__name__, _source_of(module))]
    while waiting:
        name, path = waiting.pop()
        if path is None or name in found:
            continue
        found[name] = path.read_bytes()
        is_package = path.name == "__init__.py"
        for imported in _imported(found[name], name, is_package):
            for part in _with_parents(imported):
                if part not in found and (there := _file_of(part, roots)) is not None:
                    waiting.append((part, there))
    return found


def _imported(source: bytes, name: str, is_package: bool) -> Iterator[str]:
    """Names that may be modules in the import statements of a source."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = name.split(".")
            base = parts[: len(parts) - node.level + is_package] if node.level else []
            place = ".".join([*base, *([node.module] if node.module else [])])
            if place:
                yield place
            yield from (f"{place}.{alias.name}" if place else alias.name for alias in node.names)


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    for n in range(1, len(parts) + 1):
        yield ".".join(parts[:n])


def _file_of(name: str, roots: Sequence[Path]) -> Path | None:
    for root in roots:
        place = root.joinpath(*name.split("."))
        for path in (place / "__init__.py", place.with_name(f"{place.name}.py")):
            if path.is_file():
                return path
    return None


def _without_comments(source: bytes) -> bytes:
    """A source without its comments, and without lines that are nothing else."""
    lines = source.replace(b"\r\n", b"\n").decode("utf-8", "surrogateescape").split("\n")
    dropped = set()
    try:
        for token in tokenize.generate_tokens(io.StringIO("\n".join(lines)).readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                kept = lines[row - 1][:column].rstrip()
                lines[row - 1] = kept
                if not kept:
                    dropped.add(row - 1)
    except (tokenize.TokenError, SyntaxError):
        return source
    return "\n".join(line for n, line in enumerate(lines) if n not in dropped).encode("utf-8", "surrogateescape")


# -- functions that are sent by value -----------------------------------------------------------------------------


def _value_parts(value: Any, seen: set[int]) -> Iterator[bytes]:
    """What a function does, wherever it was defined: its code, its defaults, what it holds, and the globals that it names."""
    if id(value) in seen:
        return
    seen.add(id(value))
    inner = getattr(value, "__func__", value)
    if not isinstance(inner, FunctionType):
        if isinstance(value, (ModuleType, type)) and getattr(value, "__module__", "") != "__main__":
            yield f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', getattr(value, '__name__', ''))}".encode()
            return
        if isinstance(value, type):
            for name, part in sorted(vars(value).items()):
                if isinstance(part, FunctionType):
                    yield name.encode()
                    yield from _value_parts(part, seen)
            return
        yield dumps(value, what="what the function names")
        return
    if inner.__module__ not in (None, "__main__") and "<" not in inner.__qualname__:
        yield f"{inner.__module__}:{inner.__qualname__}".encode()
        return
    yield from _code_parts(inner.__code__)
    for part in (inner.__defaults__ or (), *sorted((inner.__kwdefaults__ or {}).items())):
        yield dumps(part, what="a default of the function")
    for cell in inner.__closure__ or ():
        yield from _value_parts(cell.cell_contents, seen)
    for name in _global_names(inner.__code__):
        if name in inner.__globals__:
            yield name.encode()
            yield from _value_parts(inner.__globals__[name], seen)


def _code_parts(code: CodeType) -> Iterator[bytes]:
    yield code.co_code
    yield repr((code.co_names, code.co_varnames, code.co_freevars)).encode()
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _code_parts(const)
        else:
            yield f"{type(const).__name__} {const!r}".encode()


def _global_names(code: CodeType) -> list[str]:
    names = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            names.update(_global_names(const))
    return sorted(names)
