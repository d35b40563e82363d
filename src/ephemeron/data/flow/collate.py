"""Collation of samples to a batch: by the user's function, or as PyTorch's default, or stacked arrays without PyTorch.

A collate function may be random (MixUp, random padding, masking). Its draws depend on seed, epoch and the samples of
the batch alone, in every process, and the trainer's generators are not affected.

In loaders arrays are stacked in the memory that the trainer will map, so that a batch is written once and never copied.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from ephemeron.data.flow.description import FlowDescription
from ephemeron.data.flow.pickle_socket import SHARED, Arena, PickleSocket, aligned, can_share
from ephemeron.data.flow.sample_loader import COLLATE, SampleRequest
from ephemeron.data.randomness import batch_seed, generator_argument, generator_parameter, generators_in, kept, seed_everything
from ephemeron.errors import SampleFailed
from ephemeron.user_code import guarded, line_of

Collate: TypeAlias = Callable[[list[Any]], Any]


class Collator:
    """A collate function that gives the same batch for the same samples in every process.

    Args:
        function: from a list of samples to a batch; a parameter `rng` or `generator` gets a generator of its own.
    """

    def __init__(self, function: Collate) -> None:
        self.function = function
        self.is_pure = isinstance(function, Stacking)
        """Whether any thread may call it, since it draws no random numbers."""
        self._held = () if self.is_pure else generators_in(function)
        self._asks = None if self.is_pure else generator_parameter(function)

    def __call__(self, samples: list[Any], items: Sequence[SampleRequest]) -> Any:
        """The batch of these samples.

        Args:
            samples: in order.
            items: requests of the whole batch, also of samples that failed.
        """
        if self.is_pure or not items or items[0].seed is None:
            return self._call(samples, None)
        seed = batch_seed(items[0].seed, items[0].epoch, [item.index for item in items])
        with kept(self._held):
            seed_everything(seed, self._held)
            return self._call(samples, seed)

    def _call(self, samples: list[Any], seed: int | None) -> Any:
        if self._asks is None:
            return self.function(samples)
        own = random.getrandbits(64) if seed is None else seed
        return partial(self.function, **generator_argument(self._asks, own))(samples)


def collated(samples: list[Any], collator: Collator, flow: FlowDescription, items: Sequence[SampleRequest], *, pairs: bool = True) -> Any:
    """A batch of these samples.

    Args:
        samples: in order.
        collator: makes the batch.
        flow: that they are from.
        items: requests of the whole batch, also of samples that failed.
        pairs: whether the batch is to be a pair of inputs and targets.

    Raises:
        SampleFailed: they cannot be collated, or the batch is no pair of inputs and targets.
    """
    try:
        with guarded():
            batch = collator(samples, items)
        return as_pair(batch) if pairs else batch
    except Exception as e:
        to = " to (inputs, targets)" if pairs else ""
        text = f"{len(samples)} samples from this one on cannot be put together{to}: {line_of(e)[:300]}{_odd(samples, items)}"
        raise SampleFailed(text, flow=f"{flow.name}@{flow.version}", dataset=str(flow.source), index=items[0].index, step=COLLATE) from e


def _odd(samples: Sequence[Any], items: Sequence[SampleRequest]) -> str:
    """The first sample that is made otherwise than the first one, as a part of a sentence; empty: none is known."""
    if len(samples) != len(items):  # some were skipped
        return ""
    first = _form(samples[0])
    for item, sample in zip(items, samples, strict=True):
        if (form := _form(sample)) != first:
            return f"; sample {item.index} is {form[:100]}, sample {items[0].index} is {first[:100]}"
    return ""


def _form(sample: Any) -> str:
    """Shapes and types of a sample."""
    if isinstance(sample, Mapping):
        return f"{{{', '.join(f'{key}: {_form(value)}' for key, value in sample.items())}}}"
    if type(sample) in (tuple, list):
        return f"({', '.join(map(_form, sample))})"
    shape = getattr(sample, "shape", None)
    return type(sample).__name__ if shape is None else f"{type(sample).__name__}{list(shape)}"


def as_pair(batch: Any) -> tuple[Any, Any]:
    """A batch as a pair: input of the model, and target of the loss.

    Raises:
        TypeError: it has other parts; the message names them.
    """
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, Mapping):
        what = f"a {type(batch).__name__} with the keys {', '.join(map(repr, batch))}"
    elif isinstance(batch, tuple | list):
        what = f"a {type(batch).__name__} of {len(batch)} parts"
    else:
        what = f"a {type(batch).__name__}"
    raise TypeError(f"the batch is {what}, not a pair of inputs and targets: make one in a step or a collate function")


class Stacking:
    """The default `collate_fn`: `torch.utils.data.default_collate` where PyTorch is installed."""

    def __init__(self) -> None:
        try:
            from torch.utils.data import default_collate
        except ModuleNotFoundError:
            self._collate: Callable[[Any], Any] = _stacked
        else:
            self._collate = default_collate

    def __call__(self, samples: Sequence[Any]) -> Any:
        return self._collate(samples)

    def in_place(self, samples: Sequence[Any]) -> Any:
        """The batch of `__call__`; arrays that are adjacent in memory already are not copied."""
        first = samples[0]
        if type(first) in (tuple, list) and all(len(s) == len(first) for s in samples):
            parts = [self.in_place(part) for part in zip(*samples, strict=True)]
            return parts if self._collate is not _stacked else tuple(parts)
        if type(first) is dict and all(s.keys() == first.keys() for s in samples):
            return {key: self.in_place([s[key] for s in samples]) for key in first}
        if not _stackable(samples) or (whole := _side_by_side(samples)) is None:
            return self(samples)
        torch: Any = sys.modules.get("torch")
        return whole if self._collate is _stacked else torch.from_numpy(whole)

    def into_arena(self, samples: list[Any], line: PickleSocket) -> tuple[Any, Arena | None]:
        """The batch of `__call__` with its large arrays in an arena of a connection; None: no array is large, or none can be shared."""
        nbytes = _large(samples)
        if nbytes < SHARED or not can_share():
            return self(samples), None
        arena = line.arena(nbytes)
        try:
            return self._in(samples, arena), arena
        except BaseException:
            arena.memory[0] = 0
            raise

    def _in(self, samples: Sequence[Any], arena: Arena) -> Any:
        first = samples[0]
        if type(first) in (tuple, list) and all(len(s) == len(first) for s in samples):
            parts = [self._in(part, arena) for part in zip(*samples, strict=True)]
            return parts if self._collate is not _stacked else tuple(parts)
        if type(first) is dict and all(s.keys() == first.keys() for s in samples):
            return {key: self._in([s[key] for s in samples], arena) for key in first}
        if not _stackable(samples):
            return self(samples)
        out = arena.array((len(samples), *first.shape), first.dtype)
        np.stack([np.asarray(s) for s in samples], out=out)
        torch: Any = sys.modules.get("torch")
        return out if self._collate is _stacked else torch.from_numpy(out)


def _stackable(samples: Sequence[Any]) -> bool:
    first = samples[0]
    return (
        type(first) is np.ndarray
        and first.ndim > 0
        and first.dtype.kind in "biufc"
        and first.dtype.isnative
        and all(type(s) is np.ndarray and s.shape == first.shape and s.dtype == first.dtype for s in samples)
    )


def _side_by_side(arrays: Sequence[Any]) -> Any:
    """One array of all these arrays, if they follow each other in memory without a gap; else None."""
    first = arrays[0]
    start, nbytes = first.__array_interface__["data"][0], first.nbytes
    if not nbytes or any(
        a.__array_interface__["data"][0] != start + i * nbytes or not a.flags.c_contiguous or not a.flags.writeable
        for i, a in enumerate(arrays)
    ):
        return None
    return np.lib.stride_tricks.as_strided(first, (len(arrays), *first.shape), (nbytes, *first.strides))


def _large(samples: Sequence[Any]) -> int:
    """Bytes that an arena for these samples needs."""
    first = samples[0]
    if type(first) in (tuple, list) and all(len(s) == len(first) for s in samples):
        return sum(_large(part) for part in zip(*samples, strict=True))
    if type(first) is dict and all(s.keys() == first.keys() for s in samples):
        return sum(_large([s[key] for s in samples]) for key in first)
    return aligned(len(samples) * first.nbytes) if _stackable(samples) else 0


def _stacked(samples: Sequence[Any]) -> Any:
    first = samples[0]
    if isinstance(first, tuple):
        return tuple(_stacked(list(part)) for part in zip(*samples, strict=True))
    if isinstance(first, Mapping):
        return {key: _stacked([s[key] for s in samples]) for key in first}
    if isinstance(first, str | bytes):
        return samples
    return np.stack([np.asarray(s) for s in samples])
