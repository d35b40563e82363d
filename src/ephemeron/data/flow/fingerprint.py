"""Identity of the samples that a loader's state belongs to: flow, version, dataset, steps and view.

A state is refused by a loader of other samples; the message names the first difference. Number of samples, seed and order are in
the state of the stream itself. Batch size, ranks and number of loaders are not part of it: a state may be resumed with others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import xxhash

from ephemeron.config.typed import plain
from ephemeron.data.flow.description import FlowDescription
from ephemeron.data.shuffle import Indices
from ephemeron.errors import JobError

WHOLE = "all"
_WORDS = {"version": "flow version", "view": "subset or split"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Identity of a view of a flow. Its fields are keys of `FlowLoader.state_dict`."""

    flow: str
    version: int
    dataset: str
    """Name, version and variant; of an object: its class, and a digest of each simple attribute."""
    steps: tuple[str, ...]
    """Names of the steps, and digests of their code and options."""
    view: str
    """Digest of the dataset's numbers of the samples; `all`: the whole dataset."""

    @classmethod
    def of(cls, flow: FlowDescription, chosen: Indices | None) -> Fingerprint:
        """The fingerprint of a view.

        Args:
            flow: with its source, the version resolved.
            chosen: the dataset's numbers of the view's samples; None: all of them.
        """
        view = WHOLE
        if chosen is not None:
            view = xxhash.xxh3_64_hexdigest(np.ascontiguousarray(chosen, dtype="<i8").tobytes())
        steps = tuple(f"{step.name}#{_digest(configured((step.function, step.transform)))}" for step in flow.steps)
        own = None if flow.source is None else flow.source.dataset
        return cls(
            flow=flow.name, version=flow.version, dataset=str(flow.source) if own is None else _described(own), steps=steps, view=view
        )

    def to_json(self) -> dict[str, object]:
        """The fingerprint as part of a state."""
        written: dict[str, object] = plain(self)
        return written

    def check(self, state: Mapping[str, object]) -> None:
        """Compares a state with this fingerprint.

        Raises:
            JobError: it is no state of a loader, or of other samples; the message names the first difference.
        """
        for key, mine in self.to_json().items():
            words = _WORDS.get(key, key)
            if key not in state:
                raise JobError(f"the state does not name its {words}", remedy="load a result of state_dict() of a flow's loader")
            if state[key] != mine:
                raise JobError(
                    f"the state has another {words}: {key} = {state[key]!r}, this loader has {mine!r}",
                    remedy="resume with the flow, data, split, seed and order that the state was saved with",
                )


def _described(dataset: object) -> str:
    """The class of a dataset and its attributes, as digests: they may be secret, or long."""
    found = ", ".join(f"{name}#{_digest(value)}" for name, value in attributes_of(dataset))
    return f"{type(dataset).__name__}({found})"


def _digest(thing: object) -> str:
    return xxhash.xxh3_64_hexdigest(repr(thing).encode(errors="surrogatepass"))[:8]


# -- code and state of functions and objects as values without addresses ------------------------------------------


_MOST = 200
"""Elements of a list that are looked at."""
_SIMPLE = (bool, int, float, complex, str, bytes, PurePath, np.bool_, np.number)


def words_of(thing: Any) -> str:
    """Signature of a step's function: its name, and a digest of its code and state."""
    if thing is None:
        return "-"
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    module = getattr(named, "__module__", "?")
    return f"{module}.{named.__qualname__}#{xxhash.xxh3_64_hexdigest(repr(content_of(thing)).encode())[:8]}"


