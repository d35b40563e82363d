"""User code that raises anything, predictions of odd outputs, edited modules, repeated arguments, remains of dead processes: in virtual time."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
import importlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner

from benchmarks.adversity_cases import case
from ephemeron.cli.main import main
from ephemeron.data.flow import Flow, LocalReader
from ephemeron.errors import JobError, SampleFailed, TaskFailed
from ephemeron.executor import FunctionExecutor
from ephemeron.executor.predict import Predictor, _joined, tried
from ephemeron.executor.prediction_files import check_inputs, read_inputs

RAISES, PREDICTS, EDITED, REPEATED, REMAINS, TRACEBACKS = (
    "what is not an Exception",
    "predictions",
    "edited code",
    "repeated arguments",
    "inventory",
    "one line in place of tracebacks",
)


class Own(BaseException):
    """An exception of a user, or of an extension that panics."""


class NoText(Exception):
    """Its text cannot be made."""

    def __str__(self) -> str:
        raise Own

    __repr__ = __str__


class Needs(Exception):
    """It can neither be pickled nor made again."""

    def __init__(self, code: int, *, response: bytes) -> None:
        super().__init__(code)
        self.lock = threading.Lock()


RAISED: dict[str, Callable[[], BaseException]] = {
    "CancelledError": asyncio.CancelledError,
    "CancelledError of futures": concurrent.futures.CancelledError,
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "SystemExit": lambda: SystemExit(3),
    "SystemExit 0": lambda: SystemExit(0),
    "StopIteration": lambda: StopIteration(5),
    "StopAsyncIteration": StopAsyncIteration,
    "Own": Own,
    "BaseException": BaseException,
    "NoText": NoText,
    "Needs": lambda: Needs(404, response=b""),
    "RecursionError": RecursionError,
    "MemoryError": MemoryError,
    "ValueError of 2 MB": lambda: ValueError("x" * 2_000_000),
    "ValueError with a surrogate": lambda: ValueError("\udcff"),
    "ValueError with NUL": lambda: ValueError("a\0b\x1b[2J"),
    "BaseExceptionGroup": lambda: BaseExceptionGroup("several", [KeyboardInterrupt(), Own()]),
    "ExceptionGroup": lambda: ExceptionGroup("several", [ValueError("a"), TypeError("b")]),
}


def refused(call: Callable[[], object], kind: type[Exception]) -> Any:
    """The error of this kind that a call raises."""
    found: Exception | None = None
    try:
        value = call()
    except kind as e:
        found = e
    if found is None:
        raise AssertionError(f"it is not refused, and gives {value!r}"[:200])
    return found


def raising(name: str) -> None:
    """Raises what has this name."""
    raise RAISED[name]()


class Samples:
    """A dataset of which one sample raises."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> np.ndarray:
        if index == 3:
            raising(self.name)
        return np.full(2, index)


def _of_a_task(name: str) -> None:
    with FunctionExecutor("simulated", max_workers=2, retries=1) as pool:
        future = pool.submit(raising, name)
        going = [pool.submit(divmod, 7, n) for n in (1, 2, 3)]
        error = refused(lambda: future.result(60), TaskFailed)
        assert str(error).startswith(name.partition(" ")[0]), str(error)[:100]
        assert error.tries == 2
        assert "in raising" in error.traceback
        json.dumps([str(error), error.traceback]).encode().decode()
        assert [f.result(60) for f in going] == [divmod(7, n) for n in (1, 2, 3)]


def _of_a_sample(name: str, loaders: int) -> None:
    flow = Flow("me/x", version=1).dataset(Samples(name)).prepare_read(LocalReader(workers=loaders))
    error = str(refused(lambda: list(flow.to_shuffled(2, shuffle=False)), SampleFailed))
    assert f"sample 3, step 'read': {name.partition(' ')[0]}" in error, error[:200]
    assert len(list(flow.to_shuffled(2, shuffle=False, on_error="skip"))) == 3


for _name in RAISED:
    case(RAISES, f"a task raises {_name}")(functools.partial(_of_a_task, _name))
    case(RAISES, f"a sample raises {_name} in a loader process")(functools.partial(_of_a_sample, _name, 1))
    if _name != "KeyboardInterrupt":  # which is Ctrl-C in the main thread of a client
        case(RAISES, f"a sample raises {_name} in this process")(functools.partial(_of_a_sample, _name, 0))


class Unreadable:
    """Its pickle raises where it is read."""

    def __reduce__(self) -> Any:
        return raising, ("CancelledError",)


@case(RAISES, "a result that raises where it is read")
def unreadable_result() -> None:
    with FunctionExecutor("simulated", max_workers=1, retries=0) as pool:
        assert "its result cannot be read here: CancelledError" in str(pool.submit(Unreadable).exception(60))
        assert "CancelledError" in str(pool.submit(type, Unreadable()).exception(60))
        assert pool.submit(abs, -1).result(60) == 1


