"""`ephemeron doctor`: checks of a platform and a channel, one line for each."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click

from ephemeron.cli.clouds import cloud_options, cloud_settings, taken
from ephemeron.training.job import PLATFORMS


@click.command()
@click.option("--platform", type=click.Choice(PLATFORMS), default="local", show_default=True, help="Platform to check.")
@cloud_options
@click.option(
    "--channel",
    metavar="ADDRESS",
    default="",
    help="Channel to check.  [default: a folder on local; elsewhere none, and then no function is called]",
)
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Functions that have to run at once.")
@click.option("--no-call", is_flag=True, help="Skip the call of a function, which is billed on a cloud.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line: step, ok, text.")
def doctor(platform: str, channel: str, workers: int, no_call: bool, as_json: bool, **flags: Any) -> None:
    """Check credentials, permissions, quotas, and the round trip of one object and one function.

    \b
    ephemeron doctor                                                      this machine
    ephemeron doctor --platform aws --channel s3://bucket/prefix          an account, a function, a bucket
    ephemeron doctor --platform ray --channel redis://CACHE:6379          a cluster and all its nodes

    Each line is the result of one check. The first check that fails names the problem and a remedy, and the command ends with
    exit code 2. The function that is called puts and reads one object; a cloud bills a few seconds of it.
    """
    from ephemeron.training.driver.diagnostics import diagnose

    settings = cloud_settings(platform, taken(flags))
    for finding in diagnose(platform, channel=channel, settings=settings, call=not no_call, workers=workers):
        if as_json:
            click.echo(json.dumps(dataclasses.asdict(finding)))
        else:
            mark = click.style("ok  ", fg="green") if finding.ok else click.style("FAIL", fg="red")
            click.echo(f"{mark}  {finding.step:<9}  {finding.text}")
        if not finding.ok:
            click.get_current_context().exit(2)
