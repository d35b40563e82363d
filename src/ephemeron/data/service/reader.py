"""`RemoteReader`: the same flow, read through a service that other jobs may share (DPFlow, table 3-2)."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ephemeron.communication.rpc.auth import Token
from ephemeron.data.flow.collate import Collate
from ephemeron.data.flow.description import FlowDescription
from ephemeron.data.flow.determinism import cacheable_stages
from ephemeron.data.flow.fork_pool import ChunkDone
from ephemeron.data.flow.prefetch import LoadStrategy
from ephemeron.data.flow.sample_loader import SampleLoader, SampleRequest, open_source, pinned
from ephemeron.data.flow.view import FlowReader, FlowView
from ephemeron.data.flow_spec import SERVICE_VARIABLE
from ephemeron.data.service.client import FlowClient, Service
from ephemeron.data.service.flow_definition import define
from ephemeron.data.service.remote_pool import RemoteLoaders, RemoteLoading
from ephemeron.data.service.settings import ServiceSettings
from ephemeron.errors import JobError

_log = logging.getLogger(__name__)


class RemoteReader(FlowReader):
    """Reads through a data service.

    Jobs that read the same flow (name and version) share its loaders and all results that are equal for them: samples before
    the first random step always, finished samples if their seeds are equal or nothing is random. Random steps are found by
    loading some samples under two seeds, in a process of their own, before the flow is registered.

    Args:
        address: `HOST:PORT` of the service, as `ephemeron serve data` prints it; None: from the variable
            `EPHEMERON_DATA_SERVICE`, or this machine's own, which is started if it does not run, and ends after a while without
            readers. Arguments for a service that is started here mean this machine's own.
        token: its secret; None: the variable `EPHEMERON_DATA_TOKEN`, or that of this machine's own service.
        job: this job's name, equal for all its ranks; None: one of its own.
        timeout_s: how long to wait for an answer.
        loaders: loader functions at most, of a service that is started here; None: two.
        cache_mb: for samples that are kept, of a service that is started here.
        folder: where a service that is started here keeps its state; None: in the home folder.

    Raises:
        JobError: an argument makes no sense.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        token: Token | None = None,
        job: str | None = None,
        timeout_s: float = 60.0,
        loaders: int | None = None,
        cache_mb: float | None = None,
        folder: Path | None = None,
        settings: ServiceSettings | None = None,
    ) -> None:
        if address is not None and (loaders is not None or cache_mb is not None or settings is not None):
            raise JobError(f"loaders and cache_mb are those of the service at {address}", remedy="give them to ephemeron serve data")
        if not timeout_s > 0:
            raise JobError(f"timeout_s = {timeout_s} should be above 0")
        if address is None and all(given is None for given in (loaders, cache_mb, folder, settings)):
            address = os.environ.get(SERVICE_VARIABLE) or None
        own = settings or ServiceSettings(ends_when_idle=True)
        if loaders is not None:
            own = replace(own, loaders=loaders)
        if cache_mb is not None:
            own = replace(own, cache_mb=cache_mb)
        self.service = Service(address, token=token, folder=folder, settings=own, timeout_s=timeout_s)
        self.job = job or f"job-{secrets.token_hex(4)}"

    def read(self, flow: FlowDescription) -> FlowView:
        """A view of the flow, which is registered with the service.

        Raises:
            JobError: it has no dataset, cannot be sent to loaders, or the service has another definition of its version.
            DatasetNotFound, DatasetError: the dataset does not exist, or cannot be read.
            ServiceUnreachable, ServiceRefused: the service does not answer in time, or not with this token.
        """
        if flow.source is None:
            raise JobError(f"flow {flow.name} has no dataset", remedy="call .dataset(name, version, variant)")
        source = pinned(flow.source)
        flow = replace(flow, source=source)
        loading = SampleLoader(flow, open_source(source))
        samples, definition = len(loading), define(flow, len(loading))
        fixed = cacheable_stages(loading).fixed
        if fixed < definition.fixed:
            definition = replace(definition, fixed=fixed, random=True)
        client = FlowClient(self.service, definition)
        _log.info("job %s reads flow %s@%d through a data service", self.job, flow.name, flow.version)
        return FlowView(RemoteLoading(flow, client, samples), RemoteLoaders(client, self.job))


# -- batches that a job's sampler chooses -------------------------------------------------------------------------


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
