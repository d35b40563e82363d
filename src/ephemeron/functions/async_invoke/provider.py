"""The port `Provider`: name and limits of a cloud, its checks, and access to the calls of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, Self, TypeVar

from ephemeron.functions.async_invoke.platform import AsyncInvokePlatform
from ephemeron.functions.base import Limits


class Settings(Protocol):
    """Location of functions: a dataclass without secrets, kept in the run's record."""

    def located(self) -> Self:
        """The settings with all open values filled in.

        Raises:
            JobError: a value cannot be found, or is out of its range.
            MissingExtra: a library is absent.
        """


S = TypeVar("S", bound=Settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityRequest:
    """Number and size of the functions that a run requests."""

    workers: int
    memory_mb: int
    """0: the function's own."""
    lifetime_s: float
    """Seconds; 0: the function's own."""
    channel: str
    """Address, without credentials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHandle:
    """Run whose calls are opened."""

    run: str
    run_dir: Path
    capacity: CapacityRequest
    """Admitted."""
    channel: str
    """Address, without credentials."""
    since: float
    """Unix time of the run's beginning."""
    starting: bool
    """Functions are to be started, so the deployed function must still be the admitted one."""


class Provider(ABC, Generic[S]):
    """A port with one implementation per cloud; `ephemeron.functions.registry` knows them by name."""

    name: str
    title: str
    """Name in messages."""
    settings: type[S]
    cold_start_s: float
    """Time until a function with PyTorch runs its code: the lead of successors."""
    needs: str
    """Prerequisites beside the extra."""
    extra: str = ""
    """Extra of this package that the provider needs; empty: none."""
    module: str = ""
    """Module of the extra."""
    limits_from: str
    """Origin of `limits`."""
    suspendable: bool = False
    """Whether its platforms are `Suspendable`."""

    @property
    @abstractmethod
    def limits(self) -> Limits:
        """Limits before the cloud has been asked."""

    @abstractmethod
    def inspect(self, settings: S, channel: str, secrets: dict[str, str]) -> Iterator[str]:
        """Checks the prerequisites of a run step by step, without starting a function or a cost; yields one line per step.

        Args:
            settings: located.
            channel: address without credentials; empty: it is not checked.
            secrets: from the channel's address.

        Raises:
            JobError, MissingExtra: a step has failed; names the problem and the remedy.
        """

    def sizes(self, settings: S) -> tuple[int, ...]:
        """Memory sizes of the deployed functions, MB, the default of runs first; empty: a call may have any size.

        Args:
            settings: located.

        Raises:
            JobError, MissingExtra: the cloud cannot be asked, or nothing is deployed.
        """
        return ()

    def recorded(self, settings: S, limits: Limits) -> S:
        """The settings as a run's record keeps them.

        Args:
            settings: located.
            limits: of the admitted run.
        """
        return settings

    @abstractmethod
    def logs(self, settings: S) -> str:
        """Command that prints the output of functions."""

    @abstractmethod
    def admit(self, c: CapacityRequest, settings: S, secrets: dict[str, str]) -> tuple[CapacityRequest, Limits]:
        """Asks the cloud, and refuses a request that does not fit. Memory and time limit default to the function's own.

        Args:
            c: request of the run.
            settings: located.
            secrets: from the channel's address.

        Raises:
            JobError, PlanInfeasible, MissingExtra: one line each; no function was started.
        """

    @abstractmethod
    async def open(self, hold: RunHandle, settings: S) -> AsyncInvokePlatform:
        """Opens the calls of a run, earlier ones included.

        Raises:
            JobError: the function has changed since the run was admitted.
            PlatformError: the cloud cannot be reached.
        """
