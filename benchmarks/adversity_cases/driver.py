"""Runs that are admitted end: evaluations in lives, budgets, regions, commands."""

from __future__ import annotations

import math
import sys
from functools import partial
from pathlib import Path

from benchmarks.adversity_cases import case

_TESTS = Path(__file__).parents[2] / "tests" / "training"
sys.path[:0] = [str(_TESTS), str(_TESTS / "planner" / "model")]

LIVES = "admitted, then impossible"


def _evaluated(sync: str, lifetime_s: float) -> None:
    """Iterations of 2.9 s and evaluations of 4 s: refused, or finished as predicted."""
    from test_lives import EVALUATED, Case, replacements

    case = Case(sync=sync, **(EVALUATED | {"iterations": 7}))
    predicted = float(case.predicted(lifetime_s).seconds)
    run = case.simulated(lifetime_s)
    if math.isinf(predicted):
        assert run.ending.status == "failed", f"refused though it finishes at {lifetime_s} s"
        return
    assert run.ending.status == "finished", run.ending.causes
    assert replacements(run) == 0
    assert abs(predicted / run.trigger.ledger.ended_at - 1) < 0.04


for _sync in ("bsp", "hap"):
    for _life in (4, 5, 6, 7, 8, 10, 12, 16):
        case(LIVES, f"evaluation of 4 s, life of {_life} s, {_sync}")(partial(_evaluated, _sync, float(_life)))
