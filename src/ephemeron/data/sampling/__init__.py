"""Drawing samples for many jobs at once, so that one loads what the others use too (DPFlow section 3.4.4).

sampler     the interface and its promises: each sample once per epoch, nobody waits, deterministic, resumable
member      jobs and what they have left; stream: counted random numbers
orders      Independent (PyTorch's) and CoorDL: whole epochs, drawn beforehand
joader      dependent sampling, one sample at a time
tree, dynagcs   the intersection tree and DynaGCS, as published
coupled     ours: exactly uniform orders, with as much in common as that permits
forecast    hands what is drawn to the policies of `ephemeron.data.cache`
"""

from ephemeron.data.sampling.coupled import Coupled
from ephemeron.data.sampling.dynagcs import DynaGCS
from ephemeron.data.sampling.forecast import Forecast
from ephemeron.data.sampling.joader import Joader
from ephemeron.data.sampling.orders import CoorDL, Independent
from ephemeron.data.sampling.sampler import CollaborativeSampler, Future, SharedBatch
from ephemeron.data.sampling.tree import IntersectionTree, contribution, speed_similarity

__all__ = [
    "CollaborativeSampler",
    "CoorDL",
    "Coupled",
    "DynaGCS",
    "Forecast",
    "Future",
    "Independent",
    "IntersectionTree",
    "Joader",
    "SharedBatch",
    "contribution",
    "speed_similarity",
]
