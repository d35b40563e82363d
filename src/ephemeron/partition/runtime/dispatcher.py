"""Which pass a device does next: the judge's rule as a pure state machine, fed with what has arrived.

Not a list of operations worked off in order: a list that fits one ratio of computing to sending waits in another. A
free device takes what is ready, backward passes and older micro-batches first, as in the replay that predicted its
time. What comes out does not depend on when things arrive: the forward passes of a stage, and its backward passes, are
each done in the order of micro-batches, so sums of gradients and running statistics are the same to the last bit.
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
    """Micro-batches under way on each device at most, as the judge has it.

    Args:
        schedule: kind and number of micro-batches.
        stage_devices: device by stage; one that is there twice makes it no pipeline, and then every device may keep as
            many as a first stage would.
    """
    devices = tuple(dict.fromkeys(stage_devices))
    size, m = len(devices), schedule.micro_batches
    if schedule.kind != "1f1b":
        return dict.fromkeys(devices, m)
    pipeline = size == len(stage_devices)
    after = {d: size - (s if pipeline else 0) for s, d in enumerate(devices)}
    return {d: min(m, 2 * n - 1 if schedule.overlap else n) for d, n in after.items()}


class Dispatcher:
    """What one device does in one iteration.

    Args:
        stages: its stages.
        schedule: with the number of micro-batches of this iteration.
        in_flight: most micro-batches whose forward passes have begun and whose backward passes have not all ended.
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
            Operation(stage=s, direction=d, micro_batch=m)
            for s in self.stages for d in _PASSES for m in range(schedule.micro_batches)
        }  # fmt: skip

    @property
    def done(self) -> bool:
        """Whether every pass has been given out."""
        return not self._waiting

    @property
    def ready(self) -> bool:
        """Whether `next` would give a pass."""
        return any(self._may(o) for o in self._arrived)

    def arrived(self, operation: Operation) -> None:
        """Everything that the pass reads from elsewhere is here."""
        self._arrived.add(operation)

    def next(self) -> Operation | None:
        """The pass to begin now; None: nothing may begin before something arrives."""
        free = [o for o in self._arrived if self._may(o)]
        if not free:
            return None
        chosen = min(free, key=_urgency)
        self._arrived.discard(chosen)
        self._waiting.discard(chosen)
        self._following[chosen.stage, chosen.direction] += 1
        return chosen

    def ended(self, operation: Operation) -> None:
        """The pass is over."""
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
    feeds: Sequence[tuple[int, int]],
    stage_devices: Sequence[str],
    schedule: Schedule,
    *,
    seconds: Mapping[Pass, float] | None = None,
) -> dict[str, tuple[Operation, ...]]:
    """What each device does, where every stage takes as long as every other and sending takes no time: the textbook's
    picture.

    Args:
        feeds: (stage that makes something, stage that reads it).
        stage_devices: device by stage.
        schedule: kind and number of micro-batches.
        seconds: of a pass; by default 1 forwards and 2 backwards.
    """
    seconds = seconds or {"forward": 1.0, "backward": 2.0}
    limits = in_flight(schedule, stage_devices)
    turns = {
        d: Dispatcher([s for s, at in enumerate(stage_devices) if at == d], schedule=schedule, in_flight=k)
        for d, k in limits.items()
    }
    made: dict[str, list[Operation]] = {d: [] for d in turns}
    free_s = dict.fromkeys(turns, 0.0)
    running: list[tuple[float, str, Operation]] = []
    missing = waits_of(feeds, len(stage_devices), schedule.micro_batches)

    def release(o: Operation) -> None:
        missing[o] -= 1
        if missing[o] == 0:
            turns[stage_devices[o.stage]].arrived(o)

    for o in [o for o, n in missing.items() if n == 0]:
        turns[stage_devices[o.stage]].arrived(o)
    now_s = 0.0
    while True:
        for device, turn in turns.items():
            if free_s[device] <= now_s and (chosen := turn.next()) is not None:
                made[device].append(chosen)
                free_s[device] = now_s + seconds[chosen.direction]
                running.append((free_s[device], device, chosen))
        if not running:
            return {d: tuple(o) for d, o in made.items()}
        running.sort(key=lambda r: (r[0], r[1]))
        now_s, device, over = running.pop(0)
        turns[device].ended(over)
        for o in following(over, feeds):
            release(o)


def waits_of(feeds: Sequence[tuple[int, int]], stages: int, micro_batches: int) -> dict[Operation, int]:
    """How many messages of other stages each pass waits for."""
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
    return [
        Operation(stage=to, direction=over.direction, micro_batch=over.micro_batch)
        for at, to in ends
        if at == over.stage
    ]


_PASSES: tuple[Pass, Pass] = ("forward", "backward")


def _urgency(o: Operation) -> tuple[bool, int, int]:
    return o.direction == "forward", o.micro_batch, o.stage if o.direction == "forward" else -o.stage
