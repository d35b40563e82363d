"""What many calls of a function will take, before it starts: a few items are computed in a process of this machine, and their times are scaled up.

The model: functions take items in turn, in batches that cost requests. CPU time is longer where a function has less
than a vCPU, time without CPU is not. The range is that of the mean of the items that were computed, twice its standard error. What
one slow item at the end costs, items that fail, and requests that are repeated are left out.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ephemeron.config.typed import build, plain
from ephemeron.errors import JobError, PlanInfeasible
from ephemeron.events import Traffic
from ephemeron.executor import batching
from ephemeron.executor.item_trial import REQUEST_FILE, ItemTrial, TrialRequest
from ephemeron.executor.session import FIRST_POLL_S, MOST_POLL_S, POLL_GROWTH
from ephemeron.executor.shipping import Shipment
from ephemeron.functions.base import Limits
from ephemeron.functions.deployed_packages import missing_module_remedy
from ephemeron.functions.registry import CLOUDS, cloud
from ephemeron.functions.shipped_code import dumps
from ephemeron.functions.world import Simulation
from ephemeron.prices import Prices
from ephemeron.runs.predictions import Basis, Prediction, invocations_for, measured_now, price_basis
from ephemeron.runs.probe_process import run_probe
from ephemeron.units import human_bytes, human_count, human_seconds, human_usd

TRIED = 8
"""Items that are computed, at most, spread evenly over all of them."""
MOST_S = 600.0
"""Longest time of the trial."""
LOCAL_START_S = 0.6
RECORDED_S = 2.0
"""Longest time after which a function records what it has computed."""
_LEAST_MB, _ROOM = 256, 1.25
"""Memory of the smallest function; of that which was measured, that a function gets."""
BATCH_S = 0.02
"""Of a function, for the queue's requests for a batch of tasks."""
_PER_BATCH = Traffic(puts=4, gets=4, polls=2, lists=1)
"""Requests for a batch of tasks, of function and client; measured with batches of 80 and 15. Looks of the client come to it."""
_LEAST_BATCHES = 8
"""For each function: the first and the last ones are small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """Functions that would run the calls."""

    platform: str
    memory_mb: int
    vcpus: float
    """CPU share of a function."""
    max_workers: int
    function_timeout_s: float
    """Time limit of a function."""
    prices: Prices
    limits: Limits
    python: str = ""
    """Interpreter of functions of this machine; empty: that of this process."""


class MapModel:
    """What many calls of a function will take, by the number of functions and their memory. Some of the calls are made when this is
    made, here.

    Args:
        workers: functions that would run them.
        shipment: the function, for the run `item_trial.RUN`.
        calls: some of the calls, by their numbers from 0, in that order; see `FunctionExecutor.submit_items`.
        of: calls in all.
        seed: of the argument `rng`.
        within: `module:function` of an installed module that is called with the function and the arguments; empty: the function is.
        word: for a call, in messages.
        told: gives the name of a call for messages, by its number from 0; None: word and number.
        timeout_s: time limit of a call.

    Raises:
        JobError: an argument cannot be sent, or a call fails; with the frames of the user's code.
        PlanInfeasible: a call needs more than the memory of a function.
    """

    def __init__(
        self,
        workers: Workers,
        shipment: Shipment,
        calls: Mapping[int, tuple[str, tuple[Any, ...], Mapping[str, Any]]],
        *,
        of: int,
        seed: int | None = None,
        within: str = "",
        word: str = "item",
        told: Callable[[int], str] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.workers, self.of, self.name, self._word = workers, of, shipment.name, word
        self._chosen, self._timeout_s = list(calls), timeout_s
        request = TrialRequest(reference=shipment.reference, objects=shipment.objects, calls=list(calls.values()), seed=seed, within=within)
        names = [f"{word} {number + 1}" if told is None else told(number) for number in self._chosen]
        self.trial = _tried(
            request, names, name=shipment.name, word=word, quota_mb=workers.memory_mb, python=workers.python, platform=workers.platform
        )

    def predict(self, *, functions: int | None = None, memory_mb: int | None = None) -> Prediction:
        """Time, cost and memory.

        Args:
            functions: at once; None: as many as there may be.
            memory_mb: of a function; None: that of the workers.
        """
        pool, trial, of, word = self.workers, self.trial, self.of, self._word
        quota_mb = memory_mb or pool.memory_mb
        slower = max(1.0, pool.memory_mb / pool.vcpus / quota_mb)
        times = [t.cpu_s * slower + max(0.0, t.seconds - t.cpu_s) for t in trial.items]
        usual = times[1:] or times
        item_s = statistics.fmean(usual)
        functions = min(functions or pool.max_workers, of)
        spread_s = 2 * statistics.stdev(usual) / math.sqrt(len(usual)) if len(usual) > 2 else None
        start_s = _start_s(pool.platform) + trial.load_s * slower + max(0.0, times[0] - item_s)
        batches = max(_batches(of, item_s), min(of, _LEAST_BATCHES * functions))

        def seconds(of_item: float) -> float:
            return start_s + math.ceil(of / functions) * max(0.0, of_item) + batches / functions * BATCH_S

        def usd(of_item: float) -> float:
            taken_s = seconds(of_item)
            calls = invocations_for(functions, taken_s, pool.function_timeout_s)
            functions_usd = pool.prices.functions_usd(functions * taken_s * quota_mb / 1024, calls)
            return functions_usd + pool.prices.storage_usd(_traffic(batches, taken_s))

        notes = []
        if self._timeout_s is not None and max(times) > self._timeout_s:
            notes.append(f"{article(word)} takes up to {human_seconds(max(times))}, above timeout_s = {self._timeout_s:g}")
        if spread_s is None:
            notes.append(f"how uncertain it is is not known: too few {word}s were computed")
        ends = None if spread_s is None else (item_s - spread_s, item_s + spread_s)
        result_bytes = statistics.fmean(t.nbytes for t in trial.items)
        where = "functions of this machine start" if pool.platform == "local" else f"functions of {pool.platform} start"
        repeated_s = functions * (item_s + RECORDED_S)
        repeated_usd = pool.prices.functions_usd(repeated_s * quota_mb / 1024, functions)
        return Prediction(
            kind="tasks",
            name=self.name,
            platform=pool.platform,
            seconds=seconds(item_s),
            seconds_range=None if ends is None else (seconds(ends[0]), seconds(ends[1])),
            cost_usd=usd(item_s),
            cost_usd_range=None if ends is None else (usd(ends[0]), usd(ends[1])),
            memory_mb=trial.peak_mb,
            quota_mb=quota_mb,
            functions=functions,
            invocations=invocations_for(functions, seconds(item_s), pool.function_timeout_s),
            rests_on=(
                measured_now(f"{human_count(len(trial.items), word)} of {of:,}, computed in a process of this machine"),
                Basis(source="assumed", what=f"{where} in {_start_s(pool.platform):g} s and are as fast as this machine per vCPU"),
                price_basis(pool.prices),
            ),
            notes=tuple(notes),
            details={
                f"{word}s": of,
                f"{word}_s": item_s,
                "load_s": trial.load_s,
                "result_bytes": result_bytes,
                "interruption_s": repeated_s,
                "interruption_usd": repeated_usd,
                "tried": [{word: n + 1, **plain(t)} for n, t in zip(self._chosen, trial.items, strict=False)],
            },
            rows=(
                ("work", human_count(of, word, grouped=True)),
                (
                    article(word),
                    f"{human_seconds(item_s)}, {human_seconds(min(usual))} to {human_seconds(max(usual))}; result {human_bytes(result_bytes)}",
                ),
                ("interrupted", f"repeats up to {human_seconds(repeated_s)} of computing, {human_usd(repeated_usd)}"),
            ),
        )

    def choose(self, *, deadline_s: float, budget_usd: float | None = None, memory_mb: int | None = None) -> Prediction:
        """The cheapest number and memory of functions that meets a deadline.

        Args:
            deadline_s: seconds from the start to the end.
            budget_usd: that it may cost.
            memory_mb: of a function; None: any that the items fit in.

        Raises:
            PlanInfeasible: none does.
        """
        pool = self.workers
        one_vcpu = pool.memory_mb / pool.vcpus
        least = max(_LEAST_MB, math.ceil(self.trial.peak_mb * _ROOM / 64) * 64)
        limits = pool.limits
        usual = limits.sizes_mb or (least, *(round(one_vcpu / part) for part in (4, 2, 1)))
        sizes = [memory_mb] if memory_mb else sorted({q for q in usual if least <= q <= limits.memory_max_mb}) or [pool.memory_mb]
        found = [self.predict(functions=n, memory_mb=size) for size in sizes for n in range(1, min(pool.max_workers, self.of) + 1)]
        quick = [each for each in found if (each.seconds or 0) <= deadline_s]
        if not quick:
            best = min(found, key=lambda each: each.seconds or 0)
            raise PlanInfeasible(
                f"no number of functions up to {pool.max_workers} meets the deadline of {human_seconds(deadline_s)}: {best.functions} of "
                f"{best.quota_mb} MB take about {human_seconds(best.seconds or 0)}; use a larger --max-workers or --deadline-s",
                binding="deadline",
            )
        cheapest = min(quick, key=lambda each: (each.cost_usd or 0, each.functions))
        if budget_usd is not None and (cheapest.cost_usd or 0) > budget_usd:
            raise PlanInfeasible(
                f"the cheapest way to meet the deadline costs about {human_usd(cheapest.cost_usd or 0)}, more than the budget of ${budget_usd:g}",
                binding="budget",
            )
        return cheapest


def predict_calls(
    workers: Workers,
    shipment: Shipment,
    items: Sequence[tuple[Any, ...]],
    *,
    within: str = "",
    word: str = "item",
    timeout_s: float | None = None,
) -> Prediction:
    """Time, cost and memory of calls with positional arguments; see `MapModel`."""
    calls = {n: (f"{n:032x}", items[n], dict[str, Any]()) for n in positions(len(items))}
    return MapModel(workers, shipment, calls, of=len(items), within=within, word=word, timeout_s=timeout_s).predict()


def article(word: str) -> str:
    """A word with its indefinite article."""
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def positions(of: int, costs: Sequence[float] = ()) -> list[int]:
    """Numbers of the items that are tried: spread evenly, over the items or, where their costs are known, from the cheapest to the dearest."""
    count = min(TRIED, of)
    spread = [round(n * (of - 1) / max(1, count - 1)) for n in range(count)]
    if not len(costs):
        return spread
    order = sorted(range(of), key=lambda n: costs[n])
    return sorted(order[n] for n in spread)


def _batches(tasks: int, task_s: float) -> int:
    """Batches in which an executor publishes tasks; see `batching`."""
    return -(-tasks // max(1, min(batching.MOST_IN_BATCH, round(batching.BATCH_S / max(task_s, 1e-6)))))


def _traffic(batches: int, seconds: float) -> Traffic:
    """Requests for so many batches, and the client's looks at results between them."""
    gap_s, steps = seconds / batches, math.log(MOST_POLL_S / FIRST_POLL_S, POLL_GROWTH)
    grown_s = (MOST_POLL_S - FIRST_POLL_S) / (POLL_GROWTH - 1)
    looks = math.log1p((POLL_GROWTH - 1) * gap_s / FIRST_POLL_S) / math.log(POLL_GROWTH)
    if gap_s > grown_s:
        looks = steps + (gap_s - grown_s) / MOST_POLL_S
    p = _PER_BATCH
    return Traffic(puts=batches * p.puts, gets=batches * p.gets, polls=batches * p.polls, lists=round(batches * (p.lists + looks)))


