"""Newer prices from the public price list of AWS, which needs no account.

The list of a service in a region is a table in CSV, a row for each price: five lines about the list, the names of the columns, then the
rows. It is read row by row, since that of EC2 has some hundreds of MB. Where the list is fetched from is the caller's matter.
"""

from __future__ import annotations

import csv
import datetime
import difflib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ephemeron.config.toml import toml_text
from ephemeron.config.typed import plain
from ephemeron.errors import JobError
from ephemeron.prices.reading import Dated, PriceFile

SERVICES = {"lambda": "AWSLambda", "s3": "AmazonS3", "elasticache": "AmazonElastiCache", "fargate": "AmazonECS", "ec2": "AmazonEC2"}
"""Name in the price list, by the name on the command line."""
USUAL = ("lambda", "s3", "elasticache", "fargate")
"""Services whose lists have some MB."""
SERVER = "m5.large"
"""Instance type of `[server]`."""
BY_HAND = "write the prices by hand, into a file for --prices"
_HEADER_LINES = 10
_MACHINE = {"Operating System": "Linux", "Tenancy": "Shared", "Pre Installed S/W": "NA", "CapacityStatus": "Used"}

_INDEX_BYTES, _LIST_BYTES = 16 << 20, 2 << 30
"""Documents that are longer are none of the price list."""

Fetch = Callable[[str, int], Iterator[str]]
"""Lines of a document of the price list, by its path and the most bytes that it may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedPrice:
    """A price to look for: values that columns have, or patterns of `usageType`, whose prefix names the region."""

    table: str
    row: str = ""
    """Name of the row of a table with many, which a region need not have."""
    key: str = "hour_usd"
    columns: Mapping[str, str] = field(hash=False)

    def __str__(self) -> str:
        return f"{self.table}{f' {self.row}' if self.row else ''}.{self.key}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceList:
    """The list of a service in a region."""

    service: str
    """Its name in the price list."""
    region: str
    as_of: str
    """ISO date of its publication."""
    prices: Mapping[str, float]
    """US dollars, by the text of a `ListedPrice`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceChange:
    """A price of the file, before and now."""

    price: str
    before_usd: float | None
    usd: float
    as_of: str


def listed_prices(service: str, file: PriceFile) -> list[ListedPrice]:
    """Prices that a service's list has for a price file.

    Args:
        service: one of `SERVICES`.
        file: whose machines are looked for.
    """
    if service == "lambda":
        groups = {"gb_second_usd": "Duration", "arm64_gb_second_usd": "Duration-ARM", "invocation_usd": "Requests"}
        return [ListedPrice(table="functions", key=key, columns={"Group": f"AWS-Lambda-{name}"}) for key, name in groups.items()]
    if service == "s3":
        tiers = {"put_usd": "Tier1", "list_usd": "Tier1", "get_usd": "Tier2"}
        return [
            ListedPrice(table="objects", key=key, columns={"Group": f"S3-API-{tier}", "usageType": f"Requests-{tier}"})
            for key, tier in tiers.items()
        ]
    if service == "elasticache":
        usage = {"ecpu_usd": "ElastiCacheProcessingUnits:Valkey", "gb_hour_usd": "CachedData:Valkey"}
        return [ListedPrice(table="cache", key=key, columns={"usageType": name}) for key, name in usage.items()]
    if service == "fargate":
        usage = {"vcpu_hour_usd": "vCPU-Hours:perCPU", "gb_hour_usd": "GB-Hours"}
        return [
            ListedPrice(table="fargate", key=prefix + key, columns={"usageType": f"Fargate-{kind}{name}"})
            for prefix, kind in (("", ""), ("arm64_", "ARM-"))
            for key, name in usage.items()
        ]
    rented = [("machine", m.name) for m in file.machine] + [("gpu", g.name) for g in file.gpu]
    return [
        ListedPrice(table="server", columns={"Instance Type": SERVER, **_MACHINE}),
        *(ListedPrice(table=table, row=name, columns={"Instance Type": name, **_MACHINE}) for table, name in rented),
    ]


