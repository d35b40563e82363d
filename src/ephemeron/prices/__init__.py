"""Prices of functions, channels and machines, from dated files that name their sources."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, replace
from pathlib import Path

from ephemeron.events import Traffic
from ephemeron.prices.reading import DEFAULT, must, read

MICROVM = "aws-microvm"
"""Platform whose functions have prices of their own."""
MONTH_HOURS = 730.0
GB = 1e9
"""Bytes, as data transfer is sold."""
AGED_MONTHS = 18
"""Price lists change about once a year; after this long, half as much again, a plan warns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """One cloud's prices for functions and for one kind of channel."""

    name: str
    as_of: str
    """ISO date of the price lists."""
    gb_second_usd: float
    invocation_usd: float
    put_usd: float = 0.0
    get_usd: float = 0.0
    """Per read, found or not: a poll costs a get."""
    list_usd: float = 0.0
    delete_usd: float = 0.0
    byte_usd: float = 0.0
    """Per byte moved, for caches that bill by volume."""
    gb_hour_usd: float = 0.0
    """Per GB and hour kept, for caches that bill by it."""
    least_gb: float = 0.0
    """GB that are billed at least while such a cache exists."""
    server_hour_usd: float = 0.0
    """Per hour and parameter server."""
    burst_vcpu_second_usd: float = 0.0
    """Per second and vCPU beyond what comes with the memory, where that is billed."""
    suspend_gb_usd: float = 0.0
    """Per GB of memory that is suspended."""
    resume_gb_usd: float = 0.0
    """Per GB of memory that is resumed."""
    suspended_gb_hour_usd: float = 0.0
    """Per GB and hour suspended."""
    direct_byte_usd: float = 0.0
    """Per byte that is sent over a direct link, as far as the platform tells: the prices of leaving one function and of entering the
    other together."""
    burst: int = 0
    """Functions that may start at once; beyond it as many more every `burst_s`. 0: no such limit."""
    burst_s: float = 0.0

    def storage_usd(self, traffic: Traffic) -> float:
        """FasDL, equations 3-26 and 3-28, with the polls, lists, deletes and bytes over direct links that those leave out."""
        return (
            traffic.puts * self.put_usd
            + (traffic.gets + traffic.polls) * self.get_usd
            + traffic.lists * self.list_usd
            + traffic.deletes * self.delete_usd
            + (traffic.bytes_up + traffic.bytes_down) * self.byte_usd
            + traffic.direct_bytes_sent * self.direct_byte_usd
        )

    def kept_usd(self, gb: float, seconds: float) -> float:
        """So many GB in the channel for so long; a cache bills `least_gb` at least."""
        return max(gb, self.least_gb) * self.gb_hour_usd * seconds / 3600

    def suspended_usd(self, gb: float, seconds: float, *, resumed: bool) -> float:
        """So many GB of functions suspended, and kept for so long."""
        moved = self.suspend_gb_usd + (self.resume_gb_usd if resumed else 0.0)
        return gb * (moved + self.suspended_gb_hour_usd * seconds / 3600)

    def functions_usd(self, gb_seconds: float, invocations: int) -> float:
        """FasDL, equation 3-23, plus the price of each invocation."""
        return gb_seconds * self.gb_second_usd + invocations * self.invocation_usd


