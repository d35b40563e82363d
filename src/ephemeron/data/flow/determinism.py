"""Detection of random stages of a flow: some samples are loaded under two seeds, and the results are compared.

Used by everything that keeps or repeats samples: a data service before it caches, and a job that relies on a replay giving the same
bytes. A stage is random if it draws from any generator in reach, takes one as an argument, or gives other results under another
seed. Draws are detected with certainty in every sample that is tried; results alone would miss a flip that happens rarely. A stage
that gives other results without having drawn, or under one and the same seed, uses randomness that cannot be seeded (the operating
system, the clock): it is not cached either, and not reproducible at all.

Steps marked `can-cache` are seeded by flow and sample alone, so they give the same in every epoch even if they draw; that
their augmentation is thereby fixed is reported once (`Findings.frozen`).

Limitation: a transform that draws for one image in a thousand is not found.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import xxhash

from ephemeron.data.flow.sample_loader import READ, SampleLoader, SampleRequest
from ephemeron.data.randomness import Watch, kept, mark_loader_process
from ephemeron.errors import SampleFailed

T = TypeVar("T")
_log = logging.getLogger(__name__)

TRIED = 6
"""Number of samples loaded under each seed."""
TWICE = 2
"""Samples that are loaded a second time under the first seed."""
LIMIT_S = 30.0
"""Time limit of the trial; without any sample by then, nothing is known."""
TRYING_S = 5.0
"""Time limit before a job is started."""
_SEEDS = ((0x9E3779B9, 0), (0x7F4A7C15, 1))
_DEPTH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Result of a trial of a flow."""

    fixed: int
    """Number of leading stages that give the same under every seed: -1 none, 0 reading, n reading and n steps."""
    random: str = ""
    """Name of the first stage that does not; empty: all do."""
    unseeded: str = ""
    """Name of the first stage that gives other results under one seed."""
    frozen: tuple[str, ...] = ()
    """Steps that draw, but are fixed because they are marked `can-cache`."""
    tried: int = 0
    """Samples that were tried."""


@dataclass(slots=True)
class _Pass:
    """One sample through the stages."""

    digests: list[bytes | None]
    """Digest after each stage; None: the sample cannot be compared."""
    drew: list[bool]


def examine(
    loading: SampleLoader,
    *,
    steps: int | None = None,
    raws: Mapping[int, Any] | None = None,
    limit_s: float = LIMIT_S,
    clock: Callable[[], float] = time.monotonic,
) -> Findings:
    """Loads some samples under two seeds, in this process.

    Args:
        loading: the flow with its dataset.
        steps: number of steps to test, from the first on; None: all.
        raws: samples that were read already, by index, if reading is known to be pure.
        limit_s: time after which no further sample is begun.
        clock: in seconds.
    """
    count = len(loading.flow.steps) if steps is None else steps
    names = [READ, *(step.name for step in loading.flow.steps[:count])]
    cached = loading.flow.cached_steps
    fixed, unseeded, tried, reached = count, count + 1, 0, 0
    frozen: set[int] = set()
    end = clock() + limit_s
    for place, index in enumerate(trial_indices(len(loading))):
        if clock() > end:
            break
        passes = [_pass(loading, SampleRequest(index=index, seed=s, epoch=e), count, raws) for s, e in _passes(place)]
        first, other = passes[-2:]
        tried, reached = tried + bool(first.digests), max(reached, len(first.digests))
        for stage, drew in enumerate(first.drew):
            if drew and 0 < stage <= cached:
                frozen.add(stage)
            elif drew:
                fixed = min(fixed, stage - 1)
        if (parted := _parting(first, other)) is not None:
            fixed = min(fixed, parted - 1)
            if first.digests[parted] is not None and (not first.drew[parted] or parted in frozen):
                unseeded = min(unseeded, parted)
        if place < TWICE:
            again = _pass(loading, SampleRequest(index=index, seed=_SEEDS[0][0], epoch=_SEEDS[0][1]), count, raws)
            parted = _parting(first, again)
            if parted is not None and first.digests[parted] is not None:
                unseeded = min(unseeded, parted)
    if not tried:
        return Findings(fixed=-1, random=READ)
    fixed = min(fixed, unseeded - 1, reached - 1)  # stages that no sample reached are unknown
    return Findings(
        fixed=fixed,
        random=names[fixed + 1] if fixed < count else "",
        tried=tried,
        unseeded=names[unseeded] if unseeded <= count else "",
        frozen=tuple(names[stage] for stage in sorted(frozen) if stage <= fixed),
    )


