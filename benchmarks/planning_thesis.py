"""K-REDUCE with HAP at the thesis's own resources (tables 5.1 to 5.3) against ScatterReduce and AllReduce on the same functions.

At equal B^a the others have a smaller global batch, since K-REDUCE's non-aggregators compute B^n > B^a; so part of its gain is the
larger global batch. At equal global batch the others' B is G/W. Both under the published equations and under ours; epochs
as `benchmarks.planning` assumes them. The thesis says, on average at equal resources, 16.8 % less time and 28.3 % less cost.
"""

from __future__ import annotations

import functools
import statistics
from typing import Any

from ephemeron.performance.model import Terms, predict, published
from ephemeron.performance.profile import PlatformProfile

THESIS = {"seconds": 0.168, "cost_usd": 0.283}
"""Mean saving of K-REDUCE over the better of both at equal resources."""


def _predicted(
    f: Any,
    what: Any,
    platform: PlatformProfile,
    n: int,
    w: int,
    m: int,
    pattern: str,
    sync: str,
    k: int,
    a: float,
    b: float,
) -> tuple[float, float]:
    terms = Terms(pattern=pattern, sync=sync, epochs=n, lifetime_s=1e9)
    p = f(what, platform, terms, workers=w, memory_mb=m, aggregators=k, batch=a, other_batch=b)
    return float(p.seconds), float(p.cost_usd)


def thesis_rows(rows: Any, workload_of: Any, epochs_of: Any, platform: PlatformProfile) -> dict[str, Any]:
    """Per workload and on average: what K-REDUCE saves. Negative: it takes more."""
    found = []
    for row in rows:
        w, m, ba, k, bn = row.best
        n, what = epochs_of(row, platform), workload_of(row)
        together = ba * k + bn * (w - k)
        for model, f in (("published", published), ("ours", predict)):
            take = functools.partial(_predicted, f, what, platform, n, w, m)
            mine = take("k-reduce", "hap", k, ba, bn)
            for equal, batch in (("B^a", float(ba)), ("global batch", together / w)):
                for pattern, aggregators in (("scatter-reduce", w), ("all-reduce", 1)):
                    other = take(pattern, "bsp", aggregators, batch, batch)
                    found.append({
                        "workload": row.name, "model": model, "equal": equal, "against": pattern, "epochs": n, "W": w, "M": m,
                        "K": k, "B^a": ba, "B^n": bn, "global_batch": together, "other_batch": round(batch, 2),
                        "seconds": round(mine[0], 1), "other_seconds": round(other[0], 1),
                        "saves_time": round(1 - mine[0] / other[0], 4), "saves_cost": round(1 - mine[1] / other[1], 4),
                        "thesis_usd": {"two_stage": row.two_stage_usd, "optimum": row.optimum_usd},
                        "cost_usd": round(mine[1], 4),
                    })  # fmt: skip
    means = [
        {
            "model": model, "equal": equal, "against": pattern,
            **{key: round(statistics.fmean(r[key] for r in found if (r["model"], r["equal"], r["against"]) == (model, equal, pattern)), 4)
               for key in ("saves_time", "saves_cost")},
        }
        for model in ("published", "ours") for equal in ("B^a", "global batch") for pattern in ("scatter-reduce", "all-reduce")
    ]  # fmt: skip
    return {"rows": found, "means": means, "thesis_means": THESIS}
