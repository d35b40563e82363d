"""The ports of a cloud: `Provider`, its name and limits, its checks and access to the calls of a run; and `Deployer`, which creates and
removes its functions and says so in lines for people.
"""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

from ephemeron.communication.channels import public_address
from ephemeron.communication.channels.address import store_address
from ephemeron.errors import JobError
from ephemeron.functions.async_invoke.platform import AsyncInvokePlatform
from ephemeron.functions.async_invoke.sizes import function_of, parse_sizes
from ephemeron.functions.base import Limits
from ephemeron.functions.source_bundle import FunctionEnvironment, environment_of


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


ACCOUNT = "ACCOUNT"
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What every cloud is told of the functions to create."""

    channel: str
    """Address that functions may use, without credentials."""
    sizes_mb: tuple[int, ...]
    """Memory sizes, the first is that of runs which name none."""
    out: Path
    """Folder for what is to be reviewed."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Tags or labels of the functions; see `runs.labels`."""
    environment: FunctionEnvironment = field(default_factory=FunctionEnvironment)
    """Python and packages of the functions."""

    @property
    def store(self) -> str:
        """Address of the store of the channel."""
        return store_address(self.channel)

    def size_of(self, name: str, function: str) -> int:
        """Memory size of a function of the deployment; 0: none of its sizes."""
        return next((mb for mb in self.sizes_mb if function_of(function, self.sizes_mb, mb) == name), 0)


class Deployer(ABC, Generic[S]):
    """A port with one implementation per cloud that has functions of its own; `ephemeron.functions.registry` knows them by name."""

    settings: type[S]
    range_mb: tuple[int, int]
    """Smallest and largest memory."""

    def read(
        self,
        channel: str,
        memory_mb: str,
        out: Path,
        labels: Mapping[str, str] | None = None,
        *,
        python: str | None = None,
        requirements: Sequence[Path] = (),
        extras: Sequence[str] = (),
    ) -> Deployment:
        """What is wanted, of what a user gives.

        Args:
            channel, memory_mb, out, labels: see `Deployment`.
            python, requirements, extras: see `environment_of`.

        Raises:
            JobError: the address has credentials, a size is none, or functions cannot have such an environment.
        """
        public, secrets = public_address(channel)
        if secrets:
            raise JobError("credentials do not belong in --channel", remedy="set EPHEMERON_CHANNEL_PASSWORD instead")
        low_mb, high_mb = self.range_mb
        sizes = parse_sizes(memory_mb, low_mb=low_mb, high_mb=high_mb)
        environment = environment_of(out, python=python, requirements=requirements, extras=extras)
        return Deployment(channel=public, sizes_mb=sizes, out=out, labels=labels or {}, environment=environment)

    @abstractmethod
    def deploy(self, settings: S, wanted: Deployment, options: Mapping[str, Any], tell: Tell) -> None:
        """Writes documents for review; where the options name what was made of them, creates the functions too.

        Args:
            settings: located.
            wanted: for every cloud.
            options: of this cloud's own, by name.
            tell: takes lines for people.

        Raises:
            JobError, MissingExtra: one line each.
        """

    @abstractmethod
    def describe(self, settings: S) -> str:
        """Everything that `remove` deletes, for a question."""

    @abstractmethod
    def remove(self, settings: S, tell: Tell) -> None:
        """Deletes everything that `deploy` has created, and tells what stays.

        Raises:
            JobError: the cloud refuses.
        """


def again(command: str, wanted: Deployment, **options: object) -> str:
    """The command that deploys the same once more, for a person to add what is missing.

    Args:
        command: such as `ephemeron cloud deploy aws`.
        wanted: what it was given.
        options: further ones, by their names with `_` for `-`: a tuple is repeated, True has no value, and empty ones are left out.
    """
    sizes, tags = ",".join(map(str, wanted.sizes_mb)), tuple(f"{name}={value}" for name, value in wanted.labels.items())
    words = [command]
    for name, value in {**options, "channel": wanted.channel, "memory_mb": sizes, "out": wanted.out, "tag": tags}.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        else:
            words += [f"{option} {shlex.quote(str(each))}" for each in (value if isinstance(value, tuple) else (value,)) if each]
    return " ".join(words)


def account_of(role: str | None) -> str:
    """Number of the account of a role's ARN; without one, the word that documents have in its place."""
    return role.split(":")[4] if role and role.count(":") >= 5 else ACCOUNT


def outcome(name: str, was_there: bool) -> str:
    """A line about something that was to be deleted."""
    return f"deleted {name}" if was_there else f"there is no {name}"
