"""Training whose hooks raise what is no `Exception`, or what has no text: the run fails at once, and names it."""

from __future__ import annotations

import asyncio
import concurrent.futures

import numpy as np
import pytest
from torch import nn

import ephemeron
from ephemeron.errors import JobError, RunFailed


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))


class Own(BaseException):
    pass


class NoText(Exception):
    def __str__(self):
        raise Own

    __repr__ = __str__


class Raising(ephemeron.Task):
    """Raises in a step of the run, or in the trial before it."""

    error, at, hook = ValueError, 0, "step"

    def model(self):
        return nn.Linear(4, 2)

    def train_data(self):
        g = np.random.default_rng(0)
        return g.standard_normal((16, 4)).astype("f4"), g.integers(0, 2, 16)

    def optimizers(self, model):
        if self.hook == "optimizers":
            raise self.error
        return super().optimizers(model)

    def training_step(self, model, batch):
        if self.hook == "step" and self.global_step == self.at:
            raise self.error
        return super().training_step(model, batch)


ERRORS = [asyncio.CancelledError, concurrent.futures.CancelledError, GeneratorExit, SystemExit, StopIteration, Own, NoText]


def trained(error, **what):
    made = type("Raising", (Raising,), {"error": error, **what})
    return ephemeron.train(made(), platform="simulated", workers=2, batch_size=4, epochs=2, on_event=lambda event: None).summary


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: f"{e.__module__}.{e.__name__}")
def test_a_run_fails_with_what_a_step_has_raised(error):
    with pytest.raises(RunFailed, match=rf"iteration 2: {error.__name__}\b") as found:
        trained(error, at=2)
    events = found.value.result.summary
    assert (events.status, events.workers) == ("failed", 2)


@pytest.mark.parametrize("hook", ["step", "optimizers"])
@pytest.mark.parametrize("error", [asyncio.CancelledError, Own, NoText])
def test_the_trial_names_it_before_anything_is_started(error, hook):
    with pytest.raises(JobError, match=rf"raised {error.__name__}\b"):
        trained(error, hook=hook)
