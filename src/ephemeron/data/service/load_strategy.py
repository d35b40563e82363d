"""Batches that a job's sampler chooses, loaded by a data service that other runs share."""

from __future__ import annotations

from collections.abc import Sequence

from ephemeron.data.flow.collate import Collate
from ephemeron.data.flow.fork_pool import ChunkDone
from ephemeron.data.flow.prefetch import LoadStrategy
from ephemeron.data.flow.sample_loader import SampleLoader, SampleRequest
from ephemeron.data.service.reader import RemoteReader


class Served(LoadStrategy):
    """Requests batches from a service. The samples are those that this process would load itself, bit for bit.

    Args:
        loading: the flow, with the dataset as it was found when the run was started.
        collate: makes a batch of samples.
        address: `HOST:PORT` of the service.

    Raises:
        JobError: the flow cannot be sent to loaders, the service has another definition of its version, or there is no token.
        ServiceUnreachable, ServiceRefused: the service does not answer in time, or not with this token.
    """

    ahead = 2

    def __init__(self, loading: SampleLoader, collate: Collate, *, address: str) -> None:
        view = RemoteReader(address).read(loading.flow)
        self._pool = view.loaders.pool(view.loading, collate, prefetch=self.ahead + 1)

    def submit(self, number: int, items: Sequence[SampleRequest]) -> None:
        self._pool.submit(number, items)

    def result(self) -> ChunkDone:
        return self._pool.result()

    def close(self) -> None:
        self._pool.close()