UNKNOWN = Prices(name="", as_of="", gb_second_usd=0.0, invocation_usd=0.0)
"""Prices of a run that has told none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPrices:
    """Prices of direct links between functions, where a price file has them; else 0."""

    private_gb_usd: float = 0.0
    public_gb_usd: float = 0.0
    meeting_hour_usd: float = 0.0
    """Per hour of the smallest container, through which functions behind NAT meet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A virtual machine that can be rented by the second."""

    name: str
    vcpus: float
    memory_mb: float
    """MiB, as for functions."""
    hour_usd: float
    boot_s: float
    """Seconds from the request until a program runs. An assumption: no price list states it."""
    source: str
    as_of: str
    """ISO date of the price list."""
    kind: str = "on demand"
    """`on demand`, `spot` (may be taken away at any time) or `fargate`."""
    arm64: bool = False
    verified: bool = True
    """Whether the price was compared with its source at `as_of`; else it is an assumption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A machine with a GPU; its speed on a job is in no price list."""

    name: str
    hour_usd: float
    boot_s: float
    memory_mb: float
    """MiB of the GPU."""
    speedup: float | None
    """Over one vCPU of the functions; None: not known."""
    source: str
    as_of: str
    verified: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Beyond:
    """Prices beside those that a plan is made of; None: the file has none."""

    arm64_gb_second_usd: float | None
    gb_second_usd: float | None
    egress_gb_usd: float | None
    """Out of the cloud, beyond what is free."""


def load_prices(service: str, file: str | Path | None = None, *, platform: str = "", servers: bool = False) -> Prices:
    """Prices of a platform's functions with a channel of the given service (`objects`, `cache`, `server`, `memory`).

    Args:
        service: of the channel.
        file: price file; None: the built-in one.
        platform: `aws-microvm`, whose functions have prices of their own; others have those of `[functions]`.
        servers: there are servers beside the channel, such as the shards of a sparse store.

    Raises:
        JobError: the file is absent, lacks a value, or holds one out of bounds; named.
    """
    raw = read(file)
    where = f"price file {file or DEFAULT}"
    own = ("microvms",) if platform == MICROVM else ("functions",)
    for table in (*own, *({service, *(["server"] if servers else [])} & {"objects", "cache", "server"})):
        must(getattr(raw, table) is not None, f"{where}: the table [{table}] is missing")
    must(bool(raw.name), f"{where}: name is missing")
    storage: dict[str, float] = {}
    if service == "objects" and raw.objects is not None:
        o = raw.objects
        storage = {"put_usd": o.put_usd, "get_usd": o.get_usd, "list_usd": o.list_usd, "delete_usd": o.delete_usd}
    elif service == "cache" and raw.cache is not None:
        ecpu = raw.cache.ecpu_usd
        storage = {
            "put_usd": ecpu,
            "get_usd": ecpu,
            "list_usd": ecpu,
            "delete_usd": ecpu,
            "byte_usd": ecpu / 1000,
            "gb_hour_usd": raw.cache.gb_hour_usd,
            "least_gb": raw.cache.least_gb,
        }
    if (service == "server" or servers) and raw.server is not None:
        storage["server_hour_usd"] = raw.server.hour_usd
    between = load_link_prices(file)
    direct = {"direct_byte_usd": (between.public_gb_usd if platform == MICROVM else between.private_gb_usd) / GB}
    if platform == MICROVM:
        m = raw.microvms
        assert m is not None
        return Prices(
            name=raw.name,
            as_of=m.as_of,
            gb_second_usd=m.baseline_gb_second_usd,
            invocation_usd=0.0,
            burst=0,
            burst_s=0.0,
            burst_vcpu_second_usd=m.burst_vcpu_second_usd,
            suspend_gb_usd=m.snapshot_write_gb_usd,
            resume_gb_usd=m.snapshot_read_gb_usd,
            suspended_gb_hour_usd=m.snapshot_gb_month_usd / MONTH_HOURS,
            **storage,
            **direct,
        )
    assert raw.functions is not None
    limits = raw.limits
    return Prices(
        name=raw.name,
        as_of=raw.as_of,
        gb_second_usd=raw.functions.gb_second_usd,
        invocation_usd=raw.functions.invocation_usd,
        burst=limits.burst if limits else 0,
        burst_s=limits.burst_s if limits else 0.0,
        **storage,
        **direct,
    )


MEETING_VCPUS, MEETING_GB = 0.25, 0.5
"""The smallest container that there is."""


def load_link_prices(file: str | Path | None = None) -> LinkPrices:
    """Prices of direct links.

    Raises:
        JobError: as `load_prices`.
    """
    raw = read(file)
    f, d = raw.fargate, raw.direct
    return LinkPrices(
        private_gb_usd=d.private_gb_usd if d else 0.0,
        public_gb_usd=d.public_gb_usd if d else 0.0,
        meeting_hour_usd=MEETING_VCPUS * f.vcpu_hour_usd + MEETING_GB * f.gb_hour_usd if f else 0.0,
    )


def load_machines(file: str | Path | None = None) -> tuple[Machine, ...]:
    """Virtual machines of a price file on demand, in its order; none where it lists none.

    Raises:
        JobError: as `load_prices`.
    """
    return tuple(
        Machine(
            name=m.name,
            vcpus=m.vcpus,
            memory_mb=m.memory_mb,
            hour_usd=m.hour_usd,
            boot_s=m.boot_s,
            source=m.source,
            as_of=m.as_of,
            arm64=m.arm64,
            verified=m.verified,
        )
        for m in read(file).machine
    )


FARGATE_VCPUS = (1, 2, 4, 8, 16)
FARGATE_GB_PER_VCPU = (2, 4)
"""The least memory that comes with so many vCPUs, and twice that."""


def load_rented(file: str | Path | None = None) -> tuple[Machine, ...]:
    """Everything one process could be run on: machines on demand, the same on the spot market, containers.

    Raises:
        JobError: as `load_prices`.
    """
    raw = read(file)
    machines = load_machines(file)
    found = list(machines)
    spot = raw.spot
    if spot is not None:
        found += [
            replace(
                m,
                name=f"{m.name} spot",
                kind="spot",
                hour_usd=m.hour_usd * spot.share,
                source=spot.source,
                as_of=spot.as_of,
                verified=spot.verified,
            )
            for m in machines
        ]
    f = raw.fargate
    if f is not None:
        prices = ((False, f.vcpu_hour_usd, f.gb_hour_usd), (True, f.arm64_vcpu_hour_usd, f.arm64_gb_hour_usd))
        for arm64, vcpu_usd, gb_usd in prices:
            if vcpu_usd is None or gb_usd is None:
                continue
            found += [
                Machine(
                    name=f"Fargate {vcpus} vCPU {vcpus * gb} GB{' arm64' if arm64 else ''}",
                    vcpus=vcpus,
                    memory_mb=vcpus * gb * 1024,
                    hour_usd=vcpus * (vcpu_usd + gb * gb_usd),
                    boot_s=f.boot_s,
                    source=f.source,
                    as_of=f.as_of,
                    kind="fargate",
                    arm64=arm64,
                    verified=f.verified,
                )
                for vcpus in FARGATE_VCPUS
                for gb in FARGATE_GB_PER_VCPU
            ]
    return tuple(found)


def load_gpus(file: str | Path | None = None) -> tuple[Gpu, ...]:
    """Machines with a GPU, in the order of a price file.

    Raises:
        JobError: as `load_prices`.
    """
    return tuple(
        Gpu(
            name=g.name,
            hour_usd=g.hour_usd,
            boot_s=g.boot_s,
            memory_mb=g.memory_mb,
            speedup=g.speedup,
            source=g.source,
            as_of=g.as_of,
            verified=g.verified,
        )
        for g in read(file).gpu
    )


def load_beyond(file: str | Path | None = None) -> Beyond:
    """Prices that are shown beside a plan.

    Raises:
        JobError: as `load_prices`.
    """
    raw = read(file)
    functions, egress = raw.functions, raw.egress
    return Beyond(
        arm64_gb_second_usd=functions.arm64_gb_second_usd if functions else None,
        gb_second_usd=functions.gb_second_usd if functions else None,
        egress_gb_usd=egress.gb_usd if egress else None,
    )


def age_warning(as_of: str, today: datetime.date) -> str | None:
    """A warning about prices that are older than `AGED_MONTHS`, or whose age is unknown; None: no warning.

    Args:
        as_of: `Prices.as_of`, an ISO date or date and time.
        today: the date to count from.
    """
    remedy = "give newer ones with --prices FILE (ephemeron prices refresh)"
    try:
        date = datetime.datetime.fromisoformat(as_of).date()
    except ValueError:
        return f"the prices are of {as_of!r}, which is no ISO date, so their age is unknown; {remedy}"
    years = (today - date).days / 365.25
    if years <= AGED_MONTHS / 12:
        return None
    return f"the prices are of {date}, {years:.1f} years old; {remedy}"
