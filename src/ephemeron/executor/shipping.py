"""The client's side of shipping a function: by name with the code of its module's folder, or by value where there is no file."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ephemeron.config.code_bundle import Selection, bundle, fits_nothing, fitting, state_of, unbundle
from ephemeron.config.imported_sources import edited_since, folder_of, folders_in, is_installed, modules_in
from ephemeron.config.user_code import put_in_front, resolve
from ephemeron.errors import JobError
from ephemeron.functions.deployed_packages import missing_module_remedy
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


@dataclass(frozen=True, slots=True)
class Adapted:
    """A function that is called by another one where it runs."""

    function: Callable[..., Any] | str
    """As for `Shipper.ship`."""
    adapter: Callable[..., Any]
    """Of a module of ephemeron; given the function, and the arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Does here what it does there."""
        function = function_here(self.function) if isinstance(self.function, str) else self.function
        return self.adapter(function, *args, **kwargs)


class Shipper:
    """Makes the objects of functions, named by their content: as this process has them now, so that an edited module that was reloaded
    is sent anew.

    Args:
        keys: of the objects.
        code: folders to send along, beside those in which the functions' own modules are.
        selection: files to add and to leave out. A pattern to add has to fit a file of one of the folders that are sent first.
        made: what was sent before, by the name that was given: it is sent again as it was.
        check: refuses modules, by name, that functions could not import.
    """

    def __init__(
        self,
        keys: CodeKeys,
        code: Sequence[Path] = (),
        *,
        selection: Selection | None = None,
        made: Mapping[str, Shipment] | None = None,
        check: Callable[[Sequence[str]], None] = lambda names: None,
    ) -> None:
        self.made = dict(made or {})
        self._keys, self._selection, self._check = keys, selection or Selection(), check
        self._code = [folder.resolve() for folder in code]
        self._bundles: dict[Path, _Bundled] = {}
        self._folders: dict[str, tuple[object, Path | None]] = {}
        """By name of a module: it, and its folder if it is to be sent."""
        self._fitted: set[str] = set()
        """Patterns to add that fit a file of a folder that was sent."""

    def ship(self, function: Callable[..., Any] | str, modules: Iterable[str] = ()) -> Shipment:
        """The objects of a function.

        Args:
            function: any callable, or the name of one, `module:function`, which is searched in the working folder, too. Of one
                that is `Adapted` both are sent.
            modules: names of modules that its arguments need; those of the user are sent along.

        Raises:
            JobError: there is no such function, it cannot be pickled, or its folder is too large.
            MissingExtra: it has to be pickled by value, and cloudpickle is not installed.
        """
        if modules := set(modules) - {"__main__"}:
            self._check(sorted(modules))
        along = [folder for name in sorted(modules) if (folder := self._folder_of(name)) is not None]
        adapter = ""
        if isinstance(function, Adapted):
            adapter, function = f"{function.adapter.__module__}:{function.adapter.__qualname__}", function.function
        if isinstance(function, str):
            if along:
                return self._ship(function_here(function), adapter, along)
            if function not in self.made:
                self.made[function] = self._ship(function_here(function), adapter)
            return self.made[function]
        return self._ship(function, adapter, along)

    def _folder_of(self, name: str) -> Path | None:
        """Folder of a module of the user's; None: it is not to be sent."""
        module = sys.modules.get(name)
        known = self._folders.get(name)
        if known is None or known[0] is not module:
            is_sent = getattr(module, "__file__", None) and not is_installed(module)
            known = self._folders[name] = module, folder_of(module, Path.cwd()) if is_sent else None
        return known[1]

    def _ship(self, function: Callable[..., Any], adapter: str = "", along: Sequence[Path] = ()) -> Shipment:
        if not callable(function):
            raise JobError(f"{function!r} is a {type(function).__name__}, which cannot be called")
        name, target = name_of(function), target_of(function)
        if not target:
            pickled = dumps(function, what=f"function {name}")
            header = ShippedHeader(name=name, python=python_version(), adapter=adapter)
            self._check(modules_in(pickled))
            return self._shipment(header, pickled, [*folders_in(pickled), *along])
        module = sys.modules[target.partition(":")[0]]
        self._check([module.__name__])
        header = ShippedHeader(name=name, target=target, adapter=adapter)
        if is_installed(module) and not self._code and not along and not adapter:
            return Shipment(reference=target, name=name)
        return self._shipment(header, b"", [*([] if is_installed(module) else [folder_of(module, Path.cwd())]), *along])

    def _shipment(self, header: ShippedHeader, pickled: bytes, folders: Sequence[Path]) -> Shipment:
        objects, digests, sent = {}, [], list(dict.fromkeys([*folders, *self._code]))
        self._check_patterns(header.name, sent)
        for folder in sent:
            bundled = self._bundled(folder, header.name)
            digests.append(bundled.digest)
            objects[self._keys.bundle(bundled.digest)] = bundled.data
        shipped = encode_function(replace(header, bundles=tuple(digests)), pickled)
        reference = digest_of(shipped)
        return Shipment(reference=reference, name=header.name, objects={**objects, self._keys.function(reference): shipped})

    def _bundled(self, folder: Path, name: str) -> _Bundled:
        known, began = self._bundles.get(folder), time.monotonic()
        if known is not None and began < known.looked_at + known.quiet_s:
            return known
        state = state_of(folder, self._selection)
        if known is None or known.state != state:
            data = self._bundle(folder, name, edited := edited_since(folder))
            # Of edited files a reload decides, which leaves no trace in the folder.
            known = self._bundles[folder] = _Bundled(data, digest_of(data), () if edited else state)
        known.looked_at = time.monotonic()
        known.quiet_s = min(_LOOK_SHARE * (known.looked_at - began), _LOOK_S)
        return known

    def _check_patterns(self, name: str, folders: Sequence[Path]) -> None:
        if waiting := [pattern for pattern in self._selection.include if pattern not in self._fitted]:
            self._fitted.update(fitting(folders, waiting))
        for pattern in self._selection.include:
            if pattern not in self._fitted:
                raise JobError(f"{name} cannot be sent: {fits_nothing(pattern, folders)}")

    def _bundle(self, folder: Path, name: str, instead: Mapping[Path, bytes]) -> bytes:
        here = replace(self._selection, include=fitting([folder], self._selection.include))
        try:
            return bundle([folder], here, instead=instead)
        except JobError as e:
            raise JobError(f"{name} needs modules of {folder}, which cannot be sent: {e}") from None


