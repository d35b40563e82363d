"""NumPy's .npz files: the way in for anything that was prepared elsewhere.

Arrays keep the dtype they have in the file (whole numbers may be tokens, float64 may be meant). Arrays of Python
objects are pickles and are refused.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import asdict, dataclass

import numpy as np

from ephemeron.data.formats.one_line import one_line
from ephemeron.data.samples import Array, Samples
from ephemeron.data.sources.options import need_path, read_options
from ephemeron.data.spec import DataSpec
from ephemeron.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class NpzOptions:
    """Names of arrays in the file."""

    inputs: str = "x"
    targets: str = "y"
    test_inputs: str | None = None
    test_targets: str | None = None


def read(spec: DataSpec) -> tuple[Samples, Samples | None]:
    """Training and, if the options name its arrays, test samples.

    Options: `inputs` (default "x"), `targets` ("y"), `test_inputs` and `test_targets`: names of arrays in the file.

    Raises:
        JobError: the file is no .npz, an array is absent or holds objects, or only one of the test arrays is named.
    """
    options = read_options(spec, NpzOptions)
    if (options.test_inputs is None) != (options.test_targets is None):
        absent = "test_inputs" if options.test_inputs is None else "test_targets"
        raise JobError(f"data.options.{absent} is missing", remedy="name both test_inputs and test_targets, or neither")
    names = {option: name for option, name in asdict(options).items() if name is not None}
    arrays = _arrays(spec, names)
    train = Samples(arrays["inputs"], arrays["targets"])
    return train, Samples(arrays["test_inputs"], arrays["test_targets"]) if "test_inputs" in arrays else None


def _arrays(spec: DataSpec, names: dict[str, str]) -> dict[str, Array]:
    path = need_path(spec, "an .npz file")
    try:
        content = np.load(path, allow_pickle=False)
        if not isinstance(content, np.lib.npyio.NpzFile):
            raise JobError(f"{path} holds a single array", remedy="save inputs and targets with numpy.savez")
        with content:
            for option, name in names.items():
                if name not in content.files:
                    raise JobError(
                        f"{path} has no array {name!r}, only {', '.join(sorted(content.files)) or 'none at all'}",
                        remedy=f"set data.options.{option}",
                    )
            return {option: content[name] for option, name in names.items()}
    except (OSError, ValueError, RuntimeError, EOFError, zipfile.BadZipFile, zlib.error) as e:
        raise JobError(f"{path} cannot be read: {one_line(e)}", remedy="give an .npz file of plain arrays") from None
