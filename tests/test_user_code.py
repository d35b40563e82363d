"""The boundary around user code: what passes it, and that describing never raises."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import pickle
import sys
import threading

import pytest

from ephemeron import user_code
from ephemeron.functions.context import ThreadCompute
from ephemeron.user_code import (
    Interruption,
    RaisedByUserCode,
    failure,
    guarded,
    line_of,
    never_interrupted,
    text_of,
    unpickled,
    where_raised,
)


class Own(BaseException):
    pass


class NoText(Exception):
    def __str__(self):
        raise SystemExit("no text")

    __repr__ = __str__


class NoNotes(Exception):
    @property
    def __notes__(self):
        raise ValueError("no notes")


NO_ERRORS = [
    asyncio.CancelledError("a"),
    GeneratorExit("a"),
    SystemExit("a"),
    Own("a"),
    StopIteration("a"),
    StopAsyncIteration("a"),
    concurrent.futures.CancelledError("a"),
    BaseExceptionGroup("a", [KeyboardInterrupt()]),
]


def raising(error):
    raise error


@pytest.mark.parametrize("error", NO_ERRORS, ids=lambda e: type(e).__name__)
def test_what_is_no_error_becomes_one_that_names_it(error):
    with pytest.raises(RaisedByUserCode) as found, guarded():
        raising(error)
    assert found.value.raised is error
    name = "KeyboardInterrupt" if isinstance(error, BaseExceptionGroup) else f"{type(error).__name__}: a"
    assert line_of(found.value) == name
    line, trace = failure(found.value)
    assert line == name
    assert "in raising" in trace
    assert "RaisedByUserCode" not in trace
    assert where_raised(found.value).startswith(f"{name} (test_user_code.py, line ")
    kind, arguments = found.value.__reduce__()  # as it is pickled: without what it stands for
    assert line_of(kind(*arguments)) == name


@pytest.mark.parametrize("error", [ValueError("a"), ExceptionGroup("a", [ValueError()]), NoText(), Interruption()])
def test_errors_and_interruptions_of_the_framework_pass(error):
    with pytest.raises(type(error)) as found, guarded():
        raise error
    assert found.value is error


def test_ctrl_c_passes_in_the_main_thread_of_a_client_alone(monkeypatch):
    with pytest.raises(KeyboardInterrupt), guarded():
        raise KeyboardInterrupt
    found = []

    def elsewhere():
        try:
            with guarded():
                raise KeyboardInterrupt
        except RaisedByUserCode as e:
            found.append(line_of(e))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == ["KeyboardInterrupt"]
    monkeypatch.setattr(user_code, "_interruptible", True)  # restored afterwards
    never_interrupted()
    with pytest.raises(RaisedByUserCode), guarded():
        raise KeyboardInterrupt


@pytest.mark.parametrize("error", NO_ERRORS[:-1], ids=lambda e: type(e).__name__)
def test_a_computation_on_a_thread_raises_errors(error):
    async def main():
        compute = ThreadCompute(1)
        try:
            async with asyncio.timeout(20):
                await compute(lambda: raising(error), samples=1)
        finally:
            compute.close()

    with pytest.raises(RaisedByUserCode, match=f"^{type(error).__name__}: a$"):
        asyncio.run(main())


def test_a_thread_that_computes_nothing_has_ended_once_it_is_closed():
    """A process in which one still ends would not be used again."""

    async def main():
        compute = ThreadCompute(1)
        assert await compute(lambda: 7, samples=1) == 7
        turns = sys.getswitchinterval()
        sys.setswitchinterval(60)  # others run only when they are waited for
        try:
            compute.close()
            assert not [thread for thread in threading.enumerate() if thread.name.startswith("compute")]
        finally:
            sys.setswitchinterval(turns)

    asyncio.run(main())


def test_a_description_is_short_and_can_be_written_everywhere():
    assert line_of(NoText()) == "NoText: (its text cannot be made: SystemExit)"
    assert line_of(NoNotes("a")) == "NoNotes: (its text cannot be made: ValueError)"
    assert line_of(ValueError()) == "ValueError"
    noted = ValueError("a\n b")
    noted.add_note("c\nd")
    assert text_of(noted) == "a b c d"
    for text in ("x" * 2_000_000, "bad \udcff text", "a\x00b\x1b[31m", "é ∑ 😀"):
        line, trace = failure(ValueError(text))
        assert len(line) < 1_100
        assert len(trace) < 4_000
        assert json.loads(json.dumps(f"{line}{trace}".encode().decode())) == line + trace
        assert "\x1b" not in trace
        assert "\x00" not in line
    assert text_of(ValueError("é ∑ 😀")) == "é ∑ 😀"
    assert failure(NoText())[1].endswith("NoText: <exception str() failed>\n")


class Unreadable:
    def __reduce__(self):
        return raising, (GeneratorExit("not to be had"),)


def test_what_a_pickle_raises_is_an_error():
    with pytest.raises(RaisedByUserCode, match="GeneratorExit: not to be had"):
        unpickled(pickle.dumps(Unreadable()))
