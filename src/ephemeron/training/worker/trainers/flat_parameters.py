"""Parameters of a model and their gradients as flat vectors.

Of the vector of gradients each parameter's `.grad` is a view: sending them copies nothing. A parameter that took no part in a
step has no gradient, here as in PyTorch, and its part of the vector is minus zero (`tensors.compression`). Parameters of mixed
dtypes are exchanged in the widest of these, and keep their own. On an accelerator the vector is stored there, with a pinned copy
on the host for the exchange.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import torch
from torch import nn

from ephemeron.training.tensors import ABSENT, absent_parts
from ephemeron.training.worker.trainers.gradient_pieces import GradientPieces


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


class FlatGradients:
    """The vector of a model's gradients.

    Args:
        named: trainable parameters with their names, at least one.
        device: of the parameters.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], device: torch.device) -> None:
        self.parameters = [p for _, p in named]
        wide = wide_dtype(self.parameters)
        self.size = sum(p.numel() for p in self.parameters)
        self.flat = torch.zeros(self.size, dtype=wide, device=device)
        """The vector, on the device."""
        self.host = self.flat if device.type == "cpu" else torch.zeros(self.size, dtype=wide, pin_memory=True)
        """The vector in host memory, the same tensor where parameters are there."""
        self.dtype = self.host.numpy().dtype
        self.views: list[torch.Tensor] = []
        """By parameter, its part of `flat`."""
        self.bounds: list[tuple[int, int]] = []
        """By parameter, first element and end."""
        start = 0
        for p in self.parameters:
            self.bounds.append((start, start + p.numel()))
            self.views.append(self.flat[start : start + p.numel()].view(p.shape))
            start += p.numel()
        self.pieces = GradientPieces(self.flat, self.views, self.bounds)
        for i, p in enumerate(self.parameters):
            self.pieces.watch(i, p)
        self.took_part = self.pieces.took_part
        """Numbers of the parameters that have a gradient."""

    @property
    def is_on_host(self) -> bool:
        """Whether the vector is computed in host memory."""
        return self.host is self.flat

    def zero(self, owned: Collection[int] | None) -> None:
        """Clears the vector and makes it the parameters' gradients.

        Args:
            owned: numbers of the parameters that are about to get gradients; None: all.
        """
        self.flat.zero_()
        self.pieces.reset()
        for i, (p, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            own = owned is None or i in owned
            p.grad = view if own and p.dtype == view.dtype else None

    def has(self, i: int) -> bool:
        """Whether parameter `i` has a gradient in this step."""
        p, view = self.parameters[i], self.views[i]
        if i in self.took_part:
            return p.grad is not None
        # Written by hand: PyTorch did not accumulate it.
        return p.grad is not None and (p.grad.data_ptr() != view.data_ptr() or bool(view.any()))

    def gather(self) -> None:
        """Puts gradients that are stored elsewhere into the vector, and minus zero where there is none."""
        for i, (p, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            if not self.has(i):
                view.fill_(ABSENT)
            elif p.grad is not None and p.grad.data_ptr() != view.data_ptr():
                view.copy_(p.grad).add_(0.0)  # minus zero becomes zero

    def divide(self, weight: float) -> None:
        """Divides the gradients of the parameters by a weight above zero."""
        with torch.no_grad():
            for i, p in enumerate(self.parameters):
                if self.has(i) and p.grad is not None:
                    p.grad.div_(weight)

    def scatter(self, merged: np.ndarray) -> None:
        """Puts a merged vector into the parameters' gradients; None where no rank had one."""
        self.host.copy_(torch.from_numpy(merged) if merged.flags.writeable else torch.from_numpy(merged.copy()))
        if not self.is_on_host:
            self.flat.copy_(self.host)
        none = absent_parts(merged, self.bounds)
        for i, (p, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            p.grad = None if i in none else view if p.dtype == view.dtype else view.to(p.dtype)

    def to_host(self) -> np.ndarray:
        """The vector in host memory, valid until it changes."""
        if not self.is_on_host:
            self.host.copy_(self.flat)
        return self.host.numpy()

    def absent(self) -> np.ndarray:
        """The vector of a rank that took no part, in host memory."""
        self.host.fill_(ABSENT)
        return self.host.numpy()

    # -- the parameters in the vector's layout ----------------------------------------------------------------

    def read_parameters(self) -> None:
        """Copies the parameters into the vector."""
        with torch.no_grad():
            for p, view in zip(self.parameters, self.views, strict=True):
                view.copy_(p)

    def write_parameters(self, flat: torch.Tensor) -> None:
        """Sets the parameters.

        Args:
            flat: [size], their values.
        """
        with torch.no_grad():
            for p, (start, stop) in zip(self.parameters, self.bounds, strict=True):
                p.copy_(flat[start:stop].view(p.shape))

    def parameter_values(self) -> np.ndarray:
        """The parameters as one vector in host memory (a copy)."""
        flat = torch.cat([p.detach().reshape(-1).to(self.flat.dtype) for p in self.parameters])
        return flat.cpu().numpy().copy()
