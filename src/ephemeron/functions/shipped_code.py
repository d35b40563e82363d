"""Functions that a client ships to executors: by name with a bundle of their module's folder, or by value as a pickle.

A function is one object of the channel, whose reference is a digest of it:

    length u32, header JSON (`ShippedHeader`), then the pickle, if it has one

Arguments and results are pickles, too. A pickle can execute anything, so everything here is read through a channel that verifies
signatures (`communication.signing`), and by no other way.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import io
import json
import pickle
import re
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeAlias

from ephemeron.communication.channels.base import Channel
from ephemeron.config.code_bundle import unbundle
from ephemeron.config.typed import build, plain
from ephemeron.config.user_code import put_in_front, resolve
from ephemeron.errors import ChannelError, CorruptMessage, JobError, MissingExtra
from ephemeron.user_code import guarded, line_of, unpickled

Shipped: TypeAlias = Callable[..., Any]

PROTOCOL = 5
_LENGTH = struct.Struct("<I")
PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None)})
"""Types of values without parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedHeader:
    """How a function is found where it runs."""

    name: str
    """For errors and progress."""
    target: str = ""
    """`module:function`; empty: the pickle is the function."""
    bundles: tuple[str, ...] = ()
    """Digests of code bundles, in the order in which they are searched."""
    python: str = ""
    """Version by which a pickle was made, `3.12`: it holds byte code."""
    adapter: str = ""
    """`module:function` of ephemeron that is called in its place, with the function before the arguments; empty: there is none."""


@dataclass(frozen=True, slots=True)
class CodeKeys:
    """Keys of shipped code."""

    prefix: str
    """Of the channel's keys."""

    def function(self, reference: str) -> str:
        return f"{self.prefix}/function.{reference}"

    def bundle(self, digest: str) -> str:
        return f"{self.prefix}/bundle.{digest}"


_UNPACKED = re.compile(r'(?<=File ")[^"]*/code-[0-9a-f]{24}/[0-9]+/')
"""In a traceback, the folder into which `CodeLoader` has unpacked a bundle."""


def with_own_paths(traceback: str) -> str:
    """A traceback with the files of shipped code by their paths in the folder that was sent, as the user knows them."""
    return _UNPACKED.sub("", traceback)


def python_version() -> str:
    """Major and minor version of this interpreter."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def digest_of(data: bytes) -> str:
    """Name of an object by its content."""
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def encode_function(header: ShippedHeader, pickled: bytes = b"") -> bytes:
    """A function as one object."""
    head = json.dumps(plain(header), separators=(",", ":")).encode()
    return b"".join([_LENGTH.pack(len(head)), head, pickled])


def decode_function(data: memoryview | bytes, *, key: str) -> tuple[ShippedHeader, memoryview]:
    """Header and pickle of a function; nothing is executed.

    Raises:
        CorruptMessage: no such object.
    """
    view = memoryview(data)
    try:
        (length,) = _LENGTH.unpack_from(view)
        end = _LENGTH.size + length
        header = build(ShippedHeader, json.loads(bytes(view[_LENGTH.size : end])), where="function")
    except (struct.error, ValueError, JobError) as e:
        raise CorruptMessage(f"no shipped function: {e}", key=key) from e
    return header, view[end:]


Apart: TypeAlias = Callable[[object], tuple[int, int] | None]
"""Gives the place of a value that is sent apart: the number of its object, and a number of its own. None: it is not."""


def dumps(value: object, *, what: str, apart: Apart | None = None, modules: set[str] | None = None) -> bytes:
    """A value as a pickle, with functions and classes of the main program by value.

    Args:
        value: any picklable one.
        what: name of it for errors.
        apart: asked for each part of the value; see `user_code.unpickled`.
        modules: gets the names of the modules whose classes and functions the pickle names.

    Raises:
        JobError: it cannot be pickled.
        MissingExtra: cloudpickle is not installed, and the value needs it.
    """
    is_plain = _is_plain(value)
    if is_plain and apart is None:
        return pickle.dumps(value, protocol=PROTOCOL)
    kind = _pickler(by_value=not is_plain, is_apart=apart is not None)
    try:
        with guarded():
            file = io.BytesIO()
            pickler = kind(file, protocol=PROTOCOL)
            if apart is not None:
                pickler.apart = apart
            if modules is not None:
                pickler.modules = modules
            pickler.dump(value)
    except Exception as e:  # any error of a user's object when it is pickled
        raise JobError(
            f"{what} cannot be sent to a function: {line_of(e)}",
            remedy="open files, connections and locks inside the function that runs there",
        ) from e
    return file.getvalue()


@functools.cache  # a class of each call would keep what was pickled until the garbage collector finds it
def _pickler(*, by_value: bool, is_apart: bool) -> type[Any]:
    kind: type[Any] = pickle.Pickler
    if by_value:
        try:
            import cloudpickle
        except ModuleNotFoundError:
            raise MissingExtra("cloudpickle", "notebook") from None
        own = {"reducer_override": _reduced_by(cloudpickle.Pickler.reducer_override), "modules": None}
        kind = type("ByValue", (cloudpickle.Pickler,), own)
    return type("Apart", (kind,), {"persistent_id": lambda self, part: self.apart(part)}) if is_apart else kind


def _reduced_by(otherwise: Callable[[Any, object], Any]) -> Callable[[Any, object], Any]:
    """How cloudpickle reduces a value, and functions with a cache that no module has, which it would send by their names.

    It sees every class, function and module that a pickle names, those of the standard pickle's own reductions, too.
    """

    def reduced(pickler: Any, value: Any) -> Any:
        if pickler.modules is not None and isinstance(value, (type, FunctionType, ModuleType)):
            name = value.__name__ if isinstance(value, ModuleType) else value.__module__
            if isinstance(name, str):
                pickler.modules.add(name)
        if type(value) is _CACHED and (value.__module__ == "__main__" or _found(value) is not value):
            return _with_cache, (value.__wrapped__, value.cache_parameters())
        return otherwise(pickler, value)

    return reduced


_CACHED = type(functools.lru_cache(len))


def _found(function: Any) -> object:
    """What a function's module has under its name."""
    found: object = sys.modules.get(function.__module__)
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    return found


