"""`ephemeron serve`: services, each until Ctrl-C."""

from __future__ import annotations

import click

from ephemeron.cli.serve.dashboard import dashboard
from ephemeron.cli.serve.data import serve_data
from ephemeron.cli.serve.rendezvous import rendezvous
from ephemeron.cli.serve.sparse import sparse


@click.group(short_help="Serve a dashboard, data, parameters or introductions.")
def serve() -> None:
    """Serve pages of runs, data, parameters or introductions, until Ctrl-C.

    \b
    ephemeron serve dashboard                    live pages of runs in a browser
    ephemeron serve data --port 7070             load data for many training jobs
    ephemeron serve sparse --shards 2            keep the tables of sparse models
    ephemeron serve rendezvous                   introduce functions behind address translators to each other
    """


for _command in (dashboard, serve_data, sparse, rendezvous):
    serve.add_command(_command)
