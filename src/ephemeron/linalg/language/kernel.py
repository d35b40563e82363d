"""Kernels: functions of NumPy tiles that LAmbdaPACK programs call by name.

A kernel is pure: it returns new arrays, never changes its arguments, and gives the same bits for the same arguments on
one machine. Programs carry a kernel's path, `module:name`, and functions import it there.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ephemeron.errors import JobError

Flops = Callable[..., float]


@dataclass(frozen=True)
class Kernel:
    """A named function of tiles.

    Called like the function. In programs its result is assigned to as many tiles as it has `outputs`.
    """

    name: str
    """Name of the function."""
    function: Callable[..., Any] = field(repr=False)
    """Takes arrays and integers by position, options by keyword; returns one array, or a tuple of `outputs` arrays."""
    outputs: int
    """Number of tiles that it returns."""
    flops: Flops | None = field(default=None, repr=False)
    """From the shapes of the arguments, in order (integers as they are), and the options: floating-point operations on real numbers."""

    @property
    def path(self) -> str:
        """Where functions find it, `module:name`."""
        return f"{self.function.__module__}:{self.name}"

    @property
    def signature(self) -> inspect.Signature:
        """Parameters of the function."""
        return inspect.signature(self.function)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.function(*arguments, **options)

    def run(self, *arguments: Any, **options: Any) -> tuple[Any, ...]:
        """The outputs, always as a tuple.

        Raises:
            JobError: the function returned another number of arrays than it declares.
        """
        result = self.function(*arguments, **options)
        results = result if isinstance(result, tuple) else (result,)
        if len(results) != self.outputs:
            raise JobError(f"kernel {self.name} returned {len(results)} arrays", remedy=f"it declares {self.outputs}")
        return results


def kernel(*, outputs: int = 1, flops: Flops | None = None) -> Callable[[Callable[..., Any]], Kernel]:
    """Make a function of arrays a kernel.

    Args:
        outputs: number of arrays that it returns.
        flops: floating-point operations on elements, from the shapes of the arguments and the options.
    """

    def wrap(function: Callable[..., Any]) -> Kernel:
        made = Kernel(function.__name__, function, outputs, flops)
        # it is sent to functions by the name of the function that it stands for
        made.__dict__.update({name: getattr(function, name) for name in ("__doc__", "__module__", "__qualname__")})
        return made

    return wrap


def load_kernel(path: str) -> Kernel:
    """The kernel at `module:name`.

    Raises:
        JobError: no such module or name, or it is no kernel.
    """
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise JobError(f"no kernel at {path}: {error}") from None
    if not isinstance(found, Kernel):
        raise JobError(f"{path} is no kernel", remedy="decorate the function with @kernel()")
    return found