def _tried(request: TrialRequest, chosen: Sequence[str], *, name: str, word: str, quota_mb: int, python: str, platform: str) -> ItemTrial:
    with tempfile.TemporaryDirectory(prefix="ephemeron-dry-run-") as place:
        folder = Path(place)
        (folder / REQUEST_FILE).write_bytes(dumps(request, what=f"an argument of {name}"))
        done = run_probe("item-trial", str(folder), cwd=folder / "cwd", most_s=MOST_S, quota_mb=quota_mb, python=python)
    if done.ended == "time":
        raise JobError(
            f"{name} takes more than {MOST_S:g} s for one {word}, so that no time and cost can be told",
            remedy=f"try it with a shorter {word}",
        )
    if done.ended == "memory":
        raise PlanInfeasible(f"{name} needs more than the {quota_mb} MB of a function; use a larger --memory-mb", binding="memory")
    try:
        trial = build(ItemTrial, json.loads(done.output), where="dry run")
    except ValueError:
        raise JobError(f"the process of the dry run ended early: {done.last_error}") from None
    if trial.error:
        frames = f"\n{trial.traceback.rstrip()}" if trial.traceback else ""
        if remedy := missing_module_remedy(trial.error, platform):
            trial = replace(trial, error=f"{trial.error}; {remedy}")
        raise JobError(f"{name} fails with {chosen[trial.failed]}: {trial.error}{frames}")
    return trial


def _start_s(platform: str) -> float:
    if platform in CLOUDS:
        return cloud(platform).cold_start_s
    return Simulation().cold_start_s if platform == "simulated" else LOCAL_START_S
