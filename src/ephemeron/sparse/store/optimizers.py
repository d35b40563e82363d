"""Optimisers of the store: how a shard changes the rows that a gradient names. NumPy on rows, no I/O, no clock.

A table keeps its weights and, beside them, one array per name in the optimiser's `slots`; only rows that a gradient names are
read or written, whatever the size of the table. All arithmetic is float32.

| optimiser | change of a row w by its gradient g | slots |
|---|---|---|
| `Sum` | w + g | |
| `SGD` | w - rate (g + l2 w) | |
| `AdaGrad` (Duchi 2011) | n += g²; w - rate g / (√n + epsilon) | n |
| `FTRL` (FTRL-proximal, McMahan 2013, algorithm 1) | from z and n; exactly zero where abs(z) <= l1 | z, n |
| `Adam` (Kingma 2015), lazy | moments decay only when the row has a gradient; bias correction counts the row's own steps | m, v, t |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ephemeron.config.typed import NonNegative, Positive, Typed, Within, build, near, plain
from ephemeron.errors import JobError

Floats: TypeAlias = NDArray[np.float32]
Indices: TypeAlias = NDArray[np.int64]
Slots: TypeAlias = Mapping[str, Floats]

_Decay: TypeAlias = Annotated[float, Within(0, 1, open_maximum=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum(Typed):
    """Addition: a push is a change, not a gradient. For counts, such as those of topics and words."""

    kind: ClassVar[str] = "sum"
    slots: ClassVar[tuple[str, ...]] = ()

    def apply(self, weights: Floats, slots: Slots, rows: Indices, gradient: Floats) -> None:
        """Changes `weights[rows]`, and the slots. Rows are distinct."""
        weights[rows] += gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class SGD(Typed):
    """Stochastic gradient descent."""

    learning_rate: Positive
    l2: NonNegative = 0.0
    """Weight decay of rows that have a gradient."""
    kind: ClassVar[str] = "sgd"
    slots: ClassVar[tuple[str, ...]] = ()

    def apply(self, weights: Floats, slots: Slots, rows: Indices, gradient: Floats) -> None:
        """See `Sum.apply`."""
        if self.l2:
            gradient = gradient + np.float32(self.l2) * weights[rows]
        weights[rows] -= np.float32(self.learning_rate) * gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaGrad(Typed):
    """AdaGrad: the rate of an entry falls with the sum of its squared gradients."""

    learning_rate: Positive
    epsilon: Positive = 1e-8
    kind: ClassVar[str] = "adagrad"
    slots: ClassVar[tuple[str, ...]] = ("n",)

    def apply(self, weights: Floats, slots: Slots, rows: Indices, gradient: Floats) -> None:
        """See `Sum.apply`."""
        n = slots["n"][rows]
        n += gradient * gradient
        slots["n"][rows] = n
        np.sqrt(n, out=n)
        n += np.float32(self.epsilon)
        weights[rows] -= np.float32(self.learning_rate) * gradient / n


@dataclass(frozen=True, slots=True, kw_only=True)
class FTRL(Typed):
    """FTRL-proximal: AdaGrad's rates and, by `l1`, weights that are exactly zero.

    The weights of a row follow from its slots at its first gradient on, so an initial value lasts until then.
    """

    alpha: Positive
    beta: NonNegative = 1.0
    l1: NonNegative = 0.0
    l2: NonNegative = 0.0
    kind: ClassVar[str] = "ftrl"
    slots: ClassVar[tuple[str, ...]] = ("z", "n")

    def apply(self, weights: Floats, slots: Slots, rows: Indices, gradient: Floats) -> None:
        """See `Sum.apply`."""
        n, z = slots["n"][rows], slots["z"][rows]
        before = np.sqrt(n)
        n += gradient * gradient
        root = np.sqrt(n)
        z += gradient - (root - before) / np.float32(self.alpha) * weights[rows]
        slots["n"][rows] = n
        slots["z"][rows] = z
        shrunk = np.sign(z) * np.maximum(np.abs(z) - np.float32(self.l1), 0)
        scale = (np.float32(self.beta) + root) / np.float32(self.alpha) + np.float32(self.l2)
        # Without a gradient yet, n and beta may both be zero: such a weight is zero.
        weights[rows] = np.divide(-shrunk, scale, out=np.zeros_like(shrunk), where=scale > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam(Typed):
    """Lazy Adam. With a gradient for each row in each step, it is Adam."""

    learning_rate: Positive
    beta1: _Decay = 0.9
    beta2: _Decay = 0.999
    epsilon: Positive = 1e-8
    kind: ClassVar[str] = "adam"
    slots: ClassVar[tuple[str, ...]] = ("m", "v", "t")

    def apply(self, weights: Floats, slots: Slots, rows: Indices, gradient: Floats) -> None:
        """See `Sum.apply`."""
        one, beta1, beta2 = np.float32(1), np.float32(self.beta1), np.float32(self.beta2)
        m, v, t = slots["m"][rows], slots["v"][rows], slots["t"][rows] + one
        m += (one - beta1) * (gradient - m)
        v += (one - beta2) * (gradient * gradient - v)
        slots["m"][rows], slots["v"][rows], slots["t"][rows] = m, v, t
        m /= one - beta1**t
        v /= one - beta2**t
        weights[rows] -= np.float32(self.learning_rate) * m / (np.sqrt(v) + np.float32(self.epsilon))


Optimizer: TypeAlias = Sum | SGD | AdaGrad | FTRL | Adam
_KINDS: dict[str, type[Any]] = {cls.kind: cls for cls in (Sum, SGD, AdaGrad, FTRL, Adam)}


def document(optimizer: Optimizer) -> dict[str, Any]:
    """An optimiser as JSON, its name under `kind`."""
    return {"kind": optimizer.kind, **plain(optimizer)}


def optimizer(raw: Mapping[str, Any], *, where: str = "optimizer") -> Optimizer:
    """The inverse of `document`; also for a table of a TOML file.

    Raises:
        JobError: no optimiser of that name, or wrong settings.
    """
    values = dict(raw)
    kind = values.pop("kind", None)
    if kind not in _KINDS:
        raise JobError(f"{where}: kind = {kind!r} is not known", remedy=near(str(kind), _KINDS, what="optimisers"))
    made: Optimizer = build(_KINDS[kind], values, where=where)
    return made
