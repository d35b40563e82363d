"""Every sentence of `Platform`'s contract, as a test.

    class TestMyPlatform(PlatformContract):
        @asynccontextmanager
        async def open(self, limits: Limits) -> AsyncIterator[Platform]:
            yield MyPlatform(variables={"EPHEMERON_ENTRIES": platform_entries.declaration()}, limits=limits)

The platform is deployed with the entries of `ephemeron.testing.platform_entries`. No test asserts a duration beyond the bill
itself, and nothing sleeps until something has probably happened. A platform with a clock of its own overrides `loop`.

`PlatformConnectionContract` is the part of it that a variant needs (other instances, another enforcement of limits) of a platform
that passes the whole; what the variant does differently besides is taken from the whole, test by test:
`test_x = PlatformContract.test_x`.

Tests that a platform cannot run are skipped with its reason in `cannot`; faults of its provider
(throttling, delivering a call twice) is shown where the test class knows how to make the provider do so.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar, TypeAlias

import pytest

from ephemeron.config.typed import build
from ephemeron.errors import InvocationRefused
from ephemeron.events import Ended, Event, Invoked, Note
from ephemeron.functions import entries
from ephemeron.functions.base import Call, Limits, Outcome, Platform
from ephemeron.testing import platform_entries
from ephemeron.testing.platform_entries import TimedResult

_Scenario: TypeAlias = Callable[[Platform, str], Coroutine[Any, Any, None]]


class PlatformConnectionContract:
    """Connection part of the contract: that calls arrive, return, fail, die and are cancelled, and their events come in order."""

    limits = Limits(memory_max_mb=2048, lifetime_s=60.0, concurrency=4)
    """Limits of the platform under test."""
    memory_mb = 256
    """Quota of most calls."""
    channel = "folder"
    """Address given to functions."""
    test_timeout_s: float = 300.0
    """A test that takes longer has hung."""
    cannot: ClassVar[Mapping[str, str]] = {}
    """Cases that the platform cannot show, and why: `memory` (a quota that kills), `kill` (a death from outside)."""

    @pytest.fixture(autouse=True)
    def _entries(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """This client knows the entries of the deployment."""
        monkeypatch.setenv(entries.VARIABLE, platform_entries.declaration())

    def throttle(self, requests: int) -> None:
        """Makes the provider refuse the next requests to start a function, for a moment."""
        pytest.skip("this platform is never throttled")

    def deliver_twice(self) -> None:
        """Makes the provider run the next call twice."""
        pytest.skip("this platform never delivers a call twice")

    def needs(self, case: str) -> None:
        """Skips the test if the platform cannot show this."""
        if case in self.cannot:
            pytest.skip(self.cannot[case])

    @abstractmethod
    def open(self, limits: Limits) -> AbstractAsyncContextManager[Platform]:
        """The platform under test, which ends everything it runs when the context is left."""

    def loop(self, main: Coroutine[Any, Any, None]) -> None:
        """Runs a test; override it for a clock that is not the wall's."""
        asyncio.run(main)

    def call(self, run: str, entry: str, **changes: Any) -> Call:
        """A call of an entry; keywords that are no fields of `Call` go into its request."""
        known: dict[str, Any] = {
            "rank": 0,
            "attempt": 0,
            "memory_mb": self.memory_mb,
            "lifetime_s": 30.0,
            "reason": "start",
            "duplicate": False,
        }
        fields = {key: changes.pop(key, value) for key, value in known.items()}
        return Call(run=run, channel=self.channel, entry=entry, request=changes, **fields)

    def run(self, scenario: _Scenario) -> None:
        """Runs a scenario against a fresh platform."""

        async def main() -> None:
            async with asyncio.timeout(self.test_timeout_s), self.open(self.limits) as platform:
                await scenario(platform, f"contract-{uuid.uuid4().hex[:8]}")

        self.loop(main())

    def test_a_function_returns_its_value(self) -> None:
        async def scenario(platform: Platform, run: str) -> None:
            invocation = await platform.invoke(self.call(run, "echo", rank=3, say={"deep": [1, None]}))
            outcome = await invocation.wait()
            assert outcome.status == "ok", outcome.error
            assert outcome.value["rank"] == 3
            assert outcome.value["said"] == {"deep": [1, None]}
            assert outcome.error == ""
            assert await invocation.wait() == outcome, "waiting twice is harmless"

        self.run(scenario)

    def test_what_a_function_raises_is_a_value_that_names_it(self) -> None:
        async def scenario(platform: Platform, run: str) -> None:
            outcome = await self._outcome(platform, self.call(run, "fail"))
            assert outcome.status == "error"
            assert outcome.error.splitlines()[0] == "ValueError: seven is not a colour"
            assert outcome.value == {}
            assert outcome.billed_s > 0, "failing costs, too"

        self.run(scenario)

    def test_a_function_that_dies_is_lost_after_its_last_word(self) -> None:
        async def scenario(platform: Platform, run: str) -> None:
            outcome = await self._outcome(platform, self.call(run, "vanish"))
            assert outcome.status == "lost"
            assert outcome.error
            events = await self._events(platform, run, lambda e: isinstance(e, Ended))
            assert [e.text for e in events if isinstance(e, Note)] == ["last word"]

        self.run(scenario)

    def test_cancelling_ends_it_now_and_twice_is_harmless(self) -> None:
        async def scenario(platform: Platform, run: str) -> None:
            invocation = await platform.invoke(self.call(run, "forever"))
            await self._events(platform, run, lambda e: isinstance(e, Note))
            await invocation.cancel()
            assert (await invocation.wait()).status == "cancelled"
            await invocation.cancel()
            assert (await invocation.wait()).status == "cancelled"

        self.run(scenario)

    def test_events_come_in_order_between_invoked_and_ended(self) -> None:
        async def scenario(platform: Platform, run: str) -> None:
            invocation = await platform.invoke(self.call(run, "talk", events=200, attempt=2))
            outcome = await invocation.wait()
            events = await self._events(platform, run, lambda e: isinstance(e, Ended))
            first, *said, last = events
            assert isinstance(first, Invoked)
            assert isinstance(last, Ended)
            assert (first.invocation, first.attempt, first.reason) == (invocation.id, 2, "start")
            assert [e.text for e in said if isinstance(e, Note)] == [f"event {n}" for n in range(200)]
            assert (last.invocation, last.status, last.billed_s) == (invocation.id, "ok", outcome.billed_s)
            assert (last.memory_mb, last.gb_seconds) == (self.memory_mb, outcome.gb_seconds)

        self.run(scenario)

    async def _two_invocations(self, platform: Platform, run: str, first: str) -> None:
        """Both begin and both end, by different names."""
        ended: list[Ended] = []

        def both_end(event: Event) -> bool:
            if isinstance(event, Ended):
                ended.append(event)
            return len(ended) == 2

        events = await self._events(platform, run, both_end)
        invoked = [e for e in events if isinstance(e, Invoked)]
        assert [e.reason for e in invoked] == ["start", "duplicate"]
        assert {(e.rank, e.attempt) for e in invoked} == {(0, 0)}
        assert invoked[0].invocation == first
        assert {e.invocation for e in ended} == {e.invocation for e in invoked}

    async def _outcome(self, platform: Platform, call: Call) -> Outcome:
        return await (await platform.invoke(call)).wait()

    async def _events(self, platform: Platform, run: str, last: Callable[[Event], bool]) -> list[Event]:
        """The stream from its beginning up to the first event that is wanted."""
        out: list[Event] = []
        async for event in platform.events(run):
            out.append(event)
            if last(event):
                break
        return out


