"""`ephemeron schema`: JSON schemas of the files that users write, for editors."""

from __future__ import annotations

import click


@click.command(short_help="Print the JSON schema of job files, for editors.")
@click.argument("document", type=click.Choice(["job"]))
def schema(document: str) -> None:
    """Print the JSON schema of a file format, so that editors complete and check such files.

    \b
    ephemeron schema job > job.schema.json

    Name it in the first line of a job file: `#:schema ./job.schema.json` in TOML (Taplo, Even Better TOML), or
    `"$schema": "./job.schema.json"` in JSON.
    """
    from ephemeron.training.job.schema import job_schema

    click.echo(job_schema(), nl=False)
