"""Functions of users that are given rows, as a frame: what their signatures and sources say, what they need, and where they read and write."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ephemeron.config.code_bundle import Selection
from ephemeron.config.typed import near
from ephemeron.errors import JobError
from ephemeron.executor.places import PlaceOptions, admitted
from ephemeron.executor.programs import is_going_on
from ephemeron.executor.shipping import function_here, name_of
from ephemeron.functions.deployed_packages import check_modules
from ephemeron.functions.registry import CLOUDS
from ephemeron.functions.world import Simulation
from ephemeron.maps.calls import Callee
from ephemeron.maps.code_version import code_version
from ephemeron.maps.computing import MapOptions
from ephemeron.maps.frames import MODULES, Frame, frame_of

MEMORY_TIMES, MEMORY_MB = 4, 128
"""Memory that a function needs for rows: so many times their bytes in Arrow's format, and so much beside."""
_NOT_OF_FRAMES = ("key", "cost_column", "each_file", "results", "stop_when", "estimate")
"""Options of a map that maps of frames have not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameCallee:
    """What is known of a function that is given frames without importing it."""

    callee: Callee
    frame: Frame
    has_key: bool = False
    """Whether it has an argument `key`."""


def inspect_frame_function(
    function: Callable[..., Any] | str,
    *,
    frame: str | None,
    taken: Sequence[str],
    otherwise: Frame | None = None,
    options: MapOptions,
    executor: Mapping[str, Any],
    also: str = "",
    requirements: str = "",
) -> FrameCallee:
    """What the signature and the sources of a function say.

    Args:
        function: the user's.
        frame: what it wants rows as; None: its annotation says it.
        taken: names of the arguments that it is given; the last one is the rows.
        otherwise: see `frame_of`.
        options, executor: of the map.
        also: what else its results depend on.
        requirements: digest of those that the user names.

    Raises:
        JobError: there is no such function, or it takes other arguments.
    """
    found = function_here(function, executor.get("platform") or "local") if isinstance(function, str) else function
    if not callable(found):
        raise JobError(f"{found!r:.80} is a {type(found).__name__}, which cannot be called")
    name = function if isinstance(function, str) else name_of(found)
    named = _named_arguments(found, name, taken)
    kind = frame_of(found, frame, parameter=len(taken) - 1, otherwise=otherwise)
    selection = Selection(include=tuple(executor.get("code_include", ())), exclude=tuple(executor.get("code_exclude", ())))
    more = f"{also} {kind}{f' seed {options.seed}' if 'rng' in named else ''}"
    if requirements and not options.code_version:
        more += f" requirements {requirements}"
    version = code_version(
        found, code=[Path(each) for each in executor.get("code", ())], selection=selection, also=more, given=options.code_version
    )
    callee = Callee(name=name, version=version, has_rng="rng" in named)
    return FrameCallee(callee=callee, frame=kind, has_key="key" in named)


def _named_arguments(function: Callable[..., Any], name: str, first: Sequence[str]) -> set[str]:
    """Which of the arguments `key` and `rng` a function has.

    Raises:
        JobError: it takes too few arguments, or others without a default.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of C
        return set()
    wanted = f"{', '.join(first)} and, if it likes, key and rng"
    by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(by_place) < len(first) and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise JobError(f"{name} takes {len(by_place)} arguments", remedy=f"it is called with {wanted}")
    others = [p for p in parameters if p not in by_place[: len(first)] and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for p in others:
        if p.default is p.empty and p.name not in ("key", "rng"):
            raise JobError(f"{name} has an argument {p.name!r} without a default", remedy=f"it is called with {wanted}")
    return {p.name for p in others} & {"key", "rng"}


def checked_place(
    place: str, frame: Frame, executor: Mapping[str, Any], *, what: str = "read the groups", option: str = "--out of fit-groups"
) -> int:
    """Memory of a function, once it is known that functions reach what they read or write, and have what they need.

    Args:
        place: path or URL of that.
        frame: what rows are given as.
        executor: options of the executor.
        what: functions do there.
        option: that names the place.

    Returns:
        MB; 0: not known.

    Raises:
        JobError, PlanInfeasible: an option is refused, or functions lack something.
    """
    if is_going_on():
        return 0
    platform, channel = executor.get("platform") or "local", executor.get("channel") or "folder"
    asked = PlaceOptions(
        platform=platform,
        memory_mb=executor.get("memory_mb") or 0,
        max_workers=executor.get("max_workers") or 0,
        channel=channel,
        lifetime_s=executor.get("function_timeout_s") or 0.0,
        settings=executor.get("settings"),
        simulation=executor.get("simulation") or Simulation(),
    )
    made, _, limits = admitted(asked)
    if platform in CLOUDS:
        if "://" not in place and "://" in channel and not channel.startswith("file://"):
            raise JobError(
                f"{place} is on this machine, and functions on {platform} {what}",
                remedy=f"name a bucket, such as s3://bucket/prefix, as {option}",
            )
        __import__(MODULES[frame])
        check_modules([MODULES[frame]], limits, platform)
    return made.memory_mb


def split_options(given: Mapping[str, Any], *, but: Sequence[str] = ()) -> tuple[MapOptions, dict[str, Any]]:
    """Options of the map, and those of the executor.

    Args:
        given: as they were given.
        but: options that maps of frames have not, and this one has.

    Raises:
        JobError: there is no such option.
    """
    known = {f.name for f in fields(MapOptions)}
    if foreign := [name for name in _NOT_OF_FRAMES if name in given and name not in but]:
        raise JobError(f"no option {foreign[0]!r}", remedy=near(foreign[0], known - set(_NOT_OF_FRAMES), what="options"))
    return (
        MapOptions(**{name: value for name, value in given.items() if name in known}),
        {name: value for name, value in given.items() if name not in known},
    )
