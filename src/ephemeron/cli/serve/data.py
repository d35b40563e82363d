"""`ephemeron serve data`: a data service that training jobs share. `ephemeron data status` shows what it does."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from ephemeron.cli.bounds import label_option

service_folder = click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the service's state.  [default: ~/.ephemeron/data-service]",
)


@click.command("data")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="0: any free one.")
@click.option("--allow-remote", is_flag=True, help="Let other machines in, if --host can be reached from them.")
@click.option("--shards", type=click.IntRange(1), default=1, show_default=True, help="Shards of each flow.")
@click.option("--loaders", type=click.IntRange(1), help="Loader functions of each flow, at most.  [default: one per CPU]")
@click.option(
    "--loader-memory-mb", type=click.IntRange(128), default=1769, show_default=True, help="Memory quota of a loader; CPU in proportion."
)
@click.option(
    "--buffer-mb",
    type=click.FloatRange(1),
    default=1024.0,
    show_default=True,
    help="Memory for samples that are loaded ahead, for each flow.",
)
@click.option(
    "--cache-mb",
    type=click.FloatRange(0),
    default=1024.0,
    show_default=True,
    help="Memory for samples that are kept for later epochs and other jobs, for each flow.",
)
@click.option(
    "--idle-s",
    type=click.FloatRange(1),
    default=60.0,
    show_default=True,
    help="Seconds without a reader after which the loaders of a flow end.",
)
@service_folder
@label_option
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON when it is ready.")
def serve_data(
    host: str,
    port: int,
    allow_remote: bool,
    shards: int,
    loaders: int | None,
    loader_memory_mb: int,
    buffer_mb: float,
    cache_mb: float,
    idle_s: float,
    folder: Path | None,
    labels: dict[str, str],
    as_json: bool,
) -> None:
    """Load data for many training jobs: serves until Ctrl-C.

    Jobs that read the same flow share its loaders, its cache and, if requested, the order of samples. Loaders are functions
    with a memory quota and a timeout; their number follows demand, and is zero without readers.

    \b
    ephemeron serve data --port 7070 --loaders 4 --cache-mb 4096
    # in a training script
    reader = RemoteReader("127.0.0.1:7070", token=...)    # or EPHEMERON_DATA_TOKEN
    batches = flow.prepare_read(reader).to_shuffled(batch_size=128, sampling="shared")

    The token is that of EPHEMERON_DATA_TOKEN, or one that is made and kept in FOLDER/token. A service that was killed
    continues when it is started again with the same folder.
    """
    from ephemeron.communication.rpc import is_loopback
    from ephemeron.config.paths import home
    from ephemeron.config.typed import plain
    from ephemeron.data.service import ServiceSettings
    from ephemeron.data.service.serving import DataSettings
    from ephemeron.errors import JobError
    from ephemeron.runs import services

    place = (folder or home() / "data-service").absolute()
    if not allow_remote and not is_loopback(host):
        raise JobError(f"{host!r} can be reached from other machines", remedy="add --allow-remote if that is meant")
    settings = ServiceSettings(
        shards=shards,
        loaders=loaders or os.cpu_count() or 1,
        loader_memory_mb=loader_memory_mb,
        buffer_mb=buffer_mb,
        cache_mb=cache_mb,
        idle_s=idle_s,
        host=host,
        port=port,
        allow_remote=allow_remote,
    )
    services.start(
        "data",
        plain(DataSettings(folder=str(place), settings=settings)),
        functions=settings.loaders,
        memory_mb=settings.loader_memory_mb,
        lifetime_s=settings.loader_lifetime_s,
        labels=labels,
        on_ready=lambda said: click.echo(json.dumps(said.document) if as_json else said.text),
    )
