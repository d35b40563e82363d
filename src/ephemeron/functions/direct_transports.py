"""Transports of the direct channel that a function has, by what its platform and its environment offer; the preferred first."""

from __future__ import annotations

from ephemeron.communication.channels.credentials import variable
from ephemeron.communication.direct.relay import rendezvous_transports
from ephemeron.communication.direct.transport import Transport, kernel_transports
from ephemeron.config.typed import near
from ephemeron.errors import JobError

TRANSPORTS_VARIABLE = "EPHEMERON_DIRECT_TRANSPORTS"
"""Names of the transports that may be used, the preferred first, such as `tcp,punched`; unset: all that there are."""
NAMES = ("unix", "tcp", "punched", "relay")


def own_transports() -> list[Transport]:
    """Those of the kernel, and those through a rendezvous service where one is set.

    Raises:
        JobError: a variable of the environment is wrong.
    """
    found = {t.name: t for t in (*kernel_transports(), *rendezvous_transports())}
    wanted = [name.strip() for name in (variable(TRANSPORTS_VARIABLE) or ",".join(NAMES)).split(",") if name.strip()]
    for name in wanted:
        if name not in NAMES:
            raise JobError(f"{TRANSPORTS_VARIABLE} names {name!r}, which is no transport", remedy=near(name, NAMES))
    return [found[name] for name in wanted if name in found]