@case(RAISES, "an exception as a result")
def exception_as_result() -> None:
    with FunctionExecutor("simulated", max_workers=1, retries=0) as pool:
        assert isinstance(pool.submit(ValueError, "a").result(60), ValueError)
        assert isinstance(pool.submit(Needs, 404, response=b"").exception(60), TaskFailed)


@case(RAISES, "a cancellation by the client is one")
def cancelled() -> None:
    with FunctionExecutor("simulated", max_workers=1) as pool:
        future = pool.submit(raising, "Own")
        assert future.cancel()
        assert future.cancelled()
        assert pool.submit(abs, -1).result(60) == 1


# -- predictions ------------------------------------------------------------------------------------------

X = np.arange(20.0, dtype="f4").reshape(5, 4)


@dataclasses.dataclass
class Direct(Predictor):
    """A predictor whose model is a function of this process."""

    spec: dict[str, Any] = dataclasses.field(default_factory=dict)
    code: bytes = b""
    weights: bytes = b""
    form: Any = None

    def build(self, folder: Path) -> Any:
        """See `Predictor`."""
        import torch

        return lambda inputs: self.form(torch.from_numpy(inputs["x"]))


GIVES: dict[str, tuple[Any, dict[str, tuple[int, ...]] | str]] = {
    "one output": (lambda y: y, {"y": (5, 4)}),
    "nested outputs": (lambda y: (y, (y, {"a": y})), {"y0": (5, 4), "y1.0": (5, 4), "y1.1.a": (5, 4)}),
    "squeezed outputs": (lambda y: y[:, :1].squeeze(), {"y": (5,)}),
    "None in outputs": (lambda y: (y, None), {"y0": (5, 4)}),
    "arrays": (lambda y: y.numpy(), {"y": (5, 4)}),
    "bfloat16": (lambda y: y.bfloat16(), {"y": (5, 4)}),
    "integers": (lambda y: y.argmax(1), {"y": (5,)}),
    "a mean": (lambda y: y.mean(), "output y"),
    "the first axis is not the sample": (lambda y: (y, y.t()), "output y1"),
    "sums": (lambda y: y.sum(0), "output y"),
    "text": (lambda y: ["a"] * len(y), "output y0"),
    "no output": (lambda y: None, "NoneType"),
    "an axis that grows with the batch": (lambda y: y @ y.t(), "output y"),
}


def _predicts(name: str) -> None:
    form, want = GIVES[name]
    if isinstance(want, str):
        error = str(refused(lambda: tried(Direct(form=form), {"x": X}), JobError))
        assert want in error, error
        return
    found = tried(Direct(form=form), {"x": X})
    for size in (1, 2, 4, 5):
        outputs = _joined([found({"x": X[at : at + size]}) for at in range(0, 5, size)])
        assert {key: array.shape for key, array in outputs.items()} == want


for _name in GIVES:
    case(PREDICTS, f"a model gives {_name}")(functools.partial(_predicts, _name))

LINES: dict[str, tuple[bytes, Any]] = {
    "U+2028 in text": ('{"t": "a\u2028b"}\n'.encode(), {"t": ["a\u2028b"]}),
    "a byte-order mark": (b"\xef\xbb\xbf[1, 2]\n", {"x": [[1, 2]]}),
    "CRLF": (b"1\r\n2\r\n", {"x": [1, 2]}),
    "NaN": (b"[Infinity, 1]\n", {"x": [[np.inf, 1]]}),
    "2**53 + 1": (b"9007199254740993\n", {"x": [9007199254740993]}),
    "rows of two lengths": (b"[1, 2]\n[1]\n", "line 2"),
    "another key": (b'{"a": 1}\n{"b": 1}\n', "line 2"),
    "one more key": (b'{"a": 1}\n{"a": 1, "b": 1}\n', "line 2"),
    "null": (b"[1]\n[null]\n", "line 2"),
    "no line": (b"", "no inputs"),
    "half a line": (b"[1\n", "line 1"),
    "UTF-16": ("[1]\n".encode("utf-16"), "UTF-16"),
}


