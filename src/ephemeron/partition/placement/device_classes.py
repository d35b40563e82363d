"""Classes of interchangeable devices, by which orders of devices are enumerated.

Two devices are of one class if they have the same speed, memory and links. n devices of k classes have n! / Π cᵢ! orders instead of n!,
and the state of a chain of stages is the number of used devices of each class.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ephemeron.partition.costs.table import Costs


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClasses:
    """Devices by class."""

    members: tuple[tuple[int, ...], ...]
    """Devices of each class, ascending; classes by their first."""
    exact: bool
    """Whether links are the same for all members; else the fastest link of any two members counts."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Devices of each class."""
        return tuple(len(m) for m in self.members)

    def of(self, order: Sequence[int]) -> list[int]:
        """Devices for a sequence of classes: the first free one of each."""
        free = [iter(m) for m in self.members]
        return [next(free[x]) for x in order]


def classes_of(costs: Costs) -> DeviceClasses:
    """Coarsest classes of interchangeable devices."""
    size = len(costs.devices)
    kinds = _kinds(costs)

    def alike(a: int, b: int) -> bool:
        others = [d for d in range(size) if d not in (a, b)]
        return all(m[a][b] == m[b][a] and all(m[a][d] == m[b][d] and m[d][a] == m[d][b] for d in others) for m in distinct)

    distinct = set(costs.send) | set(costs.back)
    found: list[list[int]] = []
    for d in range(size):
        for own in found:
            if kinds[own[0]] == kinds[d] and alike(own[0], d):
                own.append(d)
                break
        else:
            found.append([d])
    return DeviceClasses(members=tuple(map(tuple, found)), exact=True)


def coarse_classes_of(costs: Costs) -> DeviceClasses:
    """Classes by speed and memory only, without links."""
    found: dict[int, list[int]] = {}
    for d, kind in enumerate(_kinds(costs)):
        found.setdefault(kind, []).append(d)
    return DeviceClasses(members=tuple(map(tuple, found.values())), exact=False)


def sequences(counts: Sequence[int]) -> int:
    """Number of sequences of classes of any length above 0, with at most `counts` of each."""
    by_length = [1] + [0] * sum(counts)  # exponential generating functions, in whole numbers
    for c in counts:
        new = [0] * len(by_length)
        for n, ways in enumerate(by_length):
            if ways:
                for k in range(min(c, len(by_length) - 1 - n) + 1):
                    new[n + k] += ways * math.comb(n + k, k)
        by_length = new
    return sum(by_length[1:])


def permutations(counts: Sequence[int], length: int) -> Iterator[tuple[int, ...]]:
    """All sequences of classes of a length, in lexicographic order."""
    left = list(counts)
    made: list[int] = []

    def go() -> Iterator[tuple[int, ...]]:
        if len(made) == length:
            yield tuple(made)
            return
        for x, c in enumerate(left):
            if c:
                left[x] -= 1
                made.append(x)
                yield from go()
                made.pop()
                left[x] += 1

    return go()


def _kinds(costs: Costs) -> list[int]:
    numbers: dict[object, int] = {}
    columns = zip(zip(*costs.forward, strict=True), zip(*costs.backward, strict=True), costs.capacity, strict=True)
    return [numbers.setdefault(column, len(numbers)) for column in columns]
