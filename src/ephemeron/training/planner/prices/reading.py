"""Price files as checked tables: every mistake is one line that names file, table and key. Pure but for the file itself."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ephemeron.config.toml import parse_toml
from ephemeron.errors import JobError

DEFAULT = "aws-us-east-1"

REMEDY = "compare it with the built-in one"


@dataclass(frozen=True, slots=True)
class PriceKeys:
    """Keys of one table. All are numbers, not negative; a table may also have `source`, `verified` and `as_of`."""

    required: Set[str]
    optional: Set[str] = frozenset()
    positive: Set[str] = frozenset()
    """Those for which 0 makes no sense."""
    named: bool = False
    """An array of tables, each with `name` and `source`."""


TABLES = {
    "functions": PriceKeys({"gb_second_usd", "invocation_usd"}, {"arm64_gb_second_usd"}),
    "limits": PriceKeys({"burst", "burst_s"}, positive={"burst", "burst_s"}),
    "objects": PriceKeys({"put_usd", "get_usd", "list_usd", "delete_usd"}),
    "express": PriceKeys({"put_usd", "get_usd", "delete_usd", "gb_up_usd", "gb_down_usd", "gb_month_usd"}),
    "cache": PriceKeys({"ecpu_usd", "gb_hour_usd"}, {"least_gb"}),
    "server": PriceKeys({"hour_usd"}),
    "egress": PriceKeys({"gb_usd"}, {"free_gb_month"}),
    "spot": PriceKeys({"share"}, positive={"share"}),
    "fargate": PriceKeys({"vcpu_hour_usd", "gb_hour_usd", "boot_s"}, {"arm64_vcpu_hour_usd", "arm64_gb_hour_usd"}),
    "machine": PriceKeys(
        {"vcpus", "memory_mb", "hour_usd", "boot_s"}, {"arm64"}, positive={"vcpus", "memory_mb"}, named=True
    ),
    "gpu": PriceKeys({"hour_usd", "boot_s", "memory_mb"}, {"speedup"}, positive={"hour_usd", "speedup", "memory_mb"}, named=True),
}  # fmt: skip
"""Every table of a price file. `machine.arm64` is true or false; `gpu.speedup` is over one vCPU, where somebody knows it."""


def read(file: str | Path | None = None) -> Mapping[str, Any]:
    """The tables of a price file, checked; `as_of` of the file and of every table as ISO text. Not to be changed.

    Raises:
        JobError: the file is absent, or a table or key is unknown, missing or of a value that makes no sense; named.
    """
    return _checked(_text(file), f"price file {file or DEFAULT}")


@lru_cache(maxsize=8)
def _checked(text: str, where: str) -> Mapping[str, Any]:
    """The same of one text, which a plan asks for many times."""
    raw = parse_toml(text, where=where, remedy=REMEDY)
    must("as_of" in raw, f"{where}: as_of, the date of the prices, is missing")
    _known(raw.keys(), {"name", "as_of", *TABLES}, where)
    _text_of(raw, "name", where)
    read: dict[str, Any] = {"name": raw.get("name"), "as_of": _date(raw["as_of"], where)}
    for name, keys in TABLES.items():
        if name not in raw:
            continue
        if not keys.named:
            read[name] = _table(raw[name], keys, read["as_of"], f"{where}: [{name}]")
            continue
        rows = raw[name]
        must(isinstance(rows, list), f"{where}: {name} should be an array, written [[{name}]]")
        read[name] = [_named(row, keys, read["as_of"], f"{where}: {name} {i}") for i, row in enumerate(rows, start=1)]
        names = [row["name"] for row in read[name]]
        twice = sorted({n for n in names if names.count(n) > 1})
        must(not twice, f"{where}: {name} {', '.join(twice)} is there twice")
    return read


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


def _named(row: Any, keys: PriceKeys, as_of: str, where: str) -> dict[str, Any]:
    must(isinstance(row, Mapping), f"{where} should be a table of names and values")
    name = row.get("name")
    must(isinstance(name, str) and name != "", f"{where}: name = {name!r} should be a word")
    where = f"{where} ({name})"
    source = row.get("source")
    found = _table({k: v for k, v in row.items() if k != "name"}, keys, as_of, where)
    must(isinstance(source, str) and source != "", f"{where}: source = {source!r} should say where the price is from")
    return {"name": name, **found}


def _table(raw: Any, keys: PriceKeys, as_of: str, where: str) -> dict[str, Any]:
    must(isinstance(raw, Mapping), f"{where} should be a table of names and values")
    numbers = {*keys.required, *keys.optional} - {"arm64"}
    _known(raw.keys(), {*keys.required, *keys.optional, "source", "verified", "as_of"}, where)
    found: dict[str, Any] = {"as_of": _date(raw.get("as_of", as_of), where), "source": _text_of(raw, "source", where)}
    for key in ("verified", "arm64"):
        found[key] = raw.get(key, key == "verified")
        must(isinstance(found[key], bool), f"{where}: {key} = {found[key]!r} should be true or false")
    for key in sorted(numbers & {*keys.required, *raw.keys()}):
        value = raw.get(key)
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        must(good and value >= 0, f"{where}: {key} = {value!r} should be a number, and not negative")
        must(value > 0 or key not in keys.positive, f"{where}: {key} = {value!r} should be above 0")
        found[key] = float(value)
    return found


def _known(keys: Set[str], known: Set[str], where: str) -> None:
    unknown = sorted(keys - known)
    must(not unknown, f"{where} has the unknown key {', '.join(unknown)}; known are {', '.join(sorted(known))}")


def _text_of(raw: Mapping[str, Any], key: str, where: str) -> str:
    value = raw.get(key, "")
    must(isinstance(value, str), f"{where}: {key} = {value!r} should be text")
    return str(value)


def _date(value: Any, where: str) -> str:
    """ISO text of a date; text of other forms stays, since its age is warned of."""
    must(isinstance(value, str | datetime.date), f"{where}: as_of = {value!r} should be a date")
    return value.isoformat() if isinstance(value, datetime.date) else str(value)
