"""The one boundary around user code: calling it, describing what it raised, reading what it pickled.

User code raises whatever it likes: a `CancelledError` that asyncio would take for a cancellation of the framework's own task, a
`KeyboardInterrupt` or an exit that would end the event loop, a `StopIteration` that no future can hold, exceptions whose text cannot
be made. Behind the boundary everything is an `Exception` with a text:

    with guarded():
        value = function(*arguments)

What passes as it is: an `Exception` that a future can hold, an `Interruption`, which the framework itself raises into user code, and
Ctrl-C: a `KeyboardInterrupt` in the main thread of a process that is no function. Cancellation of a task by the framework is never met
here, because it is delivered where a coroutine awaits, and user code is called without awaiting.
"""

from __future__ import annotations

import io
import pickle
import threading
import traceback
from concurrent.futures import CancelledError
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

_TEXT, _TRACEBACK = 1_000, 8_000
"""Characters that are kept: the first ones of a text, the last ones of a traceback."""

_interruptible = True


class Interruption(BaseException):
    """Raised by the framework into user code that is to end. Not an `Exception`, so that user code does not catch it by mistake."""


class RaisedByUserCode(Exception):
    """User code has raised what would not be taken for an error of it, such as a `CancelledError` or an exit.

    Args:
        text: class and text of that.
        raised: that; None where this error has travelled between processes.
    """

    def __init__(self, text: str, raised: BaseException | None = None) -> None:
        super().__init__(text)
        self.raised = raised

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args


class guarded:
    """Context in which user code is called; see the module.

    Raises:
        RaisedByUserCode: it raised something that is no `Exception`, or that futures take for something else.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        if e is None or isinstance(e, Interruption):
            return
        if isinstance(e, Exception) and not isinstance(e, (StopIteration, StopAsyncIteration, CancelledError)):
            return
        if isinstance(e, KeyboardInterrupt) and _interruptible and threading.current_thread() is threading.main_thread():
            return
        raise RaisedByUserCode(line_of(e), e) from e


def never_interrupted() -> None:
    """Says that this process is a function: nobody presses Ctrl-C there, so a `KeyboardInterrupt` is the user code's own."""
    global _interruptible
    _interruptible = False


def unpickled(data: memoryview | bytes, apart: Sequence[memoryview] = ()) -> Any:
    """The object of a pickle, whose classes are user code. The bytes must be verified: a pickle executes what it says.

    Args:
        data: the pickle.
        apart: pickles of its parts that were sent apart, by their numbers.
    """
    with guarded():
        return _Joining(data, apart).load() if apart else pickle.loads(data)


class _Joining(pickle.Unpickler):
    """Puts parts that were sent apart into their places. Places of one object in the arguments have one object again."""

    def __init__(self, data: memoryview | bytes, apart: Sequence[memoryview]) -> None:
        super().__init__(io.BytesIO(data))
        self._apart, self._made = apart, dict[tuple[int, int], Any]()

    def persistent_load(self, place: Any) -> Any:
        if place not in self._made:
            self._made[place] = pickle.loads(self._apart[place[0]])
        return self._made[place]


def raised_by(e: BaseException) -> BaseException:
    """What user code has raised, where an error stands for it."""
    return e.raised if isinstance(e, RaisedByUserCode) and e.raised is not None else e


def text_of(e: BaseException) -> str:
    """The text of an exception and its notes, on one line of printable characters. Never raises."""
    e = raised_by(e)
    try:
        parts = [str(e)[: 4 * _TEXT], *(str(note)[: 4 * _TEXT] for note in getattr(e, "__notes__", ()))]
    except Interruption:
        raise
    except BaseException as broken:  # noqa: BLE001 - the exception's own code
        parts = [f"(its text cannot be made: {_name_of(broken)})"]
    return _printable(" ".join(" ".join(part.split()) for part in parts).strip()[:_TEXT])


def line_of(e: BaseException) -> str:
    """`ValueError: text`. Of a group with one exception that one is told. Never raises."""
    e = raised_by(e)
    while isinstance(e, BaseExceptionGroup) and len(e.exceptions) == 1:
        e = e.exceptions[0]
    if isinstance(e, RaisedByUserCode):
        return text_of(e)
    text = text_of(e)
    return f"{_name_of(e)}: {text}" if text else _name_of(e)


def failure(e: BaseException) -> tuple[str, str]:
    """An exception as one line, and its traceback. Never raises."""
    e = raised_by(e)
    try:
        lines = traceback.format_exception(e)
    except Interruption:
        raise
    except BaseException:  # noqa: BLE001 - the exception's own code
        lines = [*traceback.format_tb(e.__traceback__), line_of(e)]
    shown = "".join(line if len(line) <= 2 * _TEXT else f"{line[: 2 * _TEXT]}…\n" for line in lines)  # a long text hides no place
    return line_of(e), _printable(shown[-_TRACEBACK:], also="\n\t")


def frames_of(error: BaseException, folder: Path) -> str:
    """The frames of a traceback that are in a folder of the user's code, or the innermost one, as Python shows them."""
    frames = traceback.extract_tb(raised_by(error).__traceback__)
    own = [f for f in frames if Path(f.filename).is_relative_to(folder)]
    return "".join(traceback.format_list(own or frames[-1:]))


def where_raised(error: BaseException, folders: Sequence[Path] = ()) -> str:
    """`ValueError: text (model.py, line 12)`: the innermost line in the user's folders, or the innermost at all. Never raises."""
    error = raised_by(error)
    if isinstance(error, SyntaxError) and error.filename:
        return f"SyntaxError: {error.msg} ({Path(error.filename).name}, line {error.lineno})"
    text = line_of(error)
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return text
    roots = [folder.resolve() for folder in folders]
    own = [f for f in frames if any(Path(f.filename).is_relative_to(root) for root in roots)]
    frame = (own or list(frames))[-1]
    return f"{text} ({Path(frame.filename).name}, line {frame.lineno})"


def _name_of(e: BaseException) -> str:
    name = type.__getattribute__(type(e), "__name__")
    return name if isinstance(name, str) else "exception"


def _printable(text: str, also: str = "") -> str:
    """The text with escapes for what terminals, files and JSON do not take: lone surrogates and control characters."""
    if not text.isprintable():
        text = "".join(c if (c >= " " and not "\ud800" <= c <= "\udfff") or c in also else ascii(c)[1:-1] for c in text)
    return text
