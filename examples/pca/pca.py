"""Ridge regression and principal components of a prepared dataset, by functions, without a table in any one memory.

    cd examples/pca && python pca.py --rows 20000 --folder /tmp/pca

A CSV file is generated, loaded and standardised by functions (`ephemeron.preparation`), and read tile by tile into a `BigMatrix`. Ridge
regression is a least-squares problem: X above √α I, the labels above zeros. Principal components are the right singular vectors of X.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import ephemeron.preparation as prep
from ephemeron import FunctionExecutor
from ephemeron.data.tables import TableDataset, dense_batch
from ephemeron.linalg import BigMatrix, lstsq, predict, svd

FACTORS, FEATURES = 5, 24


def generate(path: Path, rows: int, *, seed: int = 0) -> None:
    """A table of `FEATURES` columns that follow `FACTORS` hidden ones and noise, and a label that depends on all of them."""
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((rows, FACTORS)) * np.arange(FACTORS, 0, -1)
    x = hidden @ rng.standard_normal((FACTORS, FEATURES)) + 0.3 * rng.standard_normal((rows, FEATURES))
    y = x @ rng.standard_normal(FEATURES) + rng.standard_normal(rows) + 7
    with path.open("w") as out:
        out.write(",".join(f"x{n}" for n in range(FEATURES)) + ",y\n")
        np.savetxt(out, np.column_stack([x, y]), fmt="%.6g", delimiter=",")


class Rows:
    """Rows of a dataset, a partition of which is in memory at a time."""

    def __init__(self, dataset: TableDataset) -> None:
        self._dataset = dataset
        self._starts = np.cumsum([0, *(part.rows for part in dataset.partitions)])
        self._at, self._part = -1, (np.empty((0, 0)), np.empty(0))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        """Features and labels of some rows."""
        features, labels = [], []
        start = rows.start
        while start < rows.stop:
            part = int(np.searchsorted(self._starts, start, side="right")) - 1
            stop, first = min(rows.stop, int(self._starts[part + 1])), int(self._starts[part])
            if part != self._at:
                x, y = dense_batch(self._dataset.read(part))
                assert y is not None
                self._at, self._part = part, (x, y.astype(float))
            features.append(self._part[0][start - first : stop - first])
            labels.append(self._part[1][start - first : stop - first])
            start = stop
        return np.concatenate(features), np.concatenate(labels)


@dataclass(frozen=True)
class Found:
    """What was computed."""

    coefficients: np.ndarray
    """Of the standardised features: shape [features]."""
    intercept: float
    components: np.ndarray
    """Principal components, one a row: shape [features, features]."""
    variances: np.ndarray
    """Along them: shape [features]."""


def prepared(source: Path, folder: Path, pool: FunctionExecutor) -> TableDataset:
    """Standardised rows of a CSV file."""
    raw = prep.load_csv(str(source), out=str(folder / "raw"), label="y", label_kind="real", partition_mb=0.5, pool=pool)
    scaled = prep.Pipeline([prep.StandardScaler()]).fit(raw, pool=pool)
    return scaled.transform(raw, out=str(folder / "train"), partition_mb=0.5, pool=pool)


def fit(dataset: TableDataset, store: str, pool: FunctionExecutor, *, alpha: float, tile: int = 2048) -> Found:
    """Ridge regression and principal components.

    Args:
        dataset: of standardised features, whose means are 0.
        store: for tiles.
        pool: computes.
        alpha: weight of the squared norm of the coefficients.
        tile: rows of a tile.
    """
    data = Rows(dataset)
    n, p = len(data), len(data[0:1][0][0])
    mean = sum(float(data[slice(at, min(at + tile, n))][1].sum()) for at in range(0, n, tile)) / n

    def features(rows: slice, columns: slice) -> np.ndarray:
        below = np.sqrt(alpha) * np.eye(p)[max(rows.start - n, 0) : max(rows.stop - n, 0)]
        above = data[rows.start : min(rows.stop, n)][0] if rows.start < n else below[:0]
        return np.concatenate([above, below])[:, columns]

    def labels(rows: slice, columns: slice) -> np.ndarray:
        above = data[rows.start : min(rows.stop, n)][1] - mean if rows.start < n else np.empty(0)
        return np.concatenate([above, np.zeros(max(rows.stop - max(rows.start, n), 0))])[:, None]

    a = BigMatrix.from_function(features, (n + p, p), tile=(tile, p), store=store)
    b = BigMatrix.from_function(labels, (n + p, 1), tile=(tile, 1), store=store)
    x = BigMatrix.from_function(features, (n, p), tile=(tile, p), store=store)
    print("predicted:", predict(lstsq, a, b, executor=pool))
    w = lstsq(a, b, executor=pool)
    print("measured: ", w.report)
    u, s, vh = svd(x, executor=pool)
    print("measured: ", u.report)
    found = Found(w.to_numpy()[:, 0], mean, vh.to_numpy(), s**2 / (n - 1))
    for matrix in (a, b, x, w, u, vh):
        matrix.delete()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--folder", type=Path, default=Path("pca-data"))
    parser.add_argument("--alpha", type=float, default=1.0)
    parser.add_argument("--platform", default="local")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    source = options.folder / "table.csv"
    generate(source, options.rows)
    with FunctionExecutor(options.platform) as pool:
        dataset = prepared(source, options.folder, pool)
        found = fit(dataset, (options.folder / "tiles").resolve().as_uri(), pool, alpha=options.alpha)
    share = found.variances / found.variances.sum()
    print(f"intercept {found.intercept:.4f}, coefficients", np.round(found.coefficients[:6], 4), "…")
    print(f"{FACTORS} of {len(share)} components explain {share[:FACTORS].sum():.1%} of the variance")
    print(pool.bill())


if __name__ == "__main__":
    main()
