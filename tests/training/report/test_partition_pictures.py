"""Pictures of partitions: nothing is lost when spans and operators are drawn together, and every picture is well-formed."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import defaultdict
from dataclasses import replace

import pytest

from ephemeron.partition import Device, Graph, Node, Schedule, Tensor, connected, replay
from ephemeron.partition.report.gantt import bars, gantt
from ephemeron.partition.report.operators import drawing, operators_svg

SIZE = 300
CHAIN = Graph(
    nodes=tuple(
        Node(name=f"n{i}", forward_s={"gpu": 1e-3}, backward_s={"gpu": 2e-3}, module=f"blocks.{i // 30}.part{i % 3}") for i in range(SIZE)
    ),
    tensors=tuple(Tensor(name=f"t{i}", producer=f"n{i}", consumers=(f"n{i + 1}",), nbytes=1000) for i in range(SIZE - 1)),
)
WHERE = {f"n{i}": "xyz"[3 * i // SIZE] for i in range(SIZE)}
THREE = connected([Device(name=n, kind="gpu", memory_bytes=10**9) for n in "xyz"], lambda a, b: (1e-4, 1e8))
DONE = replay(CHAIN, THREE, WHERE, schedule=Schedule(kind="1f1b", micro_batches=8))


def test_bars_cover_the_spans_they_stand_for():
    joined = bars(DONE.spans)
    busy: dict[object, float] = defaultdict(float)
    for b in joined:
        busy[b.resource] += b.end_s - b.start_s
    assert dict(busy) == pytest.approx(dict(DONE.busy_s))
    assert sum(len(b.names) for b in joined) == len(DONE.spans)
    assert len(joined) < len(DONE.spans) / 20, "readable"
    assert len(bars(DONE.spans, few=10**6)) == len(DONE.spans)


def test_the_schedule_is_well_formed_whatever_things_are_called():
    odd = replace(
        CHAIN,
        nodes=tuple(replace(n, name=f"<{n.name}&>") for n in CHAIN.nodes[:2]),
        tensors=(replace(CHAIN.tensors[0], producer="<n0&>", consumers=("<n1&>",)),),
    )
    devices = connected([Device(name=n, kind="gpu", memory_bytes=10**9) for n in ("a<b", 'c"d')], lambda a, b: (0, 1e6))
    where = {"<n0&>": "a<b", "<n1&>": 'c"d'}
    done = replay(odd, devices, where)
    for svg in (gantt(done), operators_svg(odd, where, ["a<b", 'c"d'])):
        titles = [t.text or "" for t in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}title")]
        assert any("<n0&>" in t for t in titles)


@pytest.mark.parametrize("most", [1000, 80, 20, 4])
def test_every_operator_is_drawn_once(most):
    made = drawing(CHAIN, WHERE, most=most)
    assert sorted(n for b in made.boxes for n in b.names) == sorted(WHERE)
    assert sorted(b for row in made.rows for b in row) == list(range(len(made.boxes)))
    assert all(WHERE[n] == b.device for b in made.boxes for n in b.names)
    assert len(made.boxes) <= max(most, 3)


def test_boxes_are_modules_where_these_are_known_and_depths_where_not():
    assert {b.label for b in drawing(CHAIN, WHERE, most=80).boxes} >= {"blocks.0.part0", "blocks.9.part2"}
    assert {b.label for b in drawing(CHAIN, WHERE, most=12).boxes} == {f"blocks.{k}" for k in range(10)}
    unknown = replace(CHAIN, nodes=tuple(replace(n, module="") for n in CHAIN.nodes))
    assert all(b.label.startswith("depth ") for b in drawing(unknown, WHERE, most=80).boxes)


def test_boxes_lie_within_the_frame_and_apart():
    root = ET.fromstring(operators_svg(CHAIN, WHERE, ["x", "y", "z"], most=80))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    boxes = [r for r in root.iter("{http://www.w3.org/2000/svg}rect") if r.find("{*}title") is not None]
    at = [tuple(float(r.attrib[n]) for n in ("x", "y", "width", "height")) for r in boxes]
    assert len(at) == len(drawing(CHAIN, WHERE, most=80).boxes)
    assert all(x >= 0 and x + w <= width and y >= 0 and y + h <= height for x, y, w, h in at)
    for i, (x, y, w, _) in enumerate(at):
        assert all(y != b or x + w <= a or a + c <= x for a, b, c, _ in at[i + 1 :])
