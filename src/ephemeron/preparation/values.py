"""Values from outside as columns hold them: a category as its canonical text, a number as float64.

Files with types, Arrow, pandas, NumPy and Python have other values for the same thing: 7, 7.0, `Decimal("7.00")` and a NumPy integer; `True`
and `numpy.True_`; None, NaN, `pandas.NA`. A category is hashed by its text, so one text must stand for all of them, in training and
at inference alike:

    text                  as it is
    truth values          true, false
    numbers               as short as they can be read back as the same float64, in full (no exponent), whole ones without a point
    None, NaN, NA, NaT    absent

So an integer column with absent values, which pandas makes a float column, has the categories that it had. Anything else is refused. A
number that float64 cannot hold is no number: one beyond its range, and an integer that it would round, since that is an identifier.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ephemeron.data.tables.arrow import pyarrow

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)
_NOT_ZERO = re.compile(r"[+-]?[0.]*[1-9]")
_EXACT = 1 << 53
"""Integers up to here are float64."""
_PLAIN = {float, int, bool, type(None)}


class InvalidValue(ValueError):
    """A value that no column takes; the message is the reason.

    Args:
        reason: what it is.
        row: of the value, from 0.
    """

    def __init__(self, reason: str, row: int = 0) -> None:
        super().__init__(reason)
        self.row = row


def category_text(value: Any) -> str | None:
    """The canonical text of a category; None: it is absent.

    Raises:
        InvalidValue: it is neither text, nor a number, nor a truth value.
    """
    if isinstance(value, str):
        text = str.__str__(value)
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            raise InvalidValue(f"{text!r} is no text: it has half a surrogate pair")
        return text
    if _absent(value):
        return None
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, int | np.integer):
        return _digits(int(value))
    if isinstance(value, Decimal):
        return _in_full(value)
    if isinstance(value, float | np.floating):
        number = float(value)
        return str(int(number)) if number.is_integer() else _in_full(Decimal(repr(number)))
    if (inner := _unwrapped(value)) is not value:
        return category_text(inner)
    raise InvalidValue(f"a value of type {type(value).__name__} is neither text, nor a number, nor a truth value")


def number(value: Any) -> float:
    """The float64 of a number; NaN: it is absent.

    Raises:
        InvalidValue: it is no number, or float64 does not hold it.
    """
    if isinstance(value, str):
        text = value.strip()
        if not NUMBER.fullmatch(text):
            raise InvalidValue(f"{str(value)!r} is not a number")
        if _WHOLE.fullmatch(text) and len(text) < 400:
            return number(int(text))
        found = float(text)
        if (found == 0 and _NOT_ZERO.match(text)) or np.isinf(found):
            raise InvalidValue(f"{value!r} is beyond float64")
        return found
    if _absent(value):
        return float("nan")
    if isinstance(value, bool | np.bool_ | int | np.integer):
        whole = int(value)
        try:
            found = float(whole)
        except OverflowError:
            raise InvalidValue(f"an integer of {whole.bit_length()} bits is beyond float64") from None
        if int(found) != whole:
            raise InvalidValue(f"{whole} is an integer beyond 2**53, which float64 would round to {int(found)}")
        return found
    if isinstance(value, Decimal | float | np.floating):
        found = float(value)
        if np.isfinite(value) if isinstance(value, np.floating) else Decimal(value).is_finite():
            if not np.isfinite(found) or (found == 0 and value != 0):
                raise InvalidValue(f"{value} is beyond float64")
            if isinstance(value, Decimal) and abs(found) >= _EXACT and value == value.to_integral_value() != Decimal(found):
                raise InvalidValue(f"{value:f} is an integer beyond 2**53, which float64 would round to {int(found)}")
        return found
    if (inner := _unwrapped(value)) is not value:
        return number(inner)
    raise InvalidValue(f"a value of type {type(value).__name__} is not a number")


def coded_texts(values: Any) -> tuple[NDArray[np.int64], list[str]]:
    """A column's values as categories.

    Args:
        values: a sequence, an array of NumPy, pandas or Arrow, or one value.

    Returns:
        Per row, which text it has, -1 where it is absent; and the distinct canonical texts.

    Raises:
        InvalidValue: see `category_text`.
    """
    codes, distinct = _distinct(values)
    if is_arrow(values) and len(getattr(values, "chunks", [values])) == 1 and _is_plain_text(values.type):
        return codes, list(distinct)  # distinct and valid texts: a sixth of the time
    texts: list[str | None] = []
    for n, value in enumerate(distinct):
        try:
            texts.append(category_text(value))
        except InvalidValue as e:
            raise InvalidValue(str(e), int(np.argmax(codes == n))) from None
    places = {text: n for n, text in enumerate(dict.fromkeys(text for text in texts if text is not None))}
    code_of = np.array([*(-1 if text is None else places[text] for text in texts), -1], np.int64)
    return code_of[codes], list(places)


def floats(values: Any) -> tuple[NDArray[np.float64], dict[int, str]]:
    """A column's values as float64, NaN where they are absent.

    Args:
        values: as for `coded_texts`.

    Returns:
        The numbers; and the rows whose value is none, with the reasons.
    """
    values = _array(values)
    if is_arrow(values):
        return _arrow_floats(values)
    if isinstance(values, np.ndarray) and values.dtype.kind in "biuf" and values.dtype.itemsize <= 8 and values.ndim == 1:
        return values.astype(np.float64), _rounded(values) if values.dtype.kind in "iu" else {}
    return _one_by_one(_listed(values))


def arrow_kind(kind: Any) -> Literal["numeric", "categorical"] | None:
    """Kind of the columns of an Arrow type: numbers and truth values, or text; None: neither."""
    types = pyarrow().types
    if types.is_dictionary(kind):
        return arrow_kind(kind.value_type)
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) or types.is_boolean(kind):
        return "numeric"
    text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    return "categorical" if text else None


def is_arrow(values: Any) -> bool:
    """Whether they are an array of Arrow."""
    return type(values).__module__.startswith("pyarrow") and hasattr(values, "type") and hasattr(values, "to_pylist")


def has_text(values: Any) -> bool:
    """Whether a column has categories rather than numbers."""
    values = _array(values)
    if is_arrow(values):
        return arrow_kind(values.type) != "numeric"
    if isinstance(values, np.ndarray) and values.dtype.kind in "biuf":
        return False
    return any(isinstance(value, str) for value in _listed(values))


def _is_plain_text(kind: Any) -> bool:
    types = pyarrow().types
    return bool(types.is_string(kind) or types.is_large_string(kind))


def _absent(value: Any) -> bool:
    if value is None or (isinstance(value, Decimal) and value.is_nan()):
        return True
    if isinstance(value, float | np.floating):
        return bool(value != value)
    return type(value).__name__ in ("NAType", "NaTType") and type(value).__module__.startswith("pandas")


def _unwrapped(value: Any) -> Any:
    """The Python value in a scalar of Arrow, or an array or tensor without dimensions; else the value itself."""
    if hasattr(value, "as_py"):
        return value.as_py()
    if getattr(value, "ndim", None) == 0 and not isinstance(value, np.generic):
        return value.item()
    return value


def _digits(whole: int) -> str:
    try:
        return str(whole)
    except ValueError:
        raise InvalidValue(f"an integer of {whole.bit_length()} bits is no category") from None


def _in_full(value: Decimal) -> str:
    """Digits without an exponent or zeros at the end."""
    if not value.is_finite():
        return repr(float(value))
    if value.adjusted() > 400 or value.adjusted() < -400:
        raise InvalidValue(f"{value} is beyond float64")
    text = format(value, "f")
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def _array(values: Any) -> Any:
    """Columns of pandas as the array of NumPy or Arrow that they are, where they are one; else the values."""
    if not hasattr(values, "factorize"):
        return values
    held = getattr(values, "array", values)
    if hasattr(held.dtype, "pyarrow_dtype"):
        return held.__arrow_array__()
    return np.asarray(values) if isinstance(held.dtype, np.dtype) else values


def _listed(values: Any) -> Sequence[Any]:
    if isinstance(values, str | bytes) or not hasattr(values, "__iter__") or getattr(values, "ndim", 1) == 0:
        return [values]
    return list(values)


def _distinct(values: Any) -> tuple[NDArray[np.int64], Sequence[Any]]:
    """Which of the values each row has, -1 where none; and the values, most of them distinct."""
    values = _array(values)
    if is_arrow(values):
        return _arrow_distinct(values)
    if isinstance(values, np.ndarray) and values.dtype.kind in "biufU" and values.ndim == 1:
        found, codes = np.unique(values, return_inverse=True)
        return codes.ravel().astype(np.int64), found.tolist()
    if hasattr(values, "factorize") and not isinstance(getattr(values, "dtype", None), np.dtype):
        codes, found = values.factorize()
        return codes.astype(np.int64), list(found)
    listed = _listed(values)  # of any types: 1 and True would be one in a set
    return np.arange(len(listed)), listed


def _arrow_distinct(values: Any) -> tuple[NDArray[np.int64], list[Any]]:
    pa = pyarrow()
    codes, found = [np.empty(0, np.int64)], list[Any]()
    for chunk in getattr(values, "chunks", [values]):
        try:
            encoded = chunk if isinstance(chunk, pa.DictionaryArray) else chunk.dictionary_encode()
        except pa.ArrowNotImplementedError:
            each, texts = np.arange(len(chunk)), chunk.to_pylist()
        else:
            each = encoded.indices.cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
            texts = encoded.dictionary.to_pylist()
        codes.append(np.where(each < 0, -1, each + len(found)))
        found += texts
    return np.concatenate(codes), found


def _arrow_floats(values: Any) -> tuple[NDArray[np.float64], dict[int, str]]:
    pa, wrong = pyarrow(), dict[int, str]()
    made = [np.empty(0)]
    for chunk in getattr(values, "chunks", [values]):
        begin = sum(map(len, made))
        if isinstance(chunk, pa.DictionaryArray):
            codes, distinct = _arrow_distinct(chunk)
            of_distinct, reasons = _one_by_one(distinct)
            found = np.append(of_distinct, np.nan)[codes]
            rows = {row: reasons[code] for row, code in enumerate(codes.tolist()) if code in reasons} if reasons else {}
        elif arrow_kind(chunk.type) == "numeric":
            found = chunk.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
            rows = {}
            if pa.types.is_integer(chunk.type):
                rows = _rounded(chunk.fill_null(0).to_numpy(zero_copy_only=False))
            elif pa.types.is_decimal(chunk.type) and len(large := np.flatnonzero(np.abs(found) >= _EXACT)):
                reasons = _one_by_one(chunk.take(pa.array(large)).to_pylist())[1]
                rows = {int(large[n]): reason for n, reason in reasons.items()}
        else:
            found, rows = _one_by_one(chunk.to_pylist())
        made.append(found)
        wrong.update({begin + row: reason for row, reason in rows.items()})
    return np.concatenate(made), wrong


def _rounded(whole: NDArray[Any]) -> dict[int, str]:
    """Rows of integers that float64 does not hold, with the reasons."""
    large = np.flatnonzero((whole > _EXACT) | (whole < -_EXACT))
    return {int(large[n]): reason for n, reason in _one_by_one(whole[large].tolist())[1].items()}


def _one_by_one(values: Sequence[Any]) -> tuple[NDArray[np.float64], dict[int, str]]:
    if set(map(type, values)) <= _PLAIN:  # thirty times as quick
        with contextlib.suppress(OverflowError):
            plain = np.array(values, np.float64)
            if not (np.abs(plain) >= _EXACT).any():
                return plain, {}
    found, wrong = np.full(len(values), np.nan), dict[int, str]()
    for row, value in enumerate(values):
        try:
            found[row] = number(value)
        except InvalidValue as e:
            wrong[row] = str(e)
    return found, wrong
