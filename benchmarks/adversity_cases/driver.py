"""Runs that are admitted end: evaluations in lives, budgets, regions, commands."""

from __future__ import annotations

import errno
import math
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

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
    for _life in (4, 5, 6, 8, 10, 14):
        case(LIVES, f"evaluation of 4 s, life of {_life} s, {_sync}")(partial(_evaluated, _sync, float(_life)))


BUDGETS = "the budget stops at half"


def _budget(how: dict[str, Any]) -> None:
    """A run of eight functions ends at its budget, and says so."""
    from test_bounds import QUICK
    from training_runs import synthetic

    settings: dict[str, Any] = {"samples": 8 * 16 * 80, "epochs": 1, "workers": 8, "world": QUICK, **how}
    whole = synthetic(**settings).trigger.ledger
    limit = 0.6 * whole.cost_usd(whole.ended_at)
    run = synthetic(budget_usd=limit, **settings)
    used = run.trigger.ledger.cost_usd(run.trigger.ledger.ended_at) / limit
    assert run.ending.status == "stopped"
    assert 0.9 < used < 1.1, f"{used:.2f} of the budget"
    assert "the budget of" in run.ending.causes[0]


for _how in ({"aggregators": 1}, {"aggregators": 1, "sync": "hap"}, {"channel": "direct"}):
    case(BUDGETS, " ".join(f"{name} {value}" for name, value in _how.items()))(partial(_budget, _how))


@case(BUDGETS, "a time limit is the reason of a stop")
def _time_limit() -> None:
    from training_runs import synthetic

    assert synthetic(samples=6400, time_limit_s=20.0).ending.causes == ["the time limit of 20.0 s is reached"]


REGIONS = "a run of regions is not what its plan says"


def _planned(first: str, second: str, share: int, cores: int) -> None:
    """Functions that `train` starts, beside the cores of `regions plan` (table 5 of Cloudless-Training)."""
    from ephemeron.training.driver.api import configured

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "regions.toml"
        path.write_text(
            f"""[[region]]
name = "a"
platform = "local"
data_share = {share}
devices = [{{ kind = "{first}", cores = 12 }}]
[[region]]
name = "b"
platform = "local"
data_share = 1
devices = [{{ kind = "{second}", cores = 12 }}]
"""
        )
        assert [group.workers for group in configured({"regions": {"file": str(path)}}).regions.region] == [12, cores]


for _case in (("cascade-lake", "skylake", 1, 8), ("cascade-lake", "cascade-lake", 2, 6), ("cascade-lake", "skylake", 2, 4)):
    case(REGIONS, f"{_case[0]} and {_case[1]}, data {_case[2]}:1")(partial(_planned, *_case))


def _refused(kind: type[Exception], work: Callable[[], object]) -> str:
    """What an error of this kind says."""
    try:
        work()
    except kind as e:
        return str(e)
    raise AssertionError(f"no {kind.__name__}")


COMMANDS = "commands that leave in the wrong moment, and raw tracebacks"


@case(COMMANDS, "stop returns when the run has stopped, and not for ever")
def _stop() -> None:
    from unittest import mock

    from ephemeron.errors import UserError
    from ephemeron.runs import verbs
    from ephemeron.runs.kinds import find_kind
    from ephemeron.training.driver import lifecycle

    folder, record = mock.Mock(run_id="r"), mock.Mock(platform="local")
    states = ["running", "running", "stopped"]
    with (
        mock.patch.object(verbs, "open_run", return_value=(folder, record, find_kind("training"))),
        mock.patch.object(lifecycle, "stop", mock.AsyncMock()),
        mock.patch.object(verbs, "status_of", side_effect=lambda _: states.pop(0) if len(states) > 1 else states[0]),
    ):
        assert verbs.stop("r") == "r"
        states[:] = ["running"]
        assert "has not reached a checkpoint yet" in _refused(UserError, lambda: verbs.stop("r", wait_s=0.01))


@case(COMMANDS, "a model whose parameters have no shape yet")
def _lazy() -> None:
    from torch import nn

    from ephemeron.errors import JobError
    from ephemeron.training.task.program import built

    said = _refused(JobError, lambda: built(lambda: nn.Sequential(nn.LazyLinear(2)), "lazy", seed=0, dtype="float32"))
    assert "has no shape yet" in said


@case(COMMANDS, "a compiled model is measured")
def _compiled() -> None:
    import torch

    from ephemeron.training.driver.launching.memory import Activations, measured

    model = torch.compile(torch.nn.Linear(6, 3), backend="eager", dynamic=True)
    with measured(model, 2, Activations()):
        model(torch.ones(2, 6)).sum().backward()


def _unwritable(number: int) -> None:
    from ephemeron.errors import JobError
    from ephemeron.tuning.folder import written

    def write() -> None:
        with written(Path("study")):
            raise OSError(number, os.strerror(number))

    assert os.strerror(number) in _refused(JobError, write)


for _number in (errno.EROFS, errno.ENOSPC, errno.EACCES):
    case(COMMANDS, f"a study's folder: {os.strerror(_number)}")(partial(_unwritable, _number))
