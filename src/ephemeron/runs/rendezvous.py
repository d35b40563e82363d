"""The rendezvous service as a run: `communication.direct.rendezvous_service`, which is below runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

from ephemeron.communication.direct.rendezvous import TOKEN_VARIABLE, ServiceAddress
from ephemeron.communication.direct.rendezvous_service import RendezvousService, ServiceLimits
from ephemeron.communication.direct.tls_socket import server_context
from ephemeron.config.typed import Typed, Within, build, plain
from ephemeron.errors import JobError
from ephemeron.runs.services import Said, ServiceRun, read_token


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousSettings(Typed):
    """Settings of the service."""

    host: str
    port: Annotated[int, Within(0, 65535)]
    allow_remote: bool = False
    token_file: str = ""
    """File with the token; empty: an environment variable has it."""
    certificate: str = ""
    key: str = ""
    """PEM files, of the certificate chain and of its private key; empty: no TLS."""
    limits: ServiceLimits = field(default_factory=ServiceLimits)


async def serve(service: ServiceRun) -> Said:
    """See `runs.services.Serve`."""
    o = build(RendezvousSettings, service.header.payload, where=f"settings of {service.header.run_id}")
    context = server_context(Path(o.certificate), Path(o.key)) if o.certificate else None
    token = read_token(o.token_file, TOKEN_VARIABLE, "the service")
    served = RendezvousService(token, limits=o.limits, tls=context)
    try:
        address = ServiceAddress(*await served.listen(o.host, o.port, allow_remote=o.allow_remote), context is not None)
    except OSError as e:
        raise JobError(f"cannot listen at {o.host}:{o.port}: {e.strerror or e}", remedy="give another --listen") from None
    said = Said(f"rendezvous service at {address}; Ctrl-C ends it", {"address": str(address), "run_id": service.header.run_id})
    try:
        service.ready(said, address=str(address), payload=plain(replace(o, port=address.port)))
        await service.over.wait()
    finally:
        done = served.statistics()
        await served.close()
    return Said(f"{done.meetings} pairs were introduced, {done.relayed_bytes / 1e6:.1f} MB relayed", asdict(done))
