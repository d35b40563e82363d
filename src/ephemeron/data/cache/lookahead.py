"""Base of policies that use announced accesses: a forecast per job, kept up to date by the jobs' events."""

from __future__ import annotations

from abc import abstractmethod

from ephemeron.data.cache.access_forecast import JobFuture
from ephemeron.data.cache.events import Accessed, Announced, Event, JobId, Joined, Left, Likely
from ephemeron.data.cache.policy import CachedItem, Group, RankedPolicy
from ephemeron.errors import JobError


class LookaheadPolicy(RankedPolicy):
    """Keeps a `JobFuture` for each job, and scores again what an event changes.

    Raises:
        JobError: from `observe`, when a job joins that is here already.
    """

    def __init__(self) -> None:
        super().__init__()
        self.jobs: dict[JobId, JobFuture] = {}
        self.now_s = 0.0
        """Time of the last access."""

    def observe(self, event: Event) -> None:
        if isinstance(event, Accessed):
            self._accessed(event)
        elif isinstance(event, Joined):
            if event.job in self.jobs:
                raise JobError(f"job {event.job!r} joined twice", remedy="let it leave first, or give it another name")
            self.jobs[event.job] = JobFuture(event)
            self.refresh()
        elif event.job in self.jobs:
            if isinstance(event, Left):
                del self.jobs[event.job]
                self.refresh()
            elif isinstance(event, Announced):
                self.jobs[event.job].announce(event.keys)
                self.touch_all(event.keys)
            elif isinstance(event, Likely):
                self.touch_all(self.jobs[event.job].expect(event.weights))

    @abstractmethod
    def place(self, item: CachedItem) -> tuple[Group, float]: ...

    def _accessed(self, event: Accessed) -> None:
        self.now_s = max(self.now_s, event.now_s)
        future = self.jobs.get(event.job)
        if future is not None:
            epoch_ended = future.access(event.key, event.now_s)
            self.moved(event.job)
            if epoch_ended:
                self.refresh()
        self.touch(event.key)

    def moved(self, job: JobId) -> None:
        """A job has used one sample more; called before anything is scored again."""
