"""joblib on functions of this machine, beside loky and Ray's back end of joblib: first result, short and longer calls, a search.

    python -m benchmarks.joblib_backend [--json] [--turns 3] [--workers 2] [--sides ephemeron,loky,ray]

Each side of a turn is a process of its own, in rotating order. In it, one after the other, in seconds:

    first          from the context's begin to the results of two calls: starts of functions, processes or Ray
    short          2,000 calls that sleep 1 ms: what is left of joblib's and the back end's own time
    long           200 calls that sleep 100 ms
    first search   a grid search over the digits of scikit-learn (SVC, three folds); workers import scikit-learn
    search         the same once more

The bound of `short` and `long` is their sleep over the workers. Functions have a quota of one vCPU each, the workers of others none.
Ratios to loky are within turns. All sides must find the same scores.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import click

from benchmarks.common import ROOT, condensed, environment, write

SIDES = ("ephemeron", "loky", "ray")
MEASURES = ("first", "short", "long", "first search", "search")


@contextlib.contextmanager
def _context(side: str, workers: int) -> Iterator[None]:
    import joblib

    if side == "ephemeron":
        import ephemeron.joblib

        with ephemeron.joblib.functions(n_jobs=workers, platform="local", progress=False):
            yield
        return
    if side == "ray":
        import ray
        from ray.util.joblib import register_ray

        ray.init("local", num_cpus=workers, include_dashboard=False, log_to_driver=False, configure_logging=False)
        register_ray()
    with joblib.parallel_config(side, n_jobs=workers):
        yield
    if side == "ray":
        ray.shutdown()


def measured(side: str, *, workers: int, short: int, long: int, values: int) -> dict[str, Any]:
    """Seconds of one side, by measure, and the scores of its search. Of this process, which has measured nothing before."""
    import numpy as np
    from joblib import Parallel, delayed
    from sklearn.datasets import load_digits
    from sklearn.model_selection import GridSearchCV
    from sklearn.svm import SVC

    x, y = load_digits(return_X_y=True)
    grid = {"C": np.geomspace(0.1, 100, values), "gamma": np.geomspace(1e-5, 1e-2, values)}
    search = GridSearchCV(SVC(), grid, cv=3, n_jobs=workers)
    seconds: dict[str, float] = {}
    last = time.perf_counter()

    def lap(measure: str) -> None:
        nonlocal last
        now = time.perf_counter()
        seconds[measure], last = now - last, now

    with _context(side, workers):
        Parallel(n_jobs=workers)(delayed(abs)(n) for n in range(workers))
        lap("first")
        Parallel(n_jobs=workers)(delayed(time.sleep)(0.001) for _ in range(short))
        lap("short")
        Parallel(n_jobs=workers)(delayed(time.sleep)(0.1) for _ in range(long))
        lap("long")
        search.fit(x, y)
        lap("first search")
        search.fit(x, y)
        lap("search")
    return {"seconds": seconds, "scores": search.cv_results_["mean_test_score"].tolist()}


def _apart(side: str, options: dict[str, int]) -> dict[str, Any]:
    """The same in a process of its own."""
    program = f"import json\nfrom benchmarks.joblib_backend import measured\nprint(json.dumps(measured({side!r}, **{options!r})))"
    with tempfile.TemporaryDirectory(prefix="ephemeron-benchmark-") as home:
        variables = {**os.environ, "EPHEMERON_HOME": home, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
        ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise click.ClickException(f"{side}: {ran.stderr.strip() or ran.returncode}")
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def compare(sides: Sequence[str], turns: int, options: dict[str, int]) -> dict[str, Any]:
    """Seconds of all sides, in turns, and their ratios to loky within turns."""
    seconds: dict[str, dict[str, list[float]]] = {side: {measure: [] for measure in MEASURES} for side in sides}
    scores: list[float] | None = None
    for turn in range(turns):
        for side in [*sides[turn % len(sides) :], *sides[: turn % len(sides)]]:
            found = _apart(side, options)
            for measure, value in found["seconds"].items():
                seconds[side][measure].append(value)
            click.echo(f"{side}: " + ", ".join(f"{m} {v:.2f}" for m, v in found["seconds"].items()), err=True)
            if scores is not None and found["scores"] != scores:
                raise click.ClickException(f"{side} has found other scores")
            scores = found["scores"]
    result: dict[str, Any] = {"options": options, "sides": {s: {m: condensed(v) for m, v in of.items()} for s, of in seconds.items()}}
    if "loky" in sides:
        result["ratio_to_loky"] = {
            side: {m: round(median(a / b for a, b in zip(of[m], seconds["loky"][m], strict=True)), 3) for m in MEASURES}
            for side, of in seconds.items()
            if side != "loky"
        }
    return result


@click.command(help=__doc__)
@click.option("--turns", default=3, show_default=True)
@click.option("--workers", default=2, show_default=True)
@click.option("--short", default=2000, show_default=True, help="Calls of 1 ms.")
@click.option("--long", default=200, show_default=True, help="Calls of 100 ms.")
@click.option("--values", default=4, show_default=True, help="Of each of the two parameters of the search.")
@click.option("--sides", default=",".join(SIDES), show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def main(turns: int, workers: int, short: int, long: int, values: int, sides: str, as_json: bool) -> None:
    """The command."""
    import importlib.util

    chosen = [side for side in sides.split(",") if side != "ray" or importlib.util.find_spec("ray")]
    if unknown := set(chosen) - set(SIDES):
        raise click.UsageError(f"no side {', '.join(sorted(unknown))}; there are {', '.join(SIDES)}")
    result = environment()
    result |= compare(chosen, turns, {"workers": workers, "short": short, "long": long, "values": values})
    result["machine"]["load_after"] = [round(load, 2) for load in os.getloadavg()]
    if as_json:
        write(result)
        return
    for side, of in result["sides"].items():
        click.echo(f"{side:10} " + "  ".join(f"{measure} {seconds['median']:.2f} s" for measure, seconds in of.items()))


if __name__ == "__main__":
    main()
