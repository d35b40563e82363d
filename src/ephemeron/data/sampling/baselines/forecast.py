"""From a sampler to a cache: the draws of a sampler as events for a policy (DPFlow section 3.4.4, end).

    forecast = Forecast(sampler)
    batch, news = forecast.take(job, now_s=clock())
    for event in news:
        cache.observe(event)
    for index in batch.indices.tolist():
        cache.lookup(job, index, now_s=clock())

A sampler may draw for one job during a call of another. So with every `take` the new draws of all jobs are announced, the samples of
the batch itself first. Likely futures change with every draw and can be as long as a dataset; they are renewed only now and then.
"""

from __future__ import annotations

from ephemeron.data.cache.events import Announced, Event, Joined, Left, Likely
from ephemeron.data.sampling.job_state import JobState
from ephemeron.data.sampling.sampler import CollaborativeSampler, SharedBatch


class Forecast:
    """Turns a sampler's draws into events for a cache, each draw once.

    Args:
        sampler: whose jobs to follow.
        likely_every: samples taken by any job between two renewals of the likely futures, as a part of all samples.
    """

    def __init__(self, sampler: CollaborativeSampler, *, likely_every: float = 1 / 64) -> None:
        self.sampler = sampler
        self.likely_every = likely_every
        self._announced: dict[str, tuple[int, int]] = {}
        self._hinted: set[str] = set()
        self._since_renewal = 0

    def take(self, job: str, count: int | None = None, *, now_s: float) -> tuple[SharedBatch, list[Event]]:
        """The sampler's next batch for a job, and the events that a cache needs before the batch is looked up.

        Raises:
            JobError: as from the sampler.
        """
        batch = self.sampler.take(job, count, now_s=now_s)
        return batch, self.news(batch)

    def news(self, batch: SharedBatch | None = None) -> list[Event]:
        """Events since the last call: jobs that left or joined, draws, likely samples.

        Args:
            batch: samples that were taken meanwhile, and that are not announced yet.
        """
        events: list[Event] = []
        here = {member.job: member.number for member in self.sampler.jobs}
        for job, (number, _) in list(self._announced.items()):
            if here.get(job) != number:
                del self._announced[job]
                self._hinted.discard(job)
                events.append(Left(job=job))
        for member in self.sampler.jobs:
            events += self._of(member, batch if batch is not None and batch.job == member.job else None)
        self._since_renewal += 0 if batch is None else len(batch.indices)
        if self._since_renewal >= self.likely_every * self.sampler.jobs.slots:
            self._since_renewal = 0
            for member in self.sampler.jobs:
                weights = self.sampler.likely(member)
                if weights or member.job in self._hinted:
                    events.append(Likely(job=member.job, weights=weights))
                    (self._hinted.add if weights else self._hinted.discard)(member.job)
        return events

    def _of(self, member: JobState, batch: SharedBatch | None) -> list[Event]:
        events: list[Event] = []
        just_taken = [] if batch is None else batch.indices.tolist()
        if member.job not in self._announced:
            self._announced[member.job] = (member.number, member.taken - len(just_taken))
            events.append(Joined(job=member.job, keys=frozenset(member.indices.tolist())))
        number, announced = self._announced[member.job]
        if member.drawn > announced:
            drawn = just_taken + self.sampler.future(member.job).certain.tolist()
            events.append(Announced(job=member.job, keys=drawn[announced - member.drawn :]))
            self._announced[member.job] = (number, member.drawn)
        return events
