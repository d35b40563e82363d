"""Kinds of runs. A kind says how its runs are followed, continued and stopped; everything else is the same for all runs.

A product registers its kind by one line of the table. Kinds are loaded when a run of theirs is asked for, so the spine imports no
product.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, cast

from ephemeron.errors import JobError
from ephemeron.events import Event
from ephemeron.runs.folders import RunFolder
from ephemeron.runs.header import RunHeader

_TABLE = {
    "training": "ephemeron.training.driver.kind:TrainingRuns",
    "regions": "ephemeron.regions.kind:RegionRuns",
    "sparse": "ephemeron.sparse.job.kind:SparseRuns",
}


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
    """What verbs on runs need of a kind. Each call has the run's lock, but for `stop`."""

    @abstractmethod
    def attach(self, folder: RunFolder, header: RunHeader, following: Following) -> Any:
        """Drives a run whose functions are running to its end; returns its result.

        Raises:
            UserError: the run is not running and has no result.
        """

    @abstractmethod
    def resume(self, folder: RunFolder, header: RunHeader, following: Following) -> Any:
        """Continues a run that was stopped, has failed or was abandoned; returns its result."""

    @abstractmethod
    def stop(self, folder: RunFolder, header: RunHeader, *, now: bool) -> None:
        """Asks a run to stop where it can be continued, or kills its functions.

        Raises:
            UserError: it is not running.
        """


def find_kind(name: str) -> RunKind:
    """The kind of this name.

    Raises:
        JobError: there is none.
    """
    return cast(RunKind, load_kind(name))


@cache
def load_kind(name: str) -> Any:
    """The same for a product below that of the kind, with what the kind has beyond the port."""
    if name not in _TABLE:
        raise JobError(f"there is no kind of runs {name!r}", remedy=f"known kinds: {', '.join(sorted(_TABLE))}")
    module, _, attribute = _TABLE[name].partition(":")
    return getattr(import_module(module), attribute)()
