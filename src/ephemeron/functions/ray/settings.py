"""Settings of a Ray cluster and of the functions on it."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field

from ephemeron.errors import JobError

ADDRESS_ENV = "RAY_ADDRESS"
"""Ray's own variable."""
MB_PER_VCPU = 1769.0
"""Same as on AWS Lambda, so that a plan for one means the same on the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """Location of the cluster. Without secrets."""

    address: str = ""
    """`HOST:PORT` of the head, `ray://HOST:PORT` of a Ray Client server, or `auto`; empty: RAY_ADDRESS, or `auto`."""
    mb_per_vcpu: float = MB_PER_VCPU
    """Memory quota that reserves one CPU."""
    gpus: float = 0.0
    """GPUs of each function: whole ones, or a part of one, such as 0.25."""
    every_s: float = 5.0
    """Seconds between reports of functions, and between rounds of the collector."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables for functions, beside those of their node. No secrets: Ray keeps and shows them."""

    def located(self) -> RaySettings:
        """The settings with their address filled in.

        Raises:
            JobError: a number is out of its range, or the address names a new cluster.
        """
        address = self.address or os.environ.get(ADDRESS_ENV, "") or "auto"
        if address == "local":
            raise JobError(
                "--ray-address 'local' would make a cluster that ends with the client",
                remedy="run: ray start --head, and use --ray-address auto",
            )
        if not 0 <= self.gpus < 1_000 or (self.gpus > 1 and self.gpus != int(self.gpus)):
            raise JobError(f"gpus {self.gpus:g} is neither a whole number nor a part of one", remedy="use e.g. 1 or 0.5")
        if self.mb_per_vcpu <= 0 or self.every_s <= 0:
            raise JobError(f"mb_per_vcpu {self.mb_per_vcpu:g} and every_s {self.every_s:g} have to be positive")
        return dataclasses.replace(self, address=address)
