"""Price files, read once into typed tables: every mistake is one line that names file, table and key."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, TypeVar

from ephemeron.config import typed
from ephemeron.config.toml import parse_toml
from ephemeron.config.typed import AtLeast, NonNegative, Positive
from ephemeron.errors import JobError

DEFAULT = "aws-us-east-1"

REMEDY = "compare it with the built-in one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dated:
    """One table of a price file."""

    as_of: str = ""
    """ISO date; by default that of the file."""
    source: str = ""
    verified: bool = True
    """Whether the price was compared with its source at `as_of`; else it is an assumption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionPrices(Dated):
    """`[functions]`."""

    gb_second_usd: NonNegative
    invocation_usd: NonNegative
    arm64_gb_second_usd: NonNegative | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrovmPrices(Dated):
    """`[microvms]`: functions that are virtual machines of their own, and their snapshots."""

    gb_second_usd: NonNegative
    vcpu_second_usd: NonNegative
    gb_per_vcpu: Positive
    burst_vcpu_second_usd: NonNegative
    snapshot_write_gb_usd: NonNegative
    snapshot_read_gb_usd: NonNegative
    snapshot_gb_month_usd: NonNegative

    @property
    def baseline_gb_second_usd(self) -> float:
        """Per GB and second of a baseline, with the CPU that comes with it."""
        return self.gb_second_usd + self.vcpu_second_usd / self.gb_per_vcpu


@dataclass(frozen=True, slots=True, kw_only=True)
class StartLimits(Dated):
    """`[limits]`: functions that may start at once, and seconds until as many more may."""

    burst: Annotated[int, AtLeast(1)]
    burst_s: Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectPrices(Dated):
    """`[objects]`: requests to an object store."""

    put_usd: NonNegative
    get_usd: NonNegative
    list_usd: NonNegative
    delete_usd: NonNegative


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpressPrices(Dated):
    """`[express]`: an object store of one zone."""

    put_usd: NonNegative
    get_usd: NonNegative
    delete_usd: NonNegative
    gb_up_usd: NonNegative
    gb_down_usd: NonNegative
    gb_month_usd: NonNegative


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePrices(Dated):
    """`[cache]`: a serverless cache."""

    ecpu_usd: NonNegative
    gb_hour_usd: NonNegative
    least_gb: NonNegative = 0.1
    """GB that are billed at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPrices(Dated):
    """`[server]`: a parameter server."""

    hour_usd: NonNegative


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectPrices(Dated):
    """`[direct]`: bytes between functions, leaving one and entering another together."""

    private_gb_usd: NonNegative
    public_gb_usd: NonNegative


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressPrices(Dated):
    """`[egress]`: bytes out of the cloud."""

    gb_usd: NonNegative
    free_gb_month: NonNegative = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotPrices(Dated):
    """`[spot]`: share of the price on demand."""

    share: Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class FargatePrices(Dated):
    """`[fargate]`: containers."""

    vcpu_hour_usd: NonNegative
    gb_hour_usd: NonNegative
    boot_s: NonNegative
    arm64_vcpu_hour_usd: NonNegative | None = None
    arm64_gb_hour_usd: NonNegative | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinePrice(Dated):
    """`[[machine]]`."""

    name: str
    vcpus: Positive
    memory_mb: Positive
    hour_usd: NonNegative
    boot_s: NonNegative
    arm64: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPrice(Dated):
    """`[[gpu]]`: a machine with a GPU."""

    name: str
    hour_usd: Positive
    boot_s: NonNegative
    memory_mb: Positive
    speedup: Positive | None = None
    """Over one vCPU, if it is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceFile:
    """A price file."""

    as_of: str
    """ISO date of the prices; text of other forms is kept, and its age warned of."""
    name: str = ""
    functions: FunctionPrices | None = None
    microvms: MicrovmPrices | None = None
    limits: StartLimits | None = None
    objects: ObjectPrices | None = None
    express: ExpressPrices | None = None
    cache: CachePrices | None = None
    server: ServerPrices | None = None
    direct: DirectPrices | None = None
    egress: EgressPrices | None = None
    spot: SpotPrices | None = None
    fargate: FargatePrices | None = None
    machine: tuple[MachinePrice, ...] = ()
    gpu: tuple[GpuPrice, ...] = ()


def read(file: str | Path | None = None) -> PriceFile:
    """A price file; every table has a date.

    Raises:
        JobError: the file is absent, or a table or key is unknown, missing or out of bounds; named.
    """
    return _parsed(_text(file), f"price file {file or DEFAULT}")


@lru_cache(maxsize=8)
def _parsed(text: str, where: str) -> PriceFile:
    """The price file of a text; a plan asks many times for the same."""
    try:
        found = typed.build(PriceFile, _iso(parse_toml(text, where=where, remedy=REMEDY)), where=where)
    except JobError as e:
        raise JobError(e.problem, remedy=f"{e.remedy}, or {REMEDY}" if e.remedy else REMEDY) from None
    lists: dict[str, tuple[MachinePrice | GpuPrice, ...]] = {"machine": found.machine, "gpu": found.gpu}
    for table, rows in lists.items():
        names = [row.name for row in rows]
        twice = sorted({n for n in names if names.count(n) > 1})
        must(not twice, f"{where}: {table} {', '.join(twice)} is there twice")
        for i, row in enumerate(rows):
            must(row.name != "", f"{where}: {table}[{i}]: name is empty")
            must(row.source != "", f"{where}: {table}[{i}] ({row.name}): source should say where the price is from")
    return _dated(found)


T = TypeVar("T", bound=Dated)


def _dated(found: PriceFile) -> PriceFile:
    """The price file with its date in every table that has none."""

    def dated(table: T | None) -> T | None:
        return table if table is None or table.as_of else replace(table, as_of=found.as_of)

    return replace(
        found,
        functions=dated(found.functions),
        microvms=dated(found.microvms),
        limits=dated(found.limits),
        objects=dated(found.objects),
        express=dated(found.express),
        cache=dated(found.cache),
        server=dated(found.server),
        direct=dated(found.direct),
        egress=dated(found.egress),
        spot=dated(found.spot),
        fargate=dated(found.fargate),
        machine=tuple(filter(None, map(dated, found.machine))),
        gpu=tuple(filter(None, map(dated, found.gpu))),
    )


def _iso(value: object) -> object:
    """Dates as ISO text."""
    if isinstance(value, Mapping):
        return {key: _iso(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_iso(inner) for inner in value]
    return value.isoformat() if isinstance(value, datetime.date) else value


def must(holds: bool, problem: str) -> None:
    """Raises a `JobError` of a price file unless `holds`."""
    if not holds:
        raise JobError(problem, remedy=REMEDY)


def _text(file: str | Path | None) -> str:
    if not file:
        return files(__package__).joinpath(f"{DEFAULT}.toml").read_text()
    try:
        return Path(file).read_text()
    except FileNotFoundError:
        raise JobError(f"price file {file} does not exist") from None
    except OSError as e:
        raise JobError(f"price file {file} cannot be read: {e.strerror}") from None
    except UnicodeDecodeError:
        raise JobError(f"price file {file} is not text in UTF-8", remedy=REMEDY) from None
