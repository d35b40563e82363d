"""Regions of a run in a TOML file that users write: `regions.toml`.

    plan = "match"                  # functions of regions without workers: match (default), cheapest, fastest or all
    power = "measured"              # column of table 1 that built-in powers are from: measured (default) or rated
    store = "s3://bucket/exchange"  # reached from all regions; left out where all regions are on this machine
    replan_every_s = 60             # new plans from measured iteration times while regions train; 0 (default): none

    [[region]]
    name = "shanghai"
    platform = "aws"
    channel = "s3://shanghai/run"   # of the region's own functions
    credentials = "SHANGHAI"        # variables SHANGHAI_AWS_… of the client's environment, without that prefix
    data_share = 2                  # relative to the other regions; shares that are all below 1 add up to 1
    devices = [{ kind = "cascade-lake", cores = 12 }, { kind = "own", cores = 2, power = 1.5 }]
    prices = { usd_per_core_hour = 0.05, egress_usd_per_gb = 0.09 }

    [region.data]                   # samples of this region alone, read by its own functions; left out: a share of the job's
    flow = "flows:shanghai"

    [[link]]                        # both ways, unless one_way
    source = "shanghai"
    target = "chongqing"
    bandwidth_mbit_s = 100
    latency_s = 0.03
    usd_per_gb = 0.02               # in place of egress_usd_per_gb

`power` of a device is that of one core, or of one GPU, relative to any common unit; kinds of table 1 (`scheduling.devices`) have it built in.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from ephemeron.config.toml import parse_toml, toml_text
from ephemeron.config.typed import AtLeast, Count, Form, NonNegative, Positive, Typed, Within, build
from ephemeron.data.spec import DataSpec, check_data
from ephemeron.errors import JobError
from ephemeron.functions.base import Limits
from ephemeron.regions.driver.network_options import variables_of
from ephemeron.regions.scheduling.devices import PowerSource, power_of
from ephemeron.training.job import PlatformName, RegionPlanMethod, RunRegion

_NAME = Form(r"[a-z][a-z0-9-]{0,23}", "up to 24 small letters, digits and hyphens, a letter first")
_PREFIX = Form(r"[A-Za-z][A-Za-z0-9_]*|", "letters, digits and underscores: the beginning of names of environment variables")
_SUM_TOLERANCE = 0.01
"""Of fractions that people round to two digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSize(Typed):
    """A size of functions on a device."""

    cores: Positive = 1.0
    """Cores of one function."""
    memory_mb: Count
    """Memory of one function, MB."""
    usd_per_hour: NonNegative | None = None
    """Price of one function an hour; None: that of its cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionDevice(Typed):
    """Devices of one kind in a region."""

    kind: str
    """A kind of table 1, or any other name with a `power`."""
    cores: Count
    """Cores that the region has at most; of GPUs, their number."""
    power: Positive | None = None
    """Speed of one core, or one GPU, relative to those of other devices; None: that of table 1, whose unit is one IceLake core."""
    usd_per_core_hour: NonNegative | None = None
    """Price of one core, or one GPU, an hour; None: that of the region."""
    sizes: tuple[FunctionSize, ...] = ()
    """Sizes of functions to choose from; empty: one core each, of any memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionPrices(Typed):
    """Prices of a region."""

    file: Path | None = None
    """Price file of its functions and its channel; None: the built-in prices."""
    usd_per_core_hour: NonNegative = 0.0
    """Price of one core an hour, for plans; 0: cores cost the same everywhere."""
    egress_usd_per_gb: NonNegative = 0.0
    """Price of 10^9 bytes that leave the region for another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region(Typed):
    """A region: where its functions run, on what, and which samples they train on."""

    name: Annotated[str, _NAME]
    """Name, unlike that of every other region."""
    platform: PlatformName
    """Platform of its functions."""
    data_share: Positive = 1.0
    """Its part of the training samples, relative to those of the other regions; shares that are all below 1 add up to 1."""
    devices: tuple[RegionDevice, ...] = ()
    """Devices that it can use; empty: `workers` says how many functions it has."""
    workers: Annotated[int, AtLeast(0)] = 0
    """Number of its functions; 0: what the plan gives it."""
    memory_mb: Annotated[int, Within(0, 10_000_000)] = 0
    """Quota of each function, MB; 0: the platform's default."""
    channel: str | None = None
    """Address of the channel between its functions; None: that of the run."""
    credentials: Annotated[str, _PREFIX] = ""
    """Beginning of the names of environment variables of the client that are for this region alone, which gets them without it."""
    data: DataSpec | None = None
    """Samples of this region, which only its own functions read; None: its share of the job's samples."""
    prices: RegionPrices = field(default_factory=RegionPrices)
    """Prices of its devices and of what leaves it."""
    listen: str = ""
    """`HOST:PORT` at which it accepts connections of other regions; "": it only connects outwards."""
    endpoint: str = ""
    """Address at which others reach it; "": the one at which it listens."""
    certificate: Path | None = None
    """PEM file of its certificate, in whose DNS names is the region's; None: connections are not encrypted."""
    certificate_key: Path | None = None
    """PEM file of the certificate's key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionLink(Typed):
    """Connection between two regions."""

    source: str
    """Region that sends."""
    target: str
    """Region that receives."""
    bandwidth_mbit_s: Positive
    """Bandwidth, 10^6 bits a second."""
    latency_s: NonNegative = 0.0
    """Delay in one direction, seconds."""
    usd_per_gb: NonNegative | None = None
    """Price of 10^9 bytes sent; None: the sender's `egress_usd_per_gb`."""
    one_way: bool = False
    """Whether the way back is another link; else it is the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regions(Typed):
    """All regions of a run."""

    region: tuple[Region, ...]
    """At least one; a run has at least two."""
    link: tuple[RegionLink, ...] = ()
    """Known connections."""
    store: str = ""
    """Address of a store that all regions reach; "": a folder, where all of them are on this machine."""
    plan: RegionPlanMethod | None = None
    """Plan for the functions of regions without `workers`; None: `match`, or `all` where a region has no devices."""
    power: PowerSource = "measured"
    """Column of table 1 that powers of built-in kinds are from."""
    communicator: Literal["store", "tcp"] = "store"
    """How regions exchange updates: through `store`, or over TCP connections."""
    least_regions: Count = 1
    """Regions that can be started when a run begins, at least; others join when they can."""
    replan_every_s: NonNegative = 0.0
    """Seconds between two new plans for the functions of regions that train; 0: none."""
    relay: str = ""
    """Address of a rendezvous service, `HOST:PORT` or `tls://HOST:PORT`, through which regions connect that do not listen."""
    authority: Path | None = None
    """PEM file of the authority of all regions' certificates."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the regions, in their order."""
        return tuple(region.name for region in self.region)

    def named(self, name: str) -> Region:
        """The region of a name.

        Raises:
            JobError: there is none.
        """
        for region in self.region:
            if region.name == name:
                return region
        raise JobError(f"there is no region {name!r}", remedy=f"regions are {', '.join(self.names)}")

    def shares(self) -> tuple[float, ...]:
        """Fractions of the training samples, in the order of the regions; they add up to 1."""
        total = math.fsum(region.data_share for region in self.region)
        return tuple(region.data_share / total for region in self.region)

    def power_of(self, device: RegionDevice) -> float:
        """Power of one core of a device: its own, or that of its kind."""
        return device.power or power_of(device.kind, source=self.power)

    def egress_usd(self, source: str, target: str, nbytes: float) -> float:
        """Price of bytes sent from one region to another, US dollars."""
        link = self.link_of(source, target)
        per_gb = None if link is None else link.usd_per_gb
        return nbytes / 1e9 * (self.named(source).prices.egress_usd_per_gb if per_gb is None else per_gb)

    def link_of(self, source: str, target: str) -> RegionLink | None:
        """The link from one region to another; None: the file has none. Later links precede earlier ones."""
        for link in reversed(self.link):
            if (link.source, link.target) == (source, target):
                return link
            if not link.one_way and (link.target, link.source) == (source, target):
                return dataclasses.replace(link, source=source, target=target)
        return None