def _with_cache(function: Shipped, parameters: Mapping[str, Any]) -> Shipped:
    cached: Shipped = functools.lru_cache(**parameters)(function)
    return cached


def _is_plain(value: object) -> bool:
    """Whether the standard pickle is enough, as for most arguments: it takes a tenth of cloudpickle's time."""
    kind = type(value)
    if kind in PLAIN:
        return True
    try:
        return _has_plain_parts(value)
    except RecursionError:  # it is part of itself, or deep
        return False


def _has_plain_parts(value: object) -> bool:
    kind = type(value)
    if kind in PLAIN:
        return True
    if kind is tuple or kind is list:
        return all(map(_has_plain_parts, value))  # type: ignore[call-overload]
    if kind is dict:
        return all(_has_plain_parts(k) and _has_plain_parts(v) for k, v in value.items())  # type: ignore[attr-defined]
    return kind.__module__ == "numpy" and kind.__name__ == "ndarray" and not value.dtype.hasobject  # type: ignore[attr-defined]


def _callable(found: object, name: str) -> Shipped:
    if not callable(found):
        raise JobError(f"{name} is a {type(found).__name__}, which cannot be called")
    return found


class CodeLoader:
    """Finds shipped functions, each once.

    Args:
        channel: verifies signatures.
        keys: of the code.
        scratch: folder for bundles; None: their modules can be imported already, as in the simulator.
        timeout_s: to wait for an object that is about to be stored.
    """

    def __init__(self, channel: Channel, keys: CodeKeys, *, scratch: Path | None, timeout_s: float = 60.0) -> None:
        self._channel, self._keys, self._scratch, self._timeout_s = channel, keys, scratch, timeout_s
        self._found: dict[str, asyncio.Task[Shipped]] = {}
        self._folders: dict[str, list[Path]] = {}
        self._unpacking = asyncio.Lock()

    async def load(self, reference: str) -> Shipped:
        """The function of a reference, or of `module:function` for installed code.

        Raises:
            JobError: it is not to be had here: another version of Python, a package that is not installed, no such name.
            SignatureRefused: another party has put an object in its place. Nothing of it was executed.
            ChannelError: it cannot be read.
        """
        if reference not in self._found:
            self._found[reference] = asyncio.ensure_future(self._load(reference))
        try:
            return await asyncio.shield(self._found[reference])
        except ChannelError:
            self._found.pop(reference, None)  # the next task may find it
            raise

    async def _load(self, reference: str) -> Shipped:
        if ":" in reference:
            return _callable(resolve(reference, ()), reference)
        key = self._keys.function(reference)
        header, pickled = decode_function(await self._get(key), key=key)
        found = await self._found_by(header, pickled)
        return functools.partial(_callable(resolve(header.adapter, ()), header.adapter), found) if header.adapter else found

    async def _found_by(self, header: ShippedHeader, pickled: memoryview) -> Shipped:
        folders = [folder for digest in header.bundles for folder in await self._unpack(digest)]
        if header.target:
            return _callable(resolve(header.target, folders), header.name)
        if header.python != python_version():
            raise JobError(
                f"{header.name} was pickled by Python {header.python}, and functions have Python {python_version()}",
                remedy="use the same version on both sides, or put the function into a module, which is sent as source",
            )
        if folders:
            put_in_front(folders)
        try:
            return _callable(unpickled(pickled), header.name)
        except JobError:
            raise
        except Exception as e:
            raise JobError(f"{header.name} cannot be loaded where it runs: {line_of(e)}") from e

    async def _unpack(self, digest: str) -> Sequence[Path]:
        if self._scratch is None:
            return ()
        async with self._unpacking:
            if digest not in self._folders:
                data = bytes(await self._get(self._keys.bundle(digest)))
                self._folders[digest] = unbundle(data, self._scratch / f"code-{digest}")
        return self._folders[digest]

    async def _get(self, key: str) -> memoryview:
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        return (await self._channel.get(key, deadline=deadline)).data
