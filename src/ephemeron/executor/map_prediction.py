"""What a `map` will take, before it starts: a few items are computed in a process of this machine, and their times are scaled up.

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
from pathlib import Path
from typing import Any

from ephemeron.config.code_bundle import Selection
from ephemeron.config.typed import build, plain
from ephemeron.errors import JobError, PlanInfeasible
from ephemeron.events import Traffic
from ephemeron.executor import batching
from ephemeron.executor.executor import FunctionExecutor
from ephemeron.executor.item_trial import REQUEST_FILE, RUN, ItemTrial, TrialRequest
from ephemeron.executor.session import FIRST_POLL_S, MOST_POLL_S, POLL_GROWTH
from ephemeron.executor.shipping import Shipper
from ephemeron.functions.registry import CLOUDS, cloud
from ephemeron.functions.shipped_code import dumps
from ephemeron.functions.shipped_tasks import code_keys
from ephemeron.functions.world import Simulation
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


class MapModel:
    """What a durable map will take, by the number of its functions and their memory. The function is called with some of the items when
    this is made, here.

    Args:
        pool: that would run it; it starts nothing.
        function: as for `FunctionExecutor.map`.
        calls: some of the items, by their numbers from 0, in that order; see `FunctionExecutor.submit_items`.
        of: items of the map.
        seed: of the argument `rng`.
        told: gives the name of an item for messages, by its number from 0.
        code, code_include, code_exclude, timeout_s: as for `FunctionExecutor`.

    Raises:
        JobError: the function or an item cannot be sent, or one of the items fails; with the frames of the user's code.
        PlanInfeasible: an item needs more than the memory of a function.
    """

    def __init__(
        self,
        pool: FunctionExecutor,
        function: Callable[..., Any] | str,
        calls: Mapping[int, tuple[str, tuple[Any, ...], Mapping[str, Any]]],
        *,
        of: int,
        seed: int | None = None,
        told: Callable[[int], str] = lambda number: f"item {number + 1}",
        code: Sequence[Path] = (),
        code_include: Sequence[str] = (),
        code_exclude: Sequence[str] = (),
        timeout_s: float | None = None,
    ) -> None:
        self.pool, self.of, self._chosen, self._timeout_s = pool, of, list(calls), timeout_s
        selection = Selection(include=tuple(code_include), exclude=tuple(code_exclude))
        shipper = Shipper(code_keys(RUN), [Path(folder) for folder in code], selection=selection)
        shipment = shipper.ship(function)
        self.name = shipment.name
        request = TrialRequest(reference=shipment.reference, objects=shipment.objects, calls=list(calls.values()), seed=seed)
        self.trial = _tried(request, [told(number) for number in self._chosen], name=shipment.name, quota_mb=pool.memory_mb)

    def predict(self, *, functions: int | None = None, memory_mb: int | None = None) -> Prediction:
        """Time, cost and memory.

        Args:
            functions: at once; None: as many as the pool may have.
            memory_mb: of a function; None: the pool's.
        """
        pool, trial, of = self.pool, self.trial, self.of
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
            notes.append(f"an item takes up to {human_seconds(max(times))}, above timeout_s = {self._timeout_s:g}")
        if spread_s is None:
            notes.append("how uncertain it is is not known: too few items were computed")
        ends = None if spread_s is None else (item_s - spread_s, item_s + spread_s)
        result_bytes = statistics.fmean(t.nbytes for t in trial.items)
        where = "functions of this machine start" if pool.platform == "local" else f"functions of {pool.platform} start"
        repeated_s = functions * (item_s + RECORDED_S)
        repeated_usd = pool.prices.functions_usd(repeated_s * quota_mb / 1024, functions)
        return Prediction(
            kind="tasks",
            name=f"map {self.name}",
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
                measured_now(f"{human_count(len(trial.items), 'item')} of {of:,}, computed in a process of this machine"),
                Basis(source="assumed", what=f"{where} in {_start_s(pool.platform):g} s and are as fast as this machine per vCPU"),
                price_basis(pool.prices),
            ),
            notes=tuple(notes),
            details={
                "items": of,
                "item_s": item_s,
                "load_s": trial.load_s,
                "result_bytes": result_bytes,
                "interruption_s": repeated_s,
                "interruption_usd": repeated_usd,
                "tried": [{"item": n + 1, **plain(t)} for n, t in zip(self._chosen, trial.items, strict=False)],
            },
            rows=(
                ("work", human_count(of, "item", grouped=True)),
                (
                    "an item",
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
        pool = self.pool
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


def _tried(request: TrialRequest, chosen: Sequence[str], *, name: str, quota_mb: int) -> ItemTrial:
    with tempfile.TemporaryDirectory(prefix="ephemeron-dry-run-") as place:
        folder = Path(place)
        (folder / REQUEST_FILE).write_bytes(dumps(request, what=f"an argument of {name}"))
        done = run_probe("item-trial", str(folder), cwd=folder / "cwd", most_s=MOST_S, quota_mb=quota_mb)
    if done.ended == "time":
        raise JobError(f"{name} takes more than {MOST_S:g} s for one item", remedy="divide it into smaller items")
    if done.ended == "memory":
        raise PlanInfeasible(f"{name} needs more than the {quota_mb} MB of a function; use a larger --memory-mb", binding="memory")
    try:
        trial = build(ItemTrial, json.loads(done.output), where="dry run")
    except ValueError:
        raise JobError(f"the process of the dry run ended early: {done.last_error}") from None
    if trial.error:
        frames = f"\n{trial.traceback.rstrip()}" if trial.traceback else ""
        raise JobError(f"{name} fails with {chosen[trial.failed]}: {trial.error}{frames}")
    return trial


def _start_s(platform: str) -> float:
    if platform in CLOUDS:
        return cloud(platform).cold_start_s
    return Simulation().cold_start_s if platform == "simulated" else LOCAL_START_S
