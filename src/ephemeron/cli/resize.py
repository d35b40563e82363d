"""`ephemeron resize`: other functions for a running run."""

from __future__ import annotations

import json

import click

from ephemeron.units import human_count


@click.command()
@click.argument("run")
@click.option("--workers", type=click.IntRange(min=1), help="Number of functions.")
@click.option("--memory-mb", type=click.IntRange(min=1), help="Quota of each function, MB.")
@click.option("--aggregators", type=click.IntRange(min=1), help="K of K-REDUCE.  [default: as before]")
@click.option("--batch-size", type=click.IntRange(min=1), help="Samples per iteration of each function.  [default: as before]")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
def resize(run: str, workers: int | None, memory_mb: int | None, aggregators: int | None, batch_size: int | None, as_json: bool) -> None:
    """Change the functions of RUN while it trains.

    \b
    ephemeron resize last --workers 8
    ephemeron resize RUN --workers 8 --memory-mb 3008
    ephemeron resize RUN --workers 2 --batch-size 64       fewer functions, the same global batch

    RUN is a name, its beginning, or `last`. The functions agree on an iteration from which on the new ones train: one of the next
    iterations if the job samples globally (data.sampling), else the first one of an epoch. New functions are started ahead, and
    load meanwhile. Weights depend on these changes alone, not on what dies on the way.
    """
    from ephemeron.training.driver import api, run_dir

    found = api.resize(run, workers=workers, memory_mb=memory_mb, aggregators=aggregators, batch_size=batch_size)
    name = run_dir.find(run).run_id
    if as_json:
        told: dict[str, object] = {"run_id": name, "from_iteration": None, "workers": None, "memory_mb": None}
        if found is not None:
            told |= {"from_iteration": found.from_iteration, "workers": found.workers, "memory_mb": found.memory_mb}
        click.echo(json.dumps(told))
    elif found is None:
        click.echo(f"asked {name}; its functions have not answered yet, see: ephemeron logs {name}")
    else:
        who = f"{human_count(found.workers, 'function')} of {found.memory_mb} MB"
        click.echo(f"{name}: {who} from iteration {found.from_iteration} on (epoch {found.from_epoch})")
