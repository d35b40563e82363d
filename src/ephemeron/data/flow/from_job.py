"""The flow that a job names: found, checked and pinned where the run is started, opened again where it is read.

Functions start without samples: they call the same function of the user's code and read the store themselves. So that a replacement
reads the same as its predecessor, `latest` is resolved once, the store's URL is made absolute, and a dataset with another number of
samples than at the start is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ephemeron.config.user_code import resolve
from ephemeron.data.flow.collate import Collate, Collator, Stacking, collated
from ephemeron.data.flow.description import FlowSource
from ephemeron.data.flow.determinism import warn_if_unrepeatable
from ephemeron.data.flow.sample_loader import SampleLoader, SampleRequest, open_source, pinned
from ephemeron.data.flow.view import Flow
from ephemeron.data.flow_spec import DataProvider, FlowPart, FlowSpec
from ephemeron.data.shuffle import Indices
from ephemeron.data.sources.adapters import as_dataset
from ephemeron.data.spec import DataSpec, check_data
from ephemeron.data.split import held_out
from ephemeron.data.user_function import call
from ephemeron.errors import DatasetError, JobError, SampleFailed

_log = logging.getLogger(__name__)
TRAIN_DATA, EVALUATION_DATA = "train_data", "evaluation_data"
"""Methods of a provider."""
TRIED = 8
"""Number of samples loaded before any function is started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedFlow:
    """A job's data, of which only a few samples have been read."""

    spec: FlowSpec
    train: SampleLoader
    train_indices: Indices
    """Samples of the training flow's dataset that are trained on."""
    test_indices: Indices
    """Samples of the test flow's dataset that are tested on."""
    collate: Collate
    tried: list[Any]
    """The first samples, after all steps."""


