"""HTML page and documents of a partition: stages, simulated schedule, compared methods, and devices of operators."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from ephemeron.errors import JobError
from ephemeron.partition.graph.graph import Graph
from ephemeron.partition.graph.topology import Topology
from ephemeron.partition.placement.summary import PlacementSummary
from ephemeron.partition.report.gantt import gantt
from ephemeron.partition.report.operators import MOST, operators_svg
from ephemeron.partition.schedule_simulator.schedule import Replay
from ephemeron.partition.serialization.documents import graph_to_json, plan_to_json, topology_to_json
from ephemeron.rendering.page import card, document, header, scrolled, table, tiled
from ephemeron.rendering.svg import el
from ephemeron.units import exact_seconds, human_bytes, human_count

_log = logging.getLogger(__name__)


def write_partition_report(graph: Graph, topology: Topology, summary: PlacementSummary, done: Replay, out: Path) -> list[Path]:
    """Paths of placement.json (see `documents.parse_plan`), graph.json, topology.json, schedule.svg and report.html, which are written.

    Args:
        graph, topology: as placed.
        summary: summary of the plan.
        done: its simulation.
        out: folder; created if absent.

    Raises:
        JobError: the folder cannot be written to.
    """
    picture = _picture(graph, summary, done)
    texts = {
        "placement.json": plan_to_json(summary.plan),
        "graph.json": graph_to_json(graph),
        "topology.json": topology_to_json(topology),
        "schedule.svg": f'<?xml version="1.0" encoding="UTF-8"?>\n{picture}\n',
        "report.html": page(graph, summary, done),
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (out / name).write_text(text, encoding="utf-8")
    except OSError as e:
        raise JobError(f"{out} cannot be written to: {e.strerror}", remedy="name another folder") from None
    _log.info("wrote %s to %s", ", ".join(texts), out)
    return [out / name for name in texts]


def page(graph: Graph, summary: PlacementSummary, done: Replay) -> str:
    """Self-contained HTML report."""
    p = summary.plan
    pipeline = any(r.stage is not None for r in summary.stages)
    devices = [r.device for r in summary.stages]
    title = f"{p.graph} on {p.topology}"
    parts = [
        header("ephemeron partition", title, _summary(summary)),
        _tiles(summary),
        card(
            "One simulated iteration",
            scrolled(_picture(graph, summary, done)),
            "Devices in the order of the pipeline, then links; numbers are micro-batches. Hover for names, bytes and times."
            if pipeline
            else "Devices, then links. Hover for names, bytes and times.",
        ),
        card(
            "Stages" if pipeline else "Devices",
            _stages(summary, pipeline=pipeline),
            "Needed: parameters, gradients, optimiser, and "
            "every tensor with its gradient for as many micro-batches as may be in flight. Held: the maximum over time in the simulation.",
        ),
    ]
    if summary.links:
        parts.append(card("Links", _links(summary)))
    parts.append(
        card("Compared", _methods(summary), "Placements of all methods are simulated under the same rules; the best that fits is the plan.")
    )
    many = len(graph.nodes) > MOST
    parts.append(
        card(
            "Operators by device",
            scrolled(operators_svg(graph, p.placement, devices)),
            "Operators of one module on one device are one box; without known modules, operators of similar depth are." if many else "",
        )
    )
    parts.append(card("What the proof rests on", el("p", summary.rests_on)))
    return document(title, parts)


def _picture(graph: Graph, summary: PlacementSummary, done: Replay) -> Markup:
    parts = summary.plan.schedule.micro_batches
    return gantt(done, nbytes={t.name: (t.nbytes // parts, t.gradient_bytes // parts) for t in graph.tensors})


def _summary(summary: PlacementSummary) -> str:
    p = summary.plan
    pipelined = p.objective == "throughput"
    what = f"A micro-batch takes {exact_seconds(p.value_s)}, limited by {summary.bottleneck}"
    what = what if pipelined else f"One iteration takes {exact_seconds(p.value_s)}"
    proof = "proved optimal for these times" if p.gap < 1e-4 else f"proved to be within {p.gap:.2%} of the optimum"
    return f"{what}; {proof}."


def _tiles(summary: PlacementSummary) -> Markup:
    p, s = summary.plan, summary.plan.schedule
    again = ", recomputing" if s.recompute else ""
    return tiled(
        [
            ("Value", exact_seconds(p.value_s), "per micro-batch" if p.objective == "throughput" else "per iteration"),
            ("Bound", exact_seconds(p.bound_s), f"gap {p.gap:.2%}"),
            ("One iteration", exact_seconds(p.iteration_s), "simulated"),
            ("Rate", "–" if summary.samples_s is None else f"{summary.samples_s:,.4g}/s", "samples"),
            ("Schedule", s.kind, f"{human_count(s.micro_batches, 'micro-batch').replace('batchs', 'batches')}{again}"),
            ("Busiest", summary.bottleneck, "of devices and links"),
            ("Method", p.method, f"one of {len(summary.methods)}"),
            ("Search", exact_seconds(p.solver_s), p.objective),
        ]
    )


def _stages(summary: PlacementSummary, *, pipeline: bool) -> Markup:
    head = ["stage"] * pipeline + ["device", "operators", "parameters", "needed", "held", "of", "busy per micro-batch", ""]
    rows = []
    for r in summary.stages:
        share = r.needed_bytes / max(1, r.memory_bytes)
        cells = [
            r.device,
            str(r.operators),
            human_bytes(r.parameter_bytes),
            human_bytes(r.needed_bytes),
            human_bytes(r.peak_bytes),
            f"{human_bytes(r.memory_bytes)} ({share:.0%})",
            exact_seconds(r.busy_s),
        ]
        rows.append([str(r.stage)] * pipeline + [*cells, _mark(r.bottleneck)])
    return table(head, rows, words=1 + pipeline)


def _links(summary: PlacementSummary) -> Markup:
    rows = [
        [f"{r.source} → {r.target}", str(r.transfers), human_bytes(r.nbytes), exact_seconds(r.busy_s), _mark(r.bottleneck)]
        for r in summary.links
    ]
    return table(["", "transfers", "bytes per micro-batch", "busy per micro-batch", ""], rows)


def _mark(bottleneck: bool) -> str:
    return el("span", "bottleneck", class_="bad") if bottleneck else ""


def _methods(summary: PlacementSummary) -> Markup:
    def seconds(s: float | None) -> str:
        return "–" if s is None else exact_seconds(s)

    rows: list[Sequence[str]] = [[r.method, seconds(r.value_s), seconds(r.iteration_s), r.verdict] for r in summary.methods]
    unit = "per micro-batch" if summary.plan.objective == "throughput" else "value"
    return table(["", unit, "one iteration", "against the plan"], rows)
