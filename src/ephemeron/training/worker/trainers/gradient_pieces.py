"""Pieces of the flat gradient that are complete while a backward pass goes on.

Autograd adds up all that reaches a parameter before it calls the parameter's hook, once in a backward pass, however often the
parameter is used. A piece is complete when all parameters in it have been through their hooks. What has none stays for the end:
parameters that take no part, gradients written by hand or elsewhere.

This is not so where a backward pass is entered within another one (reentrant checkpointing) or hooks of the program change
gradients afterwards. The first pass therefore only watches: if any piece has changed after it seemed complete, no piece is ever
given early.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import torch
import xxhash
from torch import nn

from ephemeron.errors import JobError
from ephemeron.training.worker.non_finite import gaps
from ephemeron.training.worker.trainers.early_pieces import OVERLAP_VARIABLE, EarlyPieces

_log = logging.getLogger(__name__)


class GradientPieces:
    """Pieces of one model's gradient.

    Args:
        flat: the gradient.
        views: by parameter, its part of `flat`.
        bounds: by parameter, first element and end.
    """

    def __init__(self, flat: torch.Tensor, views: Sequence[torch.Tensor], bounds: Sequence[tuple[int, int]]) -> None:
        self.took_part: set[int] = set()
        """Numbers of the parameters whose gradient was accumulated in this iteration."""
        self.to: EarlyPieces | None = None
        """Receiver of pieces of a gradient in host memory; None: none are given."""
        self._flat, self._addresses, self._bounds = flat, [view.data_ptr() for view in views], bounds
        self._ranges: Sequence[tuple[int, int]] = ()
        self._pieces_of: list[list[int]] = []
        """By parameter, pieces that have elements of it."""
        self._parameters_in: list[int] = []
        """By piece, number of its parameters."""
        self._weight: float | None = None
        """Weight of the contribution; None: no piece is complete yet."""
        self._passed: set[int] = set()
        """Parameters whose gradient was accumulated in the last backward pass."""
        self._left: list[int] = []
        """By piece, parameters that have not passed."""
        self._watched: dict[int, int] = {}
        """By piece that seemed complete in the first pass, its checksum then."""
        self._given: dict[int, tuple[int, int]] = {}
        """Ranges of the pieces that are multiplied by the weight already."""
        self._fit: bool | None = None
        """Whether a piece that seems complete is; None: not known yet."""

    def watch(self, number: int, parameter: nn.Parameter) -> None:
        """Has a parameter tell when its gradient was accumulated."""
        parameter.register_post_accumulate_grad_hook(partial(self._on_accumulated, number))  # type: ignore[no-untyped-call]

    def reset(self) -> None:
        """Gradients are about to be computed from the beginning."""
        self._weight = None
        for found in (self.took_part, self._passed, self._watched, self._given):
            found.clear()

    def begin(self, weight: float) -> None:
        """The last backward pass is about to begin.

        Args:
            weight: of the contribution.
        """
        if self.to is None or self._fit is False:
            return
        if self._ranges != self.to.ranges:
            self._divide(self.to.ranges)
        if self._ranges:
            self._weight, self._left = weight, list(self._parameters_in)

    def finish(self, weight: float) -> None:
        """The gradient is complete: multiplies what was not given by the weight."""
        if self._watched and self._fit is None:
            self._fit = all(self._checksum(piece) == before for piece, before in self._watched.items())
            if not self._fit:
                _log.info("gradients change after they were accumulated: they are sent after the backward pass")
        for start, stop in gaps(list(self._given.values()), self._flat.numel()):
            self._flat[start:stop].mul_(weight)

    def _divide(self, ranges: Sequence[tuple[int, int]]) -> None:
        self._ranges, self._parameters_in = ranges, [0] * len(ranges)
        self._pieces_of = [[k for k, (start, stop) in enumerate(ranges) if start < last and first < stop] for first, last in self._bounds]
        for pieces in self._pieces_of:
            for piece in pieces:
                self._parameters_in[piece] += 1

    def _on_accumulated(self, number: int, parameter: nn.Parameter) -> None:
        """Called by autograd."""
        self.took_part.add(number)
        if self._weight is None:
            return
        again, grad = number in self._passed, parameter.grad
        self._passed.add(number)
        for piece in self._pieces_of[number]:
            if again:
                self._left[piece] += 1  # which is never complete in this pass
                self._check_not_given(number, piece)
            elif grad is not None and grad.data_ptr() == self._addresses[number]:
                self._left[piece] -= 1
                if not self._left[piece]:
                    self._complete(piece)

    def _check_not_given(self, number: int, piece: int) -> None:
        if piece in self._watched:
            self._fit, self._weight = False, None
        if piece in self._given:
            raise JobError(
                f"the gradient of parameter {number} was accumulated twice in one backward pass, which it was not before",
                remedy=f"let every pass do so from the first on, or set {OVERLAP_VARIABLE}=0",
            )

    def _complete(self, piece: int) -> None:
        if self._fit is None:
            self._watched[piece] = self._checksum(piece)
            return
        weight, to = self._weight, self.to
        if weight is None or to is None:
            return
        start, stop = self._given[piece] = self._ranges[piece]
        part = self._flat[start:stop].mul_(weight)
        if not to.take(piece, part.numpy(), weight):
            self._weight = None

    def _checksum(self, piece: int) -> int:
        start, stop = self._ranges[piece]
        return xxhash.xxh3_64_intdigest(self._flat[start:stop].numpy().data)
