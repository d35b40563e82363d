"""Samplers to compare `Coupled` with, and the adapter that experiments use. No product path imports them.

    Independent, CoorDL         whole epochs, drawn beforehand (Independent: PyTorch's)
    Joader                      dependent sampling, one sample at a time
    IntersectionTree, DynaGCS   as published
    Forecast                    turns the draws of any sampler into events for a cache of `ephemeron.data.cache`

`benchmarks/sampling.py` and `benchmarks/sharing.py` measure them.
"""

from ephemeron.data.sampling.baselines.samplers import (
    CoorDL,
    DynaGCS,
    Forecast,
    Independent,
    IntersectionTree,
    Joader,
    contribution,
    speed_similarity,
)

__all__ = ["CoorDL", "DynaGCS", "Forecast", "Independent", "IntersectionTree", "Joader", "contribution", "speed_similarity"]
