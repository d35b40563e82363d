"""Samples of a job: sources, formats, ownership by rank, and order.

    spec               source of a job's samples, as a value
    sources            that value -> train and test samples (readers: idx, cifar, npz, datasets)
    samples            the two arrays, and their bytes
    split              unequal shares for unequal batch sizes (FasDL, section 4.2)
    batch_source       source of a trainer's batches: these arrays, or a flow (flow, flow_spec)
    iteration_samples  samples that an iteration uses

Importing this imports neither torch nor scikit-learn: a cold start pays for every import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ephemeron.config.code_bundle import Selection, bundle, unbundle
    from ephemeron.config.user_code import resolve
    from ephemeron.data.iteration_samples import Sampler, batch_indices, epoch_order, global_batch
    from ephemeron.data.samples import DataSets, Samples, decode, encode
    from ephemeron.data.sources.registry import load
    from ephemeron.data.split import SampleSplit, assign, plan_split

_LAZY = {
    "Selection": "ephemeron.config.code_bundle",
    "bundle": "ephemeron.config.code_bundle",
    "unbundle": "ephemeron.config.code_bundle",
    "DataSets": "ephemeron.data.samples",
    "Samples": "ephemeron.data.samples",
    "decode": "ephemeron.data.samples",
    "encode": "ephemeron.data.samples",
    "Sampler": "ephemeron.data.iteration_samples",
    "batch_indices": "ephemeron.data.iteration_samples",
    "epoch_order": "ephemeron.data.iteration_samples",
    "global_batch": "ephemeron.data.iteration_samples",
    "load": "ephemeron.data.sources.registry",
    "SampleSplit": "ephemeron.data.split",
    "assign": "ephemeron.data.split",
    "plan_split": "ephemeron.data.split",
    "resolve": "ephemeron.config.user_code",
}

__all__ = [
    "DataSets",
    "SampleSplit",
    "Sampler",
    "Samples",
    "Selection",
    "assign",
    "batch_indices",
    "bundle",
    "decode",
    "encode",
    "epoch_order",
    "global_batch",
    "load",
    "plan_split",
    "resolve",
    "unbundle",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
