"""Objectives: Python functions that a study searches, as its file names them, and how they are called with the values of a trial."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_origin

from ephemeron.config.imported_sources import folder_of, is_installed
from ephemeron.config.typed import AtLeast, Count, Form, Positive, Typed
from ephemeron.config.user_code import resolve
from ephemeron.errors import JobError
from ephemeron.executor.shipping import name_of, target_of
from ephemeron.functions.deployed_packages import missing_module_remedy
from ephemeron.tuning.objective_call import CallForm

FUNCTION = r"[^:\s]+:[^:\s]+"
"""Form of the name of a function."""
_TRIAL = "trial"
_MAPPINGS = ("params", "parameters", "config")
"""Names of an argument that takes all values; others do where they are annotated as a mapping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSpec(Typed):
    """The function of a study, and where it runs."""

    SHORTHAND: ClassVar[str] = "function"

    function: Annotated[str, Form(f"{FUNCTION}|", "module:function")]
    """`module:function`; empty: a function of a program, which has no name."""
    code: tuple[Path, ...] = ()
    """Folders in which its module is searched, after that of the study's file, and which are sent to functions beside the module's own."""
    code_include: tuple[str, ...] = ()
    """Patterns of files that are sent in any case."""
    code_exclude: tuple[str, ...] = ()
    """Patterns of files and folders that are not sent."""
    requirements: Path | None = None
    """File of packages that functions have beside those installed here; None: there is none."""
    platform: str = "local"
    """On which its functions run."""
    channel: str = "folder"
    """Address of the store for code, trials and their results."""
    memory_mb: Count | None = None
    """Memory of a function, and with it its CPU share; None: one vCPU on this machine, the function's own on a cloud."""
    function_timeout_s: Positive | None = None
    """Time limit of a function, which runs many trials; None: the platform's."""
    timeout_s: Positive | None = None
    """Time limit of a trial; None: what its function has left."""
    retries: Annotated[int, AtLeast(0)] = 2
    """Times that a trial begins again whose function died."""
    prices: Path | None = None
    """Price file; None: the built-in prices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A function that can be searched."""

    function: Callable[..., Any]
    name: str
    """For messages."""
    form: CallForm


def find_function(spec: ObjectiveSpec, folder: Path | None) -> Callable[..., Any]:
    """The function that a study names.

    Args:
        spec: of the study.
        folder: that is searched first: of the study's file; None: the working folder.

    Raises:
        JobError: there is none, or its module cannot be imported.
    """
    try:
        found: Callable[..., Any] = resolve(spec.function, [folder or Path.cwd(), *spec.code])
    except JobError as e:
        raise JobError(f"objective {e.problem}", remedy=missing_module_remedy(e.problem, spec.platform) or e.remedy) from e
    return found


def named(function: Callable[..., Any] | str, code: Sequence[Path] = ()) -> tuple[str, list[str]]:
    """How a study file in another folder names a function.

    Args:
        function: a function, or `module:function`, which is searched in the working folder and in `code`.
        code: further folders.

    Returns:
        `module:function`, or nothing for one that is sent by value; and the folders that the file has to name.

    Raises:
        JobError: see `find_function`.
    """
    if isinstance(function, str):
        if not re.fullmatch(FUNCTION, function):
            raise JobError(f"objective {function!r} is not of the form module:function", remedy="write such as 'models:fit'")
        function = find_function(ObjectiveSpec(function=function, code=tuple(code)), None)
    check_callable(function)
    target = target_of(function)
    module = inspect.getmodule(function) if target else None
    own = [] if module is None or is_installed(module) else [folder_of(module, Path.cwd())]
    return target, [str(folder.resolve()) for folder in dict.fromkeys([*own, *(each.resolve() for each in code)])]


def check_callable(function: object) -> None:
    """Refuses what is no function.

    Raises:
        JobError: it cannot be called.
    """
    if not callable(function):
        raise JobError(f"the objective is {function!r:.80}, which cannot be called", remedy="give a function, or module:function")


def objective_of(function: Callable[..., Any], keys: Sequence[str]) -> Objective:
    """A function with the way in which it is called.

    Args:
        function: the user's.
        keys: of the parameters of the space.

    Raises:
        JobError: it cannot be called with these parameters.
    """
    check_callable(function)
    name = name_of(function)
    if any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None)))):  # noqa: B004 - an object's own
        raise JobError(f"objective {name} is a coroutine function", remedy="give one that returns when it has its result")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise JobError(f"the arguments of objective {name} are not known", remedy="call it in a function of your own") from None
    return Objective(function=function, name=name, form=_form(name, signature, keys))


def _form(name: str, signature: inspect.Signature, keys: Sequence[str]) -> CallForm:
    """How a function of this signature is called.

    Raises:
        JobError: it cannot be.
    """
    given = signature.parameters.values()
    positional = next((p.name for p in given if p.kind is p.POSITIONAL_ONLY and p.default is p.empty), None)
    if positional is not None:
        raise JobError(f"argument {positional} of objective {name} has no name to call it by", remedy="leave the / out of its signature")
    arguments = {p.name: p for p in given if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in given)
    shown = f"{name}({', '.join(str(p).partition(':')[0].partition('=')[0].strip() for p in given)})"
    trial = _TRIAL in arguments and _TRIAL not in keys
    others = {n: p for n, p in arguments.items() if not (trial and n == _TRIAL)}
    needed = [n for n, p in others.items() if p.default is p.empty]
    if takes_any or others.keys() & set(keys):
        unknown = [key for key in keys if key not in others and not takes_any]
        if unknown:
            raise JobError(
                f"the space has {', '.join(unknown)}, and objective {shown} takes no argument of that name",
                remedy="name all parameters in its signature, or take them as one argument params",
            )
        if missing := [n for n in needed if n not in keys]:
            raise JobError(
                f"objective {shown} needs {', '.join(missing)}, which the space does not have",
                remedy="add it to the space, or give it a default",
            )
        return CallForm(by_name=True, trial=trial)
    mappings = [n for n, p in others.items() if n in _MAPPINGS or _is_mapping(p.annotation)]
    if len(mappings) == 1 and set(needed) <= set(mappings):
        return CallForm(mapping=mappings[0], trial=trial)
    if trial and not needed:
        return CallForm(trial=True)
    raise JobError(
        f"objective {shown} takes none of the parameters of the space ({', '.join(keys)})",
        remedy="name them in its signature, or take all of them as one argument params",
    )


def _is_mapping(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return annotation.partition("[")[0].rpartition(".")[2] in ("dict", "Dict", "Mapping")
    found = get_origin(annotation) or annotation
    return isinstance(found, type) and issubclass(found, Mapping)
