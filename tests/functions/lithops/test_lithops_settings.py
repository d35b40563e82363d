"""Settings, limits and ends of calls of the Lithops platform, without a function."""

from __future__ import annotations

import asyncio
import copy
import json
import sys
from typing import Any

import pytest

from ephemeron.config.typed import build
from ephemeron.errors import JobError, MissingExtra
from ephemeron.functions.async_invoke.log_source import Death, LogReport
from ephemeron.functions.base import Call
from ephemeron.functions.lithops.function import run_call
from ephemeron.functions.lithops.invoker import Executor, LithopsTask
from ephemeron.functions.lithops.platform import FutureWatch, limits_of
from ephemeron.functions.lithops.settings import MARGIN_S, LithopsSettings, lithops_module, overridden


def test_on_localhost_a_gang_and_its_successors_have_places_at_once() -> None:
    theirs = {"lithops": {"data_cleaner": True, "execution_timeout": 60}, "localhost": {"version": 1, "worker_processes": 2}}
    before = copy.deepcopy(theirs)
    out = overridden(theirs, LithopsSettings(places=9))
    assert theirs == before, "what the user has is left alone"
    assert (out["localhost"]["version"], out["localhost"]["worker_processes"]) == (2, 9)
    assert out["localhost"]["runtime"] == sys.executable
    assert (out["lithops"]["data_cleaner"], out["lithops"]["execution_timeout"]) == (False, 900)


def test_on_a_cloud_the_runtime_may_live_as_long_as_it_can_and_keeps_what_the_user_set() -> None:
    theirs = {"lithops": {"storage": "aws_s3"}, "aws_lambda": {"region": "eu-west-1", "runtime_timeout": 180}}
    out = overridden(theirs, LithopsSettings(backend="aws_lambda", timeout_s=899.5, runtime="image:1"))
    assert out["aws_lambda"] == {"region": "eu-west-1", "runtime_timeout": 900, "runtime": "image:1"}
    assert (out["lithops"]["backend"], out["lithops"]["storage"]) == ("aws_lambda", "aws_s3")
    assert "localhost" not in out


def test_a_life_ends_before_lithops_would_end_it() -> None:
    settings = LithopsSettings(timeout_s=600.0)
    assert limits_of(settings).lifetime_s == 600.0 - MARGIN_S
    with pytest.raises(JobError, match="timeout_s 30 leaves functions no time"):
        LithopsSettings(timeout_s=MARGIN_S).located()
    with pytest.raises(JobError, match="places"):
        LithopsSettings(places=0).located()


class _Future:
    def __init__(self) -> None:
        self.error = self.ready = self.success = self.done = False


class _Executor:
    """An executor whose futures end at the first look, or whose storage does not answer."""

    fails = False

    def look(self, futures: list[Any]) -> None:
        if self.fails:
            raise OSError("no storage")
        futures[0].error = True


def test_an_end_is_told_once_and_a_look_that_fails_is_tried_again() -> None:
    executor: Any = _Executor()
    times = iter([1.0, 3.5])
    watch = FutureWatch(executor, clock=lambda: next(times))

    async def main() -> None:
        assert await watch.poll() == []
        watch.started("a", _Future())
        executor.fails = True
        assert await watch.poll() == []
        assert watch.problem == "OSError: no storage"
        executor.fails = False
        report, death = await watch.poll()
        assert isinstance(report, LogReport)
        assert isinstance(death, Death)
        assert (report.request, report.billed_s) == ("a", 2.5)
        assert death.text == "Lithops: its task has ended with an error"
        assert (await watch.poll(), watch.problem) == ([], "")

    asyncio.run(main())


class _Backend:
    """Takes the task of a call."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def call_async(self, function: Any, data: dict[str, Any], **options: Any) -> None:
        self.messages.append(data["message"])


def test_a_task_has_the_log_level_of_the_client_and_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPHEMERON_LOG_LEVEL", "debug")
    monkeypatch.delenv("EPHEMERON_LOG_FORMAT", raising=False)
    executor = Executor(LithopsSettings(variables={"MINE": "1"}), run_call)
    backend = executor._executor = _Backend()
    executor.call(b"{}", "r", Call(run="r", rank=0, attempt=0, memory_mb=256, lifetime_s=60.0, channel="folder"))
    task = build(LithopsTask, json.loads(json.dumps(backend.messages[0])), where="task")
    assert (task.request, task.memory_mb) == ("r", 256)
    assert task.settings.variables == {"EPHEMERON_LOG_LEVEL": "debug", "MINE": "1"}


def test_without_lithops_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lithops", None)
    with pytest.raises(MissingExtra, match=r"pip install 'ephemeron\[lithops\]'"):
        lithops_module()
