"""Tables 5.1 to 5.3 of the FasDL thesis beside ours, and K-REDUCE compared with ScatterReduce and AllReduce on the same functions.

At equal B^a the others have a smaller global batch, because K-REDUCE's non-aggregators compute B^n > B^a; so part of its gain is
the larger global batch. At equal global batch the others' B is G/W. Both comparisons use the published equations and ours, over
two transfer profiles, because the mean is small and depends on them: the built-in one, and its predecessor, whose uploads have
one rate at any size. The thesis reports, on average at equal resources, 16.8 % less time and 28.3 % less cost than ScatterReduce,
33.6 % and 31.4 % less than AllReduce.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.planning_tables import KREDUCE, ROWS, Published, described, epochs, space_of, workload
from ephemeron.training.planner.baselines import two_stage
from ephemeron.training.planner.model.exchange import ExecutionOptions
from ephemeron.training.planner.model.prediction import predict
from ephemeron.training.planner.model.profile import PlatformProfile, parse_platform
from ephemeron.training.planner.search.branch_and_bound import exact

THESIS = {"scatter-reduce": {"saves_time": 0.168, "saves_cost": 0.283}, "all-reduce": {"saves_time": 0.336, "saves_cost": 0.314}}
"""Mean saving of K-REDUCE over each pattern at equal resources."""
THESIS_OPTIMA = {"BERT-Base": 0.390, "ResNet50": 0.267, "MobileNet": 0.258, "SqueezeNet": 0.532}
"""Cost saved by K-REDUCE's optimum compared with that of ScatterReduce."""
BEFORE = Path(__file__).with_name("planning_transfer_before.json")
MODELS = (("published", two_stage), ("ours", predict))


def before(platform: PlatformProfile) -> PlatformProfile:
    """Same platform with the earlier transfers of its profile."""
    old = parse_platform(json.loads(BEFORE.read_text()), where=BEFORE.name)
    return dataclasses.replace(platform, transfer=old.transfer, measured_mb=old.measured_mb)


def thesis(platforms: Mapping[str, PlatformProfile], searches: Callable[[Published], list[dict[str, Any]]]) -> dict[str, Any]:
    """All results that `--thesis` prints.

    Args:
        platforms: built-in ones by name.
        searches: of a row: exact and two-stage under both models, as `benchmarks.planning` times them.
    """
    objects, server = platforms["aws-lambda-s3"], platforms["aws-lambda-server"]
    return {
        "table_5_1": [_workload_row(row, objects) for row in ROWS],
        "table_5_2": [r for row in ROWS for r in searches(row)],
        "table_5_3": [r for row in ROWS for r in _optima(row, objects, server)],
        "same_functions": {"built-in transfers": same_functions(objects), "transfers before": same_functions(before(objects))},
        "thesis_means": THESIS,
    }


def _workload_row(row: Published, platform: PlatformProfile) -> dict[str, Any]:
    """Table 5.1 as published, with the assumed values beside it."""
    what = workload(row)
    return {
        "workload": row.name,
        "model_mb": row.model_mb,
        "a": row.a,
        "b": row.b,
        "m": row.m,
        "samples": row.samples,
        "dataset_mb": round(what.dataset_mb, 2),
        "memory_base_mb": round(what.memory_base_mb, 1),
        "memory_slope_mb": round(what.memory_slope_mb, 2),
        "epochs": epochs(row, platform),
    }


