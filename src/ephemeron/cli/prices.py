"""`ephemeron prices`: what price lists hold, and newer ones from the public price list of AWS."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from ephemeron.errors import JobError, ServiceUnreachable

if TYPE_CHECKING:
    from ephemeron.prices.aws_list import Fetch, PriceChange
    from ephemeron.prices.reading import PriceFile

BASE_URL = "https://pricing.us-east-1.amazonaws.com"
LINE_BYTES = 1 << 20
SERVICES = ("lambda", "s3", "elasticache", "fargate", "ec2")


@click.group(short_help="List prices with their dates; fetch newer ones.")
def prices() -> None:
    """List prices of functions, channels and machines with their dates, and fetch newer ones.

    \b
    ephemeron prices list                                          the built-in list
    ephemeron prices refresh --out prices.toml                     newest list prices of us-east-1; needs no account
    ephemeron prices refresh --region eu-central-1 --service lambda --service s3
    ephemeron plan job.toml --platform aws --prices prices.toml    plan with them
    """


@prices.command("list")
@click.option("--prices", "file", type=click.Path(path_type=Path), help="Price file instead of the built-in prices.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line: one for each table.")
def list_command(file: Path | None, as_json: bool) -> None:
    """Show the tables of a price list: date, whether compared with its source, values, source."""
    import datetime

    from rich.table import Table

    from ephemeron.cli.terminal import make_console
    from ephemeron.prices import age_warning
    from ephemeron.prices.reading import read

    found = read(file)
    rows = list(_rows(found))
    if as_json:
        for row in rows:
            click.echo(json.dumps({"list": found.name, **row}))
        return
    click.echo(f"{found.name}, {found.as_of} ({file or 'built in'})")
    table = Table("table", "date", "verified", "values", "source", box=None, pad_edge=False)
    for row in rows:
        values = ", ".join(f"{key} {value:.12g}" for key, value in row["values"].items())
        table.add_row(row["table"], row["as_of"], "yes" if row["verified"] else "no", values, row["source"])
    make_console(for_tables=True).print(table)
    if warning := age_warning(found.as_of, datetime.date.today()):
        click.echo(f"note: {warning}", err=True)


@prices.command("refresh")
@click.option("--provider", type=click.Choice(["aws"]), default="aws", show_default=True, help="Whose public price list is asked.")
@click.option("--region", default="us-east-1", show_default=True, metavar="REGION", help="Region of the prices.")
@click.option(
    "--service",
    "services",
    multiple=True,
    type=click.Choice(SERVICES),
    help="Service whose prices are fetched (repeatable); the list of ec2 has some hundreds of MB.  [default: all but ec2]",
)
@click.option("--from", "base", type=click.Path(path_type=Path), help="Price file to begin with.  [default: the built-in prices]")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="File to write.  [default: prices-aws-REGION.toml]")
@click.option("--base-url", default=BASE_URL, show_default=True, metavar="URL", help="Another place that has the price list.")
@click.option("--timeout-s", type=click.FloatRange(0, min_open=True), default=30.0, show_default=True, help="Longest wait for an answer.")
@click.option("--json", "as_json", is_flag=True, help="Print the changes as one line of JSON.")
def refresh_command(
    provider: str,
    region: str,
    services: tuple[str, ...],
    base: Path | None,
    out: Path | None,
    base_url: str,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Fetch the newest list prices, and write a price file for --prices.

    \b
    ephemeron prices refresh
    ephemeron prices refresh --region eu-central-1 --service lambda --out frankfurt.toml
    ephemeron prices refresh --service ec2 --from frankfurt.toml --region eu-central-1 --out frankfurt.toml

    Prices that are not fetched stay as they are, with their dates; those of another region are marked as not verified. Without all
    prices of a service nothing is written. AWS's price list is public: no account is used.
    """
    from ephemeron.config.typed import plain
    from ephemeron.prices.aws_list import USUAL, fetch_list, file_text, refreshed
    from ephemeron.prices.reading import read

    file, fetch = read(base), _fetcher(base_url, timeout_s)
    lists = [fetch_list(fetch, service, region, file) for service in dict.fromkeys(services or USUAL)]
    made, changes = refreshed(file, lists, region)
    path = out or Path(f"prices-{provider}-{region}.toml")
    try:
        path.write_text(file_text(made), encoding="utf-8")
    except OSError as e:
        raise JobError(f"--out {path} cannot be written: {e.strerror}", remedy="name another file") from None
    if as_json:
        click.echo(json.dumps({"file": str(path), "name": made.name, "as_of": made.as_of, "prices": plain(changes)}))
        return
    for change in changes:
        click.echo(f"{change.price}  {_change(change)}  ({change.as_of})")
    click.echo(f"wrote {path}; use it with: --prices {path}")


def _change(change: PriceChange) -> str:
    if change.before_usd == change.usd:
        return f"{change.usd:.12g}, as before"
    before = "" if change.before_usd is None else f"{change.before_usd:.12g} → "
    return f"{before}{change.usd:.12g}"


def _rows(file: PriceFile) -> Iterator[dict[str, Any]]:
    from dataclasses import fields

    from ephemeron.prices.reading import Dated

    shared = {"name", *(f.name for f in fields(Dated))}
    for each in fields(file):
        found = getattr(file, each.name)
        for row in found if isinstance(found, tuple) else (found,):
            if isinstance(row, Dated):
                name = getattr(row, "name", "")
                values = {f.name: value for f in fields(row) if f.name not in shared and (value := getattr(row, f.name)) is not None}
                yield {
                    "table": f"{each.name} {name}".strip(),
                    "as_of": row.as_of,
                    "verified": row.verified,
                    "values": values,
                    "source": row.source,
                }


def _fetcher(base_url: str, timeout_s: float) -> Fetch:
    """Documents below a URL.

    Raises:
        JobError: it is no URL, or others could read and change what it sends.
    """
    from ephemeron.communication.rpc import is_loopback

    parts = urlsplit(base_url)
    if not parts.hostname or not (parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname))):
        raise JobError(f"--base-url {base_url!r} is no address of a price list", remedy="give https://HOST; http is for this machine alone")
    return lambda path, nbytes: _lines(base_url.rstrip("/") + path, nbytes, timeout_s)


def _lines(url: str, most_bytes: int, timeout_s: float) -> Iterator[str]:
    """Lines of a document, as they arrive.

    Raises:
        ServiceUnreachable: it cannot be had as a whole.
    """
    import http.client
    import urllib.error
    import urllib.request

    from ephemeron.prices.aws_list import BY_HAND

    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as reply:
            expected, nbytes = reply.headers.get("Content-Length"), 0
            while line := reply.readline(LINE_BYTES):
                nbytes += len(line)
                if nbytes > most_bytes:
                    raise ServiceUnreachable(f"{url} is longer than {most_bytes} bytes; {BY_HAND}")
                yield line.decode(errors="replace")
            if expected is not None and nbytes != int(expected):
                raise ServiceUnreachable(f"{url} ended after {nbytes} of {expected} bytes; try again, or {BY_HAND}")
    except urllib.error.HTTPError as e:
        raise ServiceUnreachable(f"{url} answers {e.code} {e.reason}; {BY_HAND}") from None
    except (OSError, http.client.HTTPException) as e:
        reason = getattr(e, "reason", None) or e
        raise ServiceUnreachable(f"{url} cannot be reached: {getattr(reason, 'strerror', None) or reason}; {BY_HAND}") from None
