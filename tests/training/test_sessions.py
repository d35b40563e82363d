"""Many runs in one process: common limits, warm functions and budget; what one run does leaves the others alone."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from training_runs import make_job

from ephemeron.config.paths import home as home_folder
from ephemeron.errors import JobError, PlanInfeasible, RunFailed, UserError
from ephemeron.events import Ended, Event, Invoked, Note, Progress, RunEnded, RunStarted, Started
from ephemeron.runs.folders import all_runs, events_of
from ephemeron.runs.verbs import attach, resume
from ephemeron.training.driver import Session, configure, train, train_async
from ephemeron.training.driver.places import Places
from ephemeron.training.driver.result import Result
from ephemeron.training.job import Target
from ephemeron.training.loggers import LoggedRun, Logger
from gates import Gate

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without pictures, which take a second each."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


SIMULATED = {"platform": "simulated", "workers": 2, "aggregators": 1, "batch_size": 24}


def small(seed: int = 0, **overrides: Any) -> Any:
    return make_job(name=f"seed-{seed}", seed=seed, **overrides)


def simulated(seed: int = 0, **overrides: Any) -> dict[str, Any]:
    job = small(seed, **overrides)
    return {"job": job, "configuration": configure(job, **SIMULATED)}


@cache
def alone(seed: int, epochs: int = 1) -> Result:
    """A run by itself, in virtual time."""
    return train(**simulated(seed, epochs=epochs))


def weights(seed: int, epochs: int = 1) -> str | None:
    return alone(seed, epochs).summary.weights_sha256


@pytest.mark.slow
def test_twenty_simulated_runs_share_eight_functions_and_train_as_if_alone() -> None:
    running, most, waits, cold = set(), 0, 0, 0

    def watch(run: int, event: Event) -> None:
        nonlocal most, waits, cold
        if isinstance(event, Invoked):
            running.add((run, event.invocation))
            most = max(most, len(running))
        elif isinstance(event, Ended):
            running.discard((run, event.invocation))
        elif isinstance(event, Started):
            cold += event.cold
        waits += isinstance(event, Note) and "waits for 2 places" in event.text

    async def main() -> list[Result]:
        async with Session(max_functions=8) as session:
            return await asyncio.gather(*(session.train(**simulated(i % 4), on_event=lambda e, i=i: watch(i, e)) for i in range(20)))

    results = asyncio.run(main())
    wanted = [weights(seed) for seed in range(4)]
    assert len(set(wanted)) == 4
    assert [each.summary.weights_sha256 for each in results] == wanted * 5
    assert (most, waits, cold) == (8, 16, 8)
    late = [e for e in events_of(results[-1].folder) if isinstance(e, RunStarted)]
    assert any("waited" in note for note in late[0].notes)


@pytest.mark.slow
def test_a_run_that_fails_leaves_the_others_alone() -> None:
    async def main() -> list[Result | BaseException]:
        async with Session() as session:
            bad = simulated(1, model=Target(target="tiny:nan_after", options={"passes": 9}))
            return await asyncio.gather(
                session.train(**simulated(0)),
                session.train(**bad),
                session.train("no such file.toml"),
                session.train(**bad, check=False),
                return_exceptions=True,
            )

    good, raised, refused, failed = asyncio.run(main())
    assert isinstance(good, Result)
    assert good.finished
    assert isinstance(raised, RunFailed)
    assert isinstance(refused, UserError)
    assert isinstance(failed, Result)
    assert failed.summary.status == "failed"
    assert good.summary.weights_sha256 == weights(0)


def test_a_cancelled_call_stops_its_run_at_a_checkpoint_and_no_other() -> None:
    async def main() -> tuple[list[Event], Result]:
        seen: list[Event] = []
        async with Session() as session:

            def on_event(event: Event) -> None:
                seen.append(event)
                if isinstance(event, Progress) and event.iteration == 1:
                    task.cancel()

            task = asyncio.create_task(session.train(**simulated(0, epochs=200), on_event=on_event))
            other = asyncio.create_task(session.train(**simulated(1)))
            with pytest.raises(asyncio.CancelledError):
                await task
            return seen, await other

    seen, other = asyncio.run(main())
    assert isinstance(seen[-1], RunEnded)
    assert seen[-1].status == "stopped"
    assert other.finished


def test_the_end_of_a_session_stops_what_runs_and_what_waits() -> None:
    async def main() -> list[Any]:
        begun = asyncio.Event()

        def on_event(event: Event) -> None:
            if isinstance(event, Progress):
                begun.set()

        async with Session(max_functions=2) as session:
            calls = [
                asyncio.create_task(session.train(**simulated(0, epochs=2000), on_event=on_event)),
                asyncio.create_task(session.train(**simulated(1))),
            ]
            await begun.wait()
        with pytest.raises(JobError, match="session has ended"):
            await session.train(**simulated(1))
        return await asyncio.gather(*calls, return_exceptions=True)

    stopped, waiting = asyncio.run(main())
    assert stopped.summary.status == "stopped"
    assert "was not begun: the session was stopped" in str(waiting)
    assert any("the session was stopped" in e.text for e in events_of(stopped.folder) if isinstance(e, Note))


@pytest.mark.slow
def test_a_session_stops_its_runs_where_its_budget_is_spent() -> None:
    cost = alone(0).summary.cost_usd

    async def main() -> tuple[list[Any], float]:
        async with Session(budget_usd=1.5 * cost, max_functions=4) as session:
            runs = await asyncio.gather(*(session.train(**simulated(seed, epochs=50)) for seed in range(3)), return_exceptions=True)
            with pytest.raises(PlanInfeasible, match=r"budget of .* is spent"):
                await session.train(**simulated(7))
            return runs, session.spent_usd

    (a, b, c), spent = asyncio.run(main())
    assert [a.summary.status, b.summary.status] == ["stopped", "stopped"]
    assert 0 < a.summary.iterations < 50 * alone(0).summary.iterations
    assert "was not begun: the session's budget" in str(c)
    assert 1.5 * cost <= spent < 4 * cost
    assert spent == pytest.approx(a.summary.cost_usd + b.summary.cost_usd)


def test_more_functions_than_there_are_places_are_refused() -> None:
    async def main() -> None:
        async with Session(max_functions=1) as session:
            with pytest.raises(PlanInfeasible, match="needs 2 functions at once, and all runs together may have 1"):
                await session.train(**simulated())

    asyncio.run(main())


def test_simulated_and_real_runs_do_not_mix() -> None:
    async def main() -> None:
        async with Session() as session:
            await session.train(**simulated())
            with pytest.raises(JobError, match="simulated runs or real ones"):
                await session.train(small(), platform="local", workers=1)

    asyncio.run(main())


class _Memory(Logger):
    name = "memory"

    def start(self, run: LoggedRun) -> str:
        self.run = run.run_id
        self.steps: list[int] = []
        return run.run_id

    def log_params(self, params: Any) -> None: ...

    def log_metrics(self, metrics: Any, step: int) -> None:
        self.steps.append(step)

    def finish(self, status: Any) -> None: ...


def test_loggers_of_runs_do_not_mix_and_one_logger_is_not_of_two_runs() -> None:
    shared, own = _Memory(), [_Memory(), _Memory()]

    async def main() -> list[Any]:
        async with Session() as session:
            return await asyncio.gather(
                *(session.train(**simulated(i), loggers=[own[i]]) for i in range(2)),
                *(session.train(**simulated(i), loggers=[shared]) for i in range(2)),
                return_exceptions=True,
            )

    *good, one, other = asyncio.run(main())
    assert [logger.run for logger in own] == [each.summary.run_id for each in good]
    assert own[0].steps == own[1].steps != []
    assert {type(one), type(other)} == {Result, JobError}


def test_train_async_leaves_the_loop_free_and_ends_as_train_does() -> None:
    async def main() -> tuple[Result, int]:
        turns = 0
        task = asyncio.create_task(train_async(**simulated(3)))
        while not task.done():
            turns += 1
            await asyncio.sleep(0.001)
        return task.result(), turns

    result, turns = asyncio.run(main())
    assert turns > 10
    assert result.summary.weights_sha256 == weights(3)


def test_places_are_given_in_the_order_of_asking() -> None:
    async def main() -> list[str]:
        places, log = Places(3), []

        async def run(name: str, count: int) -> None:
            async with places.taken(count, lambda text: log.append(f"{name} waits")):
                log.append(name)
                await asyncio.sleep(0)
                await asyncio.sleep(0)

        async def give_up() -> None:
            async with asyncio.timeout(0), places.taken(3, lambda text: None):
                log.append("never")

        await asyncio.gather(run("a", 2), run("b", 3), run("c", 1), give_up(), run("d", 1), return_exceptions=True)
        assert places.used == 0
        return log

    assert asyncio.run(main()) == ["a", "b waits", "c waits", "d waits", "b", "c", "d"]


LOCAL = {"platform": "local", "workers": 2, "aggregators": 1, "batch_size": 24, "memory_mb": 512}


def local(seed: int = 0, **overrides: Any) -> dict[str, Any]:
    job = small(seed, **overrides)
    return {"job": job, "configuration": configure(job, **LOCAL)}


@pytest.mark.slow
def test_three_local_runs_share_warm_processes_and_train_as_if_alone() -> None:
    cold: list[bool] = []

    def on_event(event: Event) -> None:
        if isinstance(event, Started):
            cold.append(event.cold)

    async def main() -> list[Result]:
        async with Session(max_functions=4) as session:
            return await asyncio.gather(*(session.train(**local(seed), on_event=on_event) for seed in range(3)))

    results = asyncio.run(main())
    assert cold.count(True) == 4  # those of the third run are warm
    assert cold.count(False) == 2
    for seed, result in enumerate(results):
        assert result.summary.weights_sha256 == weights(seed)
        assert not (result.folder.path / "host.json").exists()
    assert not list((home_folder() / "sessions").iterdir())


@pytest.mark.slow
def test_tokens_of_runs_that_run_at_once_do_not_mix() -> None:
    """Each has a parameter server of its own, which adds up its gradients."""

    def through_a_server(seed: int) -> dict[str, Any]:
        job = small(seed)
        return {"job": job, "configuration": configure(job, **LOCAL, pattern="parameter-server")}

    async def main() -> list[Result]:
        async with Session() as session:
            return await asyncio.gather(*(session.train(**through_a_server(seed)) for seed in range(2)))

    results = asyncio.run(main())
    tokens = {json.loads((result.folder.path / "server.json").read_text())["token"] for result in results}
    assert len(tokens) == 2
    assert [result.summary.weights_sha256 for result in results] == [weights(seed) for seed in range(2)]
    assert "EPHEMERON_CHANNEL_TOKEN" not in os.environ


@pytest.mark.slow
def test_a_cancelled_local_run_is_resumed_alone(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")

    async def main() -> tuple[str, Result]:
        ids: list[str] = []
        async with Session() as session:

            def on_event(event: Event) -> None:
                if isinstance(event, RunStarted):
                    ids.append(event.run_id)
                if isinstance(event, Progress) and event.iteration == 3:
                    task.cancel()
                    gate.open(0.5)  # a rank stops between two iterations

            held = local(0, epochs=3, model=gate.model(8))
            task = asyncio.create_task(session.train(**held, on_event=on_event))
            other = asyncio.create_task(session.train(**local(1)))
            with pytest.raises(asyncio.CancelledError):
                await task
            return ids[0], await other

    stopped, other = asyncio.run(main())
    assert other.finished
    gate.open()
    result = resume(stopped)
    assert result.finished
    assert result.summary.weights_sha256 == weights(0, 3)


CLIENT = """
import asyncio, sys
from pathlib import Path
from gates import Gate
from test_sessions import local
from ephemeron.training.driver import Session
from ephemeron.events import Progress

async def main():
    begun = set()
    def on_event(run, event):
        if isinstance(event, Progress) and event.iteration == 2:
            begun.add(run)
            if len(begun) == 2:
                print("begun", flush=True)
    async with Session() as session:
        model = Gate(Path(sys.argv[1])).model(6)
        await asyncio.gather(*(
            session.train(**local(i, epochs=3, model=model), on_event=lambda e, i=i: on_event(i, e)) for i in range(2)
        ))

asyncio.run(main())
"""


@pytest.mark.slow
def test_runs_of_a_session_outlive_its_client(tmp_path: Path) -> None:
    here, gate = Path(__file__).parent, Gate(tmp_path / "gate")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(here), str(here.parent)))}
    command = [sys.executable, "-c", CLIENT, str(gate.file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "begun\n"
        client.kill()
    gate.open()
    for folder in all_runs():
        result = attach(folder.run_id)
        seed = int(folder.run_id.split("-")[1])
        assert result.summary.weights_sha256 == weights(seed, 3)