def _optima(row: Published, objects: PlatformProfile, server: PlatformProfile) -> list[dict[str, Any]]:
    """Table 5.3: the thesis's configuration of each pattern, its predicted time and cost, and our optimum."""
    n, what = epochs(row, objects), workload(row)
    w, m, ba, k, bn = row.best
    patterns: tuple[tuple[str, list[tuple[str, str]], PlatformProfile, tuple[int, ...] | None], ...] = (
        ("K-REDUCE", KREDUCE, objects, (w, m, k, ba, bn)),
        ("ScatterReduce", [("scatter-reduce", "bsp")], objects, row.scatter and (*row.scatter[:2], row.scatter[0], *2 * row.scatter[2:])),
        ("AllReduce", [("all-reduce", "bsp")], objects, row.all_reduce and (*row.all_reduce[:2], 1, *2 * row.all_reduce[2:])),
        ("λDNN", [("parameter-server", "bsp")], server, row.server and (*row.server[:2], 1, *2 * row.server[2:])),
    )
    found = []
    for label, terms, platform, theirs in patterns:
        for model, f in MODELS:
            if model == "published" and platform is server:
                continue  # the thesis has no equations for a parameter server
            named = terms[:1] if model == "published" else terms
            space, limits = space_of(row, named, platform, n, equations=two_stage if model == "published" else None)
            best = exact(space, limits).best
            take = functools.partial(_predicted, f, what, platform, n, *named[0])
            predicted = None if theirs is None else take(*theirs)
            found.append(
                {
                    "workload": row.name,
                    "pattern": label,
                    "model": model,
                    "deadline_s": row.deadline_s,
                    "max_global_batch": row.max_global_batch,
                    "thesis": theirs and dict(zip(("W", "M", "K", "B^a", "B^n"), theirs, strict=True)),
                    "thesis_predicted": predicted and {"seconds": round(predicted[0], 1), "cost_usd": round(predicted[1], 5)},
                    "ours": described(best),
                }
            )
    return found


def _predicted(
    f: Any, what: Any, platform: PlatformProfile, n: int, pattern: str, sync: str, w: float, m: float, k: float, a: float, b: float
) -> tuple[float, float]:
    terms = ExecutionOptions(pattern=pattern, sync=sync, epochs=n, lifetime_s=1e9)
    p = f(what, platform, terms, workers=w, memory_mb=m, aggregators=k, batch=a, other_batch=b)
    return float(p.seconds), float(p.cost_usd)


