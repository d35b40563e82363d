"""Samplers to compare `Coupled` with, and the adapter that experiments use. No product path imports them.

    orders        Independent (PyTorch's) and CoorDL: whole epochs, drawn beforehand
    joader        dependent sampling, one sample at a time
    tree, dynagcs the intersection tree and DynaGCS, as published
    forecast      turns the draws of any sampler into events for a cache of `ephemeron.data.cache`

`benchmarks/sampling.py` and `benchmarks/sharing.py` measure them.
"""

from ephemeron.data.sampling.baselines.dynagcs import DynaGCS
from ephemeron.data.sampling.baselines.forecast import Forecast
from ephemeron.data.sampling.baselines.joader import Joader
from ephemeron.data.sampling.baselines.orders import CoorDL, Independent
from ephemeron.data.sampling.baselines.tree import IntersectionTree, contribution, speed_similarity

__all__ = ["CoorDL", "DynaGCS", "Forecast", "Independent", "IntersectionTree", "Joader", "contribution", "speed_similarity"]
