"""Tasks that raise what is no `Exception`, or what has no text: their futures end with it, and neighbours go on."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading

import pytest

from ephemeron.errors import JobError, TaskFailed
from ephemeron.executor import FunctionExecutor


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))


class Own(BaseException):
    pass


class NoText(Exception):
    def __str__(self):
        raise KeyboardInterrupt

    def __reduce__(self):
        raise SystemExit("cannot be pickled")

    __repr__ = __str__


class Needs(Exception):
    def __init__(self, code, *, response):
        super().__init__(code)
        self.lock = threading.Lock()


class Unreadable:
    """A result that raises where it is read."""

    def __reduce__(self):
        return unreadable, ()


def unreadable():
    raise asyncio.CancelledError("by reading")


RAISED = {
    "CancelledError": asyncio.CancelledError,
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "SystemExit": SystemExit(3),
    "StopIteration": StopIteration(5),
    "StopAsyncIteration": StopAsyncIteration,
    "Own": Own("enough"),
    "NoText": NoText,
    "Needs": Needs(404, response=b""),
    "RecursionError": RecursionError,
    "ValueError": ValueError("x" * 2_000_000 + "\udcff\x00"),
    "BaseException": BaseException("base"),
    "ZeroDivisionError": BaseExceptionGroup("of one", [ZeroDivisionError()]),
}


CAUSES = {"RecursionError": "RecursionError", "ZeroDivisionError": "ExceptionGroup"}
"""Of those: others are no exceptions that a future can hold, cannot be pickled or read, or are too large."""


def raise_named(name):
    raise RAISED[name]


@pytest.mark.parametrize("retries", [0, 2])
def test_every_future_ends_with_what_its_task_raised(retries):
    with FunctionExecutor(platform="simulated", max_workers=2, retries=retries) as pool:
        futures = {name: pool.submit(raise_named, name) for name in RAISED}
        going = [pool.submit(divmod, 7, n + 1) for n in range(20)]
        for name, future in futures.items():
            with pytest.raises(TaskFailed, match=f"^{name}") as found:
                future.result(60)
            assert found.value.tries == retries + 1, name
            assert len(str(found.value)) < 1_100
            assert "in raise_named" in found.value.traceback, name
            assert "in _call" not in found.value.traceback, name
            cause = found.value.__cause__
            assert type(cause).__name__ == CAUSES.get(name, "NoneType"), name
        assert [future.result(60) for future in going] == [divmod(7, n + 1) for n in range(20)]


class Refused(ValueError):
    """One that the caller catches, with what it needs."""

    def __init__(self, code, seen):
        super().__init__(code, seen)
        self.code, self.seen = code, seen


@pytest.mark.parametrize("platform", ["simulated", pytest.param("local", marks=pytest.mark.slow)])
def test_what_a_task_raised_is_the_cause_of_its_failure(platform):
    def refuses(code):
        try:
            raise KeyError("inner")
        except KeyError as e:
            refused = Refused(code, {"a": 1})
            refused.add_note("noted")
            raise refused from e

    with FunctionExecutor(platform, max_workers=1, retries=0) as pool, pytest.raises(TaskFailed) as found:
        pool.submit(refuses, 404).result(100)
    cause = found.value.__cause__
    assert isinstance(cause, Refused)
    assert (cause.code, cause.seen, cause.__notes__) == (404, {"a": 1}, ["noted"])
    assert "KeyError: 'inner'" in found.value.traceback


def test_results_and_arguments_that_raise_where_they_are_pickled_and_read():
    with FunctionExecutor(platform="simulated", max_workers=1, retries=0) as pool:
        read, sent = pool.submit(Unreadable), pool.submit(NoText)
        with pytest.raises(TaskFailed, match="its result cannot be read here: CancelledError: by reading"):
            read.result(60)
        with pytest.raises(TaskFailed, match="the result cannot be sent to a function: SystemExit: cannot be pickled"):
            sent.result(60)
        with pytest.raises(JobError, match="an argument of str cannot be sent to a function: SystemExit"):
            pool.submit(str, NoText())
        with pytest.raises(TaskFailed, match="CancelledError: by reading"):
            pool.submit(type, Unreadable()).result(60)
        assert pool.submit(divmod, 7, 2).result(60) == (3, 1)


def test_code_that_raises_where_it_is_loaded():
    class Code:
        def __call__(self):
            return 1

        def __reduce__(self):
            return unreadable, ()

    with FunctionExecutor(platform="simulated", max_workers=1, retries=0) as pool:
        failed, well = pool.submit(Code()), pool.submit(divmod, 7, 2)
        with pytest.raises(TaskFailed, match="Code cannot be loaded where it runs: CancelledError: by reading"):
            failed.result(60)
        assert well.result(60) == (3, 1)


def test_a_cancellation_by_the_client_stays_one():
    with FunctionExecutor(platform="simulated", max_workers=1) as pool:
        future = pool.submit(raise_named, "CancelledError")
        assert future.cancel()
        with pytest.raises(concurrent.futures.CancelledError):
            future.result(60)
        assert pool.submit(divmod, 7, 2).result(60) == (3, 1)


@pytest.mark.slow
def test_functions_survive_what_tasks_raise():
    def cancelled():
        async def waits():
            waiting = asyncio.ensure_future(asyncio.sleep(5))
            await asyncio.sleep(0)
            waiting.cancel()
            await waiting

        asyncio.run(waits())

    def interrupted():
        raise KeyboardInterrupt("a")

    def own():
        raise type("Own", (BaseException,), {})("a")

    def quits():
        raise SystemExit(3)

    tasks = {"CancelledError": cancelled, "KeyboardInterrupt": interrupted, "Own": own, "SystemExit": quits}
    for task in tasks.values():
        task.__module__ = "__main__"  # by value: functions do not have this module
    with FunctionExecutor("local", max_workers=1, retries=0, idle_timeout_s=120) as pool:
        futures = [pool.submit(task) for task in tasks.values()]
        well = pool.submit(divmod, 7, 2)
        for future, name in zip(futures, tasks, strict=True):
            with pytest.raises(TaskFailed, match=f"^{name}"):
                future.result(120)
        assert well.result(120) == (3, 1)
        assert pool.bill().invocations == 1