class PlatformContract(PlatformConnectionContract):
    """The whole contract: base class of a pytest class; subclasses say how to open the platform."""

    def test_a_deployed_function_serves_every_entry(self) -> None:
        async def scenario(platform: Platform, run: str) -> None:
            assert (await self._outcome(platform, self.call(run, "echo", say="before"))).value["said"] == "before"
            measured = {"transfer": {"sizes_mb": [0.01], "repeats": 1, "parallel": 1}}
            outcome = await self._outcome(platform, self.call(run, "probe", attempt=1, **measured))
            assert outcome.status == "ok", outcome.error
            assert outcome.value["memory_mb"] == self.memory_mb
            assert outcome.value["transfer"]["rows"][0]["size_mb"] == 0.01  # type: ignore[index]
            after = await self._outcome(platform, self.call(run, "echo", attempt=2, say="after"))
            assert after.value["said"] == "after"

        self.run(scenario)

    @pytest.mark.parametrize("entry", ["nothing-of-this-name", "os:abort", ""], ids=["unknown", "foreign", "empty"])
    def test_an_entry_that_is_not_deployed_is_refused_before_anything_starts(self, entry: str) -> None:
        async def scenario(platform: Platform, run: str) -> None:
            with pytest.raises(InvocationRefused, match=f"no entry '{entry}'"):
                await platform.invoke(self.call(run, entry))
            await platform.emit(run, Note(t=0.0, text="later"))
            events = await self._events(platform, run, lambda e: isinstance(e, Note))
            assert not [e for e in events if isinstance(e, Invoked)]

        self.run(scenario)

    def test_a_function_cannot_start_what_is_not_deployed(self) -> None:
        async def scenario(platform: Platform, run: str) -> None:
            outcome = await self._outcome(platform, self.call(run, "call_next", next="os:abort"))
            assert outcome.status == "ok", outcome.error
            assert str(outcome.value["refused"]).startswith("no entry 'os:abort'")

        self.run(scenario)

    def test_a_request_of_another_entry_is_an_error_that_names_it(self) -> None:
        async def scenario(platform: Platform, run: str) -> None:
            outcome = await self._outcome(platform, self.call(run, "echo", transfer={"repeats": 1}))
            assert outcome.status == "error"
            assert outcome.error.startswith("JobError: request of entry echo: unknown key transfer")

        self.run(scenario)

    def test_a_function_dies_at_its_lifetime(self) -> None:
        async def scenario(platform: Platform, run: str) -> None:
            outcome = await self._outcome(platform, self.call(run, "forever", lifetime_s=0.5))
            assert outcome.status == "timed_out"
            assert outcome.billed_s >= 0.5

        self.run(scenario)

    def test_a_function_that_is_killed_from_outside_is_lost(self) -> None:
        self.needs("kill")

        async def scenario(platform: Platform, run: str) -> None:
            outcome = await self._outcome(platform, self.call(run, "killed"))
            assert outcome.status == "lost"
            assert outcome.error
            assert outcome.billed_s > 0
            assert (await self._outcome(platform, self.call(run, "echo", attempt=1))).status == "ok"

        self.run(scenario)

    def test_beyond_its_memory_quota_a_function_is_killed(self) -> None:
        self.needs("memory")

        async def scenario(platform: Platform, run: str) -> None:
            beyond = await self._outcome(platform, self.call(run, "allocate", mb=2 * self.memory_mb))
            assert beyond.status == "out_of_memory", beyond.error
            assert str(self.memory_mb) in beyond.error
            assert beyond.peak_memory_mb >= self.memory_mb
            assert beyond.billed_s > 0

        self.run(scenario)

    def test_a_call_is_started_although_the_provider_throttles(self) -> None:
        async def scenario(platform: Platform, run: str) -> None:
            self.throttle(3)
            outcome = await self._outcome(platform, self.call(run, "echo", say="hello"))
            assert outcome.value["said"] == "hello"

        self.run(scenario)

    def test_what_the_provider_delivers_twice_are_two_invocations(self) -> None:
        async def scenario(platform: Platform, run: str) -> None:
            self.deliver_twice()
            invocation = await platform.invoke(self.call(run, "echo", say="once"))
            assert (await invocation.wait()).value["said"] == "once"
            await self._two_invocations(platform, run, invocation.id)

        self.run(scenario)

    def test_cancelling_at_once_does_not_wait_for_the_start(self) -> None:
        async def scenario(platform: Platform, run: str) -> None:
            invocation = await platform.invoke(self.call(run, "forever"))
            await invocation.cancel()
            assert (await invocation.wait()).status == "cancelled"

        self.run(scenario)

    def test_cancel_all_ends_everything(self) -> None:
        async def scenario(platform: Platform, run: str) -> None:
            invocations = [await platform.invoke(self.call(run, "forever", rank=rank)) for rank in range(3)]
            await platform.cancel_all(run)
            assert [(await i.wait()).status for i in invocations] == ["cancelled"] * 3

        self.run(scenario)

    def test_the_triggers_own_events_join_the_stream(self) -> None:
        async def scenario(platform: Platform, run: str) -> None:
            await platform.emit(run, Note(t=1.5, text="mine"))
            events = await self._events(platform, run, lambda e: isinstance(e, Note))
            assert events[-1] == Note(t=1.5, text="mine")

        self.run(scenario)

    def test_the_bill_is_exact_and_rounded_up(self) -> None:
        async def scenario(platform: Platform, run: str) -> None:
            outcome = await self._outcome(platform, self.call(run, "timed"))
            milliseconds = outcome.billed_s * 1000
            assert math.isclose(milliseconds, round(milliseconds), abs_tol=1e-6)
            assert outcome.billed_s >= _timed(outcome).took_s - 1e-9
            assert math.isclose(outcome.gb_seconds, self.memory_mb / 1024 * outcome.billed_s)

        self.run(scenario)

    def test_a_function_knows_its_deadline_and_the_runs_clock(self) -> None:
        async def scenario(platform: Platform, run: str) -> None:
            outcome = await self._outcome(platform, self.call(run, "timed", lifetime_s=20.0))
            assert 0 < _timed(outcome).left_s <= 20.0
            assert _timed(outcome).run_s >= -1e-3

        self.run(scenario)

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"memory_mb": 64}, "64"),
            ({"memory_mb": 1_000_000}, "1000000"),
            ({"lifetime_s": 61.0}, "61"),
            ({"say": "x" * 300_000}, "262144"),
        ],
        ids=["too little memory", "too much memory", "too long", "too large"],
    )
    def test_what_is_beyond_the_limits_is_refused(self, changes: Mapping[str, Any], named: str) -> None:
        async def scenario(platform: Platform, run: str) -> None:
            with pytest.raises(InvocationRefused, match=named):
                await platform.invoke(self.call(run, "echo", **changes))

        self.run(scenario)

    def test_one_too_many_at_once_is_refused_and_later_accepted(self) -> None:
        async def scenario(platform: Platform, run: str) -> None:
            n = self.limits.concurrency
            calls = [self.call(run, "forever", rank=rank, lifetime_s=60.0) for rank in range(n)]  # while all start
            running = [await platform.invoke(call) for call in calls]
            with pytest.raises(InvocationRefused, match=str(n)):
                await platform.invoke(self.call(run, "echo", rank=n))
            await running[0].cancel()
            await running[0].wait()
            assert (await self._outcome(platform, self.call(run, "echo", rank=n))).status == "ok"
            await platform.cancel_all(run)

        self.run(scenario)

    def test_invocations_share_nothing_but_the_channel(self) -> None:
        async def scenario(platform: Platform, run: str) -> None:
            first = await self._outcome(platform, self.call(run, "share"))
            second = await self._outcome(platform, self.call(run, "share", attempt=1))
            assert first.status == second.status == "ok", first.error + second.error
            if first.value["scratch"] is not None:
                assert first.value["scratch"] != second.value["scratch"]
                assert first.value["found"] == second.value["found"] == []
                assert first.value["count"] == second.value["count"] == 1
            counts = [(await self._outcome(platform, self.call(run, "through_channel"))).value for _ in range(2)]
            assert counts == [{"count": 1}, {"count": 2}]

        self.run(scenario)

    def test_a_function_starts_its_successor(self) -> None:
        async def scenario(platform: Platform, run: str) -> None:
            await platform.invoke(self.call(run, "succeed", attempts=3))
            done: list[str] = []

            def third_end(event: Event) -> bool:
                if isinstance(event, Ended):
                    done.append(event.outcome)
                return len(done) == 3

            events = await self._events(platform, run, third_end)
            invoked = [(e.attempt, e.reason) for e in events if isinstance(e, Invoked)]
            assert invoked == [(0, "start"), (1, "relay"), (2, "relay")]
            assert sorted(done) == ["finished", "relayed", "relayed"]

        self.run(scenario)

    def test_a_duplicate_is_a_second_invocation_of_the_same_call(self) -> None:
        async def scenario(platform: Platform, run: str) -> None:
            invocation = await platform.invoke(self.call(run, "echo", duplicate=True, say="once"))
            outcome = await invocation.wait()
            assert outcome.value["said"] == "once"
            await self._two_invocations(platform, run, invocation.id)

        self.run(scenario)


def _timed(outcome: Outcome) -> TimedResult:
    return build(TimedResult, outcome.value, where="result of `timed`")
