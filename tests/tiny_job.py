"""The smallest job that has everything a run can lose: momentum, random states, batches in an order of their own."""

from __future__ import annotations

from pathlib import Path

from ephemeron.training.job import DataSpec, Job, Simulation, Target

CODE = Path(__file__).parent / "training" / "code"
JOB = Job(
    name="tiny",
    model=Target(target="tiny:mlp", options={"dropout": 0.2}),
    data=DataSpec(),
    epochs=5,
    code=(CODE,),
    optimizer=Target(target="SGD", options={"lr": 0.1, "momentum": 0.9}),
    simulation=Simulation(),
)
"""50 iterations with three workers and batches of 48: milliseconds each, but enough to be slowed down for seconds."""
SHORT = Job(name="short", model=JOB.model, data=JOB.data, epochs=1, code=(CODE,))
"""For tests in which nothing of the state matters; 1 iteration with one worker and a batch of 1,440."""
