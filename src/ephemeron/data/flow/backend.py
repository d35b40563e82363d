"""The port between reading and loading: no loaders, processes of this machine, or a service."""

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
    """Loads samples on request."""

    flow: FlowDescription
    seconds: StageTimings

    def __len__(self) -> int: ...

    def load(self, items: Sequence[SampleRequest]) -> list[Any | SampleFailed]:
        """The samples of these items, in this order; an item that raises gives its error instead."""


class LoaderBackend(Protocol):
    """Loads chunks of samples ahead: exactly one result for each submitted chunk, in any order."""

    lost: int
    """Loaders that died."""
    under_way: int
    """Chunks without a result."""

    def submit(self, number: int, items: Sequence[SampleRequest]) -> None:
        """Requests a chunk of samples; numbers rise."""

    def result(self) -> ChunkDone:
        """The next chunk that is ready; waits for one.

        Raises:
            LoadersLost, ServiceUnreachable: the loaders are gone.
        """

    def announce(self, epoch: int, seed: int, order: Callable[[], Indices], *, ordered: bool) -> None:
        """Announces the samples that this job will use in an epoch; `ordered`: in this order."""

    def close(self) -> None:
        """Ends the loaders, or the connection to them."""


class Loaders(ABC):
    """Makes backends."""

    count: int
    """Loaders at most; 0: there is no backend, samples are loaded on request."""

    processes: int = 0
    """Number of loaders that are processes of this machine."""

    @abstractmethod
    def pool(self, loading: AnyLoading, collate: Collate, *, prefetch: int) -> LoaderBackend:
        """A backend for one iteration after the other.

        Args:
            loading: the flow bound to its dataset.
            collate: makes a batch of a chunk in the loader; None: chunks stay lists of samples.
            prefetch: chunks that will be under way at a time.
        """

    def shared(self, stream: BatchStream, sampling: str, chosen: Indices | None) -> BatchStream:
        """The stream whose order is drawn jointly with those of other jobs.

        Raises:
            JobError: these loaders belong to no service.
        """
        if sampling not in get_args(Sampling):
            raise JobError(f"sampling = {sampling!r} is not known", remedy="use own or shared")
        raise JobError("sampling = 'shared' takes a service that other jobs use too", remedy="read with RemoteReader")


class LocalLoaders(Loaders):
    """Processes of this machine.

    Args:
        workers: number of processes; 0: none.
        lease_s: see `LoaderPool`.
    """

    def __init__(self, workers: int, *, lease_s: float | None = None) -> None:
        self.count = self.processes = workers
        self._lease_s = lease_s

    def pool(self, loading: AnyLoading, collate: Collate, *, prefetch: int) -> LoaderPool:
        assert isinstance(loading, SampleLoader)
        return LoaderPool(loading, self.count, lease_s=self._lease_s, collate=collate)
