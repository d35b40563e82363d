"""Evaluations of all ranks, merged: rank 0 reads them, computes the metrics and publishes them; all others read these.

Only runs whose metrics are no sums, or decide something, do this; for all others the events of the ranks suffice. Every rank
acts on the published numbers, which are stored until the run ends, so a replacement that repeats an evaluation decides as its
predecessor did.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ephemeron.config.typed import build, plain
from ephemeron.errors import CorruptMessage, JobError
from ephemeron.runs.metrics import EvaluationSums, Metrics, MetricSum
from ephemeron.training.collectives import Collective, StalledPeers, all_of, wait_for_object
from ephemeron.training.collectives.group import GRACE_SHARE
from ephemeron.training.tensors import decode_state, encode_state
from ephemeron.training.worker.lifecycle import InvocationLifecycle
from ephemeron.training.worker.trainers.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class _EvaluationMeta:
    """Plain values of an evaluation."""

    samples: int
    sums: Mapping[str, MetricSum] = field(default_factory=dict)


def encode_evaluation(evaluation: EvaluationSums) -> bytes:
    """An evaluation as the bytes of an object."""
    sums = {name: None if s is None or not all(map(math.isfinite, s)) else s for name, s in evaluation.sums.items()}
    return encode_state(dict(evaluation.states), plain(_EvaluationMeta(samples=evaluation.samples, sums=sums)))


def decode_evaluation(data: memoryview | bytes, *, key: str) -> EvaluationSums:
    """The inverse of `encode_evaluation`.

    Raises:
        CorruptMessage: it is damaged, or no evaluation.
    """
    arrays, raw = decode_state(data, key=key)
    try:
        meta = build(_EvaluationMeta, raw, where=key)
    except JobError as e:
        raise CorruptMessage(f"not an evaluation of this release: {e}", key=key) from None
    return EvaluationSums(meta.samples, dict(meta.sums), arrays)


class EvaluationExchange:
    """Exchange of one rank.

    Args:
        lifecycle: of the invocation.
        trainer: computes metrics from the evaluations.
        collective: finds what a rank that has not come to an evaluation waits for.
    """

    def __init__(self, lifecycle: InvocationLifecycle, trainer: Trainer, collective: Collective) -> None:
        self._lifecycle, self._trainer, self._collective = lifecycle, trainer, collective
        self._channel, self._keys, self._rank = lifecycle.channel, lifecycle.keys, lifecycle.rank
        self._world = lifecycle.spec.configuration.workers

    async def merged(self, iteration: int, own: EvaluationSums) -> Metrics:
        """Metrics of the whole evaluation data, alike on all ranks.

        Args:
            iteration: before which the evaluation was done.
            own: evaluation of this rank's slice.
        """
        key = self._keys.measured(iteration)
        known = await self._channel.fetch(key)
        if known is not None:  # this rank repeats the evaluation
            return _decode(known, key)
        if self._rank == 0:
            others = await all_of(self._received(iteration, rank) for rank in range(1, self._world))
            metrics = self._trainer.metrics([own, *others])
            # Read back, so that rank 0 has the very numbers that the others read.
            data = json.dumps(dict(metrics)).encode()
            await self._channel.put(key, [data])
            return _decode(data, key)
        await self._channel.put(self._keys.evaluation(iteration, self._rank), [encode_evaluation(own)])
        arrived = await wait_for_object(
            self._channel,
            key,
            timeout_s=self._lifecycle.wait_timeout_s,
            stalled=lambda: self._stalled(iteration),
            on_timeout=self._lifecycle.on_timeout,
            accept=lambda data: _decode(data, key),
        )
        return arrived.value

    async def _received(self, iteration: int, rank: int) -> EvaluationSums:
        key = self._keys.evaluation(iteration, rank)

        async def stalled() -> StalledPeers:
            return await self._collective.stalled_before(iteration, rank, key)

        arrived = await wait_for_object(
            self._channel,
            key,
            timeout_s=self._lifecycle.wait_timeout_s,
            stalled=stalled,
            on_timeout=self._lifecycle.on_timeout,
            accept=lambda data: decode_evaluation(data, key=key),
        )
        return arrived.value

    async def _stalled(self, iteration: int) -> StalledPeers:
        """Rank 0, or the ranks whose evaluations it waits for itself, or those that these wait for."""
        keys = [self._keys.evaluation(iteration, rank) for rank in range(1, self._world)]
        found = await all_of(self._channel.fetch(key) for key in keys)
        missing = [rank for rank, data in enumerate(found, start=1) if data is None]
        if not missing:
            stalled = await self._collective.stalled_before(iteration, 0, self._keys.measured(iteration))
            grace_s = GRACE_SHARE * self._lifecycle.wait_timeout_s()
            return stalled._replace(grace_s=max(stalled.grace_s, grace_s))
        causes = await all_of(self._collective.stalled_before(iteration, rank, self._keys.evaluation(iteration, rank)) for rank in missing)
        first = min(causes, key=lambda cause: cause.iteration)
        same = [cause for cause in causes if cause.iteration == first.iteration]
        named = {rank: key for cause in same for rank, key in zip(cause.ranks, cause.keys, strict=False)}
        ranks = list(dict.fromkeys(rank for cause in same for rank in cause.ranks))
        known = [named[rank] for rank in ranks] if named.keys() >= set(ranks) else []
        return StalledPeers(first.iteration, ranks, known, max(cause.grace_s for cause in same))


def _decode(data: memoryview | bytes, key: str) -> Metrics:
    try:
        raw = json.loads(bytes(data))
    except ValueError as e:
        raise CorruptMessage(f"no metrics: {e}", key=key) from None
    if not isinstance(raw, dict):
        raise CorruptMessage("no metrics", key=key)
    return {str(name): None if value is None else float(value) for name, value in raw.items()}
