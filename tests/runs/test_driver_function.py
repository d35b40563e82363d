"""Functions that drive a run, in virtual time: one drives at a time, whoever dies, and their number is bounded."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import pytest

from ephemeron.communication.channels import MemoryChannel
from ephemeron.communication.signing import SigningKey
from ephemeron.config.typed import plain
from ephemeron.errors import ChannelEmptied, SignatureRefused
from ephemeron.functions import simulation
from ephemeron.functions.base import Call, Outcome
from ephemeron.functions.context import Context
from ephemeron.functions.simulated import SimulatedPlatform
from ephemeron.functions.world import Simulation
from ephemeron.runs import driver_function
from ephemeron.runs.driver_function import (
    STEP_ASIDE,
    Drive,
    DriverRecords,
    DriverRequest,
    DriverResult,
    DriverSlot,
    SignsOfLife,
    driver_call,
    name_of,
    prefix_of,
)
from ephemeron.runs.folder_copies import Copying, FolderCopy, TermOver
from ephemeron.runs.folders import RunFolder
from ephemeron.runs.function_set import MOST_LOSSES
from random_schedules import seeds

RUN = "a-run"
LAUNCH = prefix_of(RUN, "first")
LIFETIME_S = 100.0


class Work:
    """What is to be driven: it takes so many seconds of driving, and knows who drives."""

    def __init__(self, seconds: float, *, statuses: Mapping[int, int] | None = None) -> None:
        self.left_s, self.statuses = seconds, statuses or {}
        self.driving: set[int] = set()
        """Terms that are driven."""
        self.terms: list[int] = []
        self.latest = 0
        self.asked: list[str] = []
        self.unheard = self.deaf = 0
        """Requests to stop that come before it can be told, and that it does not heed."""
        self.telling_s = 0.0
        """Time that telling it takes."""


class Pretended(Drive):
    """Drives work, second by second."""

    def __init__(self, work: Work) -> None:
        self.work, self.task, self.term = work, None, 0  # type: ignore[var-annotated]

    async def start(self, term: int) -> None:
        self.term = term
        self.work.terms.append(term)
        self.work.latest = max(self.work.latest, term)
        self.task = asyncio.ensure_future(self._run())

    async def _run(self) -> int:
        work = self.work
        if (status := work.statuses.get(self.term, work.statuses.get(0, 0))) != 0:
            await asyncio.sleep(0.5)
            return status
        work.driving.add(self.term)
        try:
            while work.left_s > 0:
                await asyncio.sleep(1.0)
                if self.term == work.latest:
                    work.left_s -= 1.0
            return 0
        finally:
            work.driving.discard(self.term)

    async def wait(self) -> int:
        assert self.task is not None
        try:
            return int(await self.task)
        except asyncio.CancelledError:
            return -9

    async def kill(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait([self.task])

    async def stop_run(self, asked: str) -> bool:
        self.work.asked.append(asked)
        await asyncio.sleep(self.work.telling_s)
        if len(self.work.asked) > self.work.deaf:
            self.work.left_s = 0.0
        return len(self.work.asked) > self.work.unheard


def world(work: Work) -> SimulatedPlatform:
    async def run(ctx: Context, request: DriverRequest) -> DriverResult:
        records = DriverRecords(ctx.channel, ctx.call.run, name=name_of(ctx.call.rank, ctx.call.attempt))
        if not await records.create(f"start/{ctx.call.rank}.{ctx.call.attempt}", ctx.invocation):
            return DriverResult(outcome="duplicate")
        await records.forget(ctx.call.rank, before=ctx.call.attempt, term=(await records.look()).term)
        slot = DriverSlot(ctx, request, records, Pretended(work))
        outcome = await slot.run()
        return DriverResult(outcome=outcome, terms=slot.terms, error=slot.error)

    platform = SimulatedPlatform(Simulation())
    platform.entries = {**platform.entries, "driver": run}
    return platform


async def started(platform: SimulatedPlatform, *, lifetime_s: float = LIFETIME_S) -> DriverRecords:
    records = DriverRecords(platform.store, LAUNCH, name="client")
    call = Call(run=LAUNCH, rank=0, attempt=0, memory_mb=512, lifetime_s=lifetime_s, channel="memory")
    for slot in range(2):
        await records.create(f"claim/{slot}.0")
    for slot in range(2):
        await platform.invoke(driver_call(call, slot, DriverRequest(run=RUN)))
    return records


async def ended(platform: SimulatedPlatform, limit_s: float = 3600.0) -> float:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(limit_s):
        while platform._running:  # noqa: ASYNC110 - functions come and go
            await asyncio.sleep(0.5)
    return loop.time()


def simulated(body: Callable[[], Awaitable[None]]) -> None:
    simulation.run(body())  # type: ignore[arg-type]


def outcomes(platform: SimulatedPlatform) -> list[str]:
    return [event.outcome or event.status for event in platform._events if event.kind == "ended"]  # type: ignore[attr-defined]


def test_one_function_drives_while_the_other_waits() -> None:
    async def body() -> None:
        work = Work(30.0)
        platform = world(work)
        await started(platform)
        await ended(platform)
        assert (work.left_s, work.terms) == (0.0, [1])
        assert outcomes(platform) == ["finished", "finished"]

    simulated(body)


def test_time_limits_are_passed_without_a_gap_and_without_two_drivers() -> None:
    async def body() -> None:
        work = Work(400.0)
        platform = world(work)
        records = await started(platform)
        took_s = await ended(platform)
        assert work.left_s == 0.0
        assert work.terms == sorted(set(work.terms)), "no term has two drivers"
        assert len(work.terms) >= 4
        assert took_s < 400.0 + 5.0 * len(work.terms), "a term begins within seconds of the one before"
        assert set(outcomes(platform)) == {"relayed", "finished"}
        assert len(await platform.store.list(f"{LAUNCH}/")) < 30, "records of functions that are gone are deleted"
        assert (await records.look()).is_over

    simulated(body)


@pytest.mark.parametrize("seed", seeds(range(600), 12))
def test_whoever_dies_the_run_is_driven_to_its_end_by_one_function_at_a_time(seed: int) -> None:
    async def body() -> None:
        rng, work = random.Random(seed), Work(300.0)
        platform = world(work)
        await started(platform)
        deaths = rng.randrange(1, 7)
        for _ in range(deaths):
            await asyncio.sleep(rng.uniform(0.0, 60.0))
            alive = list(platform._running.values())
            if len(alive) == 2:  # of two that die within moments nobody is left: a client goes on
                rng.choice(alive)._kill(Outcome(status="lost", error="killed"))
        await ended(platform)
        assert work.left_s == 0.0
        assert work.terms == sorted(set(work.terms)), "no term has two drivers"
        assert outcomes(platform).count("lost") <= deaths
        assert len(outcomes(platform)) <= 2 + deaths + 2 * (600 / LIFETIME_S + 1), "each death costs one function more"

    simulated(body)


def test_a_driver_that_was_taken_for_dead_stops_when_it_sees_the_next_term() -> None:
    async def body() -> None:
        work = Work(60.0)
        platform = world(work)
        records = await started(platform)
        await asyncio.sleep(5.0)
        assert await records.take(2), "somebody else drives from here on"
        work.latest = 2
        await asyncio.sleep(3.0)
        assert work.driving == set(), "the function has ended what drove for it"
        await records.create("end")
        await ended(platform)

    simulated(body)


def test_a_driver_that_fails_again_and_again_is_given_up() -> None:
    async def body() -> None:
        work = Work(60.0, statuses={0: 1})
        platform = world(work)
        records = await started(platform)
        await ended(platform)
        assert "failed" in outcomes(platform)
        assert len(outcomes(platform)) == 2
        assert (await records.error()).startswith(f"its driver has ended {MOST_LOSSES + 1} times"), "a client says why"
        errors = [e for e in platform._events if e.kind == "ended" and e.outcome == "failed"]  # type: ignore[attr-defined]
        assert len(errors) == 1
        assert len(work.terms) == MOST_LOSSES + 1

    simulated(body)


def test_one_whose_term_is_over_steps_aside_and_lives_on() -> None:
    async def body() -> None:
        work = Work(20.0, statuses={1: STEP_ASIDE})
        platform = world(work)
        await started(platform)
        await ended(platform)
        assert work.left_s == 0.0
        assert work.terms[:2] == [1, 2]

    simulated(body)


@pytest.mark.parametrize("asked", ["stop", "now"])
def test_a_request_to_stop_reaches_the_run_once(asked: str) -> None:
    async def body() -> None:
        work = Work(1000.0)
        platform = world(work)
        records = await started(platform)
        await asyncio.sleep(10.0)
        await records.create(f"asked/{asked}")
        await ended(platform)
        assert work.asked == [asked]

    simulated(body)


@pytest.mark.parametrize(("unheard", "deaf"), [(3, 3), (0, 2)], ids=["before it drives", "while it begins"])
def test_a_request_to_stop_is_passed_on_until_the_run_stops(unheard: int, deaf: int) -> None:
    async def body() -> None:
        work = Work(1000.0)
        work.unheard, work.deaf = unheard, deaf
        platform = world(work)
        records = await started(platform)
        await asyncio.sleep(10.0)
        await records.create("asked/stop")
        took_s = await ended(platform)
        assert work.asked == ["stop"] * (deaf + 1)
        assert took_s < 60.0

    simulated(body)


def test_a_driver_that_tells_the_run_to_stop_is_not_taken_for_dead() -> None:
    async def body() -> None:
        work = Work(1000.0)
        work.telling_s = 30.0
        platform = world(work)
        records = await started(platform)
        await asyncio.sleep(10.0)
        await records.create("asked/stop")
        await ended(platform)
        assert work.terms == [1]
        assert work.asked == ["stop"]

    simulated(body)


def test_functions_of_an_earlier_launch_change_nothing_of_a_later_one() -> None:
    async def body() -> None:
        work = Work(30.0)
        platform = world(work)
        records = await started(platform)
        earlier = DriverRecords(platform.store, prefix_of(RUN, "zero"), name="0-0")
        await earlier.create("end")
        await earlier.create("claim/0.7")
        await earlier.beat()
        assert not (await records.look()).is_over
        await ended(platform)
        assert (work.left_s, work.terms) == (0.0, [1])

    simulated(body)


def test_a_call_that_is_delivered_twice_drives_once() -> None:
    async def body() -> None:
        work = Work(20.0)
        platform = world(work)
        records = DriverRecords(platform.store, LAUNCH, name="client")
        call = Call(run=LAUNCH, rank=0, attempt=0, memory_mb=512, lifetime_s=LIFETIME_S, channel="memory", duplicate=True)
        for slot in range(2):
            await records.create(f"claim/{slot}.0")
        for slot in range(2):
            await platform.invoke(dataclasses.replace(driver_call(call, slot, DriverRequest(run=RUN)), duplicate=True))
        await ended(platform)
        assert sorted(outcomes(platform)) == ["duplicate", "duplicate", "finished", "finished"]
        assert work.terms == [1]

    simulated(body)


def test_signs_of_life_need_no_common_clock() -> None:
    signs = SignsOfLife(silent_s=5.0, start_s=20.0)
    assert signs.is_alive("0-0", 0.0)
    assert signs.is_alive("0-0", 19.0), "it may still be starting"
    signs.see({"0-0": 7}, 19.0)
    assert signs.is_alive("0-0", 23.9)
    signs.see({"0-0": 7}, 24.5)
    assert not signs.is_alive("0-0", 24.5)
    signs.see({"0-0": 8}, 25.0)
    assert signs.is_alive("0-0", 25.0), "it was slow"


# -- copies of folders ----------------------------------------------------------------------------------------


def folder_in(path: Path, **files: str) -> RunFolder:
    path.mkdir(parents=True)
    for name, text in files.items():
        (path / name.replace("_", ".")).write_text(text)
    return RunFolder(path)


def copied(body: Callable[[MemoryChannel, SigningKey], Awaitable[None]]) -> None:
    asyncio.run(body(MemoryChannel(), SigningKey.new()))  # type: ignore[arg-type]


def test_a_folder_is_copied_without_its_key_and_what_is_appended_is_sent_once(tmp_path: Path) -> None:
    async def body(channel: MemoryChannel, key: SigningKey) -> None:
        folder = folder_in(tmp_path / "a" / RUN, run_json="{}", signing_key="secret", events_jsonl="one\n", driver_lock="")
        (folder.path / "objects").mkdir()
        (folder.path / "objects" / "large").write_text("stays")
        (folder.path / "logs").mkdir()
        (folder.path / "logs" / "0.txt").write_text("said\n")
        copy = FolderCopy(channel, LAUNCH, folder, key, 1)
        await copy.save()
        with folder.events.open("a") as events:
            events.write("two\n")
        (folder.path / "result.json").write_text('{"status": "finished"}')
        await copy.save()
        there = RunFolder(tmp_path / "b" / RUN)
        there.path.mkdir(parents=True)
        assert await FolderCopy(channel, LAUNCH, there, key, 2).restore() == 1
        found = {p.relative_to(there.path).as_posix(): p.read_text() for p in there.path.rglob("*") if p.is_file()}
        assert found == {"run.json": "{}", "events.jsonl": "one\ntwo\n", "logs/0.txt": "said\n", "result.json": '{"status": "finished"}'}
        sizes = [len(await channel.fetch(k) or b"") for k in await channel.list(f"{LAUNCH}/files/") if "events" in k]
        assert len(sizes) == 2

    copied(body)


def test_a_driver_whose_term_is_over_is_told_so_and_its_files_are_not_read(tmp_path: Path) -> None:
    async def body(channel: MemoryChannel, key: SigningKey) -> None:
        old = folder_in(tmp_path / "old" / RUN, events_jsonl="one\n")
        first = FolderCopy(channel, LAUNCH, old, key, 1)
        await first.save()
        new = RunFolder(tmp_path / "new" / RUN)
        new.path.mkdir(parents=True)
        assert await DriverRecords(channel, LAUNCH, name="next").take(2)
        second = FolderCopy(channel, LAUNCH, new, key, 2)
        await second.restore()
        await second.save()
        with old.events.open("a") as events:
            events.write("late\n")
        with pytest.raises(TermOver):
            await first.save()
        third = RunFolder(tmp_path / "third" / RUN)
        third.path.mkdir(parents=True)
        await FolderCopy(channel, LAUNCH, third, key, 3).restore()
        assert third.events.read_text() == "one\n"

    copied(body)


def test_a_copy_is_not_complete_before_everything_is_saved(tmp_path: Path) -> None:
    async def body(channel: MemoryChannel, key: SigningKey) -> None:
        folder = folder_in(tmp_path / RUN, run_json="{}")
        copy = FolderCopy(channel, LAUNCH, folder, key, 1)
        await copy._put("run.json", -1, b"{}", (2, 0))
        with pytest.raises(ChannelEmptied, match="no copy"):
            await copy.restore()

    copied(body)


def test_what_somebody_else_has_put_into_a_copy_is_refused_and_no_file_is_written_elsewhere(tmp_path: Path) -> None:
    async def body(channel: MemoryChannel, key: SigningKey) -> None:
        folder = folder_in(tmp_path / "a" / RUN, run_json="{}")
        await FolderCopy(channel, LAUNCH, folder, key, 1).save()
        there = RunFolder(tmp_path / "b" / RUN)
        there.path.mkdir(parents=True)
        with pytest.raises(SignatureRefused):
            await FolderCopy(channel, LAUNCH, there, SigningKey.new(), 2).restore()
        await FolderCopy(channel, LAUNCH, folder, key, 1)._put("../../escaped.json", -1, b"x", (1, 0))
        await FolderCopy(channel, LAUNCH, there, key, 2).restore()
        assert not (tmp_path / "escaped.json").exists()

    copied(body)


def test_any_name_of_a_file_is_copied_and_its_folder_may_be_a_link(tmp_path: Path) -> None:
    async def body(channel: MemoryChannel, key: SigningKey) -> None:
        folder = folder_in(tmp_path / "a" / RUN, events_jsonl="one\n")
        for name in ("mail@000000000004", "whole", "complete", "two words", "größe.txt"):
            (folder.path / name).write_text(name)
        await FolderCopy(channel, LAUNCH, folder, key, 1).save()
        (tmp_path / "elsewhere" / RUN).mkdir(parents=True)
        (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
        there = RunFolder(tmp_path / "link" / RUN)
        await FolderCopy(channel, LAUNCH, there, key, 2).restore()
        found = {p.name: p.read_text() for p in there.path.iterdir()}
        assert found == {p.name: p.read_text() for p in folder.path.iterdir()}
        assert len(found) == 6

    copied(body)


def test_the_copy_of_a_later_term_takes_the_place_of_what_was_read_from_an_earlier_one(tmp_path: Path) -> None:
    async def body(channel: MemoryChannel, key: SigningKey) -> None:
        first = folder_in(tmp_path / "first" / RUN, events_jsonl="one\n")
        earlier = FolderCopy(channel, LAUNCH, first, key, 1)
        await earlier.save()
        second = RunFolder(tmp_path / "second" / RUN)
        second.path.mkdir(parents=True)
        later = FolderCopy(channel, LAUNCH, second, key, 2)
        await later.restore()
        with first.events.open("a") as events:
            events.write("lost with its driver\n" * 100_000)
        await earlier.save()
        client = RunFolder(tmp_path / "client" / RUN)
        client.path.mkdir(parents=True)
        reading = FolderCopy(channel, LAUNCH, client, key, 0)
        assert await reading.restore() == 1
        assert client.events.stat().st_size > 2_000_000, "all of what was appended is in the copy"
        await later.save()
        with second.events.open("a") as events:
            events.write("two\n")
        await later.save()
        assert await reading.restore() == 2
        assert client.events.read_text() == "one\ntwo\n"

    copied(body)


def test_requests_of_the_copy_are_in_the_bill_of_the_function(tmp_path: Path) -> None:
    folder, key, address = folder_in(tmp_path / RUN, run_json="{}"), SigningKey.new(), (tmp_path / "objects").as_uri()
    counts = tmp_path / "scratch"
    counts.mkdir()
    with Copying(address, LAUNCH, folder, key, 1, requests=counts).running(restored=False, term_over=lambda: None):
        (folder.path / "result.json").write_text("{}")
    assert driver_function._traffic_of_copies(counts).puts == 3, "two files, and that the copy is complete"


def test_the_request_is_plain_json() -> None:
    assert plain(DriverRequest(run=RUN))["run"] == RUN
