"""A parameter sweep: ridge regression on a table, one setting per task.

python sweep.py                                                            # with a table of results
ephemeron map sweep:score --items grid.jsonl --out scores.jsonl            # the same from files
"""

from __future__ import annotations

import itertools
import sys

import numpy as np

FOLDS = 5


def samples(n: int = 400, noise: float = 0.3) -> tuple[np.ndarray, np.ndarray]:
    """Points of a curve that a polynomial of moderate degree fits best."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, n)
    return x, np.sin(4 * x) + 0.5 * x**2 + noise * rng.standard_normal(n)


def score(setting: dict[str, float]) -> dict[str, float]:
    """Mean squared error of a polynomial in cross-validation.

    Args:
        setting: `degree` of the polynomial, and `ridge`, the weight of the penalty.
    """
    x, y = samples()
    features = np.polynomial.legendre.legvander(x, int(setting["degree"]))
    fold = np.arange(len(x)) % FOLDS
    errors = []
    for held_out in range(FOLDS):
        train, test = fold != held_out, fold == held_out
        a = features[train].T @ features[train] + setting["ridge"] * np.eye(features.shape[1])
        weights = np.linalg.solve(a, features[train].T @ y[train])
        errors.append(np.mean((features[test] @ weights - y[test]) ** 2))
    return {**setting, "error": round(float(np.mean(errors)), 6)}


def main(platform: str = "local") -> None:
    import ephemeron

    grid = [{"degree": d, "ridge": r} for d, r in itertools.product(range(1, 13), (0.0, 0.01, 0.1, 1.0, 10.0))]
    with ephemeron.FunctionExecutor(platform=platform) as pool:
        scores = sorted(pool.map(score, grid), key=lambda s: s["error"])
        bill = pool.bill()
    for found in scores[:5]:
        print(f"degree {found['degree']:2}  ridge {found['ridge']:5}  error {found['error']:.4f}")
    print(bill)


if __name__ == "__main__":
    main(*sys.argv[1:])
