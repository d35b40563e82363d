"""`ephemeron partition MODEL | measure`: placement of a model's operators on devices, with a proved bound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ephemeron.cli.partition.model import OPTIMIZERS, PartitionRequest, check_placed, graph_or_model, measure, telling
from ephemeron.cli.terminal import make_console

if TYPE_CHECKING:
    from ephemeron.partition import Schedule, SearchBudget

_DEFAULT = "place"


class _Defaulting(click.Group):
    """Group with the default command `place`, whose help it shows."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [_DEFAULT, *args]
        return super().parse_args(ctx, args)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, "MODEL --devices FILE [OPTIONS]")
        formatter.write_usage(ctx.command_path, "measure MODEL --batch-size B [OPTIONS]", prefix="       ")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.commands[_DEFAULT].format_options(ctx, formatter)
        self.format_commands(ctx, formatter)


@click.group(cls=_Defaulting, short_help="Divide a model into stages for unequal devices.")
def partition() -> None:
    """Divide MODEL into stages for devices of different speed, memory and links, with a bound on the optimum.

    MODEL is path/file.py:function or module:function. The function takes the batch size and returns (nn.Module, example
    inputs). Operators are traced, compared with the model, and measured on this machine; or MODEL is a graph.json.

    \b
    ephemeron partition examples/partition/nets.py:transformer --devices examples/partition/devices.toml --batch-size 32
    ephemeron partition nets.py:net --devices devices.toml --batch-size 64 --micro-batches 16 --recompute --out cut/
    ephemeron partition nets.py:net --devices devices.toml --batch-size 8 --objective iteration
    ephemeron partition measure nets.py:net --batch-size 64 --out graph.json       measure once,
    ephemeron partition graph.json --devices devices.toml --time-limit-s 20          place often

    \b
    devices.toml:  [[devices]]                         one table each
                   name = "big"
                   memory_mb = 4096                    memory for the model
                   speed = 2.0                         relative to this machine, which is measured
                   [links]                             every pair, except those in [[links.between]]
                   bandwidth_mb_s = 1000
                   latency_s = 0.0001

    Objective throughput cuts into a pipeline whose busiest device or link is least busy; iteration seeks the shortest
    iteration of any placement. If memory does not suffice, the error names the missing bytes and changes that would fit.
    """


def _model_options(command: Any) -> Any:
    for option in (
        click.option("--threads", type=click.IntRange(1), help="Threads of PyTorch while measuring.  [default: PyTorch's own]"),
        click.option("--repeats", type=click.IntRange(3), default=9, show_default=True, help="Passes that are measured."),
        click.option("--kind", metavar="NAME", help="Name of devices like this machine.  [default: cpu or cuda]"),
        click.option(
            "--optimizer",
            type=click.Choice(list(OPTIMIZERS)),
            default="adam",
            show_default=True,
            help="Optimiser, whose state counts as memory.",
        ),
    ):
        command = option(command)
    return command


@partition.command(_DEFAULT)
@click.argument("model")
@click.option(
    "--devices",
    "devices_file",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE",
    help="Devices and links: devices.toml, or a topology in JSON.",
)
@click.option("--batch-size", type=click.IntRange(1), help="Samples of a whole batch; not needed for a graph.json.")
@click.option("--objective", type=click.Choice(["throughput", "iteration"]), default="throughput", show_default=True)
@click.option(
    "--schedule",
    "kind",
    type=click.Choice(["plain", "gpipe", "1f1b"]),
    help="Order of micro-batches.  [default: 1f1b for throughput, plain for iteration]",
)
@click.option("--micro-batches", type=click.IntRange(1), help="M.  [default: 8, or what the batch allows; plain: 1]")
@click.option("--recompute", is_flag=True, help="Recompute activations instead of keeping them: less memory, more time.")
@click.option("--no-overlap", is_flag=True, help="1f1b with few micro-batches in flight, as if links took no time.")
@click.option("--time-limit-s", type=click.FloatRange(0, min_open=True), default=60.0, show_default=True, help="Limit of search and proof.")
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Threads of CP-SAT.")
@click.option("--seed", type=int, default=0, show_default=True)
@_model_options
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write placement.json, graph.json, topology.json, schedule.svg and report.html.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, last on standard output.")
def place_(
    model: str,
    devices_file: Path,
    batch_size: int | None,
    objective: str,
    kind: str | None,
    micro_batches: int | None,
    recompute: bool,
    no_overlap: bool,
    time_limit_s: float,
    workers: int,
    seed: int,
    out: Path | None,
    as_json: bool,
    **measuring: Any,
) -> None:
    """Place MODEL on devices, as without the word `place`. See `ephemeron partition --help`."""

    from ephemeron.cli.partition.table import print_profile, print_summary
    from ephemeron.partition import SearchBudget, place, replay
    from ephemeron.partition.graph.devices import load_topology
    from ephemeron.partition.placement.robustness import robustness_of
    from ephemeron.partition.placement.summary import summary_of

    topology = load_topology(devices_file)
    budget = SearchBudget(time_limit_s=time_limit_s, workers=workers, seed=seed)
    wanted = None if batch_size is None else PartitionRequest(batch_size=batch_size, seed=seed, **measuring)
    schedule = _schedule(objective, kind, micro_batches, recompute, no_overlap, batch_size)
    with telling() as tell:
        graph, measured = graph_or_model(model, wanted, tell)
        if graph.batch_size is not None:
            schedule = _schedule(objective, kind, micro_batches, recompute, no_overlap, graph.batch_size)
        tell(_announced(len(graph.nodes), len(topology.devices), budget))
        plan = place(graph, topology, objective=objective, schedule=schedule, budget=budget)  # type: ignore[arg-type]
        tell("simulating the plan")
        done = replay(graph, topology, plan.placement, schedule=schedule, orders=plan.orders, stages=plan.stages)
        if measured is not None:
            tell("training a few steps of the stages and of the whole model, to compare them")
            check_placed(measured, plan)
        tell("resampling measured times")
        robustness = robustness_of(graph, topology, plan, seed=seed)
    summary = summary_of(graph, topology, plan, done, robustness=robustness)
    console = make_console(to_stderr=as_json, width=110)
    if measured is not None:
        print_profile(measured, console, heaviest=0)
    print_summary(summary, console)
    files: list[Path] = []
    if out is not None:
        from ephemeron.partition.report.partition_page import write_partition_report

        files = write_partition_report(graph, topology, summary, done, out)
        for path in files:
            console.print(f"wrote {path}", soft_wrap=True)
    if as_json:
        click.echo(json.dumps({**summary.to_dict(), "model": model, "files": [str(f) for f in files]}))


