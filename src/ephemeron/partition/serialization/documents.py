"""Graphs, topologies and plans as JSON, with a version; read strictly.

    {"format": "ephemeron-graph", "version": 1, "name": "…", "source": "…", "batch_size": 64,
     "nodes": [{"name": "conv1", "forward_s": {"gpu": 0.01}, "backward_s": {"gpu": 0.02}, "parameter_bytes": 400,
                "gradient_bytes": 400, "optimizer_bytes": 800, "group": null, "module": "encoder.0"}],
     "tensors": [{"name": "x", "producer": "conv1", "consumers": ["relu1"], "nbytes": 1000, "gradient_nbytes": null}]}
    {"format": "ephemeron-topology", "version": 1, "name": "…",
     "devices": [{"name": "gpu0", "kind": "gpu", "memory_bytes": 24000000000, "speed": 1.0}],
     "links": [{"source": "gpu0", "target": "gpu1", "latency_s": 5e-5, "bandwidth_bytes_s": 1.2e10}]}

Whoever reads a newer version than is known is told so; unknown keys are errors, because a misspelt cost would be a cost of 0.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ephemeron.errors import JobError
from ephemeron.partition.graph.graph import Graph, Node, Tensor
from ephemeron.partition.graph.topology import Device, Link, Topology
from ephemeron.partition.placement.plan import PlacementCandidate, PlacementPlan
from ephemeron.partition.schedule_simulator.schedule import DeviceOrders, Schedule, Task

VERSION = 1
_ENDLESS = ("value_s", "iteration_s")
"""Of candidates: null in JSON where infinite."""
_T = TypeVar("_T")


def graph_to_json(graph: Graph) -> str:
    """What `parse_graph` reads."""
    return _text("graph", _plain(graph))


def topology_to_json(topology: Topology) -> str:
    """What `parse_topology` reads."""
    return _text("topology", _plain(topology))


def plan_to_json(plan: PlacementPlan) -> str:
    """What `parse_plan` reads."""
    table = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)}
    table["schedule"] = _plain(plan.schedule)
    table["placement"] = dict(plan.placement)
    for name in ("reserved_bytes", "peak_bytes"):
        table[name] = dict(table[name])
    table["candidates"] = [
        {**dataclasses.asdict(c), **{n: None for n in _ENDLESS if math.isinf(getattr(c, n))}} for c in plan.candidates
    ]
    if plan.orders is not None:
        table["orders"] = {
            "compute": {d: [list(t) for t in tasks] for d, tasks in plan.orders.compute.items()},
            "transfers": [
                {"source": a, "target": b, "tasks": [list(t) for t in tasks]}
                for (a, b), tasks in plan.orders.transfers.items()
            ],
        }
    return _text("plan", table)


def parse_graph(text: str, *, where: str = "graph") -> Graph:
    """A graph from JSON.

    Raises:
        JobError: not JSON, another format or version, an unknown or missing key, a wrong type, or not a graph; names the place.
    """
    table = _opened(text, "graph", where)
    nodes, tensors = _list(table, "nodes", where), _list(table, "tensors", where)
    return _made(
        Graph,
        {
            **table,
            "nodes": tuple(_node(n, f"{where}: nodes[{i}]") for i, n in enumerate(nodes)),
            "tensors": tuple(_tensor(t, f"{where}: tensors[{i}]") for i, t in enumerate(tensors)),
        },
        where,
    )


def parse_topology(text: str, *, where: str = "topology") -> Topology:
    """A topology from JSON.

    Raises:
        JobError: as with `parse_graph`.
    """
    table = _opened(text, "topology", where)
    devices, links = _list(table, "devices", where), _list(table, "links", where)
    return _made(
        Topology,
        {
            **table,
            "devices": tuple(_made(Device, d, f"{where}: devices[{i}]") for i, d in enumerate(devices)),
            "links": tuple(_made(Link, k, f"{where}: links[{i}]") for i, k in enumerate(links)),
        },
        where,
    )


def parse_plan(text: str, *, where: str = "plan") -> PlacementPlan:
    """A plan from JSON.

    Raises:
        JobError: as with `parse_graph`.
    """
    table = dict(_opened(text, "plan", where))
    candidates = []
    for i, raw in enumerate(_list(table, "candidates", where)):
        row = dict(_table(raw, f"{where}: candidates[{i}]"))
        row |= {n: math.inf for n in _ENDLESS if row.get(n, 0) is None}
        candidates.append(_made(PlacementCandidate, row, f"{where}: candidates[{i}]"))
    table["candidates"] = tuple(candidates)
    if "stages" in table:
        table["stages"] = tuple(str(d) for d in _list(table, "stages", where))
    table["schedule"] = _made(Schedule, table.get("schedule"), f"{where}: schedule")
    if table.get("orders") is not None:
        table["orders"] = _orders(table["orders"], f"{where}: orders")
    for name, kind in (("placement", str), ("reserved_bytes", int), ("peak_bytes", int)):
        entries = _table(table.get(name), f"{where}: {name}")
        for key, value in entries.items():
            if not isinstance(value, kind) or isinstance(value, bool):
                raise JobError(f"{where}: {name}[{key}] = {value!r} should be {_NAMES[kind.__name__]}")
    plan = _made(PlacementPlan, table, where)
    if plan.objective not in ("throughput", "iteration"):
        raise JobError(f"{where}: objective = {plan.objective!r} is not known", remedy="use throughput or iteration")
    return plan


def load(parse: Callable[..., _T], path: str | Path) -> _T:
    """Reads a file with one of the functions above.

    Raises:
        JobError: it cannot be read, or is not what it should be.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise JobError(f"{path} cannot be read: {e}") from None
    return parse(text, where=str(path))


