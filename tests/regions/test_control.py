"""Control functions: the table of addresses, plans that are kept, and functions that end, die and go on unnoticed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from test_geo_plan import text

from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.communication.signing import SigningKey
from ephemeron.config.typed import build, plain
from ephemeron.errors import InvocationRefused, JobError, ServiceUnreachable
from ephemeron.functions import simulation
from ephemeron.functions.base import Call
from ephemeron.functions.context import Context
from ephemeron.functions.entries import serve
from ephemeron.regions.control.addressing import AddressAnswer, AddressRequest, AddressTable
from ephemeron.regions.control.client import ControlClient
from ephemeron.regions.control.function import ControlRequest, ControlStore
from ephemeron.regions.control.scheduling import ScheduleAnswer, Scheduler, ScheduleRequest
from ephemeron.regions.planning import PlanRequest
from ephemeron.regions.region_files import parse_regions
from ephemeron.regions.scheduling.replanning import MeasuredIterations


def asked(table: AddressTable, now: float, **request: Any) -> AddressAnswer:
    return build(AddressAnswer, table.apply({"identity": "sh", "holder": "run-1", **request}, now), where="answer")


def test_endpoints_change_and_ids_do_not() -> None:
    table = AddressTable(lease_s=10)
    [first] = asked(table, 0, action="register", endpoint="a:1").rows
    [moved] = asked(table, 1, action="register", endpoint="b:2").rows
    [replaced] = asked(table, 2, action="register", endpoint="c:3", fence=4).rows
    assert (first.id, moved.id, replaced.id) == (1, 1, 1)
    assert (first.changes, moved.changes, replaced.changes) == (0, 1, 2)
    [second] = asked(table, 2, action="register", endpoint="d:4", replica=1).rows
    assert second.id == 2
    assert [row.endpoint for row in asked(table, 3, action="lookup").rows] == ["c:3", "d:4"]
    with pytest.raises(JobError, match="attempt 3 of region sh, replica 0, was replaced by attempt 4"):
        asked(table, 3, action="register", endpoint="old:1", fence=3)
    asked(table, 4, action="deregister", fence=4)
    assert [row.endpoint for row in asked(table, 4, action="lookup").rows] == ["d:4"]


def test_a_second_region_of_the_same_identity_is_refused_while_the_first_lives() -> None:
    table = AddressTable(lease_s=10)
    asked(table, 0, action="register", endpoint="a:1")
    with pytest.raises(JobError, match="region sh is registered by another run, at a:1; end that run"):
        asked(table, 9, action="register", endpoint="b:1", holder="run-2")
    asked(table, 9, action="renew")
    with pytest.raises(JobError, match="registered by another run"):
        asked(table, 19, action="register", endpoint="b:1", holder="run-2")
    assert asked(table, 19.5, action="lookup").rows == (), "its lease has ended"
    [row] = asked(table, 20, action="register", endpoint="b:1", holder="run-2").rows
    assert row.id == 2
    with pytest.raises(JobError, match="registered by another run, at b:1"):
        asked(table, 21, action="renew")


@pytest.mark.parametrize(
    ("request_", "match"),
    [
        ({"action": "renew"}, "region sh has no replica 0 to renew; register it"),
        ({"action": "register"}, "an endpoint is missing"),
        ({"action": "register", "identity": ""}, "a row has an identity and a holder"),
        ({"action": "loose"}, "use one of register"),
    ],
)
def test_refused_requests(request_: dict[str, str], match: str) -> None:
    with pytest.raises(JobError, match=match):
        asked(AddressTable(), 0, **request_)


def test_a_successor_gives_leases_their_time_again() -> None:
    table, successor = AddressTable(lease_s=10), AddressTable(lease_s=99)
    asked(table, 1000, action="register", endpoint="a:1")
    successor.restore(table.state(), now=5)
    assert len(asked(successor, 15, action="lookup").rows) == 1
    assert asked(successor, 15.1, action="lookup").rows == ()
    assert asked(successor, 16, action="register", endpoint="b:1", holder="run-2").rows[0].id == 2


CASE_1 = parse_regions(text("cascade-lake", "skylake", 1))


def test_a_plan_is_kept_until_measurements_ask_for_another() -> None:
    scheduler = Scheduler()

    def asked_(request: ScheduleRequest) -> ScheduleAnswer:
        return build(ScheduleAnswer, scheduler.apply(plain(request), 0.0), where="answer")

    with pytest.raises(JobError, match="there is no plan yet"):
        scheduler.apply(plain(ScheduleRequest(action="measured")), 0.0)
    first = asked_(ScheduleRequest(action="plan", regions=CASE_1, request=PlanRequest(samples=1000, sample_s=0.1)))
    assert first.plan is not None
    assert first.plan.cores == {"shanghai": 12, "chongqing": 8}

    def iteration(cores: int, power: float, slower: float) -> MeasuredIterations:
        return MeasuredIterations(power=cores * power, samples=10, iteration_s=slower * 10 * 0.1 / (cores * power))

    same = asked_(ScheduleRequest(action="measured", measured={"shanghai": (iteration(12, 0.666, 1.0),)}))
    assert same.changed == ()
    slower = asked_(ScheduleRequest(action="measured", measured={"chongqing": (iteration(8, 0.973, 1.5),)}))
    assert slower.changed == ("chongqing",)
    assert slower.plan is not None
    assert slower.plan.cores == {"shanghai": 12, "chongqing": 12}, "the pace that was promised"
    successor = Scheduler()
    successor.restore(scheduler.state(), 0.0)
    assert successor.state() == scheduler.state()
    with pytest.raises(JobError, match="there is no region 'mars'; regions are shanghai"):
        asked_(ScheduleRequest(action="measured", measured={"mars": ()}))


CALL = Call(run="r", rank=0, attempt=0, memory_mb=128, lifetime_s=600, channel="memory", key=SigningKey.new().text)


@dataclass
class World:
    """Control functions as tasks in virtual time, which may be killed."""

    channel: MemoryChannel = field(default_factory=MemoryChannel)
    calls: list[Call] = field(default_factory=list)
    running: dict[int, asyncio.Task[Any]] = field(default_factory=dict)
    hung: bool = False
    """Functions start, and do nothing."""
    refuse: int = 0
    call: Call = CALL

    async def invoke(self, call: Call) -> None:
        if self.refuse:
            self.refuse -= 1
            raise InvocationRefused("no place")
        self.calls.append(call)
        if not self.hung:
            context = self.context(call)
            self.running[call.attempt] = asyncio.get_running_loop().create_task(serve(context))

    def context(self, call: Call) -> Context:
        def die() -> Any:
            raise AssertionError

        async def compute(work: Any, *, samples: float, batches: int = 1) -> Any:
            return work()

        return Context(
            call=call,
            invocation=f"{call.entry}-{call.attempt}-{len(self.calls)}",
            channel=self.channel,
            emit=lambda event: None,
            invoke=self.invoke,
            compute=compute,
            origin=0.0,
            deadline=asyncio.get_running_loop().time() + call.lifetime_s,
            die=die,
        )

    def client(self, owner: str = "client", **more: Any) -> ControlClient:
        return ControlClient(self.channel, self.call, self.invoke, owner=owner, **more)

    async def kill(self, attempt: int) -> None:
        self.running[attempt].cancel()
        await asyncio.gather(self.running[attempt], return_exceptions=True)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    simulation.run(scenario)


def register(endpoint: str, identity: str = "sh", **more: Any) -> AddressRequest:
    return AddressRequest(action="register", identity=identity, holder="run-1", endpoint=endpoint, **more)


LOOKUP = AddressRequest(action="lookup")


def test_a_function_is_started_on_demand_and_again_after_it_was_idle() -> None:
    async def scenario() -> None:
        world = World()
        client = world.client(request=ControlRequest(idle_s=5, lease_s=1000))
        [row] = (await client.address(register("a:1"))).rows
        assert row.id == 1
        assert [call.entry for call in world.calls] == ["geo-addressing"]
        assert (await client.address(LOOKUP)).rows == (row,)
        assert len(world.calls) == 1, "one function serves both"
        assert (await world.running[1])["outcome"] == "idle"
        assert (await client.address(LOOKUP)).rows == (row,), "from the state in the store"
        assert [call.attempt for call in world.calls] == [1, 2]
        left = await world.channel.list("r.geo/addressing/")
        assert not [key for key in left if "/request/" in key]
        assert len([key for key in left if "/state/" in key]) <= 2
        await client.clear()
        assert await world.channel.list("r.geo/") == []

    run(scenario())


def test_a_killed_function_is_replaced_and_goes_on_from_its_state() -> None:
    async def scenario() -> None:
        world = World()
        client = world.client()
        answer = await client.schedule(ScheduleRequest(action="plan", regions=CASE_1))
        await world.kill(1)
        again = await client.schedule(ScheduleRequest(action="lookup"))
        assert again.plan == answer.plan
        assert [call.reason for call in world.calls] == ["start", "replacement"]

    run(scenario())


def test_a_function_that_goes_on_unnoticed_changes_nothing() -> None:
    async def scenario() -> None:
        world = World()
        client = world.client()
        await client.address(register("a:1"))
        zombie = ControlStore(world.channel, run="r", function="addressing", owner="zombie", key=world.call.key)
        stored = await zombie.load()
        assert stored is not None
        await world.kill(1)
        [row] = (await client.address(register("b:2"))).rows
        assert not await zombie.store(stored), "a version that exists is never replaced"
        assert (await client.address(LOOKUP)).rows == (row,)

    run(scenario())


def test_an_attempt_that_is_delivered_twice_serves_once() -> None:
    async def scenario() -> None:
        world = World()
        await world.client().address(register("a:1"))
        twice = await serve(world.context(world.calls[0]))
        assert twice == {"outcome": "duplicate", "served": 0}

    run(scenario())


def test_many_clients_start_one_function() -> None:
    async def scenario() -> None:
        world = World()
        clients = [world.client(f"client-{i}") for i in range(6)]
        rows = await asyncio.gather(*(c.address(register(f"h:{i}", replica=i)) for i, c in enumerate(clients)))
        assert sorted(answer.rows[0].id for answer in rows) == [1, 2, 3, 4, 5, 6]
        assert len(world.calls) == 1
        assert sum(c.started for c in clients) == 1

    run(scenario())


def test_a_platform_that_refuses_for_a_while_and_functions_that_never_answer() -> None:
    async def scenario() -> None:
        world = World(refuse=2)
        assert (await world.client().address(register("a:1"))).rows[0].id == 1
        assert [call.attempt for call in world.calls] == [3]
        world.hung = True
        await world.kill(3)
        with pytest.raises(ServiceUnreachable, match="the addressing function of r has not answered"):
            await world.client("other").address(LOOKUP, timeout_s=30)
        assert len(world.calls) > 2

    run(scenario())


def test_a_refused_request_is_the_callers_error() -> None:
    async def scenario() -> None:
        client = World().client()
        await client.address(register("a:1"))
        with pytest.raises(JobError, match="registered by another run"):
            await client.address(AddressRequest(action="register", identity="sh", holder="run-2", endpoint="b:1"))

    run(scenario())


@pytest.mark.parametrize("step", range(1, 13))
def test_a_function_killed_at_any_put_loses_and_repeats_nothing(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attempt ends before its N-th object is created; all registrations get one id each, without gaps."""

    async def scenario() -> None:
        world, created = World(), 0
        create = ControlStore.create

        async def killing(self: ControlStore, kind: str, name: object, value: Any) -> bool:
            nonlocal created
            if kind in ("start", "state", "answer") and asyncio.current_task() is world.running.get(1):
                created += 1
                if created == step:
                    raise asyncio.CancelledError
            return await create(self, kind, name, value)

        monkeypatch.setattr(ControlStore, "create", killing)
        client = world.client()
        for i in range(5):
            [row] = (await client.address(register(f"h:{i}", replica=i))).rows
            assert row.id == i + 1
        assert len((await client.address(LOOKUP)).rows) == 5
        assert len(world.calls) == 2

    run(scenario())
