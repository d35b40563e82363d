"""Faults injected by coordinates, the same on every platform.

kill:rank=2,iteration=5[,phase=upload][,attempt=0]    the function dies in the middle of that phase
duplicate:rank=1                                      the platform delivers the call twice
drop-put:rank=0,iteration=3[,attempt=0]               one put of that iteration is acknowledged and lost
delay:rank=1,factor=10[,seconds=0.5]                  that rank computes ten times slower, and each batch half a second longer
cut:rank=0,to=2,iteration=5,seconds=30[,silent=1][,attempt=0]    on a direct channel, rank 0 cannot reach rank 2 for 30 s
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ephemeron.errors import JobError
from ephemeron.events import PHASES

_KEYS = {
    "kill": ({"rank", "iteration"}, {"phase", "attempt"}),
    "duplicate": ({"rank"}, set()),
    "drop-put": ({"rank", "iteration"}, {"attempt"}),
    "delay": ({"rank", "factor"}, {"seconds"}),
    "cut": ({"rank", "to", "iteration", "seconds"}, {"silent", "attempt"}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. A kill, a dropped put or a cut hits one attempt only, so that its replacement can get past it."""

    kind: str
    rank: int
    iteration: int = 0
    phase: str = "compute"
    attempt: int = 0
    factor: float = 1.0
    to: int = 0
    """Rank that cannot be reached."""
    seconds: float = 0.0
    silent: int = 0
    """1: connections stay and carry nothing; 0: they are reset."""

    def __str__(self) -> str:
        keys = [f"rank={self.rank}"]
        if self.kind == "cut":
            keys += [f"to={self.to}"]
        if self.kind in ("kill", "drop-put", "cut"):
            keys += [f"iteration={self.iteration}"]
        if self.kind == "kill":
            keys += [f"phase={self.phase}"]
        if self.kind == "delay":
            keys += [f"factor={self.factor!r}".removesuffix(".0")]
        if self.kind == "cut" or self.seconds:
            keys += [f"seconds={self.seconds!r}".removesuffix(".0"), *(["silent=1"] if self.silent else [])]
        if self.attempt:
            keys += [f"attempt={self.attempt}"]
        return f"{self.kind}:{','.join(keys)}"


def parse_fault(text: str) -> Fault:
    """A fault from its text form.

    Raises:
        JobError: unknown kind, key or phase, not a number, or a number out of range.
    """
    kind, _, rest = text.partition(":")
    if kind not in _KEYS:
        raise JobError(f"fault {text!r}: unknown kind {kind!r}", remedy=f"use one of {', '.join(_KEYS)}")
    needed, optional = _KEYS[kind]
    values: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        if key not in needed | optional:
            raise JobError(f"fault {text!r}: unknown key {key!r}", remedy=f"use {', '.join(sorted(needed | optional))}")
        values[key] = value
    if missing := needed - set(values):
        raise JobError(f"fault {text!r}: missing {', '.join(sorted(missing))}")
    phase = values.pop("phase", "compute")
    if phase not in PHASES:
        raise JobError(f"fault {text!r}: unknown phase {phase!r}", remedy=f"use one of {', '.join(PHASES)}")
    try:
        factor, seconds = float(values.pop("factor", "1")), float(values.pop("seconds", "0"))
        numbers = {k: int(v) for k, v in values.items()}
    except ValueError:
        raise JobError(f"fault {text!r}: expected numbers") from None
    for key, number in numbers.items():
        if number < 0:
            raise JobError(f"fault {text!r}: {key} = {number} is below 0")
    if not 1 <= factor < math.inf:
        raise JobError(f"fault {text!r}: factor = {factor:g} is not at least 1", remedy="use 10 for ten times slower")
    if not 0 <= seconds < math.inf:
        raise JobError(f"fault {text!r}: seconds = {seconds:g} is not a duration")
    if numbers.get("silent", 0) > 1:
        raise JobError(f"fault {text!r}: silent = {numbers['silent']}", remedy="use 0 or 1")
    if kind == "cut" and numbers["to"] == numbers["rank"]:
        raise JobError(f"fault {text!r}: a rank is always connected to itself", remedy="name two ranks")
    return Fault(kind=kind, phase=phase, factor=factor, seconds=seconds, **numbers)
