"""Model partitioning: which operator runs on which device, with a proof of how good that is (NetSplit, chapters 4 and 5)."""

from ephemeron.partition.documents import (
    graph_to_json,
    parse_graph,
    parse_plan,
    parse_topology,
    plan_to_json,
    topology_to_json,
)
from ephemeron.partition.effort import Effort
from ephemeron.partition.graph import Graph, Node, Tensor
from ephemeron.partition.judge import replay
from ephemeron.partition.place import place
from ephemeron.partition.plan import Candidate, Plan
from ephemeron.partition.replay import Replay, Span
from ephemeron.partition.schedule import Orders, Schedule
from ephemeron.partition.topology import Device, Link, Topology, connected

__all__ = [
    "Candidate",
    "Device",
    "Effort",
    "Graph",
    "Link",
    "Node",
    "Orders",
    "Plan",
    "Replay",
    "Schedule",
    "Span",
    "Tensor",
    "Topology",
    "connected",
    "graph_to_json",
    "parse_graph",
    "parse_plan",
    "parse_topology",
    "place",
    "plan_to_json",
    "replay",
    "topology_to_json",
]
