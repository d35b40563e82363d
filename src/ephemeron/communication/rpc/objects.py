"""Objects as a pickle and the large memory it refers to (DPFlow section 4.3.1, PyPickleData and figure 4-5).

Pickle's protocol 5 leaves arrays out of the pickle, but copies `bytes` into it, which are most of the data of a
loader. So `bytes`, `bytearray` and `memoryview` of 4 KiB and more are left out as well, as persistent ids. One that
occurs twice is sent once. Unpickling runs code that the sender chooses: only for peers that proved the token.

Only `bytes` in lists, tuples and dicts are received as views: those within other objects belong to the
objects' state, and many insist on `bytes` there.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from ephemeron.communication.rpc.frame import OBJECT, Buffer, Frame, FrameLimits, FrameMark, FrameMessage, Kind, Receive, Tag, message

_LEAST_BYTES = 4 << 10
_MARKS: dict[type, FrameMark] = {bytes: FrameMark.BYTES, bytearray: FrameMark.BYTEARRAY, memoryview: FrameMark.VIEW}


def dumps(value: Any, *, max_buffers: int) -> tuple[list[Buffer], list[FrameMark]]:
    """The pickle and its out-of-band buffers, with their types.

    Args:
        value: anything that can be pickled. Out-of-band buffers are not copied: do not change them before they are sent.
        max_buffers: when so many are used, the rest goes into the pickle.
    """
    buffers: list[Buffer] = [b""]
    marks = [FrameMark.BYTES]

    def array(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _LEAST_BYTES or len(buffers) >= max_buffers:
            return True
        buffers.append(raw)
        marks.append(FrameMark.ARRAY)
        return False

    file = io.BytesIO()
    _Pickler(file, array, buffers, marks, max_buffers).dump(value)
    buffers[0] = file.getbuffer()
    plain = _plain_bytes(value) if FrameMark.BYTES in marks[1:] else set()
    for at in range(1, len(buffers)):
        if marks[at] is FrameMark.BYTES and id(buffers[at]) not in plain:
            marks[at] = FrameMark.STATE
    return buffers, marks


def loads(buffers: Sequence[Any], marks: Sequence[FrameMark], receive: Receive) -> Any:
    """The object again.

    Under `VIEWS`, what was `bytes` of 4 KiB and more in a list, tuple or dict, or a `memoryview`, is a read-only
    `memoryview`; under `COPIES` it is `bytes`. Arrays refer to the received memory, which under `COPIES` is their own.
    """
    outside: list[Any] = []
    for buffer, mark in zip(buffers, marks, strict=True):
        match mark:
            case FrameMark.BYTEARRAY:
                outside.append(bytearray(buffer))
            case FrameMark.ARRAY:
                outside.append(buffer)
            case FrameMark.STATE:
                outside.append(bytes(buffer))
            case _:
                outside.append(memoryview(buffer).toreadonly() if receive is Receive.VIEWS else bytes(buffer))
    arrays = [buffer for buffer, mark in zip(buffers, marks, strict=True) if mark is FrameMark.ARRAY]
    return _Unpickler(io.BytesIO(buffers[0]), arrays, outside).load()


def _plain_bytes(value: Any) -> set[int]:
    found, seen, left = set[int](), set[int](), [value]
    while left:
        inner = left.pop()
        if type(inner) is bytes:
            found.add(id(inner))
        elif type(inner) in (list, tuple, dict) and id(inner) not in seen:
            seen.add(id(inner))
            left.extend(inner.values() if type(inner) is dict else inner)
    return found


def object_message(kind: Kind, id: int, tag: Tag, value: Any, *, limits: FrameLimits) -> FrameMessage:
    """A frame ready to send that carries an object; see `frame.message`."""
    buffers, marks = dumps(value, max_buffers=limits.max_buffers)
    return message(kind, id, tag, buffers, marks=marks, flags=OBJECT, limits=limits)


def object_of(frame: Frame, receive: Receive) -> Any:
    """The object that a frame carries."""
    if not frame.flags & OBJECT:
        raise TypeError("the message carries buffers and no object")
    return loads(frame.buffers, frame.marks, receive)


class _Pickler(pickle.Pickler):
    def __init__(
        self,
        file: io.BytesIO,
        array: Callable[[pickle.PickleBuffer], bool],
        buffers: list[Buffer],
        marks: list[FrameMark],
        max_buffers: int,
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=array)
        self._buffers, self._marks, self._most = buffers, marks, max_buffers
        self._known: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        mark = _MARKS.get(type(obj))
        if mark is None or (memoryview(obj).nbytes < _LEAST_BYTES and mark is not FrameMark.VIEW):
            return None
        at = self._known.get(id(obj))
        if at is None:
            if len(self._buffers) >= self._most:
                return None
            at = self._known[id(obj)] = len(self._buffers)
            self._buffers.append(obj)
            self._marks.append(mark)
        return at


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, arrays: list[Any], outside: list[Any]) -> None:
        super().__init__(file, buffers=arrays)
        self._outside = outside

    def persistent_load(self, at: Any) -> Any:
        return self._outside[at]
