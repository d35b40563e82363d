"""`ephemeron platforms`: where functions can run from here, what has to be installed for it, limits and prices.

The command sends nothing to an account, a cluster or a network, so it is instant and costs nothing. `ephemeron doctor` asks a
platform whether it works.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass

import click
from rich.table import Table

from ephemeron.cli.terminal import make_console
from ephemeron.config.typed import plain
from ephemeron.functions.base import Limits
from ephemeron.units import human_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformRow:
    """One platform, as far as it is known without asking it."""

    name: str
    available: bool
    """Everything that it needs is installed."""
    missing: tuple[str, ...]
    """Modules that are not installed."""
    install: str
    """Command that installs them; empty where nothing is missing."""
    needs: str
    """Further requirements."""
    limits: Limits
    limits_from: str
    prices: str
    """Name and date of the price list; what is billed by it."""


def rows() -> list[PlatformRow]:
    """All platforms of this release."""
    from ephemeron.training.driver.launch import platform_limits
    from ephemeron.training.job import PLATFORMS
    from ephemeron.training.planner.prices import load_prices

    out = []
    for name in PLATFORMS:
        module, extra, needs, limits_from = _about(name)
        missing = tuple(m for m in (module, "torch") if m and not _installed(m))
        extras = ",".join(e for m, e in ((module, extra), ("torch", "torch")) if m in missing)
        prices = load_prices("objects", platform=name)
        own = f"{prices.name}, {prices.as_of}"
        what = f"${prices.gb_second_usd:.10f}".rstrip("0") + f" per GB-second ({own}; --prices FILE for others)"
        if name not in ("aws", "aws-microvm"):
            what = f"as if on AWS: {what}"
        out.append(
            PlatformRow(
                name=name,
                available=not missing,
                missing=missing,
                needs=needs,
                limits=platform_limits(name),
                limits_from=limits_from,
                prices=what,
                install=f"pip install 'ephemeron[{extras}]'" if missing else "",
            )
        )
    return out


def _about(name: str) -> tuple[str, str, str, str]:
    """Module, extra, what else is needed, and where limits come from."""
    from ephemeron.functions.registry import CLOUDS, cloud

    if name in CLOUDS:
        where = cloud(name)
        return where.module, where.extra, where.needs, where.limits_from
    if name == "simulated":
        return "", "", "nothing; time is virtual", "AWS Lambda's quotas"
    return "", "", "nothing", "this machine's memory; the rest as on AWS Lambda"


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # something stands in its place in sys.modules
        return False


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
def platforms(as_json: bool) -> None:
    """List where functions can run, what is missing for it, limits and prices."""
    found = rows()
    if as_json:
        for row in found:
            click.echo(json.dumps(plain(row)))
        return
    table = Table("platform", "installed", "needs", "memory MB", "lifetime", "at once", "limits from", box=None, pad_edge=False)
    for row in found:
        limits = row.limits
        table.add_row(
            row.name,
            "yes" if row.available else row.install,
            row.needs,
            f"{limits.memory_min_mb}-{limits.memory_max_mb}",
            human_seconds(limits.lifetime_s),
            str(limits.concurrency),
            row.limits_from,
        )
    make_console(piped_width=160).print(table)
    for text in dict.fromkeys(row.prices for row in found):
        click.echo(f"prices of {', '.join(row.name for row in found if row.prices == text)}: {text}")
