"""Opaque calls, which are not traced: modules with Python control flow on data, and custom autograd functions.

`torch.export` traces a custom autograd function's forward and silently drops its backward, so gradients would be wrong. And it fails if a
branch depends on data. So both are recorded first, in real runs with two batch sizes, which determine the shapes of their results. During
the export each is replaced by one operator with those shapes, and in the traced model it is the original call again.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ephemeron.partition.tracing.program import OpaqueShape

_NUMBERS = itertools.count()


@cache
def _library() -> Any:
    """Library of the placeholder operators; its name is unique in a process."""
    make: Any = torch.library.Library
    return make("ephemeron_opaque", "DEF")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaqueCall:
    """One opaque call of a real run."""

    module: str | None
    """Path of the module."""
    function: Callable[..., Any] | None
    """`apply` of a custom autograd function."""
    shape: OpaqueShape
    given: tuple[tuple[int, ...], ...]
    """Sizes of its argument tensors."""
    made: tuple[Any, ...]
    """Flat result: (sizes, dtype, device) of tensors, and other values."""
    tensors: tuple[bool, ...]
    """Whether a value of the flat result is a tensor."""
    spec: TreeSpec


class Interceptor:
    """Recording or replacement of a model's opaque calls.

    Args:
        model: its modules' `forward` is wrapped while `watching`.
        paths: of modules that are opaque.
    """

    def __init__(self, model: nn.Module, paths: Sequence[str]) -> None:
        self.model, self.paths = model, tuple(paths)
        self.calls: list[OpaqueCall] = []
        self._replace: Callable[[OpaqueCall | None, str | None, Any, tuple[Any, ...], dict[str, object]], Any] | None = None
        self._inside = 0

    def record(self, args: tuple[Any, ...], kwargs: dict[str, object]) -> tuple[OpaqueCall, ...]:
        """Opaque calls of one real run of a copy of the model."""
        clone = Interceptor(copy.deepcopy(self.model), self.paths)
        with torch.random.fork_rng(), clone.watching(), _python_random_kept():
            clone.model(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        return tuple(clone.calls)

    @contextmanager
    def replacing(self, calls: Sequence[OpaqueCall], smaller: Sequence[OpaqueCall] | None) -> Iterator[dict[Any, OpaqueCall]]:
        """Context in which the n-th opaque call is a placeholder operator; gives the calls by operator."""
        operators: dict[Any, OpaqueCall] = {}
        pending = iter(range(len(calls)))

        def replace(_: OpaqueCall | None, module: str | None, function: Any, args: Any, kwargs: Any) -> Any:
            i = next(pending, None)
            flat, spec = tree_flatten((args, kwargs))
            tensors = [a for a in flat if isinstance(a, torch.Tensor)]
            call = calls[i] if i is not None else None
            if call is None or call.module != module or spec != call.shape.spec or len(tensors) != len(call.given):
                raise RuntimeError(f"opaque calls have another order than in a real run: {module or function}")
            assert i is not None
            operator = _operator(call, None if smaller is None else smaller[i])
            operators[operator] = call
            made = iter(operator(tensors))
            return tree_unflatten([next(made) if t else v for v, t in zip(call.made, call.tensors, strict=True)], call.spec)

        self._replace = replace
        try:
            with self.watching():
                yield operators
        finally:
            self._replace = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context with wrapped modules and `torch.autograd.Function.apply`."""
        modules = dict(self.model.named_modules())
        for path in self.paths:
            modules[path].forward = self._around(path, modules[path].forward)
        base: Any = torch.autograd.function._SingleLevelFunction
        parent: Any = super
        plain = base.apply

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            inner = plain.__func__.__get__(cls) if hasattr(plain, "__func__") else parent(base, cls).apply
            return self._seen(None, inner, cls.apply, args, kwargs)

        base.apply = classmethod(apply)
        try:
            yield
        finally:
            del base.apply
            for path in self.paths:
                modules[path].__dict__.pop("forward", None)

    def _around(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return self._seen(path, forward, None, args, kwargs)

        return wrapped

    def _seen(self, module: str | None, call: Callable[..., Any], function: Any, args: Any, kwargs: Any) -> Any:
        if self._inside:
            return call(*args, **kwargs)
        if self._replace is not None:
            return self._replace(None, module, function, args, kwargs)
        self._inside += 1
        try:
            made = call(*args, **kwargs)
        finally:
            self._inside -= 1
        self.calls.append(_call(module, function, args, kwargs, made))
        return made


def _call(module: str | None, function: Any, args: Any, kwargs: Any, made: Any) -> OpaqueCall:
    flat, spec = tree_flatten((args, kwargs))
    out, out_spec = tree_flatten(made)
    holes = tuple(isinstance(a, torch.Tensor) for a in flat)
    return OpaqueCall(
        module=module,
        function=function,
        shape=OpaqueShape(arguments=tuple(None if h else a for a, h in zip(flat, holes, strict=True)), holes=holes, spec=spec),
        given=tuple(tuple(a.shape) for a in flat if isinstance(a, torch.Tensor)),
        made=tuple((tuple(v.shape), v.dtype, v.device) if isinstance(v, torch.Tensor) else v for v in out),
        tensors=tuple(isinstance(v, torch.Tensor) for v in out),
        spec=out_spec,
    )


def _operator(call: OpaqueCall, smaller: OpaqueCall | None) -> Any:
    """Placeholder operator `Tensor[] -> Tensor[]` with shapes and no values."""
    name = f"call_{next(_NUMBERS)}"
    seen = [s for s, t in zip(call.made, call.tensors, strict=True) if t]
    other = seen if smaller is None else [s for s, t in zip(smaller.made, smaller.tensors, strict=True) if t]
    batch = _batch_size_of(call, smaller)

    def shapes(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        made = []
        for (sizes, dtype, device), (less, _, _) in zip(seen, other, strict=True):
            dims: list[Any] = list(sizes)
            if batch is not None:
                t, d, by = batch
                for i, (a, b) in enumerate(zip(sizes, less, strict=True)):
                    if a != b:
                        slope = (a - b) // by
                        dims[i] = tensors[t].shape[d] * slope + (a - slope * call.given[t][d])
            made.append(torch.empty(dims, dtype=dtype, device=device))
        return made

    _library().define(f"{name}(Tensor[] tensors) -> Tensor[]")
    torch.library.register_fake(f"ephemeron_opaque::{name}", shapes, lib=_library())
    return getattr(torch.ops.ephemeron_opaque, name).default


def _batch_size_of(call: OpaqueCall, smaller: OpaqueCall | None) -> tuple[int, int, int] | None:
    """Tensor, dimension and difference of the first argument size that depends on the batch; None: no size does."""
    if smaller is None:
        return None
    for t, (a, b) in enumerate(zip(call.given, smaller.given, strict=True)):
        for d, (x, y) in enumerate(zip(a, b, strict=True)):
            if x != y:
                return t, d, x - y
    return None


@contextmanager
def _python_random_kept() -> Iterator[None]:
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)
