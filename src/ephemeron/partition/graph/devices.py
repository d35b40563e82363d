"""Devices and links in a TOML file that users write: `devices.toml`.

    name = "two machines"

    [[devices]]
    name = "big"
    memory_mb = 4096            # as quotas of functions: 1 MB is 2**20 bytes
    kind = "cpu"                # a kind for which the graph has times; the default
    speed = 2.0                 # twice as fast as the measured device; 1 by default

    [links]                     # every pair, both ways, except those below
    bandwidth_mb_s = 1000       # 1 MB is 10**6 bytes
    latency_s = 0.0001

    [[links.between]]
    source = "big"
    target = "small"
    bandwidth_mb_s = 100
    latency_s = 0.002
    one_way = true              # false by default: the link back is the same

A measured topology is a JSON document (`documents.parse_topology`); `load_topology` reads either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ephemeron.config.toml import parse_toml
from ephemeron.config.typed import NonNegative, Positive, build
from ephemeron.errors import JobError
from ephemeron.partition.graph.topology import Device, Link, Topology
from ephemeron.partition.serialization.documents import load, parse_topology
from ephemeron.units import MB, MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    name: str
    memory_mb: Positive
    kind: str = "cpu"
    speed: Positive = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Between:
    source: str
    target: str
    bandwidth_mb_s: Positive
    latency_s: NonNegative = 0.0
    one_way: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Links:
    bandwidth_mb_s: Positive | None = None
    """Bandwidth of every pair; None: all pairs are in `between`."""
    latency_s: NonNegative | None = None
    between: tuple[_Between, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _DevicesFile:
    name: str | None = None
    devices: tuple[_Device, ...] = ()
    links: _Links = _Links()


def load_topology(path: str | Path) -> Topology:
    """Devices from a file: TOML as above, or JSON.

    Raises:
        JobError: the file cannot be read or is wrong; names the place, the value and the remedy.
    """
    return load(parse_topology if str(path).endswith(".json") else parse_devices, path)


def parse_devices(text: str, *, where: str = "devices.toml") -> Topology:
    """Devices and links from TOML as above.

    Raises:
        JobError: no TOML, an unknown or missing key, a wrong type, a bad number, an unknown device, a pair without a link.
    """
    read = build(_DevicesFile, parse_toml(text, where=where), where=where)
    if not read.devices:
        raise JobError(f"{where} names no device", remedy="give each a [[devices]] table with name and memory_mb")
    devices = tuple(Device(name=d.name, kind=d.kind, memory_bytes=int(d.memory_mb * MIB), speed=d.speed) for d in read.devices)
    links = _links(read.links, [d.name for d in devices], where)
    try:
        return Topology(name=Path(where).stem if read.name is None else read.name, devices=devices, links=links)
    except JobError as e:
        raise JobError(f"{where}: {e.problem}", remedy=e.remedy) from None


def _links(read: _Links, names: Sequence[str], where: str) -> tuple[Link, ...]:
    rates: dict[tuple[str, str], tuple[float, float]] = {}
    if read.bandwidth_mb_s is not None:
        common = (read.latency_s or 0.0, read.bandwidth_mb_s)
        rates = {(a, b): common for a in names for b in names if a != b}
    elif read.latency_s is not None:
        raise JobError(f"{where}: links: missing key bandwidth_mb_s", remedy="give both, or neither")
    for i, pair in enumerate(read.between):
        for end in (pair.source, pair.target):
            if end not in names:
                raise JobError(f"{where}: links: between[{i}]: {end} is no device", remedy=f"devices are {', '.join(names)}")
        rates[pair.source, pair.target] = (pair.latency_s, pair.bandwidth_mb_s)
        if not pair.one_way:
            rates[pair.target, pair.source] = (pair.latency_s, pair.bandwidth_mb_s)
    return tuple(
        Link(source=a, target=b, latency_s=latency_s, bandwidth_bytes_s=bandwidth_mb_s * MB)
        for (a, b), (latency_s, bandwidth_mb_s) in rates.items()
    )
