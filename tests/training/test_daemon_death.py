"""The client's waits end: the process that owns the local functions is killed, frozen or told to end, really."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from training_runs import make_job

from ephemeron.communication.channels import open_channel
from ephemeron.communication.keys import Keys
from ephemeron.errors import PlatformError
from ephemeron.events import Ended, Event, Invoked, Note, Progress
from ephemeron.functions import local
from ephemeron.functions.cgroups import detect
from ephemeron.functions.local import LocalPlatform
from ephemeron.prices import load_prices
from ephemeron.testing.training_world import PEER_TIMEOUT_S
from ephemeron.training.driver.launching.prepare import Prepared
from ephemeron.training.driver.run_driver import RunDriver, RunOutcome
from ephemeron.training.job import Configuration, Target
from ephemeron.training.worker.spec import RunSpec

LIGHT = {"EPHEMERON_PRELOAD": "ephemeron.training.worker.loop"}
"""Functions without PyTorch: they train synthetic weights."""
LIMIT_S = 240.0
"""Of a run; what waits for ever fails the test."""

Watch = Callable[[Event, LocalPlatform], None]


@dataclass
class Run:
    """A local run that has ended."""

    ending: RunOutcome
    platform: LocalPlatform
    folder: Path
    events: list[Event] = field(default_factory=list)

    @property
    def sha(self) -> str:
        assert self.ending.status == "finished", self.ending.causes
        assert self.ending.final is not None
        return str(self.ending.final.weights_sha256)

    def of(self, kind: type) -> list[Any]:
        return [e for e in self.events if isinstance(e, kind)]


def go(folder: Path, watch: Watch = lambda event, platform: None, **options: Any) -> Run:
    """Two functions that train synthetic weights for 48 iterations."""
    folder.mkdir(parents=True)
    channel_folder = folder / "objects"
    configuration = Configuration(
        platform="local",
        channel=channel_folder.as_uri(),
        workers=2,
        aggregators=1,
        memory_mb=1769,
        function_timeout_s=600.0,
        batch_size=8,
        checkpoint_every=5,
    ).resolved()
    spec = RunSpec(
        run_id=folder.name,
        model=Target(target="none"),
        loss=Target(target="none"),
        optimizer=Target(target="none"),
        configuration=configuration,
        epochs=6,
        seed=1,
        dtype="float32",
        samples=128,
        prices=load_prices("objects"),
        trainer="synthetic",
        trainer_options={"elements": 64},
        cold_start_s=0.2,
        peer_timeout_s=PEER_TIMEOUT_S,
        faults=("delay:rank=0,factor=1,seconds=0.1",),  # what happens in the middle of the run comes before its end
    )
    prepared = Prepared(job=make_job(), spec=spec, objects={Keys(spec.run_id).spec: [spec.to_bytes()]}, model_bytes=0)

    async def main() -> Run:
        events: list[Event] = []
        async with open_channel(configuration.channel) as channel:
            platform = await LocalPlatform.start(folder, env=LIGHT, restart=True, **options)

            def on_event(event: Event) -> None:
                events.append(event)
                watch(event, platform)

            trigger = RunDriver(platform, channel, spec, channel_address=configuration.channel, clock=time.time, on_event=on_event)
            try:
                await trigger.launch(prepared)
                ending = await trigger.watch()
            finally:
                await platform.shutdown()
        return Run(ending, platform, folder, events)

    return asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def at(iteration: int, *acts: Callable[[LocalPlatform], None]) -> Watch:
    """Acts once rank 0 has finished an iteration, and again 20 iterations later."""
    done: list[int] = []

    def watch(event: Event, platform: LocalPlatform) -> None:
        due = isinstance(event, Progress) and event.rank == 0 and event.iteration >= iteration + 20 * len(done)
        if due and len(done) < len(acts):
            done.append(platform.host_pid)
            acts[len(done) - 1](platform)

    return watch


def signalled(number: signal.Signals) -> Callable[[LocalPlatform], None]:
    return lambda platform: os.kill(platform.host_pid, number)


def nothing_left(folder: Path) -> None:
    """No process, no scratch folder, no socket, no address of this run."""
    assert not (folder / "scratch").exists()
    assert not (folder / "host.json").exists()
    wait_until(lambda: not processes_of(folder))  # one that has given its lock back still has to end


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def processes_of(folder: Path) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.Error):
            command = process.info["cmdline"] or []
            function = "ephemeron.functions.function_main" in command
            if str(folder) in " ".join(command) or (function and process.environ()["HOME"].startswith(str(folder))):
                found.append(process.pid)
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return go(tmp_path_factory.mktemp("runs") / "run").sha


@pytest.mark.slow
def test_the_daemon_is_killed_then_frozen_and_the_weights_are_the_same(
    tmp_path: Path, undisturbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_ASK_EVERY_S", 0.1)
    monkeypatch.setattr(local, "_SILENT_S", 5.0)  # on a busy machine a daemon may be silent for some seconds
    sockets: list[Path] = []

    def send(number: signal.Signals) -> Callable[[LocalPlatform], None]:
        def act(platform: LocalPlatform) -> None:
            sockets.append(Path(json.loads((platform.run_dir / "host.json").read_text())["socket"]).parent)
            os.kill(platform.host_pid, number)

        return act

    run = go(tmp_path / "run", at(8, send(signal.SIGKILL), send(signal.SIGSTOP)))
    assert run.sha == undisturbed
    assert len(set(sockets)) == 2
    lost = [e for e in run.of(Ended) if e.status == "lost"]
    assert len(run.of(Invoked)) == 2 + len(lost)
    assert 2 <= len(lost) <= 4
    assert all(e.gb_seconds > 0 for e in lost), "what a function did before its daemon died is billed"
    assert [e.level for e in run.of(Note) if "was killed" in e.text] == ["warning", "warning"]
    nothing_left(run.folder)
    assert not any(path.exists() for path in sockets)
    assert not [p for parent in detect().parents for p in parent.glob(f"ephemeron-{run.platform.host_pid}-*")]


@pytest.mark.slow
def test_the_fork_server_and_its_functions_are_killed_and_the_weights_are_the_same(tmp_path: Path, undisturbed: str) -> None:
    killed: list[int] = []
    tasks: list[asyncio.Future[None]] = []

    async def kill(platform: LocalPlatform) -> None:
        status = await platform.status()
        (server,) = status.fork_servers
        for pid in (server, *status.running.values()):
            with contextlib.suppress(ProcessLookupError):  # functions may end meanwhile
                os.kill(pid, signal.SIGKILL)
        killed.append(server)

    def act(platform: LocalPlatform) -> None:
        tasks.append(asyncio.ensure_future(kill(platform)))

    run = go(tmp_path / "run", at(8, act, act))
    assert run.sha == undisturbed
    assert len(set(killed)) == 2
    lost = [e for e in run.of(Ended) if e.status == "lost"]
    assert 2 <= len(lost) <= 4
    assert {e.error for e in lost} == {"killed by SIGKILL"}
    nothing_left(run.folder)


def test_a_daemon_that_is_told_to_end_stops_the_run(tmp_path: Path) -> None:
    run = go(tmp_path / "run", at(8, signalled(signal.SIGTERM)))
    assert run.ending.status == "stopped"
    nothing_left(run.folder)


def test_a_host_that_is_ending_already_is_shut_down(tmp_path: Path) -> None:
    async def main() -> None:
        platform = await LocalPlatform.start(tmp_path / "run", env=LIGHT)
        async with await LocalPlatform.attach(tmp_path / "run") as other:
            host = platform.host_pid
            psutil.Process(host).suspend()
            asks = [asyncio.ensure_future(p.shutdown()) for p in (platform, other)]
            psutil.Process(host).resume()
            await asyncio.gather(*asks)

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    nothing_left(tmp_path / "run")


@pytest.mark.slow
def test_functions_killed_by_another_client_stop_the_run(tmp_path: Path) -> None:
    tasks = []

    async def cancel(folder: Path) -> None:
        async with await LocalPlatform.attach(folder) as other:
            await other.cancel_all("run")

    run = go(tmp_path / "run", at(8, lambda p: tasks.append(asyncio.ensure_future(cancel(p.run_dir)))))
    assert run.ending.status == "stopped"
    assert len(run.of(Invoked)) == 2


@pytest.mark.slow
def test_where_no_daemon_can_be_started_the_client_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(platform: LocalPlatform) -> None:
        monkeypatch.setattr("sys.executable", "/bin/false")
        os.kill(platform.host_pid, signal.SIGKILL)

    run = go(tmp_path / "run", at(8, kill))
    assert run.ending.status == "failed"
    (cause,) = run.ending.causes
    assert "host.log" in cause
    assert "ephemeron resume run" in cause
    nothing_left(run.folder)


def test_what_dead_daemons_of_earlier_runs_left_is_swept(tmp_path: Path) -> None:
    runs = tmp_path / "runs"

    async def killed() -> Path:
        platform = await LocalPlatform.start(runs / "old", env=LIGHT)
        (runs / "old" / "scratch" / "x").mkdir(parents=True)
        private = Path(json.loads((runs / "old" / "host.json").read_text())["socket"]).parent
        living = await LocalPlatform.start(runs / "living", env=LIGHT)
        (runs / "living" / "scratch" / "x").mkdir(parents=True)
        os.kill(platform.host_pid, signal.SIGKILL)
        await platform.close()
        await asyncio.to_thread(wait_until, lambda: not local.is_hosted(runs / "old"))
        try:
            local.sweep(runs)
            assert (runs / "living" / "scratch" / "x").exists()
        finally:
            await living.shutdown()
        return private

    private = asyncio.run(asyncio.wait_for(killed(), LIMIT_S))
    nothing_left(runs / "old")
    assert not private.exists()
    shutil.rmtree(runs)
    local.sweep(runs)  # no runs yet


def test_a_wait_for_events_ends_when_the_daemon_is_gone(tmp_path: Path) -> None:
    async def main() -> None:
        platform = await LocalPlatform.start(tmp_path / "run", env=LIGHT)
        os.kill(platform.host_pid, signal.SIGKILL)
        with pytest.raises(PlatformError, match="is gone"):
            async for _ in platform.events("run"):
                pass
        await platform.close()

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))
