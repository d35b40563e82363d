"""Parameters as one flat vector: their gradients out, merged gradients in.

Parameters of mixed dtypes are exchanged in the widest of these, and keep their own. A parameter without gradient is minus zero
in the vector (`tensors.compression`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import nn

from ephemeron.training.tensors import ABSENT, absent_parts


class FlatParameters:
    """Parameters in a fixed order.

    Args:
        parameters: at least one.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.size = sum(p.numel() for p in self.parameters)
        self._flat = torch.zeros(self.size, dtype=wide_dtype(self.parameters))
        self.dtype = self._flat.numpy().dtype
        self._bounds: list[tuple[int, int]] = []
        self._views: list[torch.Tensor] = []
        start = 0
        for p in self.parameters:
            self._bounds.append((start, start + p.numel()))
            self._views.append(self._flat[start : start + p.numel()].view(p.shape))
            start += p.numel()

    def gather(self, weight: float, *, took_part: bool = True) -> np.ndarray:
        """Gradients times a weight; with weight 0 they are zero, whatever they are. Valid until the next call. Sparse ones become dense.

        Args:
            took_part: whether these gradients count at all; otherwise no parameter has one.
        """
        make_dense(self.parameters)
        for p, view in zip(self.parameters, self._views, strict=True):
            if p.grad is None or not took_part:
                view.fill_(ABSENT)
            elif weight == 0:
                view.zero_()
            else:
                view.copy_(p.grad).add_(0.0)  # minus zero becomes zero
        if weight not in (0, 1):
            self._flat.mul_(weight)
        return self._flat.numpy()

    def scatter(self, merged: np.ndarray) -> None:
        """Puts a merged gradient into `.grad` of each parameter; None where no rank had one."""
        vector = torch.from_numpy(np.array(merged))
        none = absent_parts(merged, self._bounds)
        for i, (p, (start, stop)) in enumerate(zip(self.parameters, self._bounds, strict=True)):
            p.grad = None if i in none else vector[start:stop].view(p.shape).to(device=p.device, dtype=p.dtype)

    def clear(self) -> None:
        """Clears gradients."""
        for p in self.parameters:
            p.grad = None

    def values(self) -> np.ndarray:
        """The parameters as one vector (a copy)."""
        parts = [p.detach().reshape(-1).to(device="cpu", dtype=self._flat.dtype) for p in self.parameters]
        return torch.cat(parts).numpy().copy()


def make_dense(parameters: Iterable[nn.Parameter]) -> None:
    """Makes sparse gradients dense: those of `nn.Embedding` and `nn.EmbeddingBag` with `sparse=True`."""
    for p in parameters:
        if p.grad is not None and p.grad.is_sparse:
            p.grad = p.grad.to_dense()


def wide_dtype(parameters: Sequence[nn.Parameter]) -> torch.dtype:
    """The dtype in which parameters are exchanged: the widest, and at least float32."""
    wide = parameters[0].dtype
    for p in parameters:
        wide = torch.promote_types(wide, p.dtype)
    return torch.float32 if wide in (torch.float16, torch.bfloat16) else wide
