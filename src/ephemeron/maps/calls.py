"""How the function of a durable map is called with an item, by its signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ephemeron.config.code_bundle import Selection
from ephemeron.errors import JobError
from ephemeron.executor.shipping import function_here, name_of
from ephemeron.maps.code_version import EVERYTHING, code_version


@dataclass(frozen=True, slots=True, kw_only=True)
class Callee:
    """What is known of the function without importing it: a function that drives a detached map has it from the command line."""

    name: str
    version: str
    needed: tuple[str, ...] = ()
    """Parts of an item that it takes as arguments by their names; empty: it takes the item."""
    optional: tuple[str, ...] = ()
    """Further ones that it takes if an item has them."""
    has_rng: bool = False


def inspect_callee(
    function: Callable[..., Any] | str,
    *,
    code: Sequence[Path] = (),
    selection: Selection = EVERYTHING,
    version: str = "",
    seed: int = 0,
    requirements: str = "",
    platform: str = "local",
) -> Callee:
    """What the signature and the sources of a function say.

    Args:
        function: as it is sent, or its name.
        code, selection: see `code_version`.
        version: given by the user, in place of the sources.
        seed: of the argument `rng`.
        requirements: digest of those that the user names.
        platform: on which it is to run.

    Raises:
        JobError: there is no such function.
    """
    found = function_here(function, platform) if isinstance(function, str) else function
    if not callable(found):
        raise JobError(f"{found!r:.80} is a {type(found).__name__}, which cannot be called")
    needed, optional, has_rng = _parameters(found)
    also = " ".join(
        filter(None, (f"seed {seed}" if has_rng else "", f"requirements {requirements}" if requirements and not version else ""))
    )
    made = code_version(found, code=[Path(each) for each in code], selection=selection, also=also, given=version)
    name = function if isinstance(function, str) else name_of(found)
    return Callee(name=name, version=made, needed=needed, optional=optional, has_rng=has_rng)


def _parameters(function: Callable[..., Any]) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """Arguments without and with a default of a function that takes parts of an item by name, and whether it takes `rng`."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of C
        return (), (), False
    has_rng = any(p.name == "rng" and p.kind is not p.VAR_KEYWORD for p in parameters)
    others = [p for p in parameters if p.name != "rng" and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needed = [p for p in others if p.default is p.empty]
    if len(needed) < 2 and not any(p.kind is p.KEYWORD_ONLY for p in needed):
        return (), (), has_rng
    return tuple(p.name for p in needed), tuple(p.name for p in others if p.default is not p.empty), has_rng


def arguments_of(value: Any, callee: Callee) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Arguments of the function for an item, by position and by name."""
    if not callee.needed:
        return (value,), {}
    return (), {name: value[name] for name in (*callee.needed, *callee.optional) if name in value}
