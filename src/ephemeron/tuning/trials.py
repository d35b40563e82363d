"""How the trials of a study take place: the port between the engine, which says which of them begin and end, and what is searched."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ephemeron.errors import EphemeronError
from ephemeron.tuning.prediction import TrialPrediction
from ephemeron.tuning.space import Values
from ephemeron.tuning.trial import TrialRun


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTrial:
    """A trial that can begin."""

    functions: int
    """That it has at once."""
    what: Any
    """What is tried, for those that take it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialEnd:
    """How a trial has ended. Its value is that of its `TrialRun`."""

    status: Literal["finished", "pruned", "failed", "stopped"]
    seconds: float
    cost_usd: float
    reason: str = ""


Work: TypeAlias = Callable[[], Awaitable[TrialEnd]]
"""Takes a trial to its end, unless its `TrialRun.stop` ends it before.

Raises:
    UserError: it has not begun.
    EphemeronError: it has failed.
"""


class TrialsBroken(Exception):
    """No trial can take place any more, whatever its values. The study stops, and can be gone on with.

    Args:
        error: why.
    """

    def __init__(self, error: EphemeronError) -> None:
        super().__init__(str(error))
        self.error = error


class Trials(ABC):
    """Trials of a study while one client drives it."""

    simulated: bool
    """Whether they take place in virtual time, and end with their client."""
    reports_often = False
    """Whether a trial may report many times a second."""
    stopped = "stopped at a checkpoint"
    """What has become of one that an interrupt has stopped."""

    @abstractmethod
    def prepare(self, values: Values) -> PreparedTrial:
        """Checks the values of a trial.

        Raises:
            UserError: they contradict each other.
        """

    def predict(self, prepared: PreparedTrial, values: Values) -> TrialPrediction | None:
        """Time and cost of a trial; None: they are not predicted.

        Raises:
            UserError: it cannot work.
        """
        return None

    @abstractmethod
    def opened(self, *, places: int, budget_usd: float | None) -> AbstractAsyncContextManager[None]:
        """Inside, trials take place.

        Args:
            places: functions of all of them at once.
            budget_usd: what they may cost together from now on; None: anything.
        """

    @abstractmethod
    def begin(self, trial: TrialRun, prepared: PreparedTrial) -> Work:
        """What runs a trial from its beginning on."""

    @abstractmethod
    def go_on(self, trial: TrialRun) -> Work | None:
        """What goes on with a trial that an earlier client has begun; None: it has to begin anew."""

    @abstractmethod
    def begin_again(self, trial: TrialRun, prepared: PreparedTrial) -> Work:
        """As `begin`, where an earlier client may have begun it."""

    def spent_usd(self, of_trials: float) -> float:
        """Cost of the study so far.

        Args:
            of_trials: sum over its trials.
        """
        return of_trials

    def t(self, seconds: float) -> float:
        """Time among the events of the study.

        Args:
            seconds: for which it was driven.
        """
        return seconds
