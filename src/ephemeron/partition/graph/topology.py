"""Devices and the directed links between them, as values.

Sending x bytes from p to q takes latency + x / bandwidth. NetSplit (section 4.2) fits this line for each pair of devices, because
pairs differ (PCIe switch, host bridge, network). Each ordered pair has its own link, so both directions work independently. Links
that share a bus have to be described by the bandwidth of each when all are busy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ephemeron.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A processor that runs one operator at a time."""

    name: str
    kind: str
    """Kind by which a node's times are given."""
    memory_bytes: int
    """Cap_p of equation 5-18, without the memory of libraries (section 4.3)."""
    speed: float = 1.0
    """Divisor of the times of the kind; 1 for the measured device itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction between two devices: one transfer at a time."""

    source: str
    target: str
    latency_s: float
    bandwidth_bytes_s: float

    def seconds(self, nbytes: float) -> float:
        """Commu(x, p, q) of table 5-1."""
        return self.latency_s + nbytes / self.bandwidth_bytes_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Devices, and exactly one link for every ordered pair of them.

    Raises:
        JobError: no device, a duplicate name, a link that is missing, duplicate or of an unknown device, or a bad number; names the place.
    """

    name: str = "topology"
    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        if not self.devices:
            raise JobError(f"topology {self.name} has no device")
        names = [d.name for d in self.devices]
        for name in names:
            if names.count(name) > 1:
                raise JobError(f"topology {self.name}: device {name} is there twice", remedy="give each a name of its own")
        for d in self.devices:
            where = f"topology {self.name}: device {d.name}"
            _number(d.memory_bytes, f"{where}: memory_bytes", least=0.0)
            _number(d.speed, f"{where}: speed", above=0.0)
        self._check_links(set(names))

    def link(self, source: str, target: str) -> Link:
        """The link between two different devices."""
        return next(k for k in self.links if k.source == source and k.target == target)

    def _check_links(self, names: set[str]) -> None:
        seen: set[tuple[str, str]] = set()
        for k in self.links:
            where = f"topology {self.name}: link {k.source} → {k.target}"
            for end in (k.source, k.target):
                if end not in names:
                    raise JobError(f"{where}: {end} is no device", remedy=f"devices are {', '.join(sorted(names))}")
            if k.source == k.target:
                raise JobError(f"{where} leads from a device to itself", remedy="leave it out: staying costs nothing")
            if (k.source, k.target) in seen:
                raise JobError(f"{where} is there twice", remedy="leave one out")
            seen.add((k.source, k.target))
            _number(k.latency_s, f"{where}: latency_s", least=0.0)
            _number(k.bandwidth_bytes_s, f"{where}: bandwidth_bytes_s", above=0.0)
        for a in sorted(names):
            for b in sorted(names):
                if a != b and (a, b) not in seen:
                    raise JobError(f"topology {self.name}: there is no link {a} → {b}", remedy="give one for every ordered pair of devices")


def connected(devices: Iterable[Device], rate: Callable[[Device, Device], tuple[float, float]], *, name: str = "topology") -> Topology:
    """A topology with a link for every ordered pair of devices.

    Args:
        devices: all of them.
        rate: latency in seconds and bandwidth in bytes per second from one device to another.
        name: of the topology.
    """
    devices = tuple(devices)
    links = []
    for a in devices:
        for b in devices:
            if a.name != b.name:
                latency_s, bandwidth = rate(a, b)
                links.append(Link(source=a.name, target=b.name, latency_s=latency_s, bandwidth_bytes_s=bandwidth))
    return Topology(name=name, devices=devices, links=tuple(links))


def _number(value: float, where: str, *, least: float | None = None, above: float | None = None) -> None:
    good = math.isfinite(value) and (least is None or value >= least) and (above is None or value > above)
    if not good:
        limit = f"from {least:g}" if least is not None else f"above {above:g}"
        raise JobError(f"{where} = {value} should be a number {limit}")