def _passes(place: int) -> Sequence[tuple[int, int]]:
    """Seeds and epochs to load a sample under; the very first one twice, since one-time initialisation is no randomness."""
    return _SEEDS if place else (_SEEDS[0], *_SEEDS)


def _parting(one: _Pass, other: _Pass) -> int | None:
    """The first stage whose results differ or cannot be compared; later stages had another input."""
    for stage, (a, b) in enumerate(zip(one.digests, other.digests, strict=False)):
        if a is None or a != b:
            return stage
    return None


def trial_indices(samples: int) -> list[int]:
    """Indices of the samples that are tried: spread evenly."""
    return sorted({int(i) for i in np.linspace(0, samples - 1, min(TRIED, samples))}) if samples else []


def examine_in_child(loading: SampleLoader, *, steps: int | None = None, limit_s: float = LIMIT_S) -> Findings | None:
    """The result of `examine` in a process of its own, isolated from user code; None: it did not finish.

    Where reading is pure, samples are read in this process.
    """
    raws: dict[int, Any] | None = None
    if loading.reads_are_pure:
        items = [SampleRequest(index=i) for i in trial_indices(len(loading))]
        raws = {item.index: raw for item, raw in zip(items, loading.fetch(items), strict=True)}
    if not hasattr(os, "fork"):
        return examine(loading, steps=steps, raws=raws, limit_s=limit_s)
    return in_child(lambda: examine(loading, steps=steps, raws=raws, limit_s=limit_s / 2), limit_s=limit_s)


def warn_if_unrepeatable(loading: SampleLoader) -> None:
    """Warns before a job is started if its flow's randomness cannot be seeded, so that no replay sees the same bytes."""
    found = examine(loading, limit_s=TRYING_S)
    if found.unseeded:
        warnings.warn(
            f"flow {loading.flow.name}: {found.unseeded!r} gives other results under the same seed (it asks the operating "
            "system or the clock): a function that is replaced will see other samples than the one before it; draw from "
            "random, numpy.random or torch, or take an argument rng",
            stacklevel=3,
        )


def cacheable_stages(loading: SampleLoader) -> Findings:
    """Number of stages whose results are the same in every epoch and for every job, so that a service may keep them.

    Steps behind the last `can-cache` are not tried, since their results are not kept. Warns if less is kept, or in another way, than
    the flow's author may expect.
    """
    steps, name = loading.flow.cached_steps, f"flow {loading.flow.name}"
    if (loading.reads_are_pure and steps == 0) or not len(loading):
        return Findings(fixed=0)
    found = examine_in_child(loading, steps=steps)
    if found is None:
        found = Findings(fixed=-1, random=READ)
        text = f"{name} could not be tried within {LIMIT_S:g} s, or its process died"
        warnings.warn(f"{text}: a service keeps nothing of it between epochs", stacklevel=3)
    elif not found.tried:
        warnings.warn(f"{name}: no sample could be tried: a service keeps nothing of it between epochs", stacklevel=3)
    elif found.fixed < steps:
        what = f"{found.random!r} {'cannot be seeded' if found.unseeded == found.random else 'is random'}"
        kept_of = f"what {found.fixed} steps give" if found.fixed > 0 else "what is read" if found.fixed == 0 else "nothing"
        warnings.warn(f"{name}: {what}: a service keeps {kept_of} between epochs and jobs", stacklevel=3)
    _log.info("%s: %d stages are the same in every epoch, by %d samples", name, found.fixed + 1, found.tried)
    if found.frozen:
        steps_ = ", ".join(map(repr, found.frozen))
        text = f"{name}: {steps_} draws random numbers and is marked can-cache: a sample gets the same ones in every epoch"
        warnings.warn(text, stacklevel=3)
    return found


