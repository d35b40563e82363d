"""Next pass of a device: the schedule simulator's rule as a pure state machine over arrived inputs.

There is no fixed list of operations: a list that suits one ratio of computation to communication waits at another. A free device
runs a pass that is ready, backward passes and older micro-batches first, as in the simulation that predicted its time. Results do
not depend on arrival times: the forward passes of a stage, and its backward passes, each run in the order of micro-batches, so sums
of gradients and running statistics are bit-identical.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ephemeron.partition.schedule_simulator.schedule import Pass, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One pass of one stage over one micro-batch."""

    stage: int
    direction: Pass
    micro_batch: int


def in_flight(schedule: Schedule, stage_devices: Sequence[str]) -> dict[str, int]:
    """Most micro-batches in flight on each device, as in the schedule simulator.

    Args:
        schedule: kind and number of micro-batches.
        stage_devices: device by stage. A device with two stages makes it no pipeline; then every device may keep as many as a
            first stage.
    """
    devices = tuple(dict.fromkeys(stage_devices))
    size, m = len(devices), schedule.micro_batches
    if schedule.kind != "1f1b":
        return dict.fromkeys(devices, m)
    pipeline = size == len(stage_devices)
    after = {d: size - (s if pipeline else 0) for s, d in enumerate(devices)}
    return {d: min(m, 2 * n - 1 if schedule.overlap else n) for d, n in after.items()}


class Dispatcher:
    """Passes of one device in one iteration.

    Args:
        stages: its stages.
        schedule: with the number of micro-batches of this iteration.
        in_flight: most micro-batches between the begin of their forward passes and the end of their backward passes.
    """

    def __init__(self, stages: Sequence[int], *, schedule: Schedule, in_flight: int) -> None:
        self.stages = tuple(stages)
        self.kind, self.micro_batches, self.in_flight = schedule.kind, schedule.micro_batches, in_flight
        self._arrived: set[Operation] = set()
        self._forwards = 0
        self._backwards = [0] * schedule.micro_batches
        self._after_forward: set[tuple[int, int]] = set()
        self._following = {(s, d): 0 for s in self.stages for d in _PASSES}
        self._waiting = {
            Operation(stage=s, direction=d, micro_batch=m) for s in self.stages for d in _PASSES for m in range(schedule.micro_batches)
        }

    @property
    def done(self) -> bool:
        """Whether every pass has been started."""
        return not self._waiting

    @property
    def ready(self) -> bool:
        """Whether `next` would return a pass."""
        return any(self._may(o) for o in self._arrived)

    def arrived(self, operation: Operation) -> None:
        """All inputs of the pass from other stages have arrived."""
        self._arrived.add(operation)

    def next(self) -> Operation | None:
        """Pass to begin now; None: all have to wait for inputs."""
        free = [o for o in self._arrived if self._may(o)]
        if not free:
            return None
        chosen = min(free, key=_urgency)
        self._arrived.discard(chosen)
        self._waiting.discard(chosen)
        self._following[chosen.stage, chosen.direction] += 1
        return chosen

    def ended(self, operation: Operation) -> None:
        """The pass has ended."""
        if operation.direction == "forward":
            self._forwards += 1
            self._after_forward.add((operation.stage, operation.micro_batch))
        else:
            self._backwards[operation.micro_batch] += 1

    def _may(self, o: Operation) -> bool:
        if o.micro_batch != self._following[o.stage, o.direction]:
            return False
        if o.direction == "forward":
            before = o.micro_batch - self.in_flight
            return before < 0 or self._backwards[before] == len(self.stages)
        if (o.stage, o.micro_batch) not in self._after_forward:
            return False
        return self.kind != "gpipe" or self._forwards == self.micro_batches * len(self.stages)


def sequences(
    feeds: Sequence[tuple[int, int]], stage_devices: Sequence[str], schedule: Schedule, *, seconds: Mapping[Pass, float] | None = None
) -> dict[str, tuple[Operation, ...]]:
    """Textbook schedule: passes of each device if all stages take the same time and sending takes none.

    Args:
        feeds: (producing stage, reading stage).
        stage_devices: device by stage.
        schedule: kind and number of micro-batches.
        seconds: of a pass; by default 1 forward and 2 backward.
    """
    seconds = seconds or {"forward": 1.0, "backward": 2.0}
    limits = in_flight(schedule, stage_devices)
    dispatchers = {
        d: Dispatcher([s for s, at in enumerate(stage_devices) if at == d], schedule=schedule, in_flight=k) for d, k in limits.items()
    }
    made: dict[str, list[Operation]] = {d: [] for d in dispatchers}
    free_s = dict.fromkeys(dispatchers, 0.0)
    running: list[tuple[float, str, Operation]] = []
    missing = waits_of(feeds, len(stage_devices), schedule.micro_batches)

    def release(o: Operation) -> None:
        missing[o] -= 1
        if missing[o] == 0:
            dispatchers[stage_devices[o.stage]].arrived(o)

    for o in [o for o, n in missing.items() if n == 0]:
        dispatchers[stage_devices[o.stage]].arrived(o)
    now_s = 0.0
    while True:
        for device, dispatcher in dispatchers.items():
            if free_s[device] <= now_s and (chosen := dispatcher.next()) is not None:
                made[device].append(chosen)
                free_s[device] = now_s + seconds[chosen.direction]
                running.append((free_s[device], device, chosen))
        if not running:
            return {d: tuple(o) for d, o in made.items()}
        running.sort(key=lambda r: (r[0], r[1]))
        now_s, device, over = running.pop(0)
        dispatchers[device].ended(over)
        for o in following(over, feeds):
            release(o)


def waits_of(feeds: Sequence[tuple[int, int]], stages: int, micro_batches: int) -> dict[Operation, int]:
    """Number of messages from other stages that each pass waits for."""
    waits = {}
    for s in range(stages):
        counts = {"forward": sum(v == s for _, v in feeds), "backward": sum(u == s for u, _ in feeds)}
        for m in range(micro_batches):
            for direction in _PASSES:
                waits[Operation(stage=s, direction=direction, micro_batch=m)] = counts[direction]
    return waits


def following(over: Operation, feeds: Sequence[tuple[int, int]]) -> list[Operation]:
    """Passes of other stages that wait for this one."""
    ends = [(u, v) if over.direction == "forward" else (v, u) for u, v in feeds]
    return [Operation(stage=to, direction=over.direction, micro_batch=over.micro_batch) for at, to in ends if at == over.stage]


_PASSES: tuple[Pass, Pass] = ("forward", "backward")


def _urgency(o: Operation) -> tuple[bool, int, int]:
    return o.direction == "forward", o.micro_batch, o.stage if o.direction == "forward" else -o.stage
