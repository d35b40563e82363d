"""Samples: datasets, data flows and data services, and the arrays that a job trains on.

    spec               the source of a job's samples, as a value
    sources, formats   from that value to training and test samples (idx, cifar, npz, datasets)
    samples            two arrays, and their encoding as bytes
    split              shares of unequal size for unequal batch sizes (FasDL, section 4.2)
    batch_source       the port between trainer and data: arrays, or a flow (flow, flow_spec)
    iteration_samples  the samples that an iteration uses
    catalog            datasets in folders and object stores: versions, importers, reader
    flow               data flows: dataset, map steps, loaders
    service            loading for many jobs; scheduler, cache and sampling make its decisions

Importing this imports neither torch nor scikit-learn: a cold start pays for every import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ephemeron.data.catalog import Dataset, DatasetReader, DatasetStore
    from ephemeron.data.flow import Flow, FlowLoader, FlowView, LocalReader, random_split
    from ephemeron.data.iteration_samples import Sampler, batch_indices, epoch_order, global_batch
    from ephemeron.data.samples import DataSets, Samples, decode, encode
    from ephemeron.data.service import RemoteReader, Service, ServiceSettings
    from ephemeron.data.sources.registry import load
    from ephemeron.data.spec import DataSpec
    from ephemeron.data.split import SampleSplit, assign, plan_split

_MODULES = {
    "Dataset": "catalog",
    "DatasetReader": "catalog",
    "DatasetStore": "catalog",
    "Flow": "flow",
    "FlowLoader": "flow",
    "FlowView": "flow",
    "LocalReader": "flow",
    "random_split": "flow",
    "Sampler": "iteration_samples",
    "batch_indices": "iteration_samples",
    "epoch_order": "iteration_samples",
    "global_batch": "iteration_samples",
    "DataSets": "samples",
    "Samples": "samples",
    "decode": "samples",
    "encode": "samples",
    "RemoteReader": "service",
    "Service": "service",
    "ServiceSettings": "service",
    "load": "sources.registry",
    "DataSpec": "spec",
    "SampleSplit": "split",
    "assign": "split",
    "plan_split": "split",
}
"""Module of each public name, which is imported on first use."""

__all__ = [
    "DataSets",
    "DataSpec",
    "Dataset",
    "DatasetReader",
    "DatasetStore",
    "Flow",
    "FlowLoader",
    "FlowView",
    "LocalReader",
    "RemoteReader",
    "SampleSplit",
    "Sampler",
    "Samples",
    "Service",
    "ServiceSettings",
    "assign",
    "batch_indices",
    "decode",
    "encode",
    "epoch_order",
    "global_batch",
    "load",
    "plan_split",
    "random_split",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
