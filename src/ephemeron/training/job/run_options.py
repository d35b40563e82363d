"""Options of a run by dotted names, such as `stages.count`, in which values of one source override those of another one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ephemeron.training.job.spec import Configuration, ExchangeOptions, RegionOptions, ResizeOptions, StageOptions

_TABLES: Mapping[str, ExchangeOptions | StageOptions | ResizeOptions | RegionOptions] = {
    "exchange": ExchangeOptions(),
    "stages": StageOptions(),
    "resize": ResizeOptions(),
    "regions": RegionOptions(),
}
"""Tables of a configuration, with the defaults of all their keys."""
_REGIONS = ("regions.file", "regions.region")
"""Options of which one is given."""


def flat(options: Mapping[str, object]) -> dict[str, object]:
    """Options by dotted names. Of a table that is a value of its class, those that differ from their defaults.

    Args:
        options: as in `Configuration`, tables as mappings or values of their classes; dotted names stay as they are.
    """
    found: dict[str, object] = {}
    for name, value in options.items():
        usual = _TABLES.get(name)
        if usual is not None and isinstance(value, Mapping):
            found |= {f"{name}.{key}": each for key, each in value.items()}
        elif usual is not None and isinstance(value, type(usual)):
            given = {f.name: getattr(value, f.name) for f in dataclasses.fields(usual)}
            found |= {f"{name}.{key}": each for key, each in given.items() if each != getattr(usual, key)}
        else:
            found[name] = value
    return found


def nested(options: Mapping[str, object]) -> dict[str, object]:
    """The inverse of `flat`: options with tables as mappings."""
    found: dict[str, object] = {}
    tables: dict[str, dict[str, object]] = {}
    for name, value in options.items():
        table, dot, key = name.partition(".")
        if dot:
            tables.setdefault(table, {})[key] = value
        else:
            found[name] = value
    return {**found, **tables}


def open_to(own: Mapping[str, object], given: Mapping[str, object]) -> dict[str, object]:
    """Options of `own` by dotted names, without those that `given` replaces as a whole: tables that are values of their classes,
    and regions."""
    whole = [f"{name}." for name, value in given.items() if name in _TABLES and not isinstance(value, Mapping)]
    whole += _REGIONS if any(name in _REGIONS for name in flat(given)) else ()
    return {name: value for name, value in flat(own).items() if not name.startswith(tuple(whole))}


def merged(own: Mapping[str, object], given: Mapping[str, object]) -> dict[str, object]:
    """Options by dotted names: those of `given` over `own`. A table that is a value of its class replaces the other one."""
    return {**open_to(own, given), **flat(given)}


def values_of(c: Configuration) -> dict[str, object]:
    """Values of a configuration by dotted names; of its tables those that differ from their defaults."""
    return flat({f.name: getattr(c, f.name) for f in dataclasses.fields(c)})
