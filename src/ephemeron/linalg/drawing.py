"""Pictures of programs: the compressed graph, one node for each statement (figure 18 of NumPyWren, survey 2.4), and every task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ephemeron.errors import JobError
from ephemeron.linalg.analysis.dependencies import Analysis
from ephemeron.linalg.analysis.solver import first_solution
from ephemeron.linalg.analysis.unrolled import UnrolledGraph, described
from ephemeron.linalg.language.program import Node, Program, call_text
from ephemeron.rendering.svg import el, joined, text

_ROW, _LEFT, _CHARACTER, _FONT = 46.0, 150.0, 7.3, "12px monospace"
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a929c", "#5b3a9e", "#7a5c00")
_MOST_TASKS = 3000


@dataclass(frozen=True, slots=True, order=True)
class Edge:
    """Tasks of `target` read what tasks of `source` write."""

    source: int
    """Line of the statement that writes."""
    target: int
    """Line of the statement that reads."""
    tile: str
    """How the reader names the tile."""


def compressed_edges(program: Program, sizes: Mapping[str, int] | None = None) -> tuple[Edge, ...]:
    """Edges of the compressed graph, sorted: which statements depend on which, through which tile.

    Args:
        program: the program.
        sizes: at which the edges exist; 8 of everything without.
    """
    analysis = Analysis(program, sizes or dict.fromkeys(program.sizes, 8))
    edges = set()
    for reader in analysis.domains:
        for read in reader.reads:
            for writer in analysis.domains:
                for write in writer.writes:
                    if write.reference.matrix != read.reference.matrix:
                        continue
                    edge = Edge(writer.call.line, reader.call.line, str(read.reference))
                    if edge in edges:
                        continue
                    system, by = writer.system.joined(reader.system)
                    pairs = zip(write.indices, read.indices, strict=True)
                    system.equations += [mine - theirs.shifted(by) for mine, theirs in pairs]
                    if first_solution(system, (), analysis.steps) is not None:
                        edges.add(edge)
    return tuple(sorted(edges))


def compressed_text(program: Program, sizes: Mapping[str, int] | None = None) -> str:
    """The compressed graph as lines: each statement, and below it the statements that read what it writes."""
    edges, lines = compressed_edges(program, sizes), []
    for line, call in program.calls.items():
        lines.append(f"{line:>3}  {call_text(call)}")
        lines += [f"       → {e.target} through {e.tile}" for e in edges if e.source == line]
    return "\n".join(lines) + "\n"


def compressed_svg(program: Program, sizes: Mapping[str, int] | None = None) -> str:
    """The compressed graph as SVG: statements in the order of the text, dependencies down on the left, of later iterations up on the right."""
    lines = {line: f"{line}: {call_text(call)}" for line, call in program.calls.items()}
    width = max(map(len, lines.values())) * _CHARACTER + 20
    middle = {line: 30 + k * _ROW for k, line in enumerate(lines)}
    parts = [_arrow_head()]
    for place, edge in enumerate(compressed_edges(program, sizes)):
        down = edge.target > edge.source
        side = _LEFT if down else _LEFT + width
        start, end = middle[edge.source] + 6, middle[edge.target] - 6
        reach = min(30 + abs(end - start) * 0.35 + place % 4 * 6, _LEFT - 12)
        bend = side - reach if down else side + reach
        parts.append(
            el(
                "path",
                el("title", f"{edge.source} → {edge.target} through {edge.tile}"),
                d=f"M{side:.0f} {start:.0f}C{bend:.0f} {start:.0f} {bend:.0f} {end:.0f} {side:.0f} {end:.0f}",
                fill="none",
                stroke="#0072b2" if down else "#d55e00",
                marker_end="url(#arrow)",
            )
        )
    for line, words in lines.items():
        parts.append(el("rect", x=_LEFT, y=middle[line] - 14, width=width, height=28, rx=4, fill="#fff", stroke="#8a929c"))
        parts.append(text(_LEFT + 10, middle[line] + 4, words, style=f"font:{_FONT}"))
    return str(_picture(2 * _LEFT + width, len(lines) * _ROW + 20, program.name, parts))


def unrolled_svg(program: Program, sizes: Mapping[str, int]) -> str:
    """Every task as SVG, in rows by the length of the longest chain of tasks before it.

    Raises:
        JobError: there are too many tasks to draw.
    """
    tasks = Analysis(program, sizes).count()
    if tasks > _MOST_TASKS:
        raise JobError(f"{program.name} has {tasks:,} tasks at these sizes", remedy=f"draw at most {_MOST_TASKS:,}")
    graph = UnrolledGraph(program, sizes)
    rows = _rows(graph)
    across = max(rows.count(row) for row in set(rows)) if rows else 1
    width, seen, place = across * 22.0 + 40, [0] * (max(rows) + 1), {}
    for node, row in zip(graph.nodes, rows, strict=True):
        share = (seen[row] + 0.5) / rows.count(row)
        place[node] = (20 + share * (width - 40), 24 + row * 40.0)
        seen[row] += 1
    colour = {line: _COLOURS[k % len(_COLOURS)] for k, line in enumerate(program.calls)}
    parts = []
    for node, (x, y) in place.items():
        for other in graph.downstream(node):
            to_x, to_y = place[other]
            parts.append(el("line", x1=x, y1=y, x2=to_x, y2=to_y, stroke="#d5d9de"))
    for node, (x, y) in place.items():
        tiles = ", ".join(map(described, graph.writes(node)))
        words = f"{graph.call(node).kernel} → {tiles} (line {node.line})"
        parts.append(el("circle", el("title", words), cx=x, cy=y, r=7, fill=colour[node.line]))
    return str(_picture(width, 40.0 * len(seen) + 20, program.name, parts))


def _rows(graph: UnrolledGraph) -> list[int]:
    """For each task the number of tasks in the longest chain before it."""
    depth: dict[Node, int] = {}
    for node in graph.nodes:
        depth[node] = max((depth[u] + 1 for u in graph.upstream(node)), default=0)
    return list(depth.values())


@lru_cache(maxsize=1)
def _arrow_head() -> str:
    head = el("path", d="M0 0L8 4L0 8z", fill="#555")
    marker = el("marker", head, id="arrow", viewBox="0 0 8 8", refX=8, refY=4, markerWidth=7, markerHeight=7, orient="auto")
    return el("defs", marker)


def _picture(width: float, height: float, name: str, parts: Sequence[str]) -> str:
    return el(
        "svg",
        joined(parts),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        width=width,
        height=height,
        role="img",
        aria_label=f"Task graph of {name}",
    )
