"""Interface between reading and loading: loading ahead by processes of this machine or a service, or not at all."""

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
        """Requests the samples of a chunk; numbers increase."""

    def result(self) -> ChunkDone:
        """The next chunk that is ready; waits for one.

        Raises:
            LoadersLost, ServiceUnreachable: no loader is left.
        """

    def announce(self, epoch: int, seed: int, order: Callable[[], Indices], *, ordered: bool) -> None:
        """Announces the samples that this job will use in an epoch; `ordered`: in this order."""

    def close(self) -> None:
        """Stops loading and releases the loaders."""


class Loaders(ABC):
    """Factory of loader backends."""

    count: int
    """Maximum number of loaders; 0: there is no pool, samples are loaded on request."""

    processes: int = 0
    """Number of them that are processes started by this one."""

    @abstractmethod
    def pool(self, loading: AnyLoading, collate: Collate, *, prefetch: int) -> LoaderBackend:
        """A pool for consecutive iterations.

        Args:
            loading: loads the samples.
            collate: makes a batch of a chunk, in the loader if possible; None: chunks stay lists of samples.
            prefetch: maximum number of chunks under way.
        """

    def shared(self, stream: BatchStream, sampling: str, chosen: Indices | None) -> BatchStream:
        """The stream whose order is drawn jointly with those of other jobs.

        Raises:
            JobError: these loaders do not support shared sampling.
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
