"""A grid search over the digits and the importance of their pixels: on functions, and beside that with loky on processes of this machine.

    python examples/joblib/search.py                   # on a cloud: --platform aws --channel s3://bucket/prefix --n-jobs 10

Nothing of scikit-learn changes: `n_jobs=-1` means the processes or the functions of the context. Needs
`pip install 'ephemeron[joblib,digits,report]'`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import joblib
import numpy as np
from sklearn.datasets import load_digits
from sklearn.inspection import permutation_importance
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.svm import SVC

import ephemeron.joblib


@dataclass(frozen=True)
class Found:
    """What was found, and how long it took."""

    best: dict[str, float]
    accuracy: float
    """Of images that the search has not seen."""
    scores: np.ndarray
    """Mean accuracy in cross-validation: shape [values of C, values of gamma]."""
    importances: np.ndarray
    """Accuracy that is lost when a pixel is permuted: shape [8, 8]."""
    seconds: float


def find(samples: int, values: int, repeats: int) -> Found:
    """A search of `values`² candidates with three folds each, and permutations of each of the 64 pixels."""
    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(x[:samples], y[:samples], test_size=0.25, random_state=0)
    grid = {"C": np.geomspace(0.1, 100, values), "gamma": np.geomspace(1e-5, 1e-2, values)}
    began = time.perf_counter()
    search = GridSearchCV(SVC(), grid, cv=3, n_jobs=-1).fit(x_train, y_train)
    lost = permutation_importance(search.best_estimator_, x_test, y_test, n_repeats=repeats, random_state=0, n_jobs=-1)
    return Found(
        best={name: round(float(value), 6) for name, value in search.best_params_.items()},
        accuracy=float(search.score(x_test, y_test)),
        scores=search.cv_results_["mean_test_score"].reshape(values, values),
        importances=lost.importances_mean.reshape(8, 8),
        seconds=time.perf_counter() - began,
    )


def draw(found: Found, path: Path) -> None:
    """Scores of all candidates, and importances of pixels, as one picture."""
    from matplotlib.figure import Figure

    values = len(found.scores)
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    shown = left.imshow(found.scores, origin="lower", cmap="viridis")
    left.set(title="accuracy in cross-validation", xlabel="gamma", ylabel="C")
    left.set_xticks(range(values), [f"{gamma:.0e}" for gamma in np.geomspace(1e-5, 1e-2, values)])
    left.set_yticks(range(values), [f"{c:.3g}" for c in np.geomspace(0.1, 100, values)])
    figure.colorbar(shown, ax=left)
    shown = right.imshow(found.importances, cmap="magma")
    right.set(title="accuracy lost when a pixel is permuted")
    figure.colorbar(shown, ax=right)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n-jobs", type=int, default=2, help="functions, and processes of loky")
    parser.add_argument("--platform", default="local")
    parser.add_argument("--channel", help="store that functions of a cloud reach")
    parser.add_argument("--budget-usd", type=float)
    parser.add_argument("--samples", type=int, default=1797)
    parser.add_argument("--values", type=int, default=5, help="of C, and of gamma")
    parser.add_argument("--repeats", type=int, default=5, help="permutations of a pixel")
    parser.add_argument("--picture", type=Path, default=Path("search.png"))
    options = parser.parse_args()
    work = (options.samples, options.values, options.repeats)

    places = {"platform": options.platform, "channel": options.channel, "budget_usd": options.budget_usd}
    with ephemeron.joblib.functions(n_jobs=options.n_jobs, **places) as pool:
        found = find(*work)
    print(f"functions: {found.best}, accuracy {found.accuracy:.4f}, {found.seconds:.1f} s, {pool.bill()}")

    with joblib.parallel_config("loky", n_jobs=options.n_jobs):
        beside = find(*work)
    print(f"loky:      {beside.best}, accuracy {beside.accuracy:.4f}, {beside.seconds:.1f} s")
    same = np.array_equal(found.scores, beside.scores) and np.array_equal(found.importances, beside.importances)
    print("scores and importances are the same" if same else "scores or importances differ: other versions or processors?")
    draw(found, options.picture)
    print(f"wrote {options.picture}")


if __name__ == "__main__":
    main()