def same_functions(platform: PlatformProfile) -> dict[str, Any]:
    """Savings of K-REDUCE per workload and on average. Negative: it takes more."""
    found = []
    for row in ROWS:
        w, m, ba, k, bn = row.best
        n, what = epochs(row, platform), workload(row)
        together = ba * k + bn * (w - k)
        for model, f in MODELS:
            take = functools.partial(_predicted, f, what, platform, n)
            mine = take("k-reduce", "hap", w, m, k, ba, bn)
            for equal, batch in (("B^a", float(ba)), ("global batch", together / w)):
                for pattern, aggregators in (("scatter-reduce", w), ("all-reduce", 1)):
                    other = take(pattern, "bsp", w, m, aggregators, batch, batch)
                    found.append(
                        {
                            "workload": row.name,
                            "model": model,
                            "equal": equal,
                            "against": pattern,
                            "epochs": n,
                            "W": w,
                            "M": m,
                            "K": k,
                            "B^a": ba,
                            "B^n": bn,
                            "global_batch": together,
                            "other_batch": round(batch, 2),
                            "seconds": round(mine[0], 1),
                            "other_seconds": round(other[0], 1),
                            "cost_usd": round(mine[1], 4),
                            "other_cost_usd": round(other[1], 4),
                            "saves_time": round(1 - mine[0] / other[0], 4),
                            "saves_cost": round(1 - mine[1] / other[1], 4),
                        }
                    )
    means = [
        {
            "model": model,
            "equal": equal,
            "against": pattern,
            **{
                key: round(statistics.fmean(r[key] for r in found if (r["model"], r["equal"], r["against"]) == (model, equal, pattern)), 4)
                for key in ("saves_time", "saves_cost")
            },
        }
        for model, _ in MODELS
        for equal in ("B^a", "global batch")
        for pattern in ("scatter-reduce", "all-reduce")
    ]
    return {"rows": found, "means": means}


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Prints all results as tables."""
    yield "Table 5.1 as published, and the assumed values (from epochs on the left to memory on the right)"
    for r in result["table_5_1"]:
        yield (
            f"{r['workload']:10} {r['model_mb']:7.2f} MB  a {r['a']:8.2f}  b {r['b']:5.2f}  m {r['m']:8.2f} | {r['epochs']:3d} epochs of "
            f"{r['samples']:6d} samples, {r['dataset_mb']:6.2f} MB; {r['memory_base_mb']:7.1f} + {r['memory_slope_mb']:6.2f}·B MB"
        )
    yield ""
    yield "Table 5.2: searches, cost in US dollars and decay (equation 5-1); the thesis's, then ours"
    stated = {r.name: r for r in ROWS}
    for r in result["table_5_2"]:
        row, b = stated[r["workload"]], r["best"]
        theirs = (row.two_stage_s, row.two_stage_usd) if r["search"].startswith("two") else (row.optimum_s, row.optimum_usd)
        cost = "no fit" if b is None else f"${b['cost_usd']:.4f}"
        decay = "" if r["decay_against_128_mb"] is None else f"{r['decay_against_128_mb']:6.1%}"
        yield (
            f"{r['workload']:10} {r['search']:18} thesis {theirs[0]:7.1f} s ${theirs[1]:<6} decay {r['thesis']['decay']:5.1%} (two-stage) | "
            f"{r['model']:9} {r['seconds']:7.3f} s {cost} decay {decay}"
        )
    yield ""
    yield "Table 5.3: the thesis's configuration (W × M, K, B^a/B^n), its prediction here, and our optimum"
    for r in result["table_5_3"]:
        t, p, b = r["thesis"], r["thesis_predicted"], r["ours"]
        theirs = "no fit" if t is None else f"{t['W']:3d} × {t['M']:5d}, {t['K']}, {t['B^a']}/{t['B^n']}"
        took = "" if p is None else f"{p['seconds']:8.0f} s ${p['cost_usd']:.4f}"
        mine = (
            "no fit"
            if b is None
            else f"{b['workers']:3d} × {b['memory_mb']:5d}, {b['aggregators']}, {b['batch_size_aggregator']}/{b['batch_size_nonaggregator']} "
            f"{b['seconds']:8.0f} s ${b['cost_usd']:.4f}"
        )
        yield f"{r['workload']:10} {r['pattern']:13} {r['model']:9} thesis {theirs:27} {took:20} | ours {mine}"
    yield ""
    yield "Cost saved by K-REDUCE's optimum compared with ScatterReduce's: the thesis's, then ours"
    for name, saves in THESIS_OPTIMA.items():
        yield f"{name:10} thesis {saves:5.1%} | " + ", ".join(f"{m} {_saved(result, name, m)}" for m, _ in MODELS)
    for transfers, part in result["same_functions"].items():
        yield ""
        yield f"K-REDUCE against the others on the same functions, {transfers}"
        for r in part["rows"]:
            yield (
                f"{r['workload']:10} {r['model']:9} equal {r['equal']:12} against {r['against']:14} {r['seconds']:8.0f} s and {r['other_seconds']:8.0f} s, "
                f"${r['cost_usd']:.4f} and ${r['other_cost_usd']:.4f}: saves {r['saves_time']:+7.1%} time {r['saves_cost']:+7.1%} cost"
            )
        for r in part["means"]:
            t = result["thesis_means"][r["against"]]
            yield (
                f"{'mean':10} {r['model']:9} equal {r['equal']:12} against {r['against']:14} saves {r['saves_time']:+7.1%} time "
                f"{r['saves_cost']:+7.1%} cost (thesis, at equal B^a: {t['saves_time']:.1%} and {t['saves_cost']:.1%})"
            )


def _saved(result: dict[str, Any], name: str, model: str) -> str:
    mine = {r["pattern"]: r["ours"] for r in result["table_5_3"] if (r["workload"], r["model"]) == (name, model)}
    ours, other = mine["K-REDUCE"], mine["ScatterReduce"]
    return "no fit" if ours is None or other is None else f"{1 - ours['cost_usd'] / other['cost_usd']:.1%}"
