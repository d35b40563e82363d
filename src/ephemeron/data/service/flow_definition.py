"""Serialization of flows for a service, and the signatures that distinguish definitions.

Functions of modules are pickled by name, and the loaders get the reader's module paths. Functions of a script or a notebook are
pickled by value, which takes cloudpickle.
"""

from __future__ import annotations

import importlib
import io
import os
import pickle
import sys
from dataclasses import dataclass
from typing import Any

from ephemeron.data.flow.description import FlowDescription
from ephemeron.data.flow.fingerprint import words_of
from ephemeron.errors import JobError
from ephemeron.user_code import guarded, line_of

MOST_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """A serialized flow, with what a service has to know of it."""

    name: str
    version: int
    signature: str
    dataset: str
    """Description of the dataset, for errors."""
    samples: int
    fixed: int
    """Number of leading stages that give the same in every epoch and for every job: -1 none, 0 reading, n reading and n steps.
    As the flow declares; findings of `determinism` take precedence."""
    random: bool
    """Whether other stages follow, so that samples differ between epochs."""
    paths: tuple[str, ...]
    """Paths of its modules."""
    payload: bytes


def define(flow: FlowDescription, samples: int) -> Definition:
    """Serializes a flow.

    Args:
        flow: with a dataset.
        samples: number of samples in the dataset.

    Raises:
        JobError: it cannot be pickled, or is too large.
    """
    payload = _dumps(flow)
    if len(payload) > MOST_BYTES:
        raise JobError(
            f"flow {flow.name} is {len(payload) >> 20} MB when pickled; a service takes {MOST_BYTES >> 20} MB",
            remedy="import its dataset into a store (ephemeron data import) instead of passing it as an object",
        )
    assert flow.source is not None
    own = flow.source.dataset
    source = str(flow.source) if own is None else words_of(own)
    steps = [f"{s.name}={words_of(s.function)}/{s.cache}/{words_of(s.transform)}" for s in flow.steps]
    return Definition(
        name=flow.name,
        version=flow.version,
        signature=" → ".join([source, *steps]),
        dataset=str(flow.source),
        samples=samples,
        fixed=flow.cached_steps,
        random=flow.cached_steps < len(flow.steps),
        paths=tuple(os.path.abspath(p) for p in sys.path),
        payload=payload,
    )


def restore(payload: bytes, paths: tuple[str, ...]) -> FlowDescription:
    """Deserializes a flow, in a loader."""
    for path in paths:
        if path not in sys.path and os.path.exists(path):
            sys.path.append(path)
    importlib.invalidate_caches()
    flow: FlowDescription = pickle.loads(payload)
    return flow


def _dumps(flow: FlowDescription) -> bytes:
    try:
        import cloudpickle
    except ModuleNotFoundError:
        cloudpickle = None
    try:
        with guarded():
            if cloudpickle is not None:
                whole: bytes = cloudpickle.dumps(flow, protocol=5)
                return whole
            file = io.BytesIO()
            _ByName(file, protocol=5).dump(flow)
            return file.getvalue()
    except Exception as e:  # any error of a user's object when it is pickled
        hint = "" if cloudpickle is not None else "; or: pip install 'ephemeron[data]'"
        raise JobError(
            f"flow {flow.name} cannot be sent to loaders: {line_of(e)}",
            remedy=f"use functions of modules, without open files or locks{hint}",
        ) from e


class _ByName(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if getattr(obj, "__module__", None) == "__main__" and callable(obj):
            raise pickle.PicklingError(f"{obj!r} is defined in the main script, which loaders do not have")
        return NotImplemented
