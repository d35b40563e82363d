"""A data set of the shape of Criteo's: a click, 13 numeric and 26 categorical columns, with absent values and a label that can be learnt.

    python examples/clicks/generate.py --rows 1000000 --out examples/clicks/data

The same seed gives the same files. Numbers are heavy-tailed counts. Categories are 8 hexadecimal digits; the columns have 3 to 100,000
of them, and few are frequent. A click is drawn with the probability of a logistic model over the logarithms of the numbers and a weight
of each category; about a third of the rows are clicks. `best_log_loss` is the log loss of that model itself: no other one does better.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import csv

NUMERIC = [f"I{n}" for n in range(1, 14)]
CATEGORICAL = [f"C{n}" for n in range(1, 27)]
ROWS_PER_FILE = 100_000


class Clicks:
    """The distribution from which rows are drawn.

    Args:
        seed: of the weights; rows are drawn with a seed for each file.
    """

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.seed = seed
        self.sizes = np.unique(np.geomspace(3, 100_000, len(CATEGORICAL)).astype(int))
        self.sizes = np.resize(rng.permutation(self.sizes), len(CATEGORICAL))
        self.texts = [pa.array([f"{value:08x}" for value in rng.integers(0, 2**32, size)], pa.string()) for size in self.sizes]
        self.category_weights = [rng.normal(0, 0.35, size) for size in self.sizes]
        self.number_weights = rng.normal(0, 0.25, len(NUMERIC))
        self.missing = rng.uniform(0, 0.25, len(NUMERIC) + len(CATEGORICAL))
        self.spread = rng.uniform(0.8, 2.0, len(NUMERIC))

    def rows(self, number: int, count: int) -> tuple[Any, float]:
        """A file's rows as a table, and the sum of the log losses of the true probabilities.

        Args:
            number: of the file.
            count: rows.
        """
        rng = np.random.default_rng((self.seed, number))
        columns: dict[str, Any] = {}
        score = np.full(count, -1.3)
        for n, name in enumerate(NUMERIC):
            logs = np.maximum(rng.normal(1.0, self.spread[n], count), 0)
            absent = rng.random(count) < self.missing[n]
            values = np.floor(np.expm1(logs)).astype(np.int64)
            score += np.where(absent, 0.0, self.number_weights[n] * (np.log1p(values) - 1.0))
            columns[name] = pa.array(values, mask=absent)
        for n, name in enumerate(CATEGORICAL):
            codes = self._codes(rng, int(self.sizes[n]), count)
            absent = rng.random(count) < self.missing[len(NUMERIC) + n]
            score += np.where(absent, 0.0, self.category_weights[n][codes])
            columns[name] = pa.DictionaryArray.from_arrays(pa.array(codes, mask=absent), self.texts[n]).cast(pa.string())
        probability = 1 / (1 + np.exp(-score))
        click = rng.random(count) < probability
        loss = -np.log(np.where(click, probability, 1 - probability)).sum()
        return pa.table({"click": pa.array(click.astype(np.int64)), **columns}), float(loss)

    def _codes(self, rng: np.random.Generator, size: int, count: int) -> NDArray[np.int64]:
        """Categories by a power law: the share of category k falls about as 1/k."""
        return np.minimum(np.floor(np.exp(rng.random(count) * np.log(size + 1))) - 1, size - 1).astype(np.int64)


def generate(out: Path, rows: int, seed: int) -> dict[str, Any]:
    """Writes CSV files; returns what was written.

    Args:
        out: folder.
        rows: of all files.
        seed: of everything.
    """
    out.mkdir(parents=True, exist_ok=True)
    clicks, loss, positive = Clicks(seed), 0.0, 0
    for number, begin in enumerate(range(0, rows, ROWS_PER_FILE)):
        table, part = clicks.rows(number, min(ROWS_PER_FILE, rows - begin))
        csv.write_csv(table, out / f"clicks-{number:03d}.csv", csv.WriteOptions(quoting_style="none"))
        loss, positive = loss + part, positive + int(table.column("click").to_numpy().sum())
    return {"rows": rows, "seed": seed, "clicks": positive / rows, "best_log_loss": loss / rows, "out": str(out)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data")
    given = parser.parse_args()
    print(json.dumps(generate(given.out, given.rows, given.seed)))


if __name__ == "__main__":
    main()
