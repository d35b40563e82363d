"""Thousands of forecasts, one for each product of each store, on functions.

python run.py                                       # 10,000 groups on this machine
python run.py --groups 500 --platform simulated     # in virtual time
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import ephemeron
from ephemeron.maps import GroupModels

STORES = 100
LONGEST = 400
"""Days."""
AHEAD = 14


def sales(groups: int) -> Iterator[dict[str, np.ndarray]]:
    """Sales by store, product and day; some products are new, and a few were sold for some days only."""
    rng = np.random.default_rng(0)
    for n in range(groups):
        days = int(LONGEST * rng.beta(1.5, 1)) + 5
        day = np.arange(LONGEST - days, LONGEST)
        level = 20 * rng.lognormal(sigma=1.0)
        expected = level * (1 + rng.uniform(-0.3, 0.5) * day / 365) * (1 + 0.4 * np.sin(2 * np.pi * (day / 7 + rng.uniform())))
        sold = rng.poisson(np.maximum(expected, 0.1)).astype(float)
        yield {"store": np.full(days, f"store {n % STORES:03d}"), "sku": np.full(days, n // STORES), "day": day, "sold": sold}


def write(folder: Path, groups: int) -> None:
    """Writes what was sold, and the days to predict, in the order of days."""
    import pyarrow as pa
    from pyarrow import parquet

    every = list(sales(groups))
    table = pa.table({name: np.concatenate([one[name] for one in every]) for name in every[0]})
    parquet.write_table(table.sort_by("day"), folder / "sales.parquet")
    ahead = np.tile(np.arange(LONGEST, LONGEST + AHEAD), groups)
    numbers = np.repeat(np.arange(groups), AHEAD)
    keys = {"store": [f"store {n % STORES:03d}" for n in numbers], "sku": numbers // STORES}
    parquet.write_table(pa.table({**keys, "day": ahead}), folder / "ahead.parquet")


def draw(models: GroupModels, path: Path) -> None:
    """Draws the errors of all groups, each beside that of repeating last week."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    metrics = [row["metrics"] for row in models.rows() if not row["error"]]
    mean, error, other = (np.array([m[name] for m in metrics]) for name in ("mean", "error", "error_of_last_week"))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    largest = np.quantile(other / mean, 0.99)
    left.hist(
        [error / mean, other / mean],
        bins=np.linspace(0, largest, 40),
        label=["forecast", "last week repeated"],
        histtype="step",
        fill=False,
    )
    left.set(xlabel="mean absolute error / mean sales", ylabel="groups", title=f"{len(metrics):,} models")
    left.legend()
    right.loglog(mean, error, ".", markersize=2, alpha=0.5, label="forecast")
    at = np.geomspace(mean.min(), mean.max(), 50)
    right.loglog(at, 0.8 * np.sqrt(at), color="black", linewidth=1, label="0.8 √sales: noise of a Poisson process")
    right.set(xlabel="mean sales of a day", ylabel="mean absolute error")
    right.legend()
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> None:
    """Makes the sales, fits the forecasts, predicts two weeks, and draws the errors."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", type=int, default=10_000)
    parser.add_argument("--platform", default="local")
    parser.add_argument("--folder", type=Path, default=Path("out"))
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    write(given.folder, given.groups)
    options = {"platform": given.platform, "retries": 0, "on_note": print}
    fitted = ephemeron.fit_groups(
        "forecast:fit", given.folder / "sales.parquet", by=["store", "sku"], out=given.folder / "models", **options
    )
    print(f"{fitted.computed:,} groups were fitted, {fitted.recorded:,} before; {fitted.failed:,} have no model; {fitted.bill}")
    if fitted.stopped:
        raise SystemExit(f"{fitted.stopped}: run it again, and it goes on")
    ephemeron.predict_groups(given.folder / "models", given.folder / "ahead.parquet", out=given.folder / "predicted.parquet", **options)
    models = GroupModels.open(given.folder / "models")
    rows = [row["metrics"] for row in models.rows() if not row["error"]]
    better = sum(m["error"] < m["error_of_last_week"] for m in rows)
    print(f"the forecast is better than last week's sales in {better:,} of {len(rows):,} groups")
    draw(models, given.folder / "errors.png")
    print(f"predictions: {given.folder / 'predicted.parquet'}; picture: {given.folder / 'errors.png'}")


if __name__ == "__main__":
    main()
