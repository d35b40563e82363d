"""The client's side of shipping a function: by name with the code of its module's folder, or by value where there is no file."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ephemeron.config.code_bundle import bundle
from ephemeron.config.module_folders import folder_of, folders_in, is_installed
from ephemeron.config.user_code import resolve
from ephemeron.errors import JobError
from ephemeron.functions.shipped_code import CodeKeys, ShippedHeader, digest_of, dumps, encode_function, python_version


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipment:
    """A function, ready to be stored."""

    reference: str
    """What a task names: see `CodeLoader.load`."""
    name: str
    """For errors and progress."""
    objects: dict[str, bytes] = field(default_factory=dict)
    """Key to content."""


class Shipper:
    """Makes the objects of functions. Bundles of folders are made once, by-value functions each time: what they refer to may change.

    Args:
        keys: of the objects.
        code: folders to send along, beside those in which the functions' own modules are.
    """

    def __init__(self, keys: CodeKeys, code: Sequence[Path] = ()) -> None:
        self._keys = keys
        self._code = [folder.resolve() for folder in code]
        self._bundles: dict[Path, bytes] = {}
        self._named: dict[str, Shipment] = {}

    def ship(self, function: Callable[..., Any] | str) -> Shipment:
        """The objects of a function.

        Args:
            function: any callable, or the name of one, `module:function`, which is searched in the working folder, too.

        Raises:
            JobError: there is no such function, it cannot be pickled, or its folder is too large.
            MissingExtra: it has to be pickled by value, and cloudpickle is not installed.
        """
        if isinstance(function, str):
            function = resolve(function, [Path.cwd()])
        if not callable(function):
            raise JobError(f"{function!r} is a {type(function).__name__}, which cannot be called")
        name, target = name_of(function), _target(function)
        if not target:
            pickled = dumps(function, what=f"function {name}")
            header = ShippedHeader(name=name, python=python_version())
            return self._shipment(header, pickled, folders_in(pickled))
        if target not in self._named:
            module = sys.modules[target.partition(":")[0]]
            header = ShippedHeader(name=name, target=target)
            if is_installed(module) and not self._code:
                self._named[target] = Shipment(reference=target, name=name)
            else:
                folders = [] if is_installed(module) else [folder_of(module, Path.cwd())]
                self._named[target] = self._shipment(header, b"", folders)
        return self._named[target]

    def _shipment(self, header: ShippedHeader, pickled: bytes, folders: Sequence[Path]) -> Shipment:
        objects, digests = {}, []
        for folder in dict.fromkeys([*folders, *self._code]):
            if folder not in self._bundles:
                self._bundles[folder] = _bundled(folder, header.name)
            data = self._bundles[folder]
            digests.append(digest_of(data))
            objects[self._keys.bundle(digests[-1])] = data
        shipped = encode_function(replace(header, bundles=tuple(digests)), pickled)
        reference = digest_of(shipped)
        return Shipment(
            reference=reference, name=header.name, objects={**objects, self._keys.function(reference): shipped}
        )


def _bundled(folder: Path, name: str) -> bytes:
    try:
        return bundle([folder])
    except JobError as e:
        raise JobError(
            f"{name} needs modules of {folder}, which cannot be sent: {e.problem}",
            remedy="put them into a folder of their own",
        ) from None


def name_of(function: object) -> str:
    """Name of a function in messages: `module.function`, or that of its class."""
    inner = inspect.unwrap(getattr(function, "func", function))  # type: ignore[arg-type]
    found = inner if hasattr(inner, "__qualname__") else type(inner)
    module = getattr(found, "__module__", None)
    name = str(getattr(found, "__qualname__", found))
    return name if module in (None, "__main__", "builtins") else f"{module}.{name}"


def _target(function: object) -> str:
    """`module:name` where that finds the same object again; empty: it has to be sent by value."""
    module_name, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not module_name or module_name == "__main__" or not name or "<" in name:
        return ""
    found: object = sys.modules.get(module_name)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module_name}:{name}" if found is function else ""
