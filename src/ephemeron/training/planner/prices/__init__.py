"""What things cost, from dated files that name their sources."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, replace
from pathlib import Path

from ephemeron.events import Traffic
from ephemeron.training.planner.prices.reading import DEFAULT, must, read

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
    burst: int = 0
    """Functions that may start at once; beyond it as many more every `burst_s`. 0: no such limit."""
    burst_s: float = 0.0

    def storage_usd(self, traffic: Traffic) -> float:
        """FasDL, equations 3-26 and 3-28, with the polls, lists and deletes that those leave out."""
        return (
            traffic.puts * self.put_usd
            + (traffic.gets + traffic.polls) * self.get_usd
            + traffic.lists * self.list_usd
            + traffic.deletes * self.delete_usd
            + (traffic.bytes_up + traffic.bytes_down) * self.byte_usd
        )

    def functions_usd(self, gb_seconds: float, invocations: int) -> float:
        """FasDL, equation 3-23, plus the price of each invocation."""
        return gb_seconds * self.gb_second_usd + invocations * self.invocation_usd


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A virtual machine that can be rented by the second."""

    name: str
    vcpus: float
    memory_mb: float
    """MiB, as for functions."""
    hour_usd: float
    boot_s: float
    """From the request until a program runs. An assumption: no price list states it."""
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
    """A machine with a GPU, whose speed on a job no price list says."""

    name: str
    hour_usd: float
    boot_s: float
    memory_mb: float
    """MiB of the GPU."""
    speedup: float | None
    """Over one vCPU of the functions, where the writer of the file knows it."""
    source: str
    as_of: str
    verified: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Beyond:
    """What else a price file says, as tables of numbers; None where it says nothing."""

    arm64_gb_second_usd: float | None
    gb_second_usd: float | None
    egress_gb_usd: float | None
    """Out of the cloud, beyond what is free."""


def load_prices(service: str, file: str | Path | None = None) -> Prices:
    """Prices with a channel of the given service (`objects`, `cache`, `server`, `memory`).

    Raises:
        JobError: the file is absent, lacks a value, or holds one that makes no sense; named.
    """
    raw = read(file)
    where = f"price file {file or DEFAULT}"
    for table in ("functions", *({service} & {"objects", "cache", "server"})):
        must(table in raw, f"{where}: the table [{table}] is missing")
    must(bool(raw["name"]), f"{where}: name is missing")
    storage: dict[str, float] = {}
    if service == "objects":
        storage = {k: raw["objects"][k] for k in ("put_usd", "get_usd", "list_usd", "delete_usd")}
    elif service == "cache":
        ecpu = raw["cache"]["ecpu_usd"]
        storage = {"put_usd": ecpu, "get_usd": ecpu, "list_usd": ecpu, "delete_usd": ecpu, "byte_usd": ecpu / 1000,
                   "gb_hour_usd": raw["cache"]["gb_hour_usd"], "least_gb": raw["cache"].get("least_gb", 0.1)}  # fmt: skip
    elif service == "server":
        storage = {"server_hour_usd": raw["server"]["hour_usd"]}
    limits = raw.get("limits", {})
    return Prices(
        name=raw["name"], as_of=raw["as_of"], gb_second_usd=raw["functions"]["gb_second_usd"],
        invocation_usd=raw["functions"]["invocation_usd"], burst=int(limits.get("burst", 0)),
        burst_s=limits.get("burst_s", 0.0), **storage,
    )  # fmt: skip


def load_machines(file: str | Path | None = None) -> tuple[Machine, ...]:
    """Virtual machines of a price file on demand, in its order; none where it lists none.

    Raises:
        JobError: as `load_prices`.
    """
    return tuple(Machine(**row) for row in read(file).get("machine", []))


FARGATE_VCPUS = (1, 2, 4, 8, 16)
FARGATE_GB_PER_VCPU = (2, 4)
"""The least memory that comes with so many vCPUs, and twice that."""


def load_rented(file: str | Path | None = None) -> tuple[Machine, ...]:
    """Everything one process could be run on: machines on demand, the same on the spot market, containers.

    Raises:
        JobError: as `load_prices`.
    """
    raw = read(file)
    machines = [Machine(**row) for row in raw.get("machine", [])]
    found = list(machines)
    if "spot" in raw:
        spot = raw["spot"]
        found += [
            replace(
                m, name=f"{m.name} spot", kind="spot", hour_usd=m.hour_usd * spot["share"], source=spot["source"],
                as_of=spot["as_of"], verified=spot["verified"],
            )
            for m in machines
        ]  # fmt: skip
    if "fargate" in raw:
        f = raw["fargate"]
        for arm64 in (False, True):
            prefix = "arm64_" if arm64 else ""
            vcpu_usd, gb_usd = f.get(f"{prefix}vcpu_hour_usd"), f.get(f"{prefix}gb_hour_usd")
            if vcpu_usd is None or gb_usd is None:
                continue
            found += [
                Machine(
                    name=f"Fargate {vcpus} vCPU {vcpus * gb} GB{' arm64' if arm64 else ''}", vcpus=vcpus,
                    memory_mb=vcpus * gb * 1024, hour_usd=vcpus * (vcpu_usd + gb * gb_usd), boot_s=f["boot_s"],
                    source=f["source"], as_of=f["as_of"], kind="fargate", arm64=arm64, verified=f["verified"],
                )
                for vcpus in FARGATE_VCPUS for gb in FARGATE_GB_PER_VCPU
            ]  # fmt: skip
    return tuple(found)


def load_gpus(file: str | Path | None = None) -> tuple[Gpu, ...]:
    """Machines with a GPU, in the order of a price file.

    Raises:
        JobError: as `load_prices`.
    """
    return tuple(
        Gpu(**{"speedup": None, **{k: v for k, v in row.items() if k != "arm64"}}) for row in read(file).get("gpu", [])
    )


def load_beyond(file: str | Path | None = None) -> Beyond:
    """Prices that no plan is made of, but that stand beside one.

    Raises:
        JobError: as `load_prices`.
    """
    raw = read(file)
    functions, egress = raw.get("functions", {}), raw.get("egress", {})
    return Beyond(
        arm64_gb_second_usd=functions.get("arm64_gb_second_usd"), gb_second_usd=functions.get("gb_second_usd"),
        egress_gb_usd=egress.get("gb_usd"),
    )  # fmt: skip


def age_warning(as_of: str, today: datetime.date) -> str | None:
    """What to say of prices that are older than `AGED_MONTHS`, or whose age nobody can tell; None: nothing.

    Args:
        as_of: `Prices.as_of`, an ISO date or date and time.
        today: the date to count from.
    """
    remedy = "give newer ones with --prices FILE"
    try:
        date = datetime.datetime.fromisoformat(as_of).date()
    except ValueError:
        return f"the prices are of {as_of!r}, which is no ISO date, so their age is unknown; {remedy}"
    years = (today - date).days / 365.25
    if years <= AGED_MONTHS / 12:
        return None
    return f"the prices are of {date}, {years:.1f} years old; {remedy}"
