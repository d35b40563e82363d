"""What loads ahead for an iteration: nobody, processes of this machine, or a service. The port between reading and loading."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeAlias, get_args

from ephemeron.data.flow.description import FlowDescription
from ephemeron.data.flow.fork_pool import ChunkDone, LoaderPool
from ephemeron.data.flow.sample_loader import SampleLoader, SampleRequest, StageTimings
from ephemeron.data.flow.stream import BatchStream
from ephemeron.data.shuffle import Indices
from ephemeron.errors import JobError, SampleFailed

Sampling: TypeAlias = Literal["own", "shared"]
Collate: TypeAlias = Callable[[list[Any]], Any] | None


class AnyLoading(Protocol):
    """Loads samples when they are asked for."""

    flow: FlowDescription
    seconds: StageTimings

    def __len__(self) -> int: ...

    def load(self, items: Sequence[SampleRequest]) -> list[Any | SampleFailed]:
        """The samples of these items, in this order; in place of one that raises, the error."""


class LoaderBackend(Protocol):
    """Loads chunks of samples ahead: exactly one result for each that was submitted, in any order."""

    lost: int
    """Loaders that died."""
    under_way: int
    """Chunks without a result."""

    def submit(self, number: int, items: Sequence[SampleRequest]) -> None:
        """Wants these samples; numbers rise."""

    def result(self) -> ChunkDone:
        """The next chunk that is ready; waits for one.

        Raises:
            LoadersLost, ServiceUnreachable: there is nobody who loads.
        """

    def announce(self, epoch: int, seed: int, order: Callable[[], Indices], *, ordered: bool) -> None:
        """What this job will use of an epoch, if anybody wants to know; `ordered`: in this order."""

    def close(self) -> None:
        """Ends it."""


class Loaders(ABC):
    """Makes pools."""

    count: int
    """Loaders at most; 0: there is no pool, everything happens when it is asked for."""

    processes: int = 0
    """How many of them are processes that this one starts."""

    @abstractmethod
    def pool(self, loading: AnyLoading, collate: Collate, *, prefetch: int) -> LoaderBackend:
        """A pool for one iteration after the other.

        Args:
            loading: what to load.
            collate: makes a batch of a chunk, where it is convenient; None: chunks stay lists of samples.
            prefetch: chunks that will be under way at a time.
        """

    def shared(self, stream: BatchStream, sampling: str, chosen: Indices | None) -> BatchStream:
        """The stream whose order is drawn together with that of other jobs.

        Raises:
            JobError: there is nobody to draw with.
        """
        if sampling not in get_args(Sampling):
            raise JobError(f"sampling = {sampling!r} is not known", remedy="use own or shared")
        raise JobError("sampling = 'shared' takes a service that other jobs use too", remedy="read with RemoteReader")


class LocalLoaders(Loaders):
    """Processes of this machine.

    Args:
        workers: how many; 0: none.
        lease_s: see `LoaderPool`.
    """

    def __init__(self, workers: int, *, lease_s: float | None = None) -> None:
        self.count = self.processes = workers
        self._lease_s = lease_s

    def pool(self, loading: AnyLoading, collate: Collate, *, prefetch: int) -> LoaderPool:
        assert isinstance(loading, SampleLoader)
        return LoaderPool(loading, self.count, lease_s=self._lease_s, collate=collate)
