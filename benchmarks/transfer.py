"""Errors of each transfer form on held-out sizes.

    python -m benchmarks.transfer --table FILE --json

FILE has the columns memory_mb, size_mb, upload_s and download_s, one row per quota and size. Every second size is held
out of the fit; errors are mean absolute relative errors over all quotas on the held-out sizes. `chosen` is the method of
`ephemeron profile`: the form is chosen by cross-validation within the sizes of the fit.

The shipped profile is fitted to all rows (`--coefficients` prints it), and its errors are those of `all_rows`. `beyond`
compares two predictions for objects larger than the measured ones: by the form itself, and at the bandwidth of the largest.

`--kept-out` names a table of the same columns with rows that no fit has seen; `kept_out` has the shipped profile's errors on them, by size.

For every large size, some rows repeat a value of their own quota, or of another quota, to the last digit. They are no
measurements. `measured_rows_only` leaves them out, on both sides.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import environment, write
from ephemeron.training.planner.model.builtin import builtin_platform
from ephemeron.training.planner.model.fit import FORMS, TimingSample, fit_form, fit_transfers, rate_error

LEAST_REPEATED = 4
"""Number of successive sizes that take the same time to the last digit."""


def read(path: Path) -> list[TimingSample]:
    """Both directions of every row."""
    timings = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            memory, size = float(row["memory_mb"]), float(row["size_mb"])
            timings += [
                TimingSample("up", memory, size, float(row["upload_s"])),
                TimingSample("down", memory, size, float(row["download_s"])),
            ]
    return timings


def filled_in(timings: Sequence[TimingSample]) -> set[TimingSample]:
    """Rows at the upper end of a quota that repeat their first value, or are the same at another quota."""
    out: set[TimingSample] = set()
    for direction in ("up", "down"):
        quotas = sorted({t.memory_mb for t in timings})
        rows = {q: sorted((t for t in timings if t.memory_mb == q and t.direction == direction), key=lambda t: t.size_mb) for q in quotas}
        for q in quotas:
            tail = {(t.size_mb, t.seconds): t for t in rows[q][-LEAST_REPEATED:]}
            if len({seconds for _, seconds in tail}) == 1:
                out.update(t for t in rows[q] if t.seconds == rows[q][-1].seconds)
            for p in quotas:
                if p != q and tail.keys() <= (others := {(t.size_mb, t.seconds) for t in rows[p]}):
                    out.update(t for t in rows[q] if (t.size_mb, t.seconds) in others)
    return out


def held_out(timings: Sequence[TimingSample]) -> dict[str, Any]:
    """Mean absolute relative error on every second size, per direction and form."""
    sizes = sorted({t.size_mb for t in timings})
    seen = set(sizes[::2])
    known, unknown = [t for t in timings if t.size_mb in seen], [t for t in timings if t.size_mb not in seen]
    chosen = fit_transfers(known)
    out: dict[str, Any] = {}
    for direction in ("up", "down"):
        quotas = sorted({t.memory_mb for t in timings})

        def arrays(rows: Sequence[TimingSample], quota: float, direction: str = direction) -> tuple[Any, Any]:
            mine = [t for t in rows if t.memory_mb == quota and t.direction == direction]
            return np.array([t.size_mb for t in mine]), np.array([t.seconds for t in mine])

        errors = {
            form.__name__.lower(): [rate_error(fit_form(form, *arrays(known, q)), *arrays(unknown, q)) for q in quotas] for form in FORMS
        }
        rates = {t.memory_mb: getattr(t, direction) for t in chosen.transfer}
        errors["chosen"] = [rate_error(rates[q], *arrays(unknown, q)) for q in quotas]
        out[direction] = {
            **{name: round(float(np.mean(np.concatenate(parts))), 4) for name, parts in errors.items()},
            "chosen_form": type(next(iter(rates.values()))).__name__.lower(),
            "by_quota": {f"{q:g}": round(float(np.mean(part)), 4) for q, part in zip(quotas, errors["chosen"], strict=True)},
        }
    return out


def beyond(timings: Sequence[TimingSample], largest_mb: float) -> dict[str, Any]:
    """Errors on all sizes above one, fitted to those below it: by the form itself, and at the bandwidth of the largest."""
    known = [t for t in timings if t.size_mb <= largest_mb]
    transfer = fit_transfers(known).transfer
    out: dict[str, Any] = {"fitted_up_to_mb": largest_mb}
    for direction in ("up", "down"):
        rates = {t.memory_mb: getattr(t, direction) for t in transfer}
        errors: dict[str, list[float]] = {"by_form": [], "by_bandwidth": []}
        for t in timings:
            if t.direction == direction and t.size_mb > largest_mb:
                rate = rates[t.memory_mb]
                at_largest, latency = float(rate.seconds(largest_mb)), float(rate.seconds(0.0))
                by_bandwidth = at_largest + (at_largest - latency) / largest_mb * (t.size_mb - largest_mb)
                errors["by_form"].append(abs(float(rate.seconds(t.size_mb)) / t.seconds - 1))
                errors["by_bandwidth"].append(abs(by_bandwidth / t.seconds - 1))
        out[direction] = {name: round(float(np.mean(each)), 4) for name, each in errors.items()}
    return out


def shipped(timings: Sequence[TimingSample]) -> dict[str, float]:
    """Errors of the shipped profile on all rows, to which it was fitted."""
    platform = builtin_platform("aws-lambda-s3")
    return {
        direction: round(
            float(
                np.mean(
                    [
                        abs(float(platform.seconds(t.direction, t.size_mb, t.memory_mb)) / t.seconds - 1)
                        for t in timings
                        if t.direction == direction
                    ]
                )
            ),
            4,
        )
        for direction in ("up", "down")
    }


def kept_out(timings: Sequence[TimingSample]) -> dict[str, Any]:
    """Errors of the shipped profile on rows that no fit has seen: of all sizes, and of each."""
    platform = builtin_platform("aws-lambda-s3")
    out: dict[str, Any] = {"rows": len(timings) // 2}
    for direction in ("up", "down"):
        errors: dict[float, list[float]] = {}
        for t in timings:
            if t.direction == direction:
                predicted = float(platform.seconds(t.direction, t.size_mb, t.memory_mb))
                errors.setdefault(t.size_mb, []).append(abs(predicted / t.seconds - 1))
        out[direction] = {
            "all": round(float(np.mean(np.concatenate(list(errors.values())))), 4),
            **{f"{size:g} MB": round(float(np.mean(each)), 4) for size, each in sorted(errors.items())},
        }
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, required=True, help="CSV: memory_mb,size_mb,upload_s,download_s")
    parser.add_argument("--kept-out", type=Path, help="CSV of the same columns: rows that no fit has seen")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument("--coefficients", action="store_true", help="print the fit of all rows, as in a profile")
    args = parser.parse_args()
    timings = read(args.table)
    doubtful = filled_in(timings)
    if args.coefficients:
        for row in fit_transfers(timings).transfer:
            both = {k: {n: float(f"{v:.4g}") for n, v in asdict(getattr(row, k)).items()} for k in ("up", "down")}
            sys.stdout.write(json.dumps({"memory_mb": row.memory_mb, **both}) + "\n")
        return
    result = {
        "all_rows": held_out(timings),
        "beyond": [beyond(timings, largest) for largest in (15.0, 30.0)],
        "shipped": shipped(timings),
        "measured_rows_only": held_out([t for t in timings if t not in doubtful]),
        "filled_in": sorted({f"{t.direction} {t.memory_mb:g} MB from {_first(doubtful, t):g} MB" for t in doubtful}),
    }
    if args.kept_out is not None:
        result["kept_out"] = kept_out(read(args.kept_out))
    if args.json:
        write({"benchmark": "transfer", **environment(), **result})
        return
    for rows in ("all_rows", "measured_rows_only"):
        for direction in ("up", "down"):
            part = result[rows][direction]
            shown = "  ".join(f"{k} {100 * v:.1f} %" for k, v in part.items() if isinstance(v, float))
            sys.stdout.write(f"{rows:18} {direction:4}  {shown} ({part['chosen_form']})\n")
    for row in result["beyond"]:
        sys.stdout.write(f"beyond {row['fitted_up_to_mb']:g} MB: {row['up']} up, {row['down']} down\n")
    sys.stdout.write(f"shipped, all rows: {result['shipped']}\n")
    sys.stdout.write("filled in: " + "; ".join(result["filled_in"]) + "\n")


def _first(rows: set[TimingSample], of: TimingSample) -> float:
    return min(t.size_mb for t in rows if t.direction == of.direction and t.memory_mb == of.memory_mb)


if __name__ == "__main__":
    main()
