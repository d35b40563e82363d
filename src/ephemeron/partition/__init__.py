"""Model partitioning: which operator runs on which device, with a proof of how good that is (NetSplit, chapters 4 and 5)."""

from ephemeron.partition.graph.graph import Graph, Node, Tensor
from ephemeron.partition.graph.topology import Device, Link, Topology, connected
from ephemeron.partition.placement.place import place
from ephemeron.partition.placement.plan import PlacementCandidate, PlacementPlan, SearchBudget
from ephemeron.partition.schedule_simulator.schedule import DeviceOrders, Replay, ReplaySpan, Schedule
from ephemeron.partition.schedule_simulator.simulator import replay
from ephemeron.partition.serialization.documents import (
    graph_to_json,
    parse_graph,
    parse_plan,
    parse_topology,
    plan_to_json,
    topology_to_json,
)

__all__ = [
    "Device",
    "DeviceOrders",
    "Graph",
    "Link",
    "Node",
    "PlacementCandidate",
    "PlacementPlan",
    "Replay",
    "ReplaySpan",
    "Schedule",
    "SearchBudget",
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
