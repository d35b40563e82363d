"""scikit-learn's 1797 handwritten digits, read from the file in the installed package.

Importing scikit-learn takes a second of CPU time, most of it for SciPy and pandas, and would be most of what a client does before
it starts a run of these digits. The file is a table of 64 values and a label for each digit.
"""

from __future__ import annotations

import gzip
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from ephemeron.data.samples import Array, Samples
from ephemeron.data.sources.options import NoOptions, read_options
from ephemeron.data.spec import DataSpec
from ephemeron.errors import JobError, MissingExtra

_FILE = "datasets/data/digits.csv.gz"


def read(spec: DataSpec) -> tuple[Samples, None]:
    """Inputs float32 (1797, 1, 8, 8) in [0, 1], targets int64.

    Raises:
        JobError: the source has options or a path.
        MissingExtra: scikit-learn is not installed.
    """
    read_options(spec, NoOptions)
    if spec.path is not None:
        raise JobError(f"source 'digits' reads no file, but data.path = {str(spec.path)!r}", remedy="leave data.path out")
    images, labels = _table()
    inputs = (images.reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    return Samples(inputs, labels.astype(np.int64)), None


@cache
def _table() -> tuple[Array, Array]:
    """Values from 0 to 16, float64 (1797, 64), and labels, of 1 MB: a process that trains several jobs reads them once."""
    package = find_spec("sklearn")
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        path = Path(folder, _FILE)
        if path.is_file():
            with gzip.open(path, "rt") as file:
                table = np.loadtxt(file, delimiter=",")
            return table[:, :-1], table[:, -1]
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingExtra("scikit-learn", "digits") from None
    images, labels = load_digits(return_X_y=True)
    return np.asarray(images), np.asarray(labels)
