"""Kinds of runs. A kind says how its runs are followed, continued and stopped; everything else is the same for all runs.

A product registers its kind by one line of the table, another package by an entry point of the group `ephemeron.kinds`
(`examples/own-kind`). Kinds are loaded when a run of theirs is asked for, so the spine imports no product.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, cast

from ephemeron.errors import JobError, UserError
from ephemeron.events import Event
from ephemeron.runs.folders import RunFolder
from ephemeron.runs.header import RunHeader
from ephemeron.runs.notebook import on_event_in_notebook
from ephemeron.runs.summary import RunResult
from ephemeron.user_code import line_of

GROUP = "ephemeron.kinds"
"""Entry points of packages that add kinds: `NAME = "module:Class"`."""
_TABLE = {
    "training": "ephemeron.training.driver.kind:TrainingRuns",
    "regions": "ephemeron.regions.kind:RegionRuns",
    "sparse": "ephemeron.sparse.job.kind:SparseRuns",
    "tasks": "ephemeron.executor.kind:TaskRuns",
    "study": "ephemeron.tuning.kind:StudyRuns",
    "service": "ephemeron.runs.services:ServiceRuns",
    "profile": "ephemeron.runs.profiles:ProfileRuns",
}
_SERVICES = {
    "data": "ephemeron.data.service.serving:serve",
    "sparse": "ephemeron.sparse.store.processes:serve",
    "rendezvous": "ephemeron.runs.rendezvous:serve",
}
_PROGRAMS = {"lightning": ("ephemeron.integrations.lightning:LightningTask", "ephemeron.integrations.lightning:task_of")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """How a client follows a run to its end."""

    on_event: Callable[[Event], None]
    """Called with every event of the run."""
    loggers: Sequence[Any] = ()
    """In addition to those that were named at the launch."""
    keep_code: bool = False
    """Continue with the code of the launch though it has changed since."""


class RunKind(ABC):
    """What verbs on runs need of a kind (`runs.verbs`). `attach` and `resume` are called with the run's lock."""

    simulated_go_on: ClassVar[bool] = False
    """Whether simulated runs can be stopped and continued, too."""

    @abstractmethod
    def attach(self, folder: RunFolder, header: RunHeader, following: Following) -> RunResult:
        """Drives a run whose functions are running to its end; returns its result.

        Raises:
            UserError: the run is not running and has no result.
        """

    @abstractmethod
    def resume(self, folder: RunFolder, header: RunHeader, following: Following) -> RunResult:
        """Continues a run that was stopped, has failed or was abandoned; returns its result."""

    @abstractmethod
    def stop(self, folder: RunFolder, header: RunHeader, *, now: bool) -> None:
        """Asks a run to stop where it can be continued, or kills its functions.

        Raises:
            UserError: it is not running.
        """

    @abstractmethod
    def result(self, folder: RunFolder) -> RunResult | None:
        """How a run has ended; None: it has no result that can be read."""

    def pack(self, folder: RunFolder, header: RunHeader) -> None:
        """Keeps in the folder of a run what functions elsewhere need to drive it, and that is only on this machine.

        Raises:
            JobError: it cannot be kept.
        """

    def bring_home(self, folder: RunFolder, header: RunHeader) -> None:
        """Does on this machine what is left to do for a run that functions have driven elsewhere, and whose folder is here now."""

    def suspend(self, folder: RunFolder, header: RunHeader) -> int:
        """Suspends the functions of a run with their memory; returns how many.

        Raises:
            UserError: it is not running, or its functions cannot be suspended.
        """
        raise UserError(f"run {folder.run_id} is of kind {header.kind}: its functions cannot be suspended")

    def wake(self, folder: RunFolder, header: RunHeader) -> int:
        """Lets suspended functions of a run go on; returns how many there were."""
        return 0

    def report(self, folder: RunFolder, header: RunHeader, out: Path | None) -> list[Path]:
        """Writes what shows a run better than a report of its events, to `out` or its folder; empty: nothing does.

        Raises:
            UserError: there is nothing to show yet.
        """
        return []

    def shown(self, header: RunHeader) -> Callable[[Event], None]:
        """What shows the progress of a run that a Python program follows without a callback of its own: in a notebook, the cell."""
        return on_event_in_notebook(header.prices)

    def figures(self, folder: RunFolder, header: RunHeader) -> dict[str, Any]:
        """What `report --json` has beside the figures of all kinds, as JSON."""
        return {}


def find_kind(name: str) -> RunKind:
    """The kind of this name.

    Raises:
        JobError: there is none.
    """
    return cast(RunKind, load_kind(name))


@cache
def load_kind(name: str) -> Any:
    """The same for a product below that of the kind, with what the kind has beyond the port."""
    if name in _TABLE:
        return _load(_TABLE[name])()
    others = {point.name: point for point in entry_points(group=GROUP)}
    if name not in others:
        raise JobError(f"there is no kind of runs {name!r}", remedy=f"known kinds: {', '.join(sorted({*_TABLE, *others}))}")
    try:
        kind = others[name].load()()
    except Exception as e:
        raise JobError(f"kind {name!r} of runs cannot be loaded from {others[name].value}: {line_of(e)}") from e
    if not isinstance(kind, RunKind):
        raise JobError(f"kind {name!r} of runs: {others[name].value} is no RunKind")
    return kind


def find_service(name: str) -> Any:
    """The coroutine that serves, see `runs.services`.

    Raises:
        JobError: there is none of this name.
    """
    if name not in _SERVICES:
        raise JobError(f"there is no service {name!r}", remedy=f"known services: {', '.join(sorted(_SERVICES))}")
    return _load(_SERVICES[name])


def program_makers(name: str) -> tuple[str, str]:
    """What makes the training program of a model of another library: of the model, and of its name, each as `module:name`.

    They are above those who name them, and need the library.
    """
    return _PROGRAMS[name]


def _load(what: str) -> Any:
    module, _, attribute = what.partition(":")
    return getattr(import_module(module), attribute)
