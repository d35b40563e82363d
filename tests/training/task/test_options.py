"""Options of training: schedules, clipping, scaling, limits, and the forms in which optimisers are returned."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")

from torch import nn  # noqa: E402
from torch.optim import lr_scheduler  # noqa: E402
from training_runs import WORLD, real  # noqa: E402

from ephemeron.errors import JobError  # noqa: E402
from ephemeron.events import Checkpointed, Invoked, Progress  # noqa: E402
from ephemeron.training.driver.launching.programs import job_of  # noqa: E402
from ephemeron.training.job import JobLimits, SchedulerSpec, TrainingOptions  # noqa: E402
from ephemeron.training.task.optimizers import optimizers_of  # noqa: E402
from ephemeron.training.task.program import (  # noqa: E402
    program_of,
    scheduler_for,
    with_optimizers,
)
from ephemeron.training.task.task import Task  # noqa: E402

CODE = Path(__file__).parent / "code"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(CODE))


def job(name="Tabular", **options):
    return dataclasses.replace(job_of(f"programs:{name}", options), simulation=WORLD, code=(CODE,))


def sgd(lr=0.1):
    return torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=lr)


def rates(spec, steps, *, epochs=2):
    optimizer = sgd(0.4)
    made = scheduler_for(spec, optimizer, 0, resolve=None, steps=steps, epochs=epochs)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        made.scheduler.step()
    return found


def test_warm_up_and_the_length_of_the_run():
    got = rates(SchedulerSpec(target="CosineAnnealingLR", interval="step", warmup_steps=3), 9)
    assert got[:3] == pytest.approx([0.1, 0.2, 0.3])
    assert got[3] == pytest.approx(0.4)
    assert got[4:] == sorted(got[4:], reverse=True)
    again = sgd(0.4)
    cosine = lr_scheduler.CosineAnnealingLR(again, 6)  # the six steps after the warm-up
    expected = []
    for _ in range(6):
        expected.append(again.param_groups[0]["lr"])
        again.step()
        cosine.step()
    assert got[3:] == pytest.approx(expected)


def test_a_length_that_is_given_is_kept():
    assert rates(SchedulerSpec(target="LinearLR", interval="step", options={"total_iters": 2, "start_factor": 0.5}), 4) == (
        pytest.approx([0.2, 0.3, 0.4, 0.4])
    )


@pytest.mark.parametrize(
    ("returned", "optimizers", "monitors"),
    [
        (lambda o: o, 1, []),
        (lambda o: [o, sgd()], 2, []),
        (lambda o: ([o], [lr_scheduler.StepLR(o, 1)]), 1, [None]),
        (lambda o: (o, lr_scheduler.StepLR(o, 1)), 1, [None]),
        (lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": lr_scheduler.StepLR(o, 1), "interval": "step"}}, 1, [None]),
        (lambda o: {"optimizer": o, "lr_scheduler": lr_scheduler.ReduceLROnPlateau(o)}, 1, ["loss"]),
        (lambda o: [{"optimizer": o}, {"optimizer": sgd()}], 2, []),
    ],
)
def test_forms_of_optimizers(returned, optimizers, monitors):
    found, schedulers = optimizers_of(returned(sgd()), "optimizers")
    assert len(found) == optimizers
    assert [s.monitor for s in schedulers] == monitors


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (None, "returned NoneType"),
        ([], "returned no optimiser"),
        ({"optimiser": 1}, "a mapping without 'optimizer'"),
        (([sgd()], [lr_scheduler.StepLR(sgd(), 1)]), "belongs to none of its optimisers"),
        ({"optimizer": sgd(), "lr_scheduler": {"scheduler": lr_scheduler.StepLR(sgd(), 1), "interval": "day"}}, "interval 'day'"),
        (torch.optim.LBFGS(nn.Linear(1, 1).parameters()), "evaluates the loss several times"),
        (torch.optim.SparseAdam(nn.Linear(1, 1).parameters()), "takes sparse gradients only"),
    ],
)
def test_what_is_no_optimizer_is_refused(returned, says):
    with pytest.raises(JobError) as caught:
        optimizers_of(returned, "optimizers of T")
    assert says in str(caught.value)


def test_an_optimizer_of_other_parameters_is_refused():
    class Other(Task):
        def optimizers(self, model):
            return sgd()

    with pytest.raises(JobError, match="a parameter that is not in the model"):
        with_optimizers(Other(), nn.Linear(2, 1), TrainingOptions(), find=None, epoch_length=1, epochs=1)


def test_learning_rates_scale_with_the_global_batch(home):
    run = real(job(scale_learning_rate=True, scheduler=None), workers=4, aggregators=2, batch_size=4)
    spec = run.trigger.spec
    assert spec.learning_rate_factor == 4
    made = program_of(spec, folders=[CODE], epoch_length=6, epochs=1, learning_rate_factor=spec.learning_rate_factor)
    assert made.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.4)
    assert run.sha != real(job(scheduler=None), workers=4, aggregators=2, batch_size=4).sha


def test_clipping_is_of_the_merged_gradient(home):
    """With a tiny norm every step has the length lr · clip_norm, on however many functions."""
    limit = 1e-3
    before = program_of(job(), folders=[CODE], epoch_length=1, epochs=1).model.state_dict()
    for workers in (1, 4):
        run = real(job(clip_norm=limit, epochs=1, scheduler=None), workers=workers, aggregators=min(2, workers), batch_size=96 // workers)
        assert run.trigger.spec.iterations == 1
        moved = [run.ending.arrays[n] - t.numpy() for n, t in before.items()]
        assert np.sqrt(sum((m**2).sum() for m in moved)) == pytest.approx(0.1 * limit, rel=1e-3)


def test_clipping_by_value(home):
    run = real(job(clip_value=1e-3, epochs=1, scheduler=None), workers=2, aggregators=1, batch_size=48)
    before = program_of(job(), folders=[CODE], epoch_length=1, epochs=1).model.state_dict()
    assert max(abs(run.ending.arrays[n] - t.numpy()).max() for n, t in before.items()) == pytest.approx(1e-4, rel=1e-3)


def test_a_time_limit_stops_the_run_at_a_checkpoint(home):
    made = dataclasses.replace(job(epochs=50), limits=JobLimits(time_limit_s=4.0))
    run = real(made, workers=2, aggregators=1, batch_size=8)
    assert run.ending.status == "stopped"
    done = max(e.iteration for e in run.of(Progress))
    assert 0 < done < 50 * 6
    assert {e.iteration for e in run.of(Checkpointed)} >= {done + 1}
    assert len(run.of(Invoked)) == 2


def test_a_plateau_is_the_same_on_all_ranks(home):
    """Ranks whose learning rates differed would end with different weights."""
    run = real(job("PlateauResidual"), workers=4, aggregators=4, batch_size=4)
    assert run.ending.status == "finished"
    fixed = {"scheduler": SchedulerSpec(target="ReduceLROnPlateau", monitor="loss", options={"patience": 0})}
    assert real(job(**fixed), workers=2, aggregators=1, batch_size=8).ending.status == "finished"