def load_regions(path: str | Path) -> Regions:
    """Regions from a TOML file. Relative paths in it are relative to its folder.

    Raises:
        JobError: the file cannot be read or is wrong; names the place, the value and the remedy.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise JobError(f"{path} cannot be read: {e.strerror}", remedy="give the path of a regions.toml") from None
    except UnicodeDecodeError:
        raise JobError(f"{path} is no UTF-8 text", remedy="give the path of a regions.toml") from None
    return _located(parse_regions(text, where=str(path)), path.parent)


def parse_regions(text: str, *, where: str = "regions.toml") -> Regions:
    """Regions from TOML as above.

    Raises:
        JobError: no TOML, an unknown or missing key, a wrong type, a bad number, a device without a power, two regions of one name, shares
            that do not add up, a plan with nothing to plan, or a link of an unknown region.
    """
    regions = build(Regions, parse_toml(text, where=where), where=where)
    try:
        check_regions(regions)
    except JobError as e:
        raise JobError(f"{where}: {e.problem}", remedy=e.remedy) from None
    return regions


def check_regions(regions: Regions) -> None:
    """Refuses regions that contradict each other.

    Raises:
        JobError: as `parse_regions`.
    """
    if not regions.region:
        raise JobError("there is no region", remedy="give each a [[region]] table with name, platform and devices")
    for name in regions.names:
        if regions.names.count(name) > 1:
            raise JobError(f"two regions have the name {name!r}", remedy="give each a name of its own")
    for region in regions.region:
        place = f"region {region.name}"
        if not region.devices and not region.workers:
            raise JobError(f"{place} has neither devices nor workers", remedy="give devices = [{ kind, cores }]")
        kinds = [device.kind for device in region.devices]
        for device in region.devices:
            if device.power is None:
                power_of(device.kind, source=regions.power, where=place)
            if kinds.count(device.kind) > 1:
                raise JobError(f"{place} has two devices of kind {device.kind!r}", remedy="add their cores up")
        if region.data is not None:
            check_data(region.data)
    _check_shares(regions)
    if regions.plan is not None and all(region.workers for region in regions.region):
        raise JobError(f"plan = '{regions.plan}' has nothing to plan: all regions have workers", remedy="leave plan, or workers, out")
    if regions.least_regions > len(regions.region):
        raise JobError(
            f"least_regions = {regions.least_regions} is more than the {len(regions.region)} regions of the file",
            remedy=f"give at most {len(regions.region)}",
        )
    if 0 < regions.replan_every_s < 1:
        raise JobError(f"replan_every_s = {regions.replan_every_s:g} is too often", remedy="give 1 or more, or 0 for none")
    for link in regions.link:
        for end in (link.source, link.target):
            if end not in regions.names:
                raise JobError(f"a link names {end!r}, which is no region", remedy=f"regions are {', '.join(regions.names)}")
        if link.source == link.target:
            raise JobError(f"a link joins {link.source!r} to itself", remedy="name two regions")


def _check_shares(regions: Regions) -> None:
    """Refuses fractions that do not add up to 1. Shares of which one is 1 or more are relative, and always add up."""
    shares = [region.data_share for region in regions.region]
    total = math.fsum(shares)
    if max(shares) < 1 and abs(total - 1) > _SUM_TOLERANCE:
        raise JobError(
            f"the data_share of all regions add up to {total:g}",
            remedy="give fractions that add up to 1, or whole numbers for relative shares",
        )


def _located(regions: Regions, folder: Path) -> Regions:
    """The same with paths relative to a folder."""

    def at(path: Path | None) -> Path | None:
        return None if path is None else folder / path

    found = []
    for region in regions.region:
        data = None if region.data is None else dataclasses.replace(region.data, path=at(region.data.path))
        prices = dataclasses.replace(region.prices, file=at(region.prices.file))
        found.append(
            dataclasses.replace(
                region, data=data, prices=prices, certificate=at(region.certificate), certificate_key=at(region.certificate_key)
            )
        )
    return dataclasses.replace(regions, region=tuple(found), authority=at(regions.authority))


def credentials_of(region: Region, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables that are for a region alone, by the names that its platform and its channel know.

    Args:
        region: that names them; one that names none gets none.
        environment: of the client; None: this process's.

    Raises:
        JobError: there is no variable of such a name.
    """
    return variables_of(region.credentials, f"region {region.name}", environment)