def _reads(name: str) -> None:
    data, want = LINES[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.jsonl")
        path.write_bytes(data)
        if isinstance(want, str):
            error = str(refused(lambda: read_inputs(path), JobError))
            assert want in error, error
            return
        found = {key: array.tolist() for key, array in read_inputs(path).items()}
        assert found == want, found


for _name in LINES:
    case(PREDICTS, f"JSON lines with {_name}")(functools.partial(_reads, _name))


def _refuses(array: Any) -> None:
    refused(lambda: check_inputs({"x": array}), JobError)


for _name, _array in {"objects": X.astype(object), "text": X.astype(str), "no sample": X[:0], "a scalar": np.array(3.0)}.items():
    case(PREDICTS, f"inputs that are {_name}")(functools.partial(_refuses, _array))

# -- code, arguments, remains -----------------------------------------------------------------------------


@case(EDITED, "a module that is edited and reloaded, or not")
def edited() -> None:
    from ephemeron.executor.shipping import Shipper
    from ephemeron.functions.shipped_code import CodeKeys

    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, folder)
        before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
        try:
            path = Path(folder, "edited_by_case.py")
            path.write_text("def f(): return 1\n")
            module = importlib.import_module("edited_by_case")
            first = Shipper(CodeKeys("r")).ship(module.f).reference
            path.write_text("def f(): return 22\n")
            assert Shipper(CodeKeys("r")).ship(module.f).reference == first, "this process computes 1"
            importlib.reload(module)
            assert Shipper(CodeKeys("r")).ship(module.f).reference != first, "this process computes 22"
        finally:
            sys.path.remove(folder)
            sys.dont_write_bytecode = before
            sys.modules.pop("edited_by_case", None)


def _stored_once(value: Any) -> None:
    with FunctionExecutor("simulated", max_workers=2) as pool:
        found = list(pool.map(lambda x, n: (type(x).__name__, n), [value] * 20, range(20)))
        assert found == [(type(value).__name__, n) for n in range(20)]
        assert len([key for key in pool._session._stored if ".in/" in key]) == 1


_LARGE = np.arange(100_000.0)
for _name, _value in {
    "array": _LARGE,
    "bytes": bytes(100_000),
    "list": [0.5] * 100_000,
    "mapping": {"a": [_LARGE]},
    "text": "x" * 100_000,
}.items():
    case(REPEATED, f"map with one {_name} for every task")(functools.partial(_stored_once, _value))


@case(REPEATED, "arguments that are part of themselves")
def cyclic() -> None:
    value: list[Any] = [_LARGE]
    value.append(value)
    with FunctionExecutor("simulated", max_workers=1) as pool:
        assert pool.submit(lambda x: x[1] is x, value).result(60)


@case(REPEATED, "equal arguments stay two, one argument stays one")
def identity() -> None:
    def changed(a: np.ndarray, b: np.ndarray) -> float:
        a[0] = 5.0
        return float(b[0])

    with FunctionExecutor("simulated", max_workers=1) as pool:
        assert pool.submit(changed, _LARGE, _LARGE.copy()).result(60) == 0.0
        assert pool.submit(changed, _LARGE, _LARGE).result(60) == 5.0


@case(REMAINS, "what dead processes have left is listed with its size, and goes")
def remains() -> None:
    home = Path(os.environ["EPHEMERON_HOME"])
    old = time.time() - 7200
    for name in ("tasks/dead/log", "sessions/dead/log", "profiling/dead/log", "programs/dead/a.py", "studies/mine/db", "profiles/p.json"):
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(100))
        for each in (path, path.parent):
            os.utime(each, (old, old))
    listed = [json.loads(line) for line in CliRunner().invoke(main, ["runs", "clean", "--dry-run", "--json"]).stdout.splitlines()]
    assert sum(item["nbytes"] for item in listed) == sum(p.stat().st_size for p in home.rglob("*") if p.is_file())
    done = CliRunner().invoke(main, ["runs", "clean", "--all", "--yes"])
    assert done.exit_code == 0, done.output
    assert not list(home.glob("*/dead"))
    assert (home / "studies/mine/db").exists()
    assert (home / "profiles/p.json").exists()


@case(TRACEBACKS, "FunctionExecutor(channel=None)")
def no_channel() -> None:
    with FunctionExecutor("local", channel=None) as pool:
        assert pool.channel == "folder"


@case(TRACEBACKS, "a home folder that cannot be written")
def no_home() -> None:
    before = os.environ["EPHEMERON_HOME"]
    with tempfile.NamedTemporaryFile() as file:
        os.environ["EPHEMERON_HOME"] = file.name
        try:
            assert "set EPHEMERON_HOME" in str(refused(lambda: FunctionExecutor("simulated"), JobError))
        finally:
            os.environ["EPHEMERON_HOME"] = before


@case(TRACEBACKS, "results of map on a full disk")
def full_disk() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "i.jsonl").write_text("1\n2\n")
        command = ["map", "math:sqrt", "--items", f"{folder}/i.jsonl", "--out", "/dev/full", "--platform", "simulated"]
        ran = CliRunner().invoke(main, command)
    assert ran.exit_code == 1
    assert "No space left on device" in ran.stderr, ran.stderr
    assert "Traceback" not in ran.stderr


@case(TRACEBACKS, "a batch whose samples differ")
def ragged() -> None:
    class Ragged:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> np.ndarray:
            return np.zeros(3 if index == 2 else 2)

    flow = Flow("me/x", version=1).dataset(Ragged()).prepare_read(LocalReader(workers=0))
    error = str(refused(lambda: list(flow.to_shuffled(3, shuffle=False)), SampleFailed))
    assert "sample 2 is ndarray[3], sample 0 is ndarray[2]" in error, error
