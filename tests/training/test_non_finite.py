"""A loss or gradient that is not a number ends a run at once, or is told honestly to the end."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from training_runs import configuration, make_job, real

from ephemeron.communication.object_frame import opened
from ephemeron.data import assign, batch_indices, plan_split
from ephemeron.events import Progress
from ephemeron.training.driver import configure, train
from ephemeron.training.job import Target
from ephemeron.training.tensors import decode_state


def job(passes: int, **options):
    return make_job(model=Target(target="tiny:nan_after", options={"passes": passes, **options}), epochs=1)


@pytest.mark.parametrize("exchange", ["gradients", "parameters"])
@pytest.mark.parametrize(("grad_only", "what"), [(False, "the loss is nan"), (True, "are not finite")])
def test_the_run_stops_there_and_says_where(exchange, grad_only, what):
    run = real(job(7, grad_only=grad_only), workers=2, checkpoint_every=3, batch_size=16, exchange={"quantity": exchange})
    assert run.ending.status == "failed"
    (cause,) = run.ending.causes
    assert what in cause
    assert "iteration 7 (epoch 0, batch 7 of" in cause
    assert "resume" in cause
    assert max(e.iteration for e in run.of(Progress)) == 6, "iterations after it were paid for"


def test_the_batch_is_named_as_the_data_source_numbers_it():
    run = real(job(2), workers=2, batch_size=4)
    rank = int(run.ending.causes[0].split("rank ")[1].split(",")[0])
    split = plan_split(run.trigger.spec.samples, [4, 4])
    owned = assign(run.trigger.spec.samples, split, 0)[rank]
    named = ", ".join(map(str, owned[batch_indices(split, rank, 0, 2, seed=0)]))
    assert f"4 training samples {named})" in run.ending.causes[0]


def checkpoint(run, key):
    stored = opened(memoryview(run.platform.store.objects[key]), key=key)
    return decode_state(run.trigger.signing.verified(stored, name=key))


def test_every_checkpoint_that_is_kept_is_from_before():
    run = real(job(10), workers=2, checkpoint_every=4, batch_size=16)
    states = [key for key in run.left if "/state/" in key]
    assert {int(key.rsplit("/", 1)[1]) for key in states} == {4, 8}
    for key in states:
        arrays, _ = checkpoint(run, key)
        assert all(np.isfinite(a).all() for n, a in arrays.items() if n.startswith("w/"))


def test_parameters_that_a_step_made_infinite_are_never_saved():
    huge = make_job(optimizer=Target(target="SGD", options={"lr": 3e38, "weight_decay": 100.0}))
    run = real(huge, workers=1, aggregators=1, checkpoint_every=1, batch_size=16)
    assert run.ending.status == "failed"
    assert "parameters are not finite" in run.ending.causes[0]
    for key in (k for k in run.left if "/state/" in k):
        arrays, _ = checkpoint(run, key)
        assert all(np.isfinite(a).all() for n, a in arrays.items() if n.startswith("w/"))


def strict(text: str):
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_with_continue_it_goes_on_and_all_that_is_written_stays_readable(home: Path):
    wanted = job(12)
    c = configure(wanted, platform="simulated", workers=2, aggregators=2, batch_size=16, on_non_finite="continue")
    result = train(wanted, c)
    assert result.finished
    assert result.summary.metrics == {"loss": None, "accuracy": pytest.approx(0.1, abs=0.1)}
    for line in result.folder.events.read_text().splitlines():
        strict(line)
    strict((result.folder.path / "result.json").read_text())
    page = (result.folder.path / "report.html").read_text()
    assert "had a loss that is not a finite number" in page


def test_an_unknown_choice_is_refused():
    from ephemeron.errors import JobError

    with pytest.raises(JobError, match="use one of stop, continue"):
        configuration(on_non_finite="ignore")
