"""What things cost, from dated files that name their sources."""

from __future__ import annotations

import datetime
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from ephemeron.errors import JobError
from ephemeron.events import Traffic

DEFAULT = "aws-us-east-1"

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
    server_hour_usd: float = 0.0
    """Per hour and parameter server."""

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


def load_prices(service: str, file: str | Path | None = None) -> Prices:
    """Prices with a channel of the given service (`objects`, `cache`, `server`, `memory`).

    Raises:
        JobError: the file is absent or lacks a value.
    """
    try:
        raw = tomllib.loads(_text(file))
        storage: dict[str, float] = {}
        if service == "objects":
            storage = {k: float(raw["objects"][k]) for k in ("put_usd", "get_usd", "list_usd", "delete_usd")}
        elif service == "cache":
            ecpu = float(raw["cache"]["ecpu_usd"])
            storage = {"put_usd": ecpu, "get_usd": ecpu, "list_usd": ecpu, "delete_usd": ecpu, "byte_usd": ecpu / 1000}
        elif service == "server":
            storage = {"server_hour_usd": float(raw["server"]["hour_usd"])}
        return Prices(
            name=str(raw["name"]),
            as_of=_date(raw["as_of"]),
            gb_second_usd=float(raw["functions"]["gb_second_usd"]),
            invocation_usd=float(raw["functions"]["invocation_usd"]),
            **storage,
        )
    except (KeyError, ValueError, TypeError) as e:
        raise JobError(f"price file {file or DEFAULT}: missing or bad value {e}", remedy=_REMEDY) from None


def load_machines(file: str | Path | None = None) -> tuple[Machine, ...]:
    """Virtual machines of a price file, in its order; none where it lists none.

    Raises:
        JobError: the file is absent, or a value of a `[[machine]]` is missing or makes no sense; named.
    """
    try:
        raw = tomllib.loads(_text(file))
        as_of, rows = _date(raw["as_of"]), raw.get("machine", [])
    except (KeyError, ValueError) as e:
        raise JobError(f"price file {file or DEFAULT}: missing or bad value {e}", remedy=_REMEDY) from None
    where = f"price file {file or DEFAULT}: machine"
    _must(isinstance(rows, list), f"{where} should be an array, written [[machine]]")
    machines = tuple(_machine(row, as_of, f"{where} {i}") for i, row in enumerate(rows, start=1))
    names = [m.name for m in machines]
    twice = sorted({n for n in names if names.count(n) > 1})
    _must(not twice, f"{where} {', '.join(twice)} is there twice")
    return machines


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


_REMEDY = "compare it with the built-in one"


def _text(file: str | Path | None) -> str:
    if not file:
        return files(__package__).joinpath(f"{DEFAULT}.toml").read_text()
    try:
        return Path(file).read_text()
    except FileNotFoundError:
        raise JobError(f"price file {file} does not exist") from None
    except OSError as e:
        raise JobError(f"price file {file} cannot be read: {e.strerror}") from None


def _date(as_of: Any) -> str:
    return as_of.isoformat() if isinstance(as_of, datetime.date) else str(as_of)


def _machine(row: Any, as_of: str, where: str) -> Machine:
    _must(isinstance(row, Mapping), f"{where} should be a table of names and values")
    name = row.get("name")
    _must(isinstance(name, str) and name != "", f"{where}: name = {name!r} should be a word")
    where = f"{where} ({name})"
    texts, numbers = {"name", "source"}, {"vcpus", "memory_mb", "hour_usd", "boot_s"}
    unknown = sorted(row.keys() - texts - numbers)
    _must(not unknown, f"{where} has the unknown key {', '.join(unknown)}")
    values: dict[str, float] = {}
    for key in sorted(numbers):
        value = row.get(key)
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        _must(good and value >= 0, f"{where}: {key} = {value!r} should be a number, and not negative")
        _must(value > 0 or key in ("hour_usd", "boot_s"), f"{where}: {key} = {value!r} should be above 0")
        values[key] = float(value)
    source = row.get("source")
    _must(isinstance(source, str) and source != "", f"{where}: source = {source!r} should say where the price is from")
    return Machine(name=name, source=source, as_of=as_of, **values)


def _must(holds: bool, problem: str) -> None:
    if not holds:
        raise JobError(problem, remedy=_REMEDY)
