"""`ephemeron serve dashboard`: live pages of runs and studies in a browser."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

import click

TOKEN_VARIABLE = "EPHEMERON_DASHBOARD_TOKEN"


@click.command("dashboard")
@click.argument("roots", nargs=-1, type=click.Path(path_type=Path), metavar="[ROOT]...")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=7080, show_default=True, help="0: any free one.")
@click.option("--token", help=f"Secret that pages need.  [default: {TOKEN_VARIABLE}, or a new one]")
@click.option("--allow-remote", is_flag=True, help="Let other machines in, if --host can be reached from them.")
@click.option("--name", "names", multiple=True, metavar="NAME", help="Further host name under which it is reached.")
@click.option("--open", "show", is_flag=True, help="Open the page in a browser.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON when it is ready.")
def dashboard(
    roots: tuple[Path, ...], host: str, port: int, token: str | None, allow_remote: bool, names: tuple[str, ...], show: bool, as_json: bool
) -> None:
    """Show runs, studies, data services and tasks live: serves until Ctrl-C.

    ROOT: folders with runs and studies.  [default: the home folder, and `out` of this folder]

    \b
    ephemeron serve dashboard
    ephemeron serve dashboard out --port 0 --open

    Open the address that it prints: it has the token, which the browser then keeps as a cookie. It reads what runs write, so
    runs go on without it, and it shows everything again when it is started again.
    """
    from ephemeron.config.paths import home
    from ephemeron.dashboard.server import serve
    from ephemeron.errors import JobError

    for root in roots:
        if not root.is_dir():
            raise JobError(f"there is no folder {root}")
    shown = list(roots) or [home(), *([Path("out")] if Path("out").is_dir() else [])]
    secret = os.environ.get(TOKEN_VARIABLE, "") if token is None else token
    if token is None and not secret:
        secret = secrets.token_urlsafe(32)

    def ready(address: str) -> None:
        click.echo(json.dumps({"address": address}) if as_json else f"dashboard at {address}; Ctrl-C ends it")
        if show:
            click.launch(address)

    serve(shown, host=host, port=port, token=secret, allow_remote=allow_remote, on_ready=ready, names=names)
