"""Variables of a script that change from step to step though they are not registered.

Looked at are the variables of the functions that the loop runs in, those of the script itself, and attributes of objects whose
class the script defines. What is rebound in every step (`loss`, `batch`) is no state; what an object holds that existed before the
first step is.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from ephemeron.data.randomness import generators_in
from ephemeron.errors import JobError
from ephemeron.training.task.script import Run
from ephemeron.training.task.script_state import Stateful
from ephemeron.training.task.state_codec import pack
from ephemeron.training.task.task import Task

_DEEPEST = 2
_LARGEST = 64 << 20
"""Bytes of an attribute above which it is not looked at: it is data."""


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable at a point of the script."""

    value: Any
    print: str
    """Digest of its content."""


def variables(frame: FrameType | None, folders: Sequence[Path], registered: Sequence[object]) -> dict[str, Variable]:
    """Variables in reach of a frame that hold tensors, numbers, generators or objects with `state_dict()`, by name.

    Args:
        frame: of the loop.
        folders: of the user's code: frames of other files are passed over.
        registered: objects whose state is saved; what belongs to them is left out.
    """
    roots = [str(folder.resolve()) for folder in folders]
    own = _Owned(registered)
    found: dict[str, Variable] = {}
    while frame is not None:
        if any(str(Path(frame.f_code.co_filename).resolve()).startswith(root) for root in roots):
            for namespace in (frame.f_locals, frame.f_globals):
                for name, value in list(namespace.items()):
                    for path, each in _within(name, value, _DEEPEST):
                        digest = None if path in found or path.startswith("__") or own.has(each) else _digest(each)
                        if digest is not None:
                            found[path] = Variable(each, digest)
        frame = frame.f_back
    return found


def attributes(task: Task, model: nn.Module) -> dict[str, Variable]:
    """Attributes of a task that may be state, by name: its model and random generators, which are saved, are left out."""
    own, found = _Owned([model]), dict[str, Variable]()
    for name, value in vars(task).items():
        if hasattr(Task, name) or own.has(value) or generators_in(value) or _nbytes(value) > _LARGEST:
            continue
        digest = _digest(value)
        if digest is not None:
            found[f"self.{name}"] = Variable(value, digest)
    return found


def _nbytes(value: object) -> int:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.nbytes
    return sum(tensor.nbytes for tensor in _tensors_of(value))


def changed(before: Mapping[str, Variable], after: Mapping[str, Variable]) -> tuple[list[str], list[str], list[str]]:
    """Names of variables that existed before and have changed: objects in place, numbers, and all others."""
    objects, numbers, others = [], [], []
    for name, old in before.items():
        new = after.get(name)
        if new is None or new.print == old.print:
            continue
        if isinstance(new.value, (bool, int, float)):
            numbers.append(name)
        elif new.value is old.value:
            objects.append(name)
        else:
            others.append(name)
    return objects, numbers, others


def described(names: Sequence[str], found: Mapping[str, Variable]) -> str:
    """Names with the types of their values, such as `teacher (Linear)`."""
    return ", ".join(f"{name} ({type(found[name].value).__name__})" for name in names)


class _Owned:
    """Tensors and objects that belong to registered objects."""

    def __init__(self, registered: Sequence[object]) -> None:
        self._objects = {id(each) for each in registered}
        self._storages: set[int] = set()
        for each in registered:
            for tensor in _tensors_of(each):
                self._storages.add(tensor.untyped_storage().data_ptr())

    def has(self, value: object) -> bool:
        if id(value) in self._objects:
            return True
        if isinstance(value, torch.Tensor):
            return value.untyped_storage().data_ptr() in self._storages
        if isinstance(value, nn.Module):
            tensors = list(_tensors_of(value))
            return bool(tensors) and all(t.untyped_storage().data_ptr() in self._storages for t in tensors)
        return False


def _tensors_of(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, torch.optim.Optimizer):
        for state in value.state.values():
            yield from (t for t in state.values() if isinstance(t, torch.Tensor))


def _within(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """A value, and the attributes of objects whose class the script defines."""
    if isinstance(value, (ModuleType, FunctionType, type, Run)):
        return
    yield name, value
    if depth and type(value).__module__ == "__main__" and not isinstance(value, nn.Module):
        for attribute, inner in list(getattr(value, "__dict__", {}).items()):
            yield from _within(f"{name}.{attribute}", inner, depth - 1)


def _digest(value: Any) -> str | None:
    """Digest of a value that may be state; None: it is of another kind."""
    if isinstance(value, (bool, int, float)):
        return repr(value)
    if isinstance(value, DataLoader):
        return None
    if isinstance(value, torch.Generator):
        return _of(value.get_state(), "generator")
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return _of(value, "tensor")
    if isinstance(value, (np.random.Generator, np.random.RandomState, random.Random)):
        return hashlib.sha256(repr(_generator_state(value)).encode()).hexdigest()
    if isinstance(value, Stateful) and not isinstance(value, type):
        try:
            return _of(value.state_dict(), "state")
        except (JobError, RuntimeError, TypeError, ValueError, AttributeError):
            return None
    return None


def _generator_state(value: Any) -> object:
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    return value.getstate() if hasattr(value, "getstate") else value.get_state()


def _of(value: object, path: str) -> str:
    arrays: dict[str, np.ndarray] = {}
    plain = pack(value, path, arrays)
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True, default=repr).encode())
    for name in sorted(arrays):
        digest.update(name.encode() + np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()
