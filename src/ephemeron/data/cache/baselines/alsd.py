"""ALSD, approximate longest sample distance (DPFlow section 3.4.3, equations 3-1 … 3-5, algorithm 3.10).

The distance of a sample in one job's sequence is exact where the sequence is drawn, and estimated by three rules where
it is not; over several jobs the distances are averaged with weights α, and the longest average is evicted:

    d̂ = N            used in this epoch                          d̄ = Σ_j α_j · d̂_j      (3-5)
        p - k        certain future, at position p      (3-1)
        d̂_uc         likely future, one number for all  (3-2)
        d̂_uk         unknown future, one number for all (3-3)

The average is what keeps ALSD from the optimum: Belady's rule asks when a sample is used next by *any* job, which is the
minimum over jobs. A sample that one job needs at once and three need in a thousand steps has a longer average than one
that all need in five hundred steps, and is evicted although it is worth keeping. `NextUse` asks for the minimum and has
the same interface; ALSD is here because it is the published method, and to be compared with.

Exact, without scoring the whole cache: d̂ consists of a part that never changes (Σ α_j p_j over the jobs that announced
the sample) and a part that is the same for all samples of which the jobs know the same kind of thing. There is a heap
for each combination that occurs, 2^jobs of them for samplers that draw whole epochs, and at most one per object.
"""

from __future__ import annotations

from ephemeron.data.cache.access_forecast import JobFuture, Knowledge
from ephemeron.data.cache.lookahead import LookaheadPolicy
from ephemeron.data.cache.policy import CachedItem, Group, bin_scale, value_bin


class ALSD(LookaheadPolicy):
    """Evicts the longest weighted average of estimated sampling distances.

    A sample that is none of a job's counts as used in its epoch (distance N): the paper has no such samples.

    Args:
        cost_aware: multiply distances by bytes per second of preprocessing. If all cost the same, that changes nothing.
    """

    def __init__(self, *, cost_aware: bool = False) -> None:
        super().__init__()
        self.cost_aware = cost_aware

    def place(self, item: CachedItem) -> tuple[Group, float]:
        total = sum(future.weight for future in self.jobs.values())
        known, score = [], 0.0
        for future in self.jobs.values():
            knowledge = future.knows(item.key)
            known.append(knowledge)
            if knowledge is Knowledge.CERTAIN:
                position = future.position(item.key)
                assert position is not None
                score += future.weight / total * (position + 1)
        return (value_bin(item, cost_aware=self.cost_aware), tuple(known)), score

    def standing(self, group: Group, score: float) -> float:
        assert isinstance(group, tuple)
        number, known = group
        total = sum(future.weight for future in self.jobs.values())
        for knowledge, future in zip(known, self.jobs.values(), strict=True):
            score += future.weight / total * _shared(knowledge, future)
        return bin_scale(number) * score


def _shared(knowledge: Knowledge, future: JobFuture) -> float:
    """The part of a distance that is the same for all samples of which the same kind of thing is known."""
    if knowledge is Knowledge.CERTAIN:
        return -future.accessed
    if knowledge is Knowledge.LIKELY:
        return future.likely_distance
    if knowledge is Knowledge.UNKNOWN:
        return future.unknown_distance
    return future.size
