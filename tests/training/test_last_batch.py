"""Batch statistics of one sample are refused before the start, or avoided."""

from __future__ import annotations

import dataclasses

import pytest
from training_runs import configuration, make_job, real

from ephemeron.errors import JobError
from ephemeron.events import Progress
from ephemeron.functions.base import Limits
from ephemeron.prices import load_prices
from ephemeron.training.driver.launching.prepare import prepare
from ephemeron.training.job import DataSpec, Target

SHAPE = {"workers": 1, "aggregators": 1, "batch_size": 479}
"""1,438 samples: three batches, and one of a single sample."""


def job(model="tiny:with_batch_norm", **data):
    return make_job(model=Target(target=model), data=DataSpec(**data))


def ready(job, **how):
    return prepare(job, configuration(**how), run_id="run", limits=Limits(), prices=load_prices("objects"))


def test_a_last_batch_of_one_is_refused_where_the_model_refuses_it():
    with pytest.raises(JobError, match=r"rank 0 has 1 in iteration 3 of every epoch.*last_batch = \"drop\" or \"merge\""):
        ready(job(), **SHAPE)
    ready(job("tiny:mlp"), **SHAPE)
    with pytest.raises(JobError, match="replica 0 has 1 in iteration 3"):
        ready(job(), **{**SHAPE, "stages": {"count": 2}, "workers": 2})


@pytest.mark.parametrize(("last", "sizes"), [("drop", [479] * 3), ("merge", [479, 479, 480])])
def test_dropped_or_merged_it_trains(last, sizes):
    run = real(dataclasses.replace(job(last_batch=last), epochs=2), **SHAPE)
    assert run.ending.status == "finished", run.ending.causes
    assert [e.samples for e in run.of(Progress)] == sizes * 2


def test_an_unknown_choice_is_refused():
    with pytest.raises(JobError, match=r"DataSpec: last_batch = 'skip' is not known; use one of keep, drop, merge"):
        ready(job(last_batch="skip"), **SHAPE)


def test_functions_without_a_sample_are_refused():
    few = job("tiny:words_model", source="tiny:sequences", options={"samples": 3}, test_fraction=0.0)
    few = dataclasses.replace(few, loss=Target(target="tiny:words_loss"))
    with pytest.raises(JobError, match=r"3 training samples are fewer than 8 functions to share them.*use at most 3 workers"):
        ready(few, workers=8)
    assert real(few, workers=3).ending.status == "finished"