def write_regions(regions: Regions, source: Path, target: Path) -> None:
    """Writes a file of regions with the functions that they have now, and all other values of the file that they are from, without its comments.

    Args:
        regions: those of `source`, all with `workers`.
        source: a file of regions.
        target: the file to write: relative paths in it name the same files as before. It is replaced if it is a file of regions, or `source`.

    Raises:
        JobError: `target` is another kind of file, or cannot be written.
    """
    raw = parse_toml(source.read_text(encoding="utf-8"), where=str(source))
    raw.pop("plan", None)
    _move(raw, "authority", source, target)
    for table, region in zip(raw["region"], regions.region, strict=True):
        table |= {"workers": region.workers} | ({"memory_mb": region.memory_mb} if region.memory_mb else {})
        for holder, key in ((table, "certificate"), (table, "certificate_key"), (table.get("data"), "path"), (table.get("prices"), "file")):
            _move(holder, key, source, target)
    text = toml_text(raw)
    again = parse_regions(text, where=str(target))
    assert [(r.name, r.workers, r.memory_mb) for r in again.region] == [(r.name, r.workers, r.memory_mb) for r in regions.region]
    if target.exists():
        try:
            load_regions(target)
        except JobError:
            raise JobError(f"{target} exists and is no file of regions, so it is not replaced", remedy="name another file") from None
    try:
        part = target.with_name(f"{target.name}.part")
        part.write_text(text, encoding="utf-8")
        part.replace(target)
    except OSError as e:
        raise JobError(f"{target} cannot be written: {e.strerror}", remedy="name another file") from None


