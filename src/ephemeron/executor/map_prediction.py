"""What many calls of a function will take, before it starts: a few items are computed in a process of this machine, and their times are scaled up.

The model: functions take tasks of `chunksize` items in turn, in batches that cost requests. CPU time is longer where a function has less
than a vCPU, time without CPU is not. The range is that of the mean of the items that were computed, twice its standard error. What
one slow item at the end costs, items that fail, and requests that are repeated are left out.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from ephemeron.executor.shipping import Shipment, Shipper
from ephemeron.functions.registry import CLOUDS, cloud
from ephemeron.functions.shipped_code import dumps
from ephemeron.functions.shipped_tasks import code_keys
from ephemeron.functions.world import Simulation
from ephemeron.prices import Prices
from ephemeron.runs.predictions import Basis, Prediction, invocations_for, measured_now, price_basis
from ephemeron.runs.probe_process import run_probe
from ephemeron.units import human_bytes, human_count, human_seconds

TRIED = 8
"""Items that are computed, at most, spread evenly over all of them."""
MOST_S = 600.0
"""Longest time of the trial."""
LOCAL_START_S = 0.6
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


def predict_map(
    pool: FunctionExecutor,
    function: Callable[..., Any] | str,
    items: Sequence[Any],
    *,
    chunksize: int = 1,
    code: Sequence[Path] = (),
    code_include: Sequence[str] = (),
    code_exclude: Sequence[str] = (),
    timeout_s: float | None = None,
) -> Prediction:
    """Time, cost and memory of `pool.map(function, items)`. The function is really called with some of the items, here.

    Args:
        pool: that would run it; it starts nothing.
        function, items, chunksize: as for `FunctionExecutor.map`.
        code, code_include, code_exclude, timeout_s: as for `FunctionExecutor`.

    Raises:
        JobError: the function or an item cannot be sent, or one of the items fails; with the frames of the user's code.
        PlanInfeasible: an item needs more than the memory of a function.
    """
    selection = Selection(include=tuple(code_include), exclude=tuple(code_exclude))
    shipment = Shipper(code_keys(RUN), [Path(folder) for folder in code], selection=selection).ship(function)
    workers = Workers(
        platform=pool.platform,
        memory_mb=pool.memory_mb,
        vcpus=pool.vcpus,
        max_workers=pool.max_workers,
        function_timeout_s=pool.function_timeout_s,
        prices=pool.prices,
    )
    found = predict_calls(workers, shipment, [(item,) for item in items], chunksize=chunksize, timeout_s=timeout_s)
    return replace(found, name=f"map {shipment.name}")


def predict_calls(
    pool: Workers,
    shipment: Shipment,
    items: Sequence[tuple[Any, ...]],
    *,
    within: str = "",
    word: str = "item",
    chunksize: int = 1,
    timeout_s: float | None = None,
) -> Prediction:
    """Time, cost and memory of calls of a function. It is really called some times, here.

    Args:
        pool: functions that would run them.
        shipment: the function, for the run `item_trial.RUN`.
        items: arguments of each call.
        within: `module:function` of an installed module that is called with the function and the arguments; empty: the function is.
        word: for a call, in messages.
        chunksize: calls of a task.
        timeout_s: time limit of a task.

    Raises:
        JobError: an argument cannot be sent, or a call fails; with the frames of the user's code.
        PlanInfeasible: a call needs more than the memory of a function.
    """
    count = min(TRIED, len(items))
    chosen = [round(n * (len(items) - 1) / max(1, count - 1)) for n in range(count)]
    request = TrialRequest(reference=shipment.reference, objects=shipment.objects, items=[items[n] for n in chosen], within=within)
    trial = _tried(request, chosen, name=shipment.name, word=word, quota_mb=pool.memory_mb)
    slower = max(1.0, 1.0 / pool.vcpus)
    times = [t.cpu_s * slower + max(0.0, t.seconds - t.cpu_s) for t in trial.items]
    usual = times[1:] or times
    item_s, tasks = statistics.fmean(usual), math.ceil(len(items) / chunksize)
    functions = min(pool.max_workers, tasks)
    spread_s = 2 * statistics.stdev(usual) / math.sqrt(len(usual)) if len(usual) > 2 else None
    start_s = _start_s(pool.platform) + trial.load_s * slower + max(0.0, times[0] - item_s)

    chunk = min(chunksize, len(items))
    batches = max(_batches(tasks, chunk * item_s), min(tasks, _LEAST_BATCHES * functions))

    def seconds(of_item: float) -> float:
        return start_s + math.ceil(tasks / functions) * chunk * max(0.0, of_item) + batches / functions * BATCH_S

    def usd(of_item: float) -> float:
        taken_s = seconds(of_item)
        calls = invocations_for(functions, taken_s, pool.function_timeout_s)
        functions_usd = pool.prices.functions_usd(functions * taken_s * pool.memory_mb / 1024, calls)
        return functions_usd + pool.prices.storage_usd(_traffic(batches, taken_s))

    notes = []
    if timeout_s is not None and chunksize * max(times) > timeout_s:
        notes.append(
            f"a task of {human_count(chunksize, word)} takes up to {human_seconds(chunksize * max(times))}, above timeout_s = {timeout_s:g}"
        )
    if spread_s is None:
        notes.append(f"how uncertain it is is not known: too few {word}s were computed")
    ends = None if spread_s is None else (item_s - spread_s, item_s + spread_s)
    result_bytes = statistics.fmean(t.nbytes for t in trial.items)
    where = "functions of this machine start" if pool.platform == "local" else f"functions of {pool.platform} start"
    return Prediction(
        kind="tasks",
        name=shipment.name,
        platform=pool.platform,
        seconds=seconds(item_s),
        seconds_range=None if ends is None else (seconds(ends[0]), seconds(ends[1])),
        cost_usd=usd(item_s),
        cost_usd_range=None if ends is None else (usd(ends[0]), usd(ends[1])),
        memory_mb=trial.peak_mb,
        quota_mb=pool.memory_mb,
        functions=functions,
        invocations=invocations_for(functions, seconds(item_s), pool.function_timeout_s),
        rests_on=(
            measured_now(f"{human_count(len(trial.items), word)} of {len(items):,}, computed in a process of this machine"),
            Basis(source="assumed", what=f"{where} in {_start_s(pool.platform):g} s and are as fast as this machine per vCPU"),
            price_basis(pool.prices),
        ),
        notes=tuple(notes),
        details={
            f"{word}s": len(items),
            "tasks": tasks,
            f"{word}_s": item_s,
            "load_s": trial.load_s,
            "result_bytes": result_bytes,
            "tried": [{word: n + 1, **plain(t)} for n, t in zip(chosen, trial.items, strict=False)],
        },
        rows=(
            ("work", f"{human_count(len(items), word, grouped=True)} in {human_count(tasks, 'task', grouped=True)}"),
            (
                f"{'an' if word[0] in 'aeiou' else 'a'} {word}",
                f"{human_seconds(item_s)}, {human_seconds(min(usual))} to {human_seconds(max(usual))}; result {human_bytes(result_bytes)}",
            ),
        ),
    )


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


def _tried(request: TrialRequest, chosen: Sequence[int], *, name: str, word: str, quota_mb: int) -> ItemTrial:
    with tempfile.TemporaryDirectory(prefix="ephemeron-dry-run-") as place:
        folder = Path(place)
        (folder / REQUEST_FILE).write_bytes(dumps(request, what=f"an argument of {name}"))
        done = run_probe("item-trial", str(folder), cwd=folder / "cwd", most_s=MOST_S, quota_mb=quota_mb)
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
        raise JobError(f"{name} fails with {word} {chosen[trial.failed] + 1}: {trial.error}{frames}")
    return trial


def _start_s(platform: str) -> float:
    if platform in CLOUDS:
        return cloud(platform).cold_start_s
    return Simulation().cold_start_s if platform == "simulated" else LOCAL_START_S
