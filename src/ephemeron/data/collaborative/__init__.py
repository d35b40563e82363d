"""Drawing samples for many jobs at once, so that one loads what the others use too (DPFlow section 3.4.4).

sampler     the interface and its promises: each sample once per epoch, nobody waits, deterministic, resumable
member      jobs and what they have left; stream: counted random numbers
orders      Independent (PyTorch's) and CoorDL: whole epochs, drawn beforehand
joader      dependent sampling, one sample at a time
tree, dynagcs   the intersection tree and DynaGCS, as published
coupled     ours: exactly uniform orders, with as much in common as that permits
forecast    hands what is drawn to the policies of `ephemeron.data.caching`
"""

from ephemeron.data.collaborative.coupled import Coupled
from ephemeron.data.collaborative.dynagcs import DynaGCS
from ephemeron.data.collaborative.forecast import Forecast
from ephemeron.data.collaborative.joader import Joader
from ephemeron.data.collaborative.orders import CoorDL, Independent
from ephemeron.data.collaborative.sampler import Batch, CollaborativeSampler, Future
from ephemeron.data.collaborative.tree import IntersectionTree, contribution, speed_similarity

__all__ = [
    "Batch",
    "CollaborativeSampler",
    "CoorDL",
    "Coupled",
    "DynaGCS",
    "Forecast",
    "Future",
    "Independent",
    "IntersectionTree",
    "Joader",
    "contribution",
    "speed_similarity",
]
