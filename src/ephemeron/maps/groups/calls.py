"""Functions of users, called with a group in a function of a platform. The first two are adapters (`executor.shipping.Adapted`)."""

from __future__ import annotations

import hashlib
import itertools
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ephemeron.data.catalog.files import FileRange
from ephemeron.data.catalog.loop import run
from ephemeron.data.catalog.open_files import open_files
from ephemeron.data.tables.arrow import pyarrow
from ephemeron.errors import DamagedObject, MissingExtra, UserError
from ephemeron.functions.tasks.item_calls import WithData
from ephemeron.maps.frames import Frame, key_of, to_columns, to_frame
from ephemeron.maps.groups.group_rows import read_group, stream_group
from ephemeron.user_code import line_of, unpickled

_PROTOCOL = 5


class GroupCall(NamedTuple):
    """How a function is called with groups: the same for all of them. It is sent as a plain tuple."""

    by: tuple[str, ...]
    columns: tuple[str, ...]
    """Of a group; by-columns are none of them."""
    nulls: tuple[str, ...]
    """Those that have a null in some group."""
    frame: Frame
    has_key: bool
    """Whether it has an argument `key`."""
    is_streamed: bool = False
    """Whether it is given the parts of a group one after the other."""


class GroupItem(NamedTuple):
    """A group. It is sent as a plain tuple."""

    key: str
    file: str
    """Path or URL."""
    first: int
    rows: int
    digest: bytes
    call: tuple[Any, ...]
    """A `GroupCall`."""
    model: bytes | str = b""
    """For a prediction: the model, pickled; or the path or URL of that."""
    model_digest: str = ""


def fit_group(function: Callable[..., Any], item: tuple[Any, ...], *, rng: Any = None) -> WithData:
    """Calls `fit(group)`.

    Returns:
        What is recorded of the model, and the model.

    Raises:
        UserError: it returned no model, or one that cannot be pickled.
        DamagedObject: the rows of the group are damaged.
    """
    group = GroupItem(*item)
    frame, named = _arguments(group, rng)
    made = function(frame, **named)
    model, metrics = made, {}
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Mapping):
        model, metrics = made[0], dict(made[1])
    if model is None:
        raise UserError("the function returned None, which is no model")
    data = pickled_model(model)
    return WithData({"rows": group.rows, "nbytes": len(data), "digest": digest_of_model(data), "metrics": metrics}, data)


def predict_group(function: Callable[..., Any], item: tuple[Any, ...], *, rng: Any = None) -> WithData:
    """Calls `predict(model, group)`.

    Returns:
        What is recorded of the predictions, and the predictions as a stream of Arrow.

    Raises:
        UserError: they are no columns with a value per row.
        DamagedObject: the rows or the model are damaged.
    """
    pa = pyarrow()
    group = GroupItem(*item)
    model = unpickled(_model_bytes(group))
    frame, named = _arguments(group, rng)
    call = GroupCall(*group.call)
    table = to_columns(function(model, frame, **named), group.rows, (*call.by, *call.columns))
    file = pa.BufferOutputStream()
    with pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return WithData({"rows": group.rows, "columns": table.column_names}, file.getvalue().to_pybytes())


def call_predict(model: Any, group: Any) -> Any:
    """Predictions where the user names no function: `model.predict(group)`; of a model that is a function, what it returns.

    A model of scikit-learn's interface that was fitted to columns with names is given these columns.
    """
    names = getattr(model, "feature_names_in_", None)
    if names is not None and not isinstance(group, dict):
        wanted, columns = [str(name) for name in names], getattr(group, "column_names", None) or list(group.columns)
        if set(wanted) <= set(columns):
            group = group.select(wanted) if hasattr(group, "select") else group[wanted]
    if hasattr(model, "predict"):
        return model.predict(group)
    if callable(model):
        return model(group)
    raise UserError(f"the model is a {type(model).__name__}, which has no predict: name a function with --predict MODULE:FUNCTION")


def _arguments(group: GroupItem, rng: Any) -> tuple[Any, dict[str, Any]]:
    """The group as the function wants it, and its arguments by name."""
    call = GroupCall(*group.call)
    where = group.file, group.first, group.rows
    about: dict[str, Any] = {"digest": group.digest, "columns": call.columns, "key": group.key}
    named: dict[str, Any] = {} if rng is None else {"rng": rng}
    if call.is_streamed:
        parts = stream_group(*where, **about)
        first = next(parts)
        if call.has_key:
            named["key"] = key_of(first, call.by)
        return _frames(itertools.chain([first], parts), call), named
    table = read_group(*where, **about)
    if call.has_key:
        named["key"] = key_of(table, call.by)
    return to_frame(table.select(call.columns), call.frame, call.nulls), named


def _frames(parts: Iterator[Any], call: GroupCall) -> Iterator[Any]:
    for part in parts:
        yield to_frame(part.select(call.columns), call.frame, call.nulls)


# -- models as bytes ----------------------------------------------------------------------------------------------


def pickled_model(model: Any) -> bytes:
    """A model as a pickle. Functions and classes that no module has, or that of a notebook has, are in it by value.

    Raises:
        UserError: it cannot be pickled.
        MissingExtra: it needs cloudpickle, which is not installed.
    """
    try:
        data = pickle.dumps(model, protocol=_PROTOCOL)
        if b"__main__" not in data:
            return data
    except Exception:  # noqa: BLE001 - of the model's classes; cloudpickle says what it is
        pass
    try:
        import cloudpickle
    except ModuleNotFoundError:
        raise MissingExtra("cloudpickle", "notebook") from None
    try:
        return bytes(cloudpickle.dumps(model, protocol=_PROTOCOL))
    except Exception as e:
        raise UserError(f"the model cannot be pickled: {line_of(e)}") from e


def digest_of_model(data: bytes) -> str:
    """Digest of a pickled model, hexadecimal."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def verified_model(data: bytes | None, digest: str, *, key: str, place: str) -> bytes:
    """A pickled model whose digest is right: only then it may be unpickled.

    Args:
        data: the bytes; None: they are gone.
        digest: as it was recorded.
        key: of its group.
        place: where the bytes are, for messages.

    Raises:
        DamagedObject: they are gone, or others.
    """
    if data is None or digest_of_model(data) != digest:
        what = "gone" if data is None else "damaged"
        raise DamagedObject(f"the model of group {key} is {what} ({place}): restore it, or delete the models to fit all anew", key=place)
    return data


def _model_bytes(group: GroupItem) -> bytes:
    if isinstance(group.model, bytes):
        return verified_model(group.model, group.model_digest, key=group.key, place="as it was sent")
    data = None
    root, _, name = group.model.rpartition("/")
    try:
        if "://" in group.model:
            (data,) = run(open_files(root).fetch([FileRange(name)]))
        else:
            data = Path(group.model).read_bytes()
    except FileNotFoundError:
        pass
    return verified_model(data, group.model_digest, key=group.key, place=group.model)
