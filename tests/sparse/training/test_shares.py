"""Which ends of functions are tried again, and how often, without functions."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from ephemeron.errors import FunctionFailed, FunctionLost, RunFailed, ServiceUnreachable, TaskFailed
from ephemeron.functions import simulation
from ephemeron.functions.base import Outcome
from ephemeron.runs.function_set import MOST_LOSSES
from ephemeron.sparse.job.driving import _error_of
from ephemeron.sparse.training.part import Part, PartReport
from ephemeron.sparse.training.shares import Shares, ShareWatcher
from ephemeron.user_code import failure


class NoStore:
    async def get(self, key: str) -> None:
        return None

    async def set(self, key: str, value: bytes) -> None: ...


def ended(*ends: PartReport | Exception) -> tuple[int, BaseException | None, list[PartReport]]:
    """Number of functions that were started where they end like this, the last one again and again; the error; and the reports."""
    started = 0

    def start(part: Part) -> Any:
        nonlocal started
        end = ends[min(started, len(ends) - 1)]
        started += 1
        task: Future[PartReport] = Future()
        if isinstance(end, Exception):
            task.set_exception(end)
        else:
            task.set_result(end)
        return task

    part: Any = Part(
        run="r", rank=0, attempt=0, model=None, dataset=None, schedule=None, addresses=(), ring=1, time_s=1.0, compression=None
    )  # type: ignore[arg-type]

    async def go() -> tuple[BaseException | None, list[PartReport]]:
        shares = Shares(start, NoStore(), [part], ShareWatcher())  # type: ignore[arg-type]
        try:
            return None, await shares.trained()
        except RunFailed as e:
            return e, []

    error, reports = simulation.run(asyncio.wait_for(go(), 10_000))
    return started, error, reports


DONE = PartReport(rank=0, steps=9, finished=True)


@pytest.mark.parametrize(
    "error",
    [
        TaskFailed("ModuleNotFoundError: No module named 'mine'", task="t", traceback="Traceback…"),
        TaskFailed("ZeroDivisionError: division by zero", task="t", traceback="Traceback…"),
        FunctionFailed("ValueError: no", rank=0),
    ],
)
def test_what_user_code_raises_is_tried_once(error: Exception) -> None:
    started, failed, _ = ended(error)
    assert started == 1
    assert str(error) in str(failed)


@pytest.mark.parametrize(
    "error",
    [
        TaskFailed("killed, or out of memory", task="t"),
        TaskFailed("ServiceUnreachable: shard 0 does not answer", task="t", traceback="Traceback…"),
        TaskFailed("ConnectionResetError: by peer", task="t", traceback="Traceback…"),
        FunctionFailed("ChannelUnreachable: no answer", rank=0),
        FunctionLost("lost", rank=0),
    ],
)
def test_what_the_world_does_is_tried_again_and_not_for_ever(error: Exception) -> None:
    assert ended(error, error, DONE)[1:] == (None, [DONE])
    started, failed, _ = ended(error)
    assert started == MOST_LOSSES + 1
    assert "without a step" in str(failed)


@pytest.mark.parametrize("error", [ServiceUnreachable("shard 0 does not answer"), ValueError("no")])
def test_a_function_of_a_run_is_told_by_its_error_and_not_by_the_end_of_its_traceback(error: Exception) -> None:
    error.add_note("as a note says")
    outcome = Outcome(status="error", error="\n".join(failure(error)))
    part: Any = SimpleNamespace(rank=0, attempt=0)
    told = _error_of(outcome, part)
    assert type(error).__name__ in str(told)
    started, _, _ = ended(told, DONE)
    assert started == (1 if isinstance(error, ValueError) else 2)


def test_functions_that_hand_over_without_a_step_use_up_the_same_budget() -> None:
    started, failed, _ = ended(PartReport(rank=0))
    assert started == MOST_LOSSES + 1
    assert "its time was up" in str(failed)
    steps = [PartReport(rank=0, steps=n) for n in range(1, 3 * MOST_LOSSES)]
    assert ended(*steps, DONE)[1:] == (None, [DONE]), "with a step each they are relays"
