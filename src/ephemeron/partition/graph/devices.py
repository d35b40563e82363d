"""Devices and links as people write them: `devices.toml`.

    name = "two machines"

    [[devices]]
    name = "big"
    memory_mb = 4096            # as quotas of functions: 1 MB is 2**20 bytes
    kind = "cpu"                # of which the graph has times; the default
    speed = 2.0                 # twice as fast as what was measured; 1 by default

    [links]                     # every pair, both ways, unless it is told below
    bandwidth_mb_s = 1000       # 1 MB is 10**6 bytes
    latency_s = 0.0001

    [[links.between]]
    source = "big"
    target = "small"
    bandwidth_mb_s = 100
    latency_s = 0.002
    one_way = true              # false by default: the way back is the same

What was measured is a topology in JSON (`documents.parse_topology`); `load_topology` takes either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ephemeron.config.toml import parse_toml
from ephemeron.config.typed import build
from ephemeron.errors import JobError
from ephemeron.partition.graph.topology import Device, Link, Topology
from ephemeron.partition.serialization.documents import load, parse_topology
from ephemeron.units import MB, MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    name: str
    memory_mb: float
    kind: str = "cpu"
    speed: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rate:
    bandwidth_mb_s: float
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Between:
    source: str
    target: str
    bandwidth_mb_s: float
    latency_s: float = 0.0
    one_way: bool = False


def load_topology(path: str | Path) -> Topology:
    """Devices from a file: TOML as above, or JSON.

    Raises:
        JobError: it cannot be read, or is not what it should be; names the place, the value and the remedy.
    """
    return load(parse_topology if str(path).endswith(".json") else parse_devices, path)


def parse_devices(text: str, *, where: str = "devices.toml") -> Topology:
    """Devices and links from TOML as above.

    Raises:
        JobError: no TOML, an unknown or missing key, a wrong type, a bad number, a device that is not there, a pair without a link.
    """
    raw = parse_toml(text, where=where)
    for key in raw:
        if key not in ("name", "devices", "links"):
            raise JobError(f"{where}: unknown key {key}", remedy="known are name, devices and links")
    tables = raw.get("devices")
    if not isinstance(tables, list) or not tables:
        raise JobError(f"{where} names no device", remedy="give each a [[devices]] table with name and memory_mb")
    devices = tuple(_device(t, f"{where}: devices[{i}]") for i, t in enumerate(tables))
    name = raw.get("name", Path(where).stem)
    if not isinstance(name, str):
        raise JobError(f"{where}: name = {name!r} should be text")
    links = _links(raw.get("links", {}), [d.name for d in devices], where)
    try:
        return Topology(name=name, devices=devices, links=links)
    except JobError as e:
        raise JobError(f"{where}: {e.problem}", remedy=e.remedy) from None


def _device(raw: Any, where: str) -> Device:
    told: _Device = build(_Device, raw, where=where)
    if not 0 < told.memory_mb < math.inf:
        raise JobError(f"{where}: memory_mb = {told.memory_mb:g} should be a number above 0")
    return Device(name=told.name, kind=told.kind, memory_bytes=int(told.memory_mb * MIB), speed=told.speed)


def _links(raw: Any, names: list[str], where: str) -> tuple[Link, ...]:
    if not isinstance(raw, Mapping):
        raise JobError(
            f"{where}: links = {raw!r} should be a table", remedy="write [links] and below it bandwidth_mb_s"
        )
    common = {k: v for k, v in raw.items() if k != "between"}
    rates: dict[tuple[str, str], tuple[float, float]] = {}
    if common:
        everywhere: _Rate = build(_Rate, common, where=f"{where}: links")
        rates = {(a, b): _rate(everywhere, f"{where}: links") for a in names for b in names if a != b}
    pairs = raw.get("between", [])
    if not isinstance(pairs, list):
        raise JobError(f"{where}: links.between should be a list of tables", remedy="write [[links.between]]")
    for i, table in enumerate(pairs):
        place = f"{where}: links.between[{i}]"
        pair: _Between = build(_Between, table, where=place)
        for end in (pair.source, pair.target):
            if end not in names:
                raise JobError(f"{place}: {end} is no device", remedy=f"devices are {', '.join(names)}")
        told = _rate(pair, place)
        rates[pair.source, pair.target] = told
        if not pair.one_way:
            rates[pair.target, pair.source] = told
    return tuple(
        Link(source=a, target=b, latency_s=latency_s, bandwidth_bytes_s=bandwidth)
        for (a, b), (latency_s, bandwidth) in rates.items()
    )


def _rate(told: _Rate | _Between, where: str) -> tuple[float, float]:
    if not 0 < told.bandwidth_mb_s < math.inf:
        raise JobError(f"{where}: bandwidth_mb_s = {told.bandwidth_mb_s:g} should be a number above 0")
    return told.latency_s, told.bandwidth_mb_s * MB