def _move(table: object, key: str, source: Path, target: Path) -> None:
    """Lets a relative path in a table name the same file from another folder."""
    if not isinstance(table, dict) or not isinstance(table.get(key), str) or os.path.isabs(table[key]):
        return
    before, after = source.parent.resolve(), target.parent.resolve()
    if before != after:
        table[key] = os.path.relpath(before / table[key], after)


def groups_of(regions: Regions, *, limits: Limits | None = None) -> tuple[RunRegion, ...]:
    """Groups of functions of a `Configuration`, one for each region, in their order.

    A region without `workers` has as many functions as all of its cores need. New plans may give any region so many.

    Args:
        regions: of the run.
        limits: of the platforms, which say how many cores come with a quota; None: those of AWS Lambda.

    Raises:
        JobError: there is one region.
    """
    if len(regions.region) < 2:
        raise JobError("training across regions needs two regions", remedy="add a [[region]] table, or train without regions")
    return tuple(group_of(regions, name, limits=limits) for name in regions.names)


def group_of(regions: Regions, name: str, *, limits: Limits | None = None) -> RunRegion:
    """Group of functions of one region; see `groups_of`.

    Raises:
        JobError: there is no such region.
    """
    region = regions.named(name)
    cores = sum(device.cores for device in region.devices)
    return RunRegion(
        name=region.name,
        platform=region.platform,
        channel=region.channel,
        memory_mb=region.memory_mb,
        share=regions.shares()[regions.names.index(name)],
        workers=region.workers or functions_of(region, cores, limits=limits),
        most_workers=math.floor(cores / cores_of_function(region, limits=limits) + 1e-9),
        prices=region.prices.file,
        data=region.data,
        credentials=region.credentials,
        power=mean_power(regions, region),
        listen=region.listen,
        endpoint=region.endpoint,
        certificate=region.certificate,
        certificate_key=region.certificate_key,
    )


def functions_of(region: Region, cores: int, *, limits: Limits | None = None) -> int:
    """Functions that have so many cores in all, at least 1: one for each, or, with a `memory_mb`, as the quota has cores."""
    return max(1, math.ceil(cores / cores_of_function(region, limits=limits) - 1e-9))


def cores_of_function(region: Region, *, limits: Limits | None = None) -> float:
    """Cores that come with the quota of a function; 1 without a `memory_mb`."""
    return (Limits() if limits is None else limits).vcpus(region.memory_mb) if region.memory_mb else 1.0


def mean_power(regions: Regions, region: Region) -> float:
    """Mean power of the cores of a region; 1 without devices."""
    cores = sum(device.cores for device in region.devices)
    return sum(device.cores * regions.power_of(device) for device in region.devices) / cores if cores else 1.0