@partition.command("measure")
@click.argument("model")
@click.option("--batch-size", type=click.IntRange(1), required=True, help="Samples of a whole batch.")
@_model_options
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the model's weights and the example.")
@click.option(
    "--links",
    type=click.IntRange(2),
    metavar="N",
    help="Measure links between N processes of this machine too, and write topology.json beside the graph.",
)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), default="graph.json", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, last on standard output.")
def measure_(model: str, batch_size: int, links: int | None, out: Path, as_json: bool, **measuring: Any) -> None:
    """Measure MODEL, operator by operator, on this machine, and write its graph.

    \b
    ephemeron partition measure examples/partition/nets.py:convnet --batch-size 32 --out graph.json
    ephemeron partition graph.json --devices examples/partition/devices.toml

    Forward and backward pass of every operator are measured separately, and their sum is compared with the whole model. If the
    ratio is far from 1, or quartiles are far apart, the machine had other load: measure again.
    """

    from ephemeron.cli.partition.table import print_profile, profile_table
    from ephemeron.config.typed import plain
    from ephemeron.errors import JobError
    from ephemeron.partition import graph_to_json

    if not out.absolute().parent.is_dir():
        raise JobError(f"--out {out} is not in a folder that exists", remedy="make the folder, or name a file elsewhere")
    if model.endswith(".json"):
        raise JobError(f"{model} is measured already", remedy=f"place it: ephemeron partition {model} --devices FILE")
    with telling() as tell:
        measured = measure(model, PartitionRequest(batch_size=batch_size, **measuring), tell)
        written = {out: graph_to_json(measured.graph)}
        if links is not None:
            tell(f"measuring links between {links} processes")
            written[out.absolute().parent / "topology.json"] = _linked(links, measured.times.device, measuring["kind"])
    console = make_console(to_stderr=as_json, width=110)
    print_profile(measured, console)
    for path, text in written.items():
        try:
            path.write_text(text)
        except OSError as e:
            raise JobError(f"--out {path} cannot be written: {e.strerror}") from None
        console.print(f"wrote {path}", soft_wrap=True)
    console.print(f"place it with: ephemeron partition {out} --devices FILE", soft_wrap=True)
    if as_json:
        click.echo(json.dumps({**plain(profile_table(measured)), "model": model, "files": [str(p) for p in written]}))


def _schedule(objective: str, kind: str | None, parts: int | None, recompute: bool, no_overlap: bool, batch_size: int | None) -> Schedule:
    from ephemeron.errors import JobError
    from ephemeron.partition import Schedule

    pipelined = objective == "throughput" or recompute or no_overlap or (parts or 1) > 1
    chosen = kind or ("1f1b" if pipelined else "plain")
    if objective == "throughput" and chosen == "plain":
        raise JobError(
            "--objective throughput does not go with --schedule plain, in which nothing overlaps", remedy="leave one of them out"
        )
    if parts is None:
        parts = 1 if chosen == "plain" else min(8, batch_size or 8)
    if batch_size is not None and parts > batch_size:
        raise JobError(
            f"--micro-batches {parts} of a batch of {batch_size} leaves micro-batches without a sample", remedy=f"take {batch_size} at most"
        )
    return Schedule(kind=chosen, micro_batches=parts, recompute=recompute, overlap=not no_overlap)  # type: ignore[arg-type]


def _announced(operators: int, devices: int, budget: SearchBudget) -> str:
    return f"placing {operators} operators on {devices} devices, {budget.time_limit_s:g} s at most"


def _linked(count: int, device: str, kind: str | None) -> str:
    """A topology of equal processes with measured links. Each process has an equal share of this machine's free memory."""
    import asyncio

    import psutil

    from ephemeron.partition import Device, topology_to_json
    from ephemeron.partition.costs import measure_here

    share = psutil.virtual_memory().available // count
    devices = [Device(name=f"process{k}", kind=kind or device, memory_bytes=int(share)) for k in range(count)]
    return topology_to_json(asyncio.run(measure_here(devices)).topology)
