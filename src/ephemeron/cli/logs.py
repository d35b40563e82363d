"""`ephemeron logs`: output of a run's functions."""

from __future__ import annotations

import click


@click.command()
@click.argument("run")
@click.option("--rank", type=click.IntRange(min=0), help="Show only functions of this rank.")
@click.option("--follow", "-f", is_flag=True, help="Continue until the run has ended.")
def logs(run: str, rank: int | None, follow: bool) -> None:
    """Print the output of the functions of RUN, with warnings and whole tracebacks.

    For functions on a cloud it prints the output of those that failed, and names the command that prints the rest.
    """
    from ephemeron.training.driver import run_dir
    from ephemeron.training.driver.logs import elsewhere, lines

    folder = run_dir.find(run)
    said = False
    for line in lines(folder, rank=rank, follow=follow):
        said = True
        click.echo(f"{line.source} | {line.text}")
    if rest := elsewhere(folder):
        click.echo(f"everything that functions print there: {rest}", err=True)
    elif not said:
        click.echo(f"the functions of {folder.run_id} have printed nothing", err=True)
