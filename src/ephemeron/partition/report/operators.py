"""Picture of a model's operators from top to bottom, coloured by device.

Above `MOST` operators, those of one module on one device are one box, at the finest level of modules that has room; without known modules,
operators of similar depth are one box. Tensors between devices are drawn darker, with their bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ephemeron.partition.graph.graph import Graph, Node
from ephemeron.rendering.svg import el, joined, num, text
from ephemeron.units import human_bytes

MOST = 80
"""Most boxes."""
WIDTH, ROW, TALL, GAP, TOP = 1160, 34, 20, 10, 34
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8a929c")
"""Colours of devices in the order given; repeated if there are more."""
_DARK = frozenset({"#0072b2", "#009e73", "#d55e00"})
"""Colours with white labels."""
_SOFT = "#5d6673"


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Operators that are one box."""

    label: str
    device: str
    names: tuple[str, ...]
    forward_s: float
    backward_s: float
    state_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Boxes, edges between them, and their rows."""

    boxes: tuple[Box, ...]
    edges: Mapping[tuple[int, int], int]
    """Bytes by source and target box."""
    rows: tuple[tuple[int, ...], ...]
    """Boxes of each row, from left to right."""


def drawing(graph: Graph, placement: Mapping[str, str], *, most: int = MOST) -> Drawing:
    """Layout of the picture.

    Args:
        graph: the model.
        placement: device by node.
        most: boxes.
    """
    order = graph.topological_order()
    depth = _depths(graph, order)
    keys = _keys(graph, placement, depth, most)
    nodes = {n.name: n for n in graph.nodes}
    members: dict[tuple[str, str], list[str]] = {}
    for name in order:
        members.setdefault(keys[name], []).append(name)
    number = {key: i for i, key in enumerate(members)}
    box_of = {name: number[keys[name]] for name in order}
    edges: dict[tuple[int, int], int] = {}
    for t in graph.tensors:
        a = box_of[t.producer]
        for b in dict.fromkeys(box_of[c] for c in t.consumers):
            if a != b:
                edges[a, b] = edges.get((a, b), 0) + t.nbytes
    boxes = tuple(_box(key, [nodes[n] for n in names]) for key, names in members.items())
    first = [min(depth[n] for n in names) for names in members.values()]
    return Drawing(boxes=boxes, edges=edges, rows=_rows(first, edges))


def operators_svg(graph: Graph, placement: Mapping[str, str], devices: Sequence[str], *, most: int = MOST) -> Markup:
    """SVG of the operators. Arguments as for `drawing`; devices in the order of their colours."""
    made = drawing(graph, placement, most=most)
    colours = {d: PALETTE[k % len(PALETTE)] for k, d in enumerate(devices)}
    at: dict[int, tuple[float, float, float]] = {}
    for r, row in enumerate(made.rows):
        wide = max(30.0, min(190.0, (WIDTH - GAP) / len(row) - GAP))
        left = (WIDTH - len(row) * (wide + GAP) + GAP) / 2
        for k, b in enumerate(row):
            at[b] = (left + k * (wide + GAP), TOP + r * ROW, wide)
    lines = [_edge(made, a, b, nbytes, at) for (a, b), nbytes in made.edges.items()]
    drawn = [_drawn(made.boxes[b], *at[b], colours[made.boxes[b].device]) for b in at]
    height = TOP + len(made.rows) * ROW + 8
    return el(
        "svg",
        _legend(devices, colours),
        *lines,
        *drawn,
        viewBox=f"0 0 {WIDTH} {num(height)}",
        width=WIDTH,
        height=height,
        class_="chart",
        role="img",
        aria_label="The model's operators by device",
        xmlns="http://www.w3.org/2000/svg",
        font_family="system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif",
        font_size=11,
    )


def _depths(graph: Graph, order: Sequence[str]) -> dict[str, int]:
    depth = dict.fromkeys(order, 0)
    made: dict[str, list[str]] = {}
    for t in graph.tensors:
        made.setdefault(t.producer, []).extend(t.consumers)
    for name in order:
        for c in made.get(name, ()):
            depth[c] = max(depth[c], depth[name] + 1)
    return depth


def _keys(graph: Graph, placement: Mapping[str, str], depth: Mapping[str, int], most: int) -> dict[str, tuple[str, str]]:
    """Device and label of the box that each node belongs to."""
    if len(graph.nodes) <= most:
        return {n.name: (placement[n.name], n.name) for n in graph.nodes}
    paths = {n.name: n.module.split(".") if n.module else [] for n in graph.nodes}
    if sum(map(bool, paths.values())) > len(paths) / 2:
        for level in range(max(map(len, paths.values())), 0, -1):
            made = {n: (placement[n], ".".join(path[:level]) or n) for n, path in paths.items()}
            if len(set(made.values())) <= most:
                return made
    deepest = max(depth.values()) + 1
    bins = most
    while True:
        made = {n: (placement[n], _span(depth[n] * bins // deepest, deepest, bins)) for n in depth}
        if len(set(made.values())) <= most or bins == 1:
            return made
        bins -= max(1, bins // 8)


def _span(part: int, deepest: int, bins: int) -> str:
    low, high = -(-part * deepest // bins), -(-(part + 1) * deepest // bins) - 1
    return f"depth {low}" if low >= high else f"depth {low} to {high}"


def _box(key: tuple[str, str], nodes: Sequence[Node]) -> Box:
    def fastest(n: Node, backward: bool) -> float:
        return min((n.backward_s if backward else n.forward_s).values())

    return Box(
        label=key[1],
        device=key[0],
        names=tuple(n.name for n in nodes),
        forward_s=sum(fastest(n, False) for n in nodes),
        backward_s=sum(fastest(n, True) for n in nodes),
        state_bytes=sum(n.state_bytes for n in nodes),
    )


def _rows(first: Sequence[int], edges: Mapping[tuple[int, int], int]) -> tuple[tuple[int, ...], ...]:
    """Rows of boxes, each below its inputs; in a cycle of boxes, the less deep is above."""
    size = len(first)
    order = sorted(range(size), key=lambda b: (first[b], b))
    place = {b: k for k, b in enumerate(order)}
    above: list[list[int]] = [[] for _ in range(size)]
    for a, b in edges:
        if place[a] < place[b]:
            above[b].append(a)
    row = [0] * size
    for b in order:
        row[b] = max((row[a] + 1 for a in above[b]), default=0)
    rows: list[list[int]] = [[] for _ in range(max(row, default=0) + 1)]
    across: dict[int, float] = {}
    for b in order:
        rows[row[b]].append(b)
    for members in rows:
        members.sort(key=lambda b: sum(across[a] for a in above[b]) / len(above[b]) if above[b] else 0.5)
        for k, b in enumerate(members):
            across[b] = (k + 1) / (len(members) + 1)
    return tuple(map(tuple, rows))


def _edge(made: Drawing, a: int, b: int, nbytes: int, at: Mapping[int, tuple[float, float, float]]) -> Markup:
    (xa, ya, wa), (xb, yb, wb) = at[a], at[b]
    x0, y0, x1, y1 = xa + wa / 2, ya + TALL, xb + wb / 2, yb
    crosses = made.boxes[a].device != made.boxes[b].device
    far = abs(y1 - y0) > ROW  # curved, so that it passes beside the boxes in between
    out = (max(wa, wb) / 2 + min(60.0, 12 + abs(y1 - y0) / 12)) / 0.75  # a cubic goes three quarters of the way
    aside = out * (1 if (a + b) % 2 else -1) if far else 0.0
    middle = (y0 + y1) / 2
    d = f"M{x0:.1f} {y0:.1f}C{x0 + aside:.1f} {middle:.1f} {x1 + aside:.1f} {middle:.1f} {x1:.1f} {y1:.1f}"
    words = f"{made.boxes[a].label} → {made.boxes[b].label}: {human_bytes(nbytes)} per batch"
    return el(
        "path",
        el("title", words),
        d=d,
        fill="none",
        stroke="#c6362f" if crosses else "#8a929c",
        stroke_width=1.8 if crosses else 1.0,
        stroke_opacity=0.9 if crosses else 0.55,
    )


def _drawn(box: Box, x: float, y: float, wide: float, colour: str) -> Markup:
    many = f"{len(box.names)} operators, " if len(box.names) > 1 else ""
    words = (
        f"{box.label} on {box.device}: {many}forward {1e3 * box.forward_s:.3g} ms, backward {1e3 * box.backward_s:.3g} ms, "
        f"state {human_bytes(box.state_bytes)}"
    )
    label = f"{box.label} ×{len(box.names)}" if len(box.names) > 1 else box.label
    room = int((wide - 8) / 6.3)
    if len(label) > room:
        label = "…" + label[-(room - 1) :] if room > 3 else ""
    rect = el("rect", el("title", words), x=x, y=y, width=wide, height=TALL, rx=4, fill=colour)
    ink = "#fff" if colour in _DARK else "#1b2027"
    return rect + text(x + wide / 2, y + 14, label, text_anchor="middle", style=f"fill:{ink};font-size:11px", pointer_events="none")


def _legend(devices: Sequence[str], colours: Mapping[str, str]) -> Markup:
    out, x = [], 4.0
    for d in devices:
        out.append(el("rect", x=x, y=8, width=14, height=12, rx=2, fill=colours[d]))
        out.append(text(x + 20, 18, d, fill=_SOFT))
        x += 40 + 7.0 * len(d)
    out.append(el("line", x1=x, x2=x + 18, y1=14, y2=14, stroke="#c6362f", stroke_width=1.8))
    out.append(text(x + 24, 18, "from device to device", fill=_SOFT))
    return joined(out)
