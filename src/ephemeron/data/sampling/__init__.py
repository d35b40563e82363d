"""Drawing samples for several jobs, so that one loads what the others use too (DPFlow section 3.4.4).

sampler    the interface and its promises: each sample once per epoch, no job waits, deterministic, resumable; counted random numbers
job_state  jobs and the samples that they have left
coupled    Coupled: exactly uniform orders, with as much in common as that permits; the sampler of the data service
baselines  samplers to compare with: Independent, CoorDL, Joader, DynaGCS
"""

from ephemeron.data.sampling.coupled import Coupled
from ephemeron.data.sampling.sampler import CollaborativeSampler, Future, SharedBatch

__all__ = ["CollaborativeSampler", "Coupled", "Future", "SharedBatch"]