def _pass(loading: SampleLoader, item: SampleRequest, steps: int, raws: Mapping[int, Any] | None) -> _Pass:
    """Runs one sample through the stages, up to the first one that fails."""
    watch, out, sample = Watch(loading.held), _Pass([], []), None
    with kept(loading.held):
        for stage in range(steps + 1):
            loading.seed(item, stage)
            watch.begin()
            if stage:
                sample = loading.steps(item, sample, first=stage - 1, end=stage)
            elif raws is None:
                (sample,) = loading.fetch([item])
            else:
                sample = _copied(raws[item.index])
            if isinstance(sample, SampleFailed):
                break
            out.drew.append(watch.drew() or (stage > 0 and loading.asks(stage - 1) is not None))
            out.digests.append(digest(sample))
    return out


def _copied(raw: Any) -> Any:
    """A copy of a sample: steps may change their argument in place."""
    return raw if isinstance(raw, SampleFailed) else pickle.loads(pickle.dumps(raw, protocol=5))


# -- comparing ----------------------------------------------------------------------------------------------


def digest(sample: Any) -> bytes | None:
    """Digest of a sample's content; None if it cannot be compared."""
    state = xxhash.xxh3_128()
    try:
        _feed(state, sample, _DEPTH)
    except Exception:  # noqa: BLE001 - anything that a user's object raises when it is inspected
        return None
    return state.digest()


def _feed(state: Any, thing: Any, depth: int) -> None:
    state.update(f"{type(thing).__module__}.{type(thing).__qualname__}:".encode())
    if depth == 0:
        raise ValueError("too deep")
    if thing is None or isinstance(thing, bool | int | float | complex | str):
        state.update(repr(thing).encode())
    elif isinstance(thing, bytes | bytearray | memoryview):
        state.update(thing)
    elif isinstance(thing, np.ndarray | np.generic) and not thing.dtype.hasobject:
        state.update(f"{thing.dtype.str}{thing.shape}".encode())
        state.update(np.ascontiguousarray(thing).tobytes())
    elif _is_tensor(thing):
        state.update(f"{thing.dtype}{tuple(thing.shape)}".encode())
        state.update(pickle.dumps(thing.detach().cpu().flatten().tolist()))
    elif isinstance(thing, Mapping):
        for key, value in thing.items():
            _feed(state, key, depth - 1)
            _feed(state, value, depth - 1)
    elif isinstance(thing, Sequence):
        state.update(f"{len(thing)}".encode())
        for each in thing:
            _feed(state, each, depth - 1)
    elif dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        for field in dataclasses.fields(thing):
            _feed(state, getattr(thing, field.name), depth - 1)
    elif hasattr(thing, "tobytes") and hasattr(thing, "size") and hasattr(thing, "mode"):  # an image of Pillow's
        state.update(f"{thing.mode}{thing.size}".encode())
        state.update(thing.tobytes())
    else:
        state.update(pickle.dumps(thing, protocol=5))


def _is_tensor(thing: Any) -> bool:
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    return kind is not None and isinstance(thing, kind)


# -- in a separate process ----------------------------------------------------------------------------------


def in_child(work: Callable[[], T], *, limit_s: float) -> T | None:
    """The result of work in a forked process; None: it raised, died, or took longer than `limit_s` seconds."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(ours)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            mark_loader_process()
            torch: Any = sys.modules.get("torch")
            if torch is not None:
                torch.set_num_threads(1)  # the parent's threads do not exist in the child
            with open(theirs, "wb") as pipe:
                pickle.dump(work(), pipe)
            status = 0
        finally:
            os._exit(status)
    os.close(theirs)
    try:
        with open(ours, "rb") as pipe:
            if not select.select([pipe], [], [], limit_s)[0]:
                return None
            with suppress(EOFError, pickle.UnpicklingError):
                found: T = pickle.load(pipe)
                return found
        return None
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
