"""Partitions and measured models as people read them on a terminal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ephemeron.cli.terminal import text_of
from ephemeron.units import exact_seconds, human_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from ephemeron.partition.costs.profile import ModelProfile
    from ephemeron.partition.placement.summary import PlacementSummary

HEAVIEST = 10


def print_summary(summary: PlacementSummary, console: Console) -> None:
    """Stages, links, what is proved, and every method that was compared."""
    from rich.table import Table

    p = summary.plan
    schedule = f"{p.schedule.kind}, {p.schedule.micro_batches} micro-batches" if p.schedule.kind != "plain" else "whole batch"
    again = ", recomputing" if p.schedule.recompute else ""
    console.print(
        text_of("\n", (f"{p.graph} on {p.topology}", "bold"), f", {p.objective}, {schedule}{again}, by {p.method}\n"), soft_wrap=True
    )
    pipeline = bool(summary.stages) and summary.stages[0].stage is not None
    first = "stage" if pipeline else ""
    table = Table(first, "device", "operators", "parameters", "memory needed", "of", "busy per micro-batch", "", box=None, pad_edge=False)
    for column in table.columns[2:7]:
        column.justify = "right"
    for row in summary.stages:
        table.add_row(
            "" if row.stage is None else str(row.stage),
            row.device,
            str(row.operators),
            human_bytes(row.parameter_bytes),
            human_bytes(row.needed_bytes),
            f"{human_bytes(row.memory_bytes)} ({row.needed_bytes / max(1, row.memory_bytes):.0%})",
            exact_seconds(row.busy_s),
            _mark(row.bottleneck),
        )
    console.print(table)
    if summary.links:
        console.print()
        table = Table("link", "transfers", "bytes per micro-batch", "busy per micro-batch", "", box=None, pad_edge=False)
        for column in table.columns[1:4]:
            column.justify = "right"
        for link in summary.links:
            table.add_row(
                f"{link.source} → {link.target}",
                str(link.transfers),
                human_bytes(link.nbytes),
                exact_seconds(link.busy_s),
                _mark(link.bottleneck),
            )
        console.print(table)
    console.print(f"\n{value_words(summary)}\n", soft_wrap=True)
    console.print(f"{summary.rests_on}\n", soft_wrap=True)
    table = Table("method", unit_of(summary), "one iteration", "against the plan", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for row_ in summary.methods:
        table.add_row(
            row_.method,
            "–" if row_.value_s is None else exact_seconds(row_.value_s),
            "–" if row_.iteration_s is None else exact_seconds(row_.iteration_s),
            row_.verdict,
        )
    console.print(table)


def _mark(bottleneck: bool) -> Text:
    return text_of(("bottleneck", "red") if bottleneck else "")


def unit_of(summary: PlacementSummary) -> str:
    """Unit of the objective."""
    return "per micro-batch" if summary.plan.objective == "throughput" else "value"


def value_words(summary: PlacementSummary) -> str:
    """The value, its bound and gap, in one line."""
    p = summary.plan
    what = f"a micro-batch every {exact_seconds(p.value_s)} (held up by {summary.bottleneck})"
    if p.objective == "iteration":
        what = f"an iteration takes {exact_seconds(p.value_s)} (busiest is {summary.bottleneck})"
    rate = "" if summary.samples_s is None else f", {summary.samples_s:,.4g} samples/s"
    proof = "proved optimal for these times" if p.gap < 1e-4 else f"at most {p.gap:.2%} from the best"
    whole = f"one iteration {exact_seconds(p.iteration_s)}; " if p.objective == "throughput" else ""
    return f"{what}{rate}; no placement is faster than {exact_seconds(p.bound_s)}: {proof}; {whole}{p.solver_s:.1f} s of search"


def print_profile(measured: ModelProfile, console: Console, *, heaviest: int = HEAVIEST) -> None:
    """Prints the ratio of operators to the whole model, the spread of repetitions, and the heaviest operators."""
    from rich.table import Table

    totals = profile_table(measured, heaviest=heaviest)
    console.print(
        text_of(
            (totals.graph, "bold"),
            f": {totals.operators} operators on {totals.kind}, batch of {totals.batch_size}; forward "
            f"{exact_seconds(totals.forward_s)}, backward {exact_seconds(totals.backward_s)}; α = {totals.alpha:.2f}",
        ),
        soft_wrap=True,
    )
    console.print(
        f"sum of operators / whole model = {totals.ratio:.2f}; quartiles of a pass are {totals.spread:.0%} of its time apart",
        soft_wrap=True,
    )
    if not totals.heaviest:
        return
    table = Table("heaviest operators", "module", "forward", "backward", "spread", "share", "memory", box=None, pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"
    for row in totals.heaviest:
        table.add_row(
            row.operator,
            row.module,
            exact_seconds(row.forward_s),
            exact_seconds(row.backward_s),
            f"{row.spread:.0%}",
            f"{row.share:.1%}",
            human_bytes(row.state_bytes + row.tensor_bytes),
        )
    console.print(table)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRow:
    """Measured times and sizes of one operator."""

    operator: str
    module: str
    forward_s: float
    backward_s: float
    spread: float
    """Distance of the quartiles, as a share of the time."""
    share: float
    """Share of the time of all operators."""
    state_bytes: int
    tensor_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileTable:
    """Totals of a measured model, and its heaviest operators."""

    graph: str
    kind: str
    """Kind of device."""
    batch_size: int | None
    operators: int
    forward_s: float
    backward_s: float
    alpha: float
    ratio: float
    """Sum of all operators by the time of the whole model."""
    spread: float
    repeats: int
    heaviest: tuple[OperatorRow, ...]


def profile_table(measured: ModelProfile, *, heaviest: int = HEAVIEST) -> ProfileTable:
    """Totals and the heaviest operators of a measured model."""
    graph, times = measured.graph, measured.times
    nodes = {n.name: n for n in graph.nodes}
    tensors: dict[str, int] = dict.fromkeys(nodes, 0)
    for t in graph.tensors:
        tensors[t.producer] += t.nbytes + t.gradient_bytes
    both = {n: times.forward[n].median_s + times.backward[n].median_s for n in times.forward}
    apart = {n: times.forward[n].spread_s + times.backward[n].spread_s for n in times.forward}
    total_s = sum(both.values())
    rows = tuple(
        OperatorRow(
            operator=n,
            module=nodes[n].module,
            forward_s=times.forward[n].median_s,
            backward_s=times.backward[n].median_s,
            spread=apart[n] / both[n] if both[n] else 0.0,
            share=both[n] / total_s if total_s else 0.0,
            state_bytes=nodes[n].state_bytes,
            tensor_bytes=tensors[n],
        )
        for n in sorted(both, key=lambda n: -both[n])[:heaviest]
    )
    return ProfileTable(
        graph=graph.name,
        kind=next(iter(graph.nodes[0].forward_s)),
        batch_size=graph.batch_size,
        operators=len(graph.nodes),
        forward_s=times.whole_forward.median_s,
        backward_s=times.whole_backward.median_s,
        alpha=measured.alpha,
        ratio=times.ratio,
        spread=sum(apart.values()) / total_s if total_s else 0.0,
        repeats=times.repeats,
        heaviest=rows,
    )
