"""Unpacking of files whose parts are samples: gzip, deflate, CIFAR's pickles, Parquet row groups.

Unpacking a file for each of its samples would cost the whole file each time, so the reader keeps unpacked files.

Decoders: functions from a data part and its options in the metadata to a value.

Metadata names decoders and never code: others are passed to the reader. No decoder here unpickles. The value that a decoder
returns owns its memory, so that keeping one sample does not keep the response that it arrived in.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ephemeron.data.catalog.files import FileReader, Files
from ephemeron.data.catalog.meta import DataRef
from ephemeron.data.formats.records import cells_of
from ephemeron.data.samples import Array
from ephemeron.errors import MissingExtra


class Table:
    """Some rows of a Parquet file."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self.nbytes = int(table.nbytes)

    def pick(self, row: int, column: str | None) -> Any:
        """A row as a table of plain values, or the value of one of its columns.

        Raises:
            ValueError: the row or the column does not exist.
        """
        if not 0 <= row < self._table.num_rows:
            raise ValueError(f"row {row} of a row group with {self._table.num_rows}")
        value: Any = self._table.slice(row, 1).to_pylist()[0]
        for name in column.split(".") if column else ():
            if not isinstance(value, dict) or name not in value:
                raise ValueError(f"row {row} has no column {column!r}")
            value = value[name]
        return value


def unpack_bytes(how: str, data: bytes) -> bytes:
    """The unpacked bytes.

    Raises:
        ValueError: they are damaged or cut short.
    """
    try:
        if how == "gzip":
            return gzip.decompress(data)
        if how == "deflate":
            stream = zlib.decompressobj(-zlib.MAX_WBITS)
            out = stream.decompress(data)
            if not stream.eof:
                raise EOFError("the deflated data ends early")
            return out
        if how == "cifar-python":
            from ephemeron.data.formats.cifar import pickled_pixels
            from ephemeron.errors import PickleRefused

            try:
                return pickled_pixels(data).tobytes()
            except PickleRefused as e:
                raise ValueError(str(e)) from None
    except (OSError, EOFError, zlib.error) as e:
        raise ValueError(str(e)) from None
    raise ValueError(f"{how!r} is not a packing of bytes")


def parquet_file(files: Files, path: str, nbytes: int) -> Any:
    """An open `pyarrow.parquet.ParquetFile`.

    Raises:
        MissingExtra: pyarrow is not installed.
        ValueError: it is not a Parquet file.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise MissingExtra("pyarrow", "data") from None
    try:
        return pq.ParquetFile(pa.PythonFile(FileReader(files, path, length=nbytes), mode="r"), pre_buffer=True)
    except (pa.ArrowException, OSError) as e:
        raise ValueError(str(e)) from None


def row_group(files: Files, ref: DataRef, path: str, nbytes: int) -> Table:
    """The row group that a reference names; only its column, if it names one.

    Raises:
        MissingExtra: pyarrow is not installed.
        ValueError: the file is damaged, or has no such group or column.
    """
    opened = parquet_file(files, path, nbytes)
    import pyarrow as pa

    group = (ref.row or (0, 0))[0]
    if group >= opened.num_row_groups:
        raise ValueError(f"row group {group} of a file with {opened.num_row_groups}")
    try:
        return Table(opened.read_row_group(group, columns=[ref.column] if ref.column else None))
    except (pa.ArrowException, OSError) as e:
        raise ValueError(str(e)) from None


# -- decoders -----------------------------------------------------------------------------------------------------


Decoder = Callable[[Any, Mapping[str, Any]], Any]
"""`(part, options) -> value`. The part is bytes; of a Parquet row it is the value of the column or row."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Audio:
    """A recording."""

    samples: Array
    """float32 in [-1, 1], shape (frames,), or (frames, channels) where there are several."""
    rate_hz: int


def _bytes(part: Any, options: Mapping[str, Any]) -> bytes:
    return bytes(part)


def _text(part: Any, options: Mapping[str, Any]) -> str:
    return bytes(part).decode(options.get("encoding", "utf-8"))


def _json(part: Any, options: Mapping[str, Any]) -> Any:
    return json.loads(bytes(part))


def _image(part: Any, options: Mapping[str, Any]) -> Array:
    """uint8 (H, W, C), or (H, W) in mode "L". `mode` (default "RGB") is one of Pillow's.

    Grey images of more than 8 bits keep their values, in "L" and "RGB": uint16, int32 or float32; 8 bits would cut them off at 255. Of
    colours Pillow reads the 8 leading bits.
    """
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtra("Pillow", "data") from None
    with Image.open(io.BytesIO(part)) as image:
        mode = options.get("mode", "RGB")
        if image.mode.startswith("I") or image.mode == "F":
            if mode not in ("L", "RGB"):
                raise ValueError(f"the image has values of mode {image.mode}, which {mode} cuts off; use L or RGB")
            grey = np.array(image)
            if image.mode == "I" and image.format in ("PNG", "PPM"):  # formats of at most 16 bits
                grey = grey.astype(np.uint16)
            grey = grey.astype(grey.dtype.newbyteorder("="))
            return grey if mode == "L" else np.repeat(grey[..., None], 3, axis=2)
        return np.array(image.convert(mode))


def _audio(part: Any, options: Mapping[str, Any]) -> Audio:
    """WAV, FLAC, Ogg and all other formats that libsndfile reads."""
    try:
        import soundfile
    except ImportError:
        raise MissingExtra("soundfile", "audio") from None
    samples, rate = soundfile.read(io.BytesIO(part), dtype="float32")
    return Audio(samples=samples, rate_hz=int(rate))


def _array(part: Any, options: Mapping[str, Any]) -> Array:
    """Raw numbers in C order: `dtype` as NumPy writes it, e.g. "|u1" or "<f4", and `shape`. In native byte order."""
    dtype = np.dtype(options["dtype"])
    return np.frombuffer(part, dtype=dtype).reshape(options["shape"]).astype(dtype.newbyteorder("="))


def _npy(part: Any, options: Mapping[str, Any]) -> Array:
    """A whole .npy file."""
    return np.asarray(np.load(io.BytesIO(part), allow_pickle=False))


def _csv(part: Any, options: Mapping[str, Any]) -> dict[str, object]:
    """One record of a table: `columns`, their `types` ("int", "float", "text"), and the `delimiter`."""
    cells = cells_of(bytes(part), options.get("delimiter", ","))
    return {name: CELL_TYPES[kind](cell) for name, kind, cell in zip(options["columns"], options["types"], cells, strict=True) if kind}


def _row(part: Any, options: Mapping[str, Any]) -> Any:
    """The values of a Parquet row: its `columns`, or all."""
    columns = options.get("columns")
    return part if columns is None else {name: part[name] for name in columns}


CELL_TYPES: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "text": str}

DECODERS: Mapping[str, Decoder] = {
    "bytes": _bytes,
    "text": _text,
    "json": _json,
    "image": _image,
    "audio": _audio,
    "array": _array,
    "npy": _npy,
    "csv": _csv,
    "row": _row,
}
"""Decoders by the names that metadata gives them."""
