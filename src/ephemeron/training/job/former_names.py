"""Names that options of a run had in earlier releases: users' are refused with the name of today, stored ones are read.

Flags of commands are one word each, so they keep the names that options had before they were in tables.
"""

from __future__ import annotations

from collections.abc import Mapping

from ephemeron.errors import JobError

FLAGS: Mapping[str, str] = {
    "exchange": "exchange.quantity",
    "local_steps": "exchange.local_steps",
    "outer_optimizer": "exchange.outer_optimizer",
    "compression": "exchange.compression",
    "ranks_per_machine": "exchange.ranks_per_machine",
    "stages": "stages.count",
    "replicas": "stages.replicas",
    "micro_batches": "stages.micro_batches",
    "schedule": "stages.schedule",
    "recompute": "stages.recompute",
    "placement": "stages.placement",
    "regions": "regions.file",
    "region_plan": "regions.plan",
    "region_sync": "regions.sync",
    "region_compression": "regions.compression",
    "exchange_every": "regions.exchange_every",
}
"""Flags whose options are in a table, and the names of these."""
FORMER_NAMES: Mapping[str, str] = {
    **FLAGS,
    "resize_policy": "resize.policy",
    "adapt": "resize.adapt",
    "average_every": "regions.exchange_every",
    "least_regions": "regions.least_regions",
    "region_replan_every_s": "regions.replan_every_s",
    **{f"{word}_{name}": f"regions.{name}" for word in ("group", "region") for name in ("store", "communicator", "relay", "authority")},
    "groups": "regions.region",
}
"""Names of options in earlier releases, and their names now."""
_LISTS = {"schedule": "resize.schedule", "regions": "regions.region"}
"""Options that were a text or a list, and the names of the lists."""
_TABLES = frozenset(name.partition(".")[0] for name in FORMER_NAMES.values())


def _name_of_today(name: str, value: object) -> str | None:
    """Name of an option that an earlier release knew by another one; None: it has this one."""
    if name in _TABLES and not isinstance(value, (str, int, list, tuple)):
        return None
    return (_LISTS if isinstance(value, (list, tuple)) else FORMER_NAMES).get(name) or FORMER_NAMES.get(name)


def refuse_former_names(options: Mapping[str, object], *, where: str = "") -> None:
    """Refuses names that options of a run had in earlier releases.

    Args:
        options: what is given.
        where: prefix of the message.

    Raises:
        JobError: with the name of today.
    """
    for name, value in options.items():
        if (now := _name_of_today(name, value)) is not None:
            written = f"[[run.{now}]]" if now in _LISTS.values() else now
            raise JobError(f"{where}{name} is now {now}", remedy=f"write {written}")


def with_names_of_today(options: Mapping[str, object]) -> dict[str, object]:
    """Options of a run that an earlier release has stored, by the names that they have now."""
    found: dict[str, object] = {}
    tables: dict[str, dict[str, object]] = {}
    for name, value in options.items():
        now = _name_of_today(name, value)
        if now is None and value is not None:
            found[name] = value
        elif now is not None and value:  # what is empty or 0 is the default
            table, _, key = now.partition(".")
            tables.setdefault(table, {})[key] = value
    return {**found, **tables}
