"""Graphs, topologies, plans and stages as JSON documents."""