def find_flow(data: DataSpec, *, seed: int, code: Sequence[Path] = (), provider: DataProvider | None = None) -> NamedFlow:
    """Finds and checks the flow of a job before a function is started.

    Args:
        data: specification of the data, with a flow unless there is a provider.
        seed: seed of the job: determines the held-out samples, and the random steps.
        code: folders of the user's code.
        provider: object whose methods `train_data` and `evaluation_data` return the data; its batches may have any form.

    Raises:
        JobError: a function cannot be imported, raises, or returns no flow; the flow has no dataset, no samples, or its first
            samples fail or cannot be collated.
        DatasetNotFound: the dataset is not there.
        DatasetError: it cannot be read.
    """
    check_data(data)
    arguments = arguments_of(data)
    if provider is None:
        assert data.flow is not None
        target, test_target, where = data.flow, data.test_flow, f"data.flow {data.flow}"
    else:
        separate = getattr(provided(provider, code), EVALUATION_DATA)() is not None
        target, test_target, where = (TRAIN_DATA, EVALUATION_DATA if separate else None, f"{TRAIN_DATA} of {provider.target}")
    train, part = _pinned(target, arguments, code, provider)
    if len(train) == 0:
        raise JobError(f"{where}: its dataset {train.flow.source} is empty", remedy="give it samples")
    everything = np.arange(len(train))
    if test_target is None or test_target == target:
        test_part = part
        chosen, tested = held_out(len(train), data.test_fraction, seed=seed)
    else:
        test, test_part = _pinned(test_target, arguments, code, provider)
        if _same(train, test):
            chosen, tested = held_out(len(train), data.test_fraction, seed=seed)
        else:
            chosen, tested = everything, np.arange(len(test))
    spec = FlowSpec(
        train=part,
        test=test_part,
        options=dict(data.options),
        path=None if data.path is None else str(data.path),
        collate=data.collate,
        on_error=data.on_error,
        loaders=data.loaders,
        prefetch_mb=data.prefetch_mb,
        provider=provider,
        pairs=provider is None,
    )
    collate = collate_of(data.collate, code, provider)
    samples = _try(train, chosen, data, seed, where)
    requests = [SampleRequest(index=int(i), seed=seed) for i in chosen[:TRIED]]
    try:
        batch = collated(samples, Collator(collate), train.flow, requests, pairs=spec.pairs)
    except SampleFailed as e:
        remedy = "bring samples to one shape in a step, or name a function with data.collate"
        raise JobError(f"{where}: {e}", remedy=remedy) from e
    warn_if_unrepeatable(train)
    spec = replace(spec, sample_nbytes=nbytes(batch) // len(samples))
    _log.info("flow %s: %d samples to train on, %d to test on", train.flow.name, len(chosen), len(tested))
    return NamedFlow(spec=spec, train=train, train_indices=chosen, test_indices=tested, collate=collate, tried=samples)


def arguments_of(data: DataSpec) -> dict[str, object]:
    """Arguments of a job's flow functions."""
    return {**({} if data.path is None else {"path": data.path}), **data.options}


def open_part(part: FlowPart, spec: FlowSpec, code: Sequence[Path]) -> SampleLoader:
    """Opens a flow where it is read, with the dataset that was found when the run was started.

    Raises:
        JobError: the user's function does not return a flow any more.
        DatasetError: the dataset has changed, or cannot be read.
    """
    flow = make_flow(part.target, spec.arguments, code, spec.provider)
    assert flow.source is not None
    if part.store is not None:
        flow = replace(flow, source=replace(flow.source, version=part.version, store=part.store))
    assert flow.source is not None
    loading = SampleLoader(flow, open_source(flow.source))
    if len(loading) != part.samples:
        raise DatasetError(
            f"flow {part.target} has {len(loading)} samples here, and had {part.samples} where the run was started",
            dataset=str(flow.source),
        )
    return loading


def make_flow(target: str, arguments: Mapping[str, object], code: Sequence[Path], provider: DataProvider | None = None) -> Flow:
    """The flow that `module:function`, or a provider's method, returns, or that `module:name` is. Other data of a provider is a flow
    without steps.

    Raises:
        JobError: the function cannot be imported, does not take these arguments, raises, or returns no flow with a dataset.
    """
    if provider is None:
        made = resolve(target, code)
        if not isinstance(made, Flow):
            made = call(target, made, arguments, code)
        elif arguments:
            raise JobError(f"{target} is a flow, and takes no {', '.join(arguments)}", remedy="name a function")
    else:
        made = call(f"{provider.target}.{target}", getattr(provided(provider, code), target), {}, code)
        if not isinstance(made, Flow):
            made = Flow("task/data").dataset(as_dataset(made, f"{target} of {provider.target}"))
    if not isinstance(made, Flow):
        raise JobError(f"{target} returned {type(made).__name__}", remedy="return an ephemeron.data.Flow")
    if made.source is None:
        raise JobError(f"{target}: flow {made.name} has no dataset", remedy="call .dataset(name, version, variant)")
    return made


def provided(provider: DataProvider, code: Sequence[Path]) -> Any:
    """The provider's object, made by its class or function.

    Raises:
        JobError: it cannot be imported, or raises.
    """
    found = resolve(provider.target, code)
    return call(provider.target, found, provider.options, code) if callable(found) else found


def collate_of(target: str | None, code: Sequence[Path], provider: DataProvider | None = None) -> Collate:
    """The collate function of a job or of its provider, or the default.

    Raises:
        JobError: it cannot be imported, or is not callable.
    """
    if target is not None:
        function = resolve(target, code)
    elif provider is not None and (own := getattr(provided(provider, code), "collate", None)) is not None:
        target, function = f"{provider.target}.collate", own
    else:
        return Stacking()
    if not callable(function):
        raise JobError(f"data.collate {target} is not callable but {type(function).__name__}", remedy="name a function")
    collate: Collate = function
    return collate


def nbytes(batch: Any) -> int:
    """Bytes of all arrays and tensors in a batch."""
    if isinstance(batch, (tuple, list)):
        return sum(map(nbytes, batch))
    if isinstance(batch, Mapping):
        return sum(map(nbytes, batch.values()))
    return int(getattr(batch, "nbytes", 0))


def _pinned(
    target: str, arguments: Mapping[str, object], code: Sequence[Path], provider: DataProvider | None
) -> tuple[SampleLoader, FlowPart]:
    flow = make_flow(target, arguments, code, provider)
    source = flow.source
    assert source is not None
    if source.dataset is not None:
        loading = SampleLoader(flow, source.dataset)
        return loading, FlowPart(target=target, samples=len(loading))
    source = pinned(source)
    loading = SampleLoader(replace(flow, source=source), open_source(source))
    return loading, FlowPart(target=target, samples=len(loading), version=source.version, store=source.store)


def _same(a: SampleLoader, b: SampleLoader) -> bool:
    """True if both read the same samples of a store."""

    def place(source: FlowSource | None) -> tuple[Any, ...]:
        assert source is not None
        return (source.name, source.version, source.variant, source.store, source.name or id(source.dataset))

    return place(a.flow.source) == place(b.flow.source)


def _try(loading: SampleLoader, chosen: Indices, data: DataSpec, seed: int, where: str) -> list[Any]:
    items = [SampleRequest(index=int(i), epoch=0, seed=seed) for i in chosen[:TRIED]]
    results = loading.load(items)
    samples = [r for r in results if not isinstance(r, SampleFailed)]
    failed = [r for r in results if isinstance(r, SampleFailed)]
    if failed and (data.on_error != "skip" or not samples):
        raise JobError(f"{where}: {failed[0]}", remedy="see: ephemeron data benchmark") from failed[0]
    return samples