def _plain(value: Any) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(value)))  # type: ignore[no-any-return]


def _text(kind: str, table: Mapping[str, Any]) -> str:
    return json.dumps({"format": f"ephemeron-{kind}", "version": VERSION, **table}, indent=1, allow_nan=False) + "\n"


def _opened(text: str, kind: str, where: str) -> dict[str, Any]:
    try:
        table = dict(_table(json.loads(text), where))
    except ValueError as e:
        raise JobError(f"{where} is not JSON: {e}") from None
    if table.pop("format", None) != f"ephemeron-{kind}":
        raise JobError(f"{where} is no {kind}", remedy=f'it should begin with "format": "ephemeron-{kind}"')
    version = table.pop("version", None)
    if version != VERSION:
        raise JobError(f"{where} has version {version}", remedy=f"this release reads version {VERSION}")
    return table


def _node(raw: Any, where: str) -> Node:
    table = dict(_table(raw, where))
    for name in ("forward_s", "backward_s"):
        for kind, value in _table(table.get(name), f"{where}.{name}").items():
            _checked(value, "float", f"{where}.{name}[{kind}]")
    passes = {}
    for kind, rows in _table(table.get("passes_s", {}), f"{where}.passes_s").items():
        place = f"{where}.passes_s[{kind}]"
        if not isinstance(rows, list) or not all(isinstance(r, list) and len(r) == 2 for r in rows):
            raise JobError(f"{place} should be a list of [forward, backward]")
        passes[kind] = tuple((_checked(f, "float", place), _checked(b, "float", place)) for f, b in rows)
    return _made(Node, {**table, "passes_s": passes}, where)


def _tensor(raw: Any, where: str) -> Tensor:
    table = dict(_table(raw, where))
    consumers = _list(table, "consumers", where)
    for i, name in enumerate(consumers):
        _checked(name, "str", f"{where}.consumers[{i}]")
    return _made(Tensor, {**table, "consumers": tuple(consumers)}, where)


def _orders(raw: Any, where: str) -> DeviceOrders:
    table = _table(raw, where)
    compute = {
        d: _tasks(tasks, f"{where}.compute[{d}]")
        for d, tasks in _table(table.get("compute"), f"{where}.compute").items()
    }
    transfers: dict[tuple[str, str], tuple[Task, ...]] = {}
    for i, entry in enumerate(_list(table, "transfers", where)):
        place = f"{where}.transfers[{i}]"
        row = _table(entry, place)
        ends = (
            _checked(row.get("source"), "str", f"{place}.source"),
            _checked(row.get("target"), "str", f"{place}.target"),
        )
        transfers[ends] = _tasks(row.get("tasks"), f"{place}.tasks")
    return DeviceOrders(compute=compute, transfers=transfers)


def _tasks(raw: Any, where: str) -> tuple[Task, ...]:
    tasks: list[Task] = []
    for entry in raw if isinstance(raw, list) else [None]:
        if not (isinstance(entry, list) and len(entry) == 2 and entry[1] in ("forward", "backward")):
            raise JobError(f'{where} = {entry!r} should be a list of ["name", "forward" or "backward"]')
        tasks.append((str(entry[0]), entry[1]))
    return tuple(tasks)


_NAMES = {"str": "text", "int": "a whole number", "float": "a number", "bool": "true or false"}
_TYPES: dict[str, type | tuple[type, ...]] = {"str": str, "int": int, "float": (int, float), "bool": bool}


def _made(cls: type[_T], raw: Any, where: str) -> _T:
    """A dataclass from a table; its simple fields are checked by their annotations."""
    table = _table(raw, where)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in table:
        if key not in fields:
            raise JobError(f"{where} has the unknown key {key}", remedy=f"known are {', '.join(fields)}")
    for name, field in fields.items():
        if name not in table:
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise JobError(f"{where}: {name} is missing")
            continue
        kind, _, rest = str(field.type).partition(" | ")
        if kind in _TYPES and not (rest == "None" and table[name] is None):
            _checked(table[name], kind, f"{where}.{name}")
    return cls(**table)


def _checked(value: Any, kind: str, where: str) -> Any:
    if not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "bool"):
        raise JobError(f"{where} = {value!r} should be {_NAMES[kind]}")
    return value


def _table(raw: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(raw, Mapping):
        raise JobError(f"{where} is missing, or is not a table of names and values")
    return raw


def _list(table: Mapping[str, Any], key: str, where: str) -> list[Any]:
    value = table.get(key)
    if not isinstance(value, list):
        raise JobError(f"{where}: {key} is missing, or is not a list")
    return value
