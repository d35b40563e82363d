"""Number of functions of a run at each of its iterations, from its events. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from ephemeron.events import Event, GenerationStarted, RunStarted


@dataclass(slots=True)
class Membership:
    """The generations of a run, as far as they are known."""

    first: RunStarted | None = None
    """First start of the run; None: it was not seen."""
    later: dict[int, GenerationStarted] = field(default_factory=dict)
    """By number, from 1 on."""

    def feed(self, event: Event) -> None:
        """Takes one event into account."""
        if isinstance(event, RunStarted):
            self.first = self.first or event
        elif isinstance(event, GenerationStarted):
            self.later[event.generation] = event

    @property
    def workers(self) -> int:
        """Functions now."""
        if self.later:
            return self.later[max(self.later)].workers
        return 0 if self.first is None else self.first.workers

    @property
    def iterations(self) -> int:
        """Iterations of the whole run, as far as it is known now."""
        if self.later:
            return self.later[max(self.later)].iterations
        return 0 if self.first is None else self.first.iterations

    def workers_at(self, iteration: int) -> int:
        """Functions that compute an iteration. Those that evaluate before it are those of the iteration before."""
        begun = [number for number, event in self.later.items() if event.from_iteration <= iteration]
        if begun:
            return self.later[max(begun)].workers
        return 0 if self.first is None else self.first.workers
