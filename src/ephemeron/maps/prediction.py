"""What a durable map will take before it starts, and the functions that meet a deadline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ephemeron.config.code_bundle import Selection
from ephemeron.executor.executor import FunctionExecutor
from ephemeron.executor.item_trial import RUN
from ephemeron.executor.map_prediction import MapModel, Workers, positions
from ephemeron.executor.shipping import Shipper
from ephemeron.functions.shipped_tasks import code_keys
from ephemeron.maps.calls import Callee, arguments_of
from ephemeron.maps.sources import Source, hex_of
from ephemeron.runs.predictions import Prediction
from ephemeron.units import human_count


def predict_items(
    function: Callable[..., Any] | str,
    callee: Callee,
    source: Source,
    todo: NDArray[np.bool_],
    *,
    seed: int = 0,
    deadline_s: float | None = None,
    **options: Any,
) -> Prediction:
    """What it takes to compute items. The function is really called with some of them, here.

    Args:
        function, callee: whose results are wanted.
        source: of the items.
        todo: which are to be computed.
        seed: of the argument `rng`.
        deadline_s: in which it is to be done, by the cheapest functions that do so; None: with as many functions as there may be.
        options: of `FunctionExecutor`.

    Raises:
        JobError: the function or an item cannot be sent, or an item fails.
        PlanInfeasible: no number of functions meets the deadline or the budget.
    """
    numbers = np.flatnonzero(todo)
    selection = Selection(include=tuple(options.get("code_include", ())), exclude=tuple(options.get("code_exclude", ())))
    shipment = Shipper(code_keys(RUN), [Path(each) for each in options.get("code", ())], selection=selection).ship(function)
    with FunctionExecutor(**options) as pool:
        workers = Workers(
            platform=pool.platform,
            memory_mb=pool.memory_mb,
            vcpus=pool.vcpus,
            max_workers=pool.max_workers,
            function_timeout_s=pool.function_timeout_s,
            prices=pool.prices,
            limits=pool.limits,
            python=pool.python,
        )
        model = MapModel(
            workers,
            shipment,
            _calls(source, callee, numbers),
            of=len(numbers),
            told=source.told,
            seed=seed if callee.has_rng else None,
            timeout_s=options.get("timeout_s"),
        )
        if deadline_s is None:
            found = model.predict()
        else:
            found = model.choose(deadline_s=deadline_s, budget_usd=options.get("budget_usd"), memory_mb=options.get("memory_mb"))
    found = replace(found, name=f"map {found.name}")
    done = int(len(todo) - len(numbers))
    if done:
        found = replace(found, rows=(*found.rows, ("recorded", f"{human_count(done, 'item', grouped=True)} already, which cost nothing")))
    return replace(found, details={**found.details, "recorded": done})


def _calls(source: Source, callee: Callee, numbers: NDArray[np.int64]) -> Mapping[int, tuple[str, tuple[Any, ...], Mapping[str, Any]]]:
    """Some of the items, as they are sent."""
    costs: Sequence[float] = ()
    if source.columns.cost is not None:
        every = np.concatenate([np.asarray(block.costs) for block in source.blocks()])
        costs = every[numbers]  # type: ignore[assignment]
    chosen = [int(numbers[n]) for n in positions(len(numbers), costs)]
    calls = {}
    for block in source.blocks():
        for n in (n for n in chosen if block.first <= n < block.first + len(block.ids)):
            at = n - block.first
            calls[n] = (hex_of(block.ids[at]), *arguments_of(block.value(at), callee))
        if chosen and block.first + len(block.ids) > chosen[-1]:
            break
    return calls