class TaskCode:
    """The code of the tasks of one call of the user's: of their function, and of what their arguments name.

    Args:
        shipper: that sends it.
        function: see `Shipper.ship`.

    Raises:
        JobError, MissingExtra: see `Shipper.ship`.
    """

    def __init__(self, shipper: Shipper, function: Callable[..., Any] | str) -> None:
        self._shipper, self._function = shipper, function
        self._shipment, self._count = shipper.ship(function), 0
        self.name = self._shipment.name
        """Of the function, for errors and progress."""

    def with_modules(self, modules: set[str]) -> Shipment:
        """The code of a task.

        Args:
            modules: names of those that the arguments of this task and of earlier ones name.
        """
        if len(modules) > self._count:
            self._shipment, self._count = self._shipper.ship(self._function, modules), len(modules)
        return self._shipment


_LOOK_SHARE, _LOOK_S = 20, 0.1
"""Between two looks at the files of a folder: so many times as long as a look takes, and no longer than that."""


@dataclass(slots=True)
class _Bundled:
    """A folder, as it is sent."""

    data: bytes
    digest: str
    state: tuple[tuple[str, int, int], ...]
    """See `state_of`."""
    looked_at: float = 0.0
    quiet_s: float = 0.0


def find_code_of(made: Iterable[Shipment], keys: CodeKeys, place: Path) -> None:
    """Has this process find the modules of functions as they were sent: simulated functions are in it.

    Args:
        made: what was sent.
        keys: of the code.
        place: folder for the modules.
    """
    prefix = keys.bundle("")
    bundles = {key.removeprefix(prefix): data for one in made for key, data in one.objects.items() if key.startswith(prefix)}
    put_in_front([folder for digest, data in bundles.items() for folder in unbundle(bytes(data), place / f"code-{digest}")])


def function_here(name: str, platform: str = "local") -> Any:
    """The function of a name, `module:function`, which is searched in the working folder, too.

    Args:
        name: of it.
        platform: on which it is to run.

    Raises:
        JobError: there is none, or its module cannot be imported; names the requirement that it lacks.
    """
    try:
        return resolve(name, [Path.cwd()])
    except JobError as e:
        raise JobError(e.problem, remedy=missing_module_remedy(e.problem, platform) or e.remedy) from e


def name_of(function: object) -> str:
    """Name of a function in messages: `module.function`, or that of its class."""
    inner = inspect.unwrap(getattr(function, "func", function))  # type: ignore[arg-type]
    found = inner if hasattr(inner, "__qualname__") else type(inner)
    module = getattr(found, "__module__", None)
    name = str(getattr(found, "__qualname__", found))
    return name if module in (None, "__main__", "builtins") else f"{module}.{name}"


def target_of(function: object) -> str:
    """`module:name` where that finds the same object again; empty: it has to be sent by value."""
    module_name, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not module_name or module_name == "__main__" or not name or "<" in name:
        return ""
    found: object = sys.modules.get(module_name)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module_name}:{name}" if found is function else ""