def content_of(thing: Any, depth: int = 4) -> Any:
    """Code and state of a function, without addresses: code, defaults, closure.

    Functions that it calls are not included; objects are, by their attributes, down to a depth.
    """
    if thing is None or isinstance(thing, bool | int | float | complex | str | bytes):
        return thing
    if isinstance(thing, np.ndarray) and thing.dtype != object:
        return (thing.dtype.str, thing.shape, xxhash.xxh3_64_hexdigest(np.ascontiguousarray(thing).tobytes()))
    if depth == 0:
        return type(thing).__qualname__
    if isinstance(thing, CodeType):
        return (thing.co_code, thing.co_names, [content_of(constant, depth) for constant in thing.co_consts])
    if isinstance(thing, list | tuple):
        return [content_of(each, depth - 1) for each in thing]
    if isinstance(thing, set | frozenset):
        return sorted(repr(content_of(each, depth - 1)) for each in thing)
    if isinstance(thing, dict):
        return [(repr(key), content_of(value, depth - 1)) for key, value in thing.items()]
    if isinstance(thing, partial):
        return [content_of(each, depth - 1) for each in (thing.func, thing.args, thing.keywords)]
    if isinstance(thing, MethodType):
        return [content_of(each, depth - 1) for each in (thing.__func__, thing.__self__)]
    if isinstance(thing, FunctionType):
        closed = [cell.cell_contents for cell in thing.__closure__ or () if cell != CellType()]
        return [content_of(each, depth - 1) for each in (thing.__code__, thing.__defaults__, thing.__kwdefaults__, closed)]
    if isinstance(thing, type):
        return [(name, content_of(f, depth - 1)) for name, f in vars(thing).items() if isinstance(f, FunctionType)]
    slots = [name for kind in type(thing).__mro__ for name in _names(vars(kind).get("__slots__", ()))]
    attributes = {name: getattr(thing, name) for name in slots if hasattr(thing, name)} | getattr(thing, "__dict__", {})
    return [type(thing).__qualname__, content_of(type(thing), depth - 1), content_of(attributes or None, depth - 1)]


def _names(slots: Any) -> tuple[str, ...]:
    """Names of attributes, from a class's `__slots__`."""
    return (slots,) if isinstance(slots, str) else tuple(slots)


def configured(thing: Any, depth: int = 4) -> Any:
    """What a function or an object was made with, as far as its use does not change it: for identities that outlive a process.

    Of functions their code, defaults and closures. Of objects their class's name and simple attributes: numbers, texts, paths, and lists
    of them; of private ones, which often hold what was cached, texts and paths alone. Attributes that are datasets, functions or parts of
    a composition are looked into, down to a depth. Of a long list the length counts and some of its elements, since it may name each file.
    """
    if isinstance(thing, PurePath):
        return str(thing)
    if thing is None or isinstance(thing, _SIMPLE):
        return repr(thing)
    if depth == 0:
        return type(thing).__qualname__
    if isinstance(thing, CodeType):
        return content_of(thing)
    if isinstance(thing, list | tuple):
        return [len(thing), *(configured(each, depth - 1) for each in _spread(thing))]
    if isinstance(thing, frozenset):
        return sorted(repr(configured(each, depth - 1)) for each in thing)
    if isinstance(thing, partial):
        return [configured(each, depth - 1) for each in (thing.func, thing.args, sorted(thing.keywords.items()))]
    if isinstance(thing, MethodType):
        return [configured(each, depth - 1) for each in (thing.__func__, thing.__self__)]
    if isinstance(thing, FunctionType):
        closed = [cell.cell_contents for cell in thing.__closure__ or () if cell != CellType()]
        kept = (thing.__code__, thing.__defaults__, sorted((thing.__kwdefaults__ or {}).items()), closed)
        return [configured(each, depth - 1) for each in kept]
    if isinstance(thing, type) or callable(getattr(thing, "__func__", None)):
        return getattr(thing, "__qualname__", type(thing).__qualname__)
    return [type(thing).__qualname__, *(f"{name}={value}" for name, value in attributes_of(thing, depth))]


def attributes_of(thing: Any, depth: int = 4) -> list[tuple[str, Any]]:
    """Attributes of an object by which `configured` knows it, with their values, by name."""
    found = []
    slots = [name for kind in type(thing).__mro__ for name in _names(vars(kind).get("__slots__", ()))]
    held = {name: getattr(thing, name) for name in slots if hasattr(thing, name)} | getattr(thing, "__dict__", {})
    for name, value in sorted(held.items()):
        if isinstance(value, str | bytes | PurePath) or (not name.startswith("_") and _is_configuration(value)):
            found.append((name, configured(value, depth - 1)))
    return found


def _spread(values: Sequence[Any]) -> Sequence[Any]:
    """At most `_MOST` elements, evenly spaced."""
    return values if len(values) <= _MOST else [values[n * (len(values) - 1) // (_MOST - 1)] for n in range(_MOST)]


def _is_configuration(value: Any) -> bool:
    if value is None or isinstance(value, (*_SIMPLE, FunctionType, MethodType, partial)):
        return True
    if isinstance(value, list | tuple):
        return all(_is_configuration(each) for each in _spread(value))
    return (hasattr(value, "__len__") and hasattr(value, "__getitem__") and hasattr(value, "__dict__")) or callable(value)
