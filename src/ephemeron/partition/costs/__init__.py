"""Costs of a real model and real links, in the form that placement needs (NetSplit, sections 4.2 to 4.4).

`times`, `optimizer` and `profile` need torch and are imported by name; links do not.
"""

from ephemeron.partition.costs.links import LinkFit, MeasuredTopology, fit_link, measure_here, measure_links
from ephemeron.partition.costs.peer import Throttle

__all__ = ["LinkFit", "MeasuredTopology", "Throttle", "fit_link", "measure_here", "measure_links"]