def fetch_list(fetch: Fetch, service: str, region: str, file: PriceFile) -> ServiceList:
    """The newest list of a service in a region, as far as a price file has its prices.

    Args:
        fetch: gets documents.
        service: one of `SERVICES`.
        region: of AWS, such as `us-east-1`.
        file: whose prices are looked for.

    Raises:
        JobError: there is no such region, or the list lacks a price or has two for it.
    """
    offer = SERVICES[service]
    where = f"price list of {offer}"
    path = f"/offers/v1.0/aws/{offer}/current/region_index.json"
    try:
        regions = json.loads("".join(fetch(path, _INDEX_BYTES)))["regions"]
        known = {str(name): str(entry["currentVersionUrl"]) for name, entry in regions.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise JobError(f"{where}: {path} is no index of regions", remedy=BY_HAND) from None
    if region not in known:
        close = difflib.get_close_matches(region, known, n=1)
        raise JobError(f"{where} has no region {region!r}", remedy=f"did you mean {close[0]}?" if close else f"one of {', '.join(known)}")
    lines = fetch(known[region].removesuffix(".json") + ".csv", _LIST_BYTES)
    return parse_list(lines, listed_prices(service, file), service=offer, region=region)


def parse_list(lines: Iterable[str], wanted: Sequence[ListedPrice], *, service: str, region: str) -> ServiceList:
    """Prices of the first tier, on demand, in a list.

    Args:
        lines: of the list, as CSV.
        wanted: prices to look for, each of which it has to have but those of rows.
        service: its name in the price list.
        region: whose list it is.

    Raises:
        JobError: it is no list, lacks a price, or has two for one; named.
    """
    where = f"price list of {service} for {region}"
    rows = _rows(lines, where)
    about, header = _header(rows, where)
    at = {name: i for i, name in enumerate(header)}
    needed = {"TermType", "Currency", "StartingRange", "PricePerUnit", *(name for each in wanted for name in each.columns)}
    if missing := sorted(needed - set(at)):
        raise JobError(f"{where} has no column {missing[0]}", remedy=BY_HAND)
    tests = [(each, [(at[name], _matcher(name, value)) for name, value in each.columns.items()]) for each in wanted]
    found: dict[ListedPrice, set[float]] = {each: set() for each in wanted}
    term, currency, start, price = (at[name] for name in ("TermType", "Currency", "StartingRange", "PricePerUnit"))
    for row in rows:
        if len(row) != len(header):
            raise JobError(f"{where}: a row has {len(row)} columns instead of {len(header)}", remedy=BY_HAND)
        if row[term] != "OnDemand" or row[currency] != "USD" or row[start] not in ("0", ""):
            continue
        for each, columns in tests:
            if all(matches(row[i]) for i, matches in columns) and (usd := _usd(row[price], where)) > 0:  # 0 within a free tier
                found[each].add(usd)
    return ServiceList(
        service=service,
        region=region,
        as_of=_date(about.get("Publication Date", ""), where),
        prices={str(each): _agreed(each, usd, where) for each, usd in found.items() if usd or not each.row},
    )


def refreshed(file: PriceFile, lists: Sequence[ServiceList], region: str) -> tuple[PriceFile, list[PriceChange]]:
    """A price file with the prices of newer lists, and what has changed. What they do not have stays, with its date.

    Args:
        file: to begin with.
        lists: of one region.
        region: theirs. Prices of another one that stay are marked as not verified.
    """
    name = f"aws-{region}" if not file.name or file.name.startswith("aws-") else file.name  # a file of the user's own keeps its name
    prices = {price: (usd, each) for each in lists for price, usd in each.prices.items()}
    changes: list[PriceChange] = []

    def newer(table: Any, text: str) -> Any:
        own = {key.name: prices[f"{text}.{key.name}"] for key in fields(table) if f"{text}.{key.name}" in prices}
        if not own:
            source = f"{table.source}; of {file.name}, not of {region}"
            return replace(table, verified=False, source=source) if file.name not in ("", name) else table
        listed = next(iter(own.values()))[1]
        for key, (usd, _) in own.items():
            changes.append(PriceChange(price=f"{text}.{key}", before_usd=getattr(table, key), usd=usd, as_of=listed.as_of))
        source = f"AWS price list, {listed.service}, {region}, first tier, on demand"
        return replace(table, as_of=listed.as_of, source=source, verified=True, **{key: usd for key, (usd, _) in own.items()})

    tables = {f.name: getattr(file, f.name) for f in fields(file) if f.name not in ("name", "as_of")}
    made: dict[str, Any] = {
        key: tuple(newer(row, f"{key} {row.name}") for row in table) if isinstance(table, tuple) else newer(table, key)
        for key, table in tables.items()
        if table
    }
    functions: Dated | None = made.get("functions")
    return replace(file, name=name, as_of=functions.as_of if functions else file.as_of, **made), changes


def file_text(file: PriceFile) -> str:
    """A price file as text, which `reading.read` reads."""
    tables = {name: table for name, table in plain(file).items() if table != []}
    return "# List prices, in US dollars, for --prices FILE.\n" + toml_text(tables)


def _header(rows: Iterator[list[str]], where: str) -> tuple[dict[str, str], list[str]]:
    """What a list says of itself, and the names of its columns."""
    about: dict[str, str] = {}
    for _, row in zip(range(_HEADER_LINES), rows, strict=False):
        if row[:1] == ["SKU"]:
            return about, row
        if len(row) == 2:
            about[row[0]] = row[1]
    raise JobError(f"{where} has no row of column names", remedy=BY_HAND)


def _agreed(price: ListedPrice, usd: Collection[float], where: str) -> float:
    """The only price that was found."""
    if not usd:
        raise JobError(f"{where} has no price for {price}", remedy=BY_HAND)
    if len(usd) > 1:
        raise JobError(f"{where} has {len(usd)} prices for {price}: {', '.join(f'{one:g}' for one in sorted(usd))}", remedy=BY_HAND)
    return next(iter(usd))


def _rows(lines: Iterable[str], where: str) -> Iterator[list[str]]:
    try:
        yield from csv.reader(lines)
    except csv.Error as e:
        raise JobError(f"{where} is no CSV: {e}", remedy=BY_HAND) from None


def _matcher(column: str, value: str) -> Callable[[str], bool]:
    if column != "usageType":
        return value.__eq__
    pattern = re.compile(rf"(?:[A-Z0-9]+-)?{re.escape(value)}")  # EUC1-Requests-Tier1
    return lambda text: pattern.fullmatch(text) is not None


def _usd(text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise JobError(f"{where}: {text!r} is no price", remedy=BY_HAND) from None


def _date(text: str, where: str) -> str:
    try:
        return datetime.datetime.fromisoformat(text).date().isoformat()
    except ValueError:
        raise JobError(f"{where}: {text!r} is no date of publication", remedy=BY_HAND) from None
