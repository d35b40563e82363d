"""One cloud, as whoever starts runs takes hold of it: what it is called, what it refuses, how a run's calls are opened."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, Self, TypeVar

from ephemeron.functions.async_invoke.platform import AsyncInvokePlatform
from ephemeron.functions.base import Limits


class Settings(Protocol):
    """Where functions are. A dataclass without secrets, that is kept in the run's record."""

    def located(self) -> Self:
        """With everything filled in that is left open.

        Raises:
            JobError: it cannot be, or a value is out of its range.
            MissingExtra: a library is absent.
        """


S = TypeVar("S", bound=Settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityRequest:
    """How many functions of which size a run asks for."""

    workers: int
    memory_mb: int
    """0: the function's own."""
    lifetime_s: float
    """Seconds; 0: the function's own."""
    channel: str
    """Address, without credentials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHandle:
    """Which run's calls are opened."""

    run: str
    run_dir: Path
    capacity: CapacityRequest
    """Admitted."""
    channel: str
    """Address, without credentials."""
    since: float
    """Unix time of the run's beginning."""
    starting: bool
    """Functions are to be started, so the function has to be what the run was admitted to."""


class Provider(ABC, Generic[S]):
    """A port with one implementation per cloud; `ephemeron.functions.registry` knows them by name."""

    name: str
    title: str
    """For people."""
    settings: type[S]
    cold_start_s: float
    """Until a function with PyTorch runs its code: the lead that successors get."""
    needs: str
    """What has to be there besides what `extra` installs."""
    extra: str = ""
    """Of this package."""
    module: str = ""
    """That the extra brings."""
    limits_from: str
    """Whose `limits` are."""

    @property
    @abstractmethod
    def limits(self) -> Limits:
        """Before anybody has been asked."""

    @abstractmethod
    def inspect(self, settings: S, channel: str, secrets: dict[str, str]) -> Iterator[str]:
        """Asks step by step, starting nothing and paying nothing, for what every run needs; each step says what it found.

        Args:
            settings: located.
            channel: address without credentials; empty: nothing is asked about it.
            secrets: that the channel's address held.

        Raises:
            JobError, MissingExtra: at the first step that fails; names it, and what to do.
        """

    @abstractmethod
    def logs(self, settings: S) -> str:
        """Where a person reads what functions have printed: a command."""

    @abstractmethod
    def admit(self, c: CapacityRequest, settings: S, secrets: dict[str, str]) -> tuple[CapacityRequest, Limits]:
        """Asks what there is, and refuses what does not fit it. Memory and lifetime default to the function's own.

        Args:
            c: what the run asks for.
            settings: located.
            secrets: that the channel's address held.

        Raises:
            JobError, PlanInfeasible, MissingExtra: one line each; nothing has been started.
        """

    @abstractmethod
    async def open(self, hold: RunHandle, settings: S) -> AsyncInvokePlatform:
        """Takes hold of a run's calls, earlier ones included.

        Raises:
            JobError: the function has become another one since.
            PlatformError: it cannot be had.
        """
