"""Transfer times at any memory quota: rates of the measured quotas, evaluated together and interpolated.

A quota (MiB) between two measured ones is interpolated linearly; above the last measured one nothing gets faster. A prediction
asks many times for the same quotas and sizes, so results of the last call are kept.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ephemeron.training.planner.model.rates import Array, Direction, Rate, Transfer

Evaluation = Callable[[Array], Array]
"""Seconds by size."""

KEPT = 16
"""Sizes, or rows of sizes, of which seconds are kept."""


@dataclass(slots=True)
class TransferCurves:
    """Rates of one direction at all measured quotas."""

    nodes: Array
    """Measured quotas, ascending."""
    rates: tuple[Rate, ...]
    form: type[Rate] | None
    """Form of all rates; None: they have several."""
    coefficients: tuple[Array, ...]
    """Coefficients of the form, each by measured quota."""
    s_per_mb: Array
    """Seconds per MB of many objects, by measured quota."""
    _memory: Array | None = None
    """Quotas of the last call, by identity."""
    _place: tuple[Any, Any] = (0, 0.0)
    """Their measured neighbours below, and how far they are from there to the ones above."""
    _around: tuple[Evaluation, Evaluation] | None = None
    """Rates at the neighbours below and above."""
    _fixed: dict[float, Array] = dataclasses.field(default_factory=dict)
    """Seconds at every measured quota, for sizes that do not depend on a configuration: a model, a lease."""
    _last: dict[float | bytes | None, Array] = dataclasses.field(default_factory=dict)
    """Seconds at the quotas of the last call: of one size, of a row of sizes, and (key None) of one MB of many objects."""

    def seconds(self, size: Array, memory: Array) -> Array:
        """Seconds of one object alone, of the broadcast shape of sizes and quotas."""
        if size.ndim == 0 and len(self.nodes) > 1:
            return self._of_one(float(size), memory)
        shape = size.shape if size.shape == memory.shape else np.broadcast_shapes(size.shape, memory.shape)
        if len(self.nodes) == 1:
            return np.broadcast_to(self.rates[0].seconds(size), shape)
        if size.ndim == 2 and memory.ndim == 2 and size.shape[0] == memory.shape[1] == 1 and len(memory) > 1:
            return self._of_row(size, memory)
        if memory.size == 1 or math.prod(shape) <= 2 * size.size * len(self.nodes):
            i, weight = self._at(memory)
            if self._around is None:
                self._around = self._rate(i), self._rate(i + 1)
            low, high = (rate(size) for rate in self._around)
        else:  # few sizes at many quotas: every size once at every node
            i, weight = _node(self.nodes, memory)
            each = self._everywhere(size)
            place = np.ogrid[tuple(slice(n) for n in size.shape)] if size.ndim else ()
            low, high = each[(i, *place)], each[(i + 1, *place)]
        found = np.asarray(low + weight * (high - low))
        return found if found.shape == shape else np.broadcast_to(found, shape)

    def seconds_per_mb(self, memory: Array) -> Array:
        """Seconds per MB of many objects."""
        if len(self.nodes) == 1:
            return np.full(memory.shape, self.s_per_mb[0])
        self._at(memory)
        found = self._last.get(None)
        return self._keep(None, np.asarray(np.interp(memory, self.nodes, self.s_per_mb))) if found is None else found

    def _at(self, memory: Array) -> tuple[Any, Any]:
        """The node below each quota, and how far the quota is from there to the one above."""
        if self._memory is not memory:
            self._last.clear()
            self._memory, self._place, self._around = memory, _node(self.nodes, memory), None
        return self._place

    def _of_one(self, size: float, memory: Array) -> Array:
        """Seconds of one size at many quotas."""
        i, weight = self._at(memory)
        found = self._last.get(size)
        if found is not None:
            return found
        each = self._fixed.get(size)
        if each is None:
            if len(self._fixed) >= KEPT:
                self._fixed.clear()
            each = self._fixed[size] = self._everywhere(np.asarray(size))
        low = each.take(i)
        return self._keep(size, np.asarray(low + weight * (each.take(i + 1) - low)))

    def _of_row(self, size: Array, memory: Array) -> Array:
        """Seconds of a row of sizes at a column of quotas."""
        i, weight = self._at(memory)
        key = size.tobytes()
        found = self._last.get(key)
        if found is not None:
            return found
        each, rows = self._everywhere(size[0]), i[:, 0]
        found = (each[1:] - each[:-1]).take(rows, axis=0)
        found *= weight
        found += each.take(rows, axis=0)
        return self._keep(key, found)

    def _keep(self, key: float | bytes | None, found: Array) -> Array:
        if len(self._last) >= KEPT:
            self._last.clear()
        found.flags.writeable = False
        self._last[key] = found
        return found

    def _rate(self, node: Any) -> Evaluation:
        """The rate at one node, or one per element: coefficients of the shape of `node`."""
        if self.form is not None:
            curve, coefficients = self.form.curve, [c[node] for c in self.coefficients]
            return lambda size: curve(size, *coefficients)
        return self.rates[int(node)].seconds if np.ndim(node) == 0 else lambda size: self._mixed(size, node)

    def _mixed(self, size: Array, node: Array) -> Array:
        """Seconds by rates of different forms, one chosen per element."""
        shape = np.broadcast_shapes(size.shape, node.shape)
        every = np.stack([np.broadcast_to(r.seconds(size), shape) for r in self.rates])
        return np.asarray(np.take_along_axis(every, np.broadcast_to(node, shape)[None], axis=0)[0])

    def _everywhere(self, size: Array) -> Array:
        """Seconds of every size at every node, nodes first."""
        if self.form is None:
            return np.stack([rate.seconds(size) for rate in self.rates])
        ones = (1,) * size.ndim
        return self.form.curve(size, *(c.reshape(-1, *ones) for c in self.coefficients))


_KNOWN: dict[int, tuple[tuple[Transfer, ...], dict[Direction, TransferCurves]]] = {}
"""Curves by the identity of a profile's transfers, which are immutable: stacking them costs more than evaluating them."""


def transfer_curves(transfer: tuple[Transfer, ...]) -> dict[Direction, TransferCurves]:
    """Curves of both directions of a profile."""
    known = _KNOWN.get(id(transfer))
    if known is not None and known[0] is transfer:
        return known[1]
    nodes = np.array([t.memory_mb for t in transfer])
    found: dict[Direction, TransferCurves] = {
        "up": _curves(nodes, tuple(t.up for t in transfer)),
        "down": _curves(nodes, tuple(t.down for t in transfer)),
    }
    if len(_KNOWN) > 256:
        _KNOWN.clear()
    _KNOWN[id(transfer)] = transfer, found
    return found


def _curves(nodes: Array, rates: tuple[Rate, ...]) -> TransferCurves:
    forms = {type(r) for r in rates}
    form = forms.pop() if len(forms) == 1 else None
    names = [f.name for f in dataclasses.fields(form)] if form is not None else []
    coefficients = tuple(np.array([getattr(r, name) for r in rates]) for name in names)
    return TransferCurves(nodes, rates, form, coefficients, np.array([1 / r.bandwidth_mb_s for r in rates]))


def _node(nodes: Array, memory_mb: Any) -> tuple[Any, Any]:
    """The measured quota below each quota, and how far the quota is from there to the one above."""
    m = np.minimum(np.maximum(memory_mb, nodes[0]), nodes[-1])
    i = nodes[1:-1].searchsorted(m, side="right")
    return i, (m - nodes[i]) / (nodes[i + 1] - nodes[i])
