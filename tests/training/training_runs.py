"""Runs of every kind, as quickly as each kind allows."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ephemeron.communication.keys import Keys
from ephemeron.data import assign, global_batch
from ephemeron.events import Event
from ephemeron.functions import simulation
from ephemeron.functions.base import Limits
from ephemeron.functions.simulated import SimulatedPlatform
from ephemeron.prices import load_prices
from ephemeron.testing.flaky import FlakyChannel
from ephemeron.training.driver.launching.prepare import Prepared, prepare
from ephemeron.training.driver.run_driver import RunDriver, RunOutcome
from ephemeron.training.job import Configuration, DataSpec, Job, JobLimits, Simulation, Target
from ephemeron.training.job.run_options import merged, nested
from ephemeron.training.worker.spec import RunSpec

CODE = Path(__file__).parent / "code"
WORLD = Simulation(compute={"a": 50.0, "b": 4.0, "m": 0.0})


@dataclasses.dataclass
class Run:
    """A simulated run that has ended."""

    ending: RunOutcome
    trigger: RunDriver
    platform: SimulatedPlatform
    events: list[Event]
    most_objects: int

    @property
    def sha(self) -> str:
        assert self.ending.status == "finished", self.ending.causes
        return self.ending.final.weights_sha256

    @property
    def left(self) -> set[str]:
        """Objects left in the channel."""
        store = self.platform.store
        return set(getattr(store, "inner", store).objects)

    def of(self, kind: type) -> list[Any]:
        return [e for e in self.events if isinstance(e, kind)]


def make_job(**overrides: Any) -> Job:
    values: dict[str, Any] = {
        "name": "test",
        "model": Target(target="tiny:mlp"),
        "optimizer": Target(target="SGD", options={"lr": 0.1, "momentum": 0.9}),
        "data": DataSpec(),
        "epochs": 1,
        "code": (CODE,),
        "simulation": WORLD,
    }
    return Job(**{**values, **overrides})


def combined(options: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a run, with each of `more` in place of its own."""
    return nested(merged(options, more))


def configuration(**overrides: Any) -> Configuration:
    values: dict[str, Any] = {
        "platform": "simulated",
        "channel": "memory",
        "memory_mb": 1769,
        "function_timeout_s": 900.0,
        "aggregators": 2,
    }
    if overrides.get("pattern", "k-reduce") not in ("k-reduce", "pipelined", "parameter-server"):
        del values["aggregators"]
    if overrides.get("pattern") == "parameter-server":
        values["channel"] = "parameter_server"
    return Configuration(**{**values, **overrides}).resolved()


def simulate(
    prepared: Prepared,
    *,
    world: Simulation = WORLD,
    until: Callable[[RunDriver], Any] | None = None,
    decide: Callable[[float, str, str], Any] | None = None,
) -> Run:
    """Runs something that is prepared, in virtual time.

    Args:
        decide: from the time, an operation and its key to how this request fails; see `ephemeron.testing.flaky`.
    """
    events: list[Event] = []

    async def go() -> Run:
        platform = SimulatedPlatform(world, seed=prepared.spec.seed, limits=Limits())
        loop, store, most = asyncio.get_running_loop(), platform.store, 0
        publish = store.publish

        def counted(key: str, data: bytes) -> None:
            nonlocal most
            publish(key, data)
            most = max(most, len(store.objects))

        store.publish = counted
        if decide is not None:
            platform.store = FlakyChannel(store, lambda operation, key: decide(loop.time(), operation, key))
        trigger = RunDriver(
            platform, platform.store, prepared.spec, channel_address="memory", clock=asyncio.get_running_loop().time, on_event=events.append
        )
        await trigger.launch(prepared)
        if until is not None:
            until(trigger)
        ending = await trigger.watch()
        return Run(ending, trigger, platform, events, most)

    return simulation.run(go())


def synthetic(
    *,
    samples: int = 640,
    epochs: int = 2,
    elements: int = 64,
    faults: Sequence[str] = (),
    world: Simulation = WORLD,
    budget_usd: float | None = None,
    time_limit_s: float | None = None,
    until: Callable[[RunDriver], Any] | None = None,
    counting: bool = False,
    decide: Callable[[float, str, str], Any] | None = None,
    test_samples: int = 0,
    **overrides: Any,
) -> Run:
    """A run without a model: milliseconds. `counting`: its weights say how often each contribution was used."""
    spec = RunSpec(
        run_id="run",
        model=Target(target="none"),
        loss=Target(target="none"),
        optimizer=Target(target="none"),
        configuration=configuration(**overrides),
        epochs=epochs,
        seed=1,
        dtype="float32",
        samples=samples,
        prices=load_prices("objects"),
        faults=tuple(faults),
        trainer="counting" if counting else "synthetic",
        trainer_options={} if counting else {"elements": elements},
        cold_start_s=world.cold_start_s,
        budget_usd=budget_usd,
        time_limit_s=time_limit_s,
        test_samples=test_samples,
    )
    objects = {Keys("run").spec: [spec.to_bytes()]}
    return simulate(Prepared(job=make_job(), spec=spec, objects=objects, model_bytes=0), world=world, until=until, decide=decide)


def real(job: Job | None = None, *, faults: Sequence[Any] = (), **overrides: Any) -> Run:
    """A simulated run with real gradients."""
    job = job or make_job()
    prepared = prepare(
        job,
        configuration(**overrides),
        run_id="run",
        limits=Limits(),
        prices=load_prices("objects"),
        faults=faults,
        cold_start_s=job.simulation.cold_start_s,
    )
    return simulate(prepared, world=job.simulation)


def batch_indices(spec: RunSpec, iteration: int) -> np.ndarray:
    """The global batch of an iteration, in rank order, as indices into the training set."""
    order = assign(spec.samples, spec.split, spec.seed)
    if not spec.samples_globally:
        epoch, number = divmod(iteration, spec.split.iterations)
        return global_batch(spec.split, order, epoch, number, seed=spec.seed)
    parts = [spec.sampler(rank).batch(iteration) for rank in range(spec.configuration.workers)]
    return np.concatenate(order)[np.concatenate(parts)]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home folder."""
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


__all__ = ["JobLimits", "batch_indices", "configuration", "make_job", "real", "simulate", "synthetic"]
