"""Synchronisation policies: when a worker may go on, and what an aggregator has to wait for. Pure.

Policies are stated in *versions*: version v is the merged update of iteration v. Before a worker computes
iteration t its parameters must have seen some number of versions, and before an aggregator publishes version v
some contributions must have been folded in:

| protocol | before computing t: versions applied | before publishing v: contributions in |
|---|---|---|
| BSP    | exactly t                                  | all of v |
| HAP    | aggregators exactly t, others exactly t−1  | all of v (FasDL, section 3.2.2) |
| SSP(s) | at least t−s, newer ones if they exist | all of v (Ho et al. 2013) |
| ASP    | those that exist                           | those that have arrived |
| HSP    | those of earlier epochs, newer ones if they exist | those that have arrived; the last of an epoch: all of the epoch |

HSP is the hybrid synchronous parallel protocol of SIREN (survey, section 2.3): ASP within an epoch, a barrier at its end, where all ranks
have applied the same versions in the same order, so that their parameters are equal bit for bit.

Under BSP and HAP every step is determined, so two runs are bit-identical. HAP's staleness is exactly one for
non-aggregators and zero for aggregators. Under SSP the fastest worker is at most s iterations ahead.
"""

from __future__ import annotations

from dataclasses import dataclass

from ephemeron.training.job import sync_name

UNBOUNDED = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A synchronisation protocol as three numbers."""

    name: str
    aggregator_staleness: int
    """Versions an aggregator's parameters may lack."""
    other_staleness: int
    """Versions a non-aggregator's parameters may lack."""
    exact: bool
    """The allowed staleness is also the actual one: newer versions are not applied early."""
    waits_for_all: bool
    """A version holds every rank's contribution of its iteration."""
    barrier_every: int = UNBOUNDED
    """Iterations between barriers, before which all versions have to be applied; the end of the run is one in any case."""
    first: int = 0
    """First iteration of the generation, before which all versions are applied."""

    def staleness(self, *, aggregator: bool) -> int:
        """Allowed staleness of a role."""
        return self.aggregator_staleness if aggregator else self.other_staleness

    def must_have_applied(self, iteration: int, *, aggregator: bool) -> int:
        """Number of versions that have to be applied before `iteration` may be computed."""
        return max(self.barrier_before(iteration), iteration - self.staleness(aggregator=aggregator))

    def is_barrier(self, iteration: int) -> bool:
        """Whether every rank waits for all versions before `iteration` is computed, which it need not before others."""
        return iteration > self.first and self.barrier_before(iteration) == iteration

    def barrier_before(self, iteration: int) -> int:
        """Last barrier before an iteration, which may be one itself."""
        return iteration - (iteration - self.first) % self.barrier_every

    def barrier_after(self, version: int, iterations: int) -> int:
        """First barrier after a version: the iteration before which it has to be applied, at most `iterations`."""
        return min(iterations, self.barrier_before(version) + self.barrier_every)

    def may_apply(self, applied: int, iteration: int, *, aggregator: bool) -> bool:
        """Whether version `applied` (the next one) may be applied before computing `iteration`."""
        if self.exact:
            return applied < self.must_have_applied(iteration, aggregator=aggregator)
        return applied < iteration

    @property
    def deterministic(self) -> bool:
        """Whether two runs give bit-identical weights."""
        return self.exact and self.waits_for_all


def policy_for(text: str, *, epoch_length: int = UNBOUNDED, first: int = 0) -> Policy:
    """The policy named `bsp`, `hap`, `hsp`, `asp` or `ssp:N`.

    Args:
        text: the name.
        epoch_length: iterations of an epoch, after which `hsp` has its barriers.
        first: first iteration of the generation.

    Raises:
        JobError: no such protocol.
    """
    name, bound = sync_name(text)
    lag = {"bsp": 0, "hap": 0, "ssp": bound, "asp": UNBOUNDED, "hsp": UNBOUNDED}[name]
    return Policy(
        name=text,
        aggregator_staleness=lag,
        other_staleness=1 if name == "hap" else lag,
        exact=name in ("bsp", "hap"),
        waits_for_all=name not in ("asp", "hsp"),
        barrier_every=epoch_length if name == "hsp" else UNBOUNDED,
        first=first,
    )
