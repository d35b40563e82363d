"""Figures 5.8 to 5.11 of FasDL: training loss and accuracy of K-REDUCE under HAP, ScatterReduce and AllReduce, against cost.

`Opt` sides have the configurations of table 5.3, `CP` sides have W, M and B of K-REDUCE's with another pattern. Costs are those of
the performance model for the thesis's workloads on AWS Lambda with S3. Its data sets and models are not at hand: losses and
accuracies are of a dense network on scikit-learn's digits, with batches divided by `DIVISORS` so that an epoch has a similar number
of iterations. So the order of the curves is a statement about protocols and global batches, and the values are not the thesis's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.planning_tables import ROWS, Published, workload
from benchmarks.stale_training import Curve, Setting
from ephemeron.training.planner.model.builtin import builtin_platform
from ephemeron.training.planner.model.exchange import ExecutionOptions
from ephemeron.training.planner.model.prediction import predict

FIGURES = {"BERT-Base": "5.8", "ResNet50": "5.9", "MobileNet": "5.10", "SqueezeNet": "5.11"}
DIVISORS = {"BERT-Base": 4, "ResNet50": 8, "MobileNet": 8, "SqueezeNet": 8}
EPOCHS = 15
"""Epochs of K-REDUCE; the other sides get what costs as much."""
LR, MOMENTUM = 0.05, 0.9


def sides(row: Published) -> dict[str, tuple[str, str, int, int, int, int, int]]:
    """By side: pattern, protocol, W, M, K, B^a and B^n."""
    w, m, ba, k, bn = row.best
    found = {
        "K-Opt": ("k-reduce", "hap", w, m, k, ba, bn),
        "Scatter-CP": ("scatter-reduce", "bsp", w, m, w, ba, ba),
        "All-CP": ("all-reduce", "bsp", w, m, 1, ba, ba),
    }
    for name, pattern, best in (("Scatter-Opt", "scatter-reduce", row.scatter), ("All-Opt", "all-reduce", row.all_reduce)):
        if best is not None:
            found[name] = (pattern, "bsp", best[0], best[1], best[0] if name == "Scatter-Opt" else 1, best[2], best[2])
    return found


def figures(
    run: Callable[..., list[Curve]], *, remedy: str, quick: bool, processes: int, seeds: tuple[int, ...] = (0, 1, 2)
) -> dict[str, Any]:
    """Curves of all sides, and their ends at the cost of K-REDUCE's."""
    platform = builtin_platform("aws-lambda-s3")
    planned: list[tuple[Published, str, float, list[Setting]]] = []
    budgets = {}
    for row in ROWS[3:] if quick else ROWS:
        for side, (pattern, sync, w, m, k, ba, bn) in sides(row).items():
            one, two = (
                float(
                    predict(
                        workload(row),
                        platform,
                        ExecutionOptions(pattern=pattern, sync=sync, epochs=n),
                        workers=w,
                        memory_mb=m,
                        aggregators=k,
                        batch=ba,
                        other_batch=bn,
                    ).cost_usd
                )
                for n in (1, 2)
            )
            each = two - one
            budget = budgets.setdefault(row.name, EPOCHS * each)  # K-Opt comes first
            d = DIVISORS[row.name]
            base = Setting(
                sync=sync,
                workers=w,
                aggregators=k,
                batch=max(1, ba // d),
                nonaggregator_batch=max(1, bn // d),
                epochs=max(1, int(budget / each + 1e-9)),
                lr=LR,
                momentum=MOMENTUM,
                remedy=remedy if sync == "hap" else "none",
                model="mlp",
            )
            planned.append((row, side, each, [Setting(**{**_fields(base), "seed": seed}) for seed in seeds]))
    curves = {c.setting: c for c in run([s for *_, settings in planned for s in settings], processes=processes)}
    found = []
    for row, side, each, settings in planned:
        runs = [curves[s] for s in settings]
        loss = [statistics.fmean(v) for v in zip(*(c.loss for c in runs), strict=True)]
        accuracy = [statistics.fmean(v) for v in zip(*(c.accuracy for c in runs), strict=True)]
        found.append(
            {
                "figure": FIGURES[row.name],
                "workload": row.name,
                "side": side,
                "epochs": len(loss),
                "cost_usd": round(len(loss) * each, 5),
                "usd_per_epoch": round(each, 6),
                "loss": round(loss[-1], 5),
                "accuracy": round(accuracy[-1], 4),
                "losses": [round(v, 4) for v in loss],
                "accuracies": [round(v, 4) for v in accuracy],
            }
        )
    return {"stand_in": "dense network on scikit-learn's digits; costs of the thesis's workloads by the performance model", "rows": found}


def _fields(s: Setting) -> dict[str, Any]:
    return {name: getattr(s, name) for name in s.__dataclass_fields__}
