"""Every sentence of `TaskQueue`'s contract, as a test.

    class TestMyQueue(TaskQueueContract):
        @asynccontextmanager
        async def world(self) -> AsyncIterator[Open]:
            yield lambda owner: MyQueue("q", owner=owner, lease_s=self.lease_s)

`TaskQueueConnectionContract` is the part of it that a variant needs (another store, signatures) of a queue that passes the whole.

Each test runs in an event loop of its own, with a queue of its own. Nothing asserts a duration: leases that have to expire are
waited for until a bound, and all others are too long to expire.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from abc import abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeAlias

import pytest

from ephemeron.errors import JobError
from ephemeron.functions.tasks.model import TaskEdge, TaskLease, TaskResult, TaskSpec
from ephemeron.functions.tasks.queue import TaskQueue

Open: TypeAlias = Callable[[str], TaskQueue]
"""A view of the test's queue for the owner of that name."""


def task(id: str, **more: Any) -> TaskSpec:
    """A task whose function is never called."""
    return TaskSpec(id=id, function="nowhere:nothing", **more)


def ok(*ids: str) -> list[TaskResult]:
    """Successes."""
    return [TaskResult(id=id, value=id) for id in ids]


class TaskQueueConnectionContract:
    """Connection part of the contract: that batches, leases, edges and results arrive, and those who wait are told."""

    lease_s: float = 0.4
    """Where leases have to expire; `run` prolongs it for all other tests."""
    test_timeout_s: float = 300.0
    """A test that takes longer has hung."""

    @abstractmethod
    def world(self) -> AbstractAsyncContextManager[Open]:
        """A fresh queue, and the way to open views of it."""

    def loop(self, main: Coroutine[Any, Any, None]) -> None:
        """Runs a test; virtual time does as well."""
        asyncio.run(main)

    def run(self, scenario: Callable[[Open], Coroutine[Any, Any, None]], *, expires: bool = False) -> None:
        """Runs a scenario against a fresh queue, and checks that `clear` leaves nothing of it.

        Args:
            scenario: of the test.
            expires: leases expire in it; else they last as long as the test.
        """
        if not expires:
            self.lease_s = max(self.lease_s, self.test_timeout_s)

        async def main() -> None:
            async with self.world() as fresh, asyncio.timeout(self.test_timeout_s):
                opened: dict[str, TaskQueue] = {}

                def view(owner: str) -> TaskQueue:
                    if owner not in opened:
                        opened[owner] = fresh(owner)
                    return opened[owner]

                await scenario(view)
                await view("cleaner").clear()
                assert (await view("cleaner").depth()).tasks == 0
                assert await view("cleaner").reader().read() == []
                for queue in opened.values():
                    await queue.close()

        self.loop(main())

    async def taken(self, queue: TaskQueue, n: int = 1) -> list[TaskLease]:
        """Asks until something can be taken: leases of vanished owners expire meanwhile."""
        while True:
            if leases := await queue.take(n):
                return leases
            await asyncio.sleep(self.lease_s / 10)

    def test_a_batch_is_taken_whole_and_its_results_are_read_once(self) -> None:
        async def scenario(view: Open) -> None:
            client, worker = view("client"), view("worker")
            tasks = [task(f"t{n}", payload=bytes([n]), arguments={"n": n}, inputs=("k/a",)) for n in range(5)]
            await client.publish(tasks)
            (lease,) = await worker.take(1)
            assert lease.tasks == tuple(tasks)
            assert lease.attempt == 1
            assert await view("other").take(1) == []
            reader = client.reader()
            assert await reader.read() == []
            done = [TaskResult(id="t0", data=b"\0raw"), TaskResult(id="t1", value={"a": [1, None]}), *ok("t2", "t3")]
            assert [r.id for r in await worker.complete(lease, done)] == ["t0", "t1", "t2", "t3"]
            assert (await client.depth()).tasks == 5, "an unfinished batch stays"
            await client.finish()
            drained = [worker.is_drained]
            await worker.complete(lease, ok("t4"))
            assert await worker.take(1) == []
            assert [*drained, worker.is_drained] == [False, True]
            results = {r.id: r for r in await reader.read()}
            assert (results["t0"].data, results["t1"].value, results["t4"].status) == (b"\0raw", {"a": [1, None]}, "ok")
            assert len(results) == 5
            assert await reader.read() == []
            assert (await client.depth()).tasks == 0
            assert await worker.take(1) == []

        self.run(scenario)

    def test_takers_at_once_share_no_batch(self) -> None:
        async def scenario(view: Open) -> None:
            for n in range(20):
                await view("client").publish([task(f"{n}-0"), task(f"{n}-1")], order=n)
            taken = await asyncio.gather(*(view(f"worker-{n}").take(8) for n in range(6)))
            batches = [lease.batch for leases in taken for lease in leases]
            assert len(batches) == len(set(batches))
            rest = await view("worker-0").take(1000)
            assert len(batches) + len(rest) == 20
            assert (await view("worker-0").depth()).leased == 40

        self.run(scenario)

    def test_the_lease_of_a_vanished_owner_expires(self) -> None:
        async def scenario(view: Open) -> None:
            await view("client").publish([task("a"), task("b"), task("c")])
            (first,) = await view("dead").take(1)
            await view("dead").complete(first, ok("a"))
            (second,) = await self.taken(view("worker"))
            assert [t.id for t in second.tasks] == ["b", "c"]
            assert (second.attempt, second.is_careful) == (2, True)
            assert await view("dead").renew([first]) == [first]
            # The one who was late records what is not there, and cannot replace what is.
            await view("worker").complete(second, [TaskResult(id="b", value="by worker")])
            late = [TaskResult(id="b", value="late"), TaskResult(id="c", value="late")]
            assert [r.id for r in await view("dead").complete(first, late)] == ["c"]
            assert await view("worker").complete(second, [TaskResult(id="c", value="by worker")]) == []
            seen = {r.id: r.value for r in await view("client").reader().read()}
            assert seen == {"a": "a", "b": "by worker", "c": "late"}
            assert (await view("client").depth()).tasks == 0
            assert await view("other").take(1) == []

        self.run(scenario, expires=True)

    def test_a_task_that_fails_too_often_is_dead_with_its_traceback(self) -> None:
        async def scenario(view: Open) -> None:
            await view("client").publish([task("bad", max_tries=3), task("good")])
            reader = view("client").reader()
            for number in range(1, 4):
                (lease,) = await view("worker").take(1)
                assert [t.id for t in lease.tasks] == (["bad", "good"] if number == 1 else ["bad"])
                failed = TaskResult(id="bad", status="failed", error=f"ValueError: {number}", traceback="line 7")
                recorded = await view("worker").complete(lease, [failed, *ok("good")])
                assert (recorded[0].status, recorded[0].tries) == ("failed" if number < 3 else "dead", number)
                await view("worker").release(lease)
                assert [r.id for r in await reader.read()] == (["good"] if number == 1 else ["bad"] if number == 3 else [])
            (dead,) = [r for r in await view("other").reader().read() if r.id == "bad"]
            assert (dead.status, dead.error, dead.traceback, dead.tries) == ("dead", "ValueError: 3", "line 7", 3)
            assert (await view("client").depth()).tasks == 0

        self.run(scenario)

    def test_an_edge_releases_its_tasks_once_when_all_inputs_are_there(self) -> None:
        async def scenario(view: Open) -> None:
            client = view("client")
            await client.connect(TaskEdge(name="sum", inputs=5, tasks=(task("add", then=("last",)),)))
            await client.connect(TaskEdge(name="last", inputs=1, tasks=(task("end"),)))
            await client.publish([task(f"a{n}", then=("sum",)) for n in range(3)])
            await client.publish([task(f"b{n}", then=("sum",)) for n in range(2)], order=1)
            leases = await view("worker").take(5)
            for lease in leases:
                assert "add" not in {t.id for t in lease.tasks}
            results = [(lease, ok(*(t.id for t in lease.tasks))) for lease in leases]
            first, second = results
            await view("worker").complete(first[0], first[1])
            await view("worker").complete(second[0], second[1][:-1])
            assert await view("worker").take(1) == []
            await asyncio.gather(view("worker").complete(second[0], second[1]), view("late").complete(second[0], second[1]))
            (lease,) = await view("worker").take(5)
            assert [t.id for t in lease.tasks] == ["add"]
            assert await view("other").take(5) == []
            await view("worker").complete(lease, ok("add"))
            await view("late").complete(second[0], second[1])
            (lease,) = await view("worker").take(5)
            assert [t.id for t in lease.tasks] == ["end"]
            await view("worker").complete(lease, ok("end"))
            assert sorted(r.id for r in await client.reader().read()) == ["a0", "a1", "a2", "add", "b0", "b1", "end"]
            assert await view("other").take(5) == []

        self.run(scenario)

    def test_those_who_wait_are_told_of_work_and_of_the_end(self) -> None:
        async def scenario(view: Open) -> None:
            worker, client = view("worker"), view("client")
            if not worker.notifies:
                assert not await worker.wait_for_work(0.001)
                assert not await worker.wait_until_empty(0.001)
                return
            idle = asyncio.create_task(worker.wait_for_work(20.0))
            end = asyncio.create_task(client.wait_until_empty(20.0))
            await client.connect(TaskEdge(name="next", inputs=1, tasks=(task("b"),)))
            await client.publish([task("a", then=("next",))])
            assert await idle
            (lease,) = await worker.take(1)
            await worker.complete(lease, ok("a"))
            assert not end.done()
            assert await view("other").wait_for_work(20.0)
            (lease,) = await worker.take(1)
            assert not await view("other").wait_for_work(0.01), "it is taken"
            await worker.release(lease)
            assert await view("other").wait_for_work(20.0)
            (lease,) = await worker.take(1)
            await worker.complete(lease, ok("b"))
            assert await end
            await worker.announce("idle")
            await client.finish()
            assert await worker.wait_for_work(20.0), "executors look, and end"

        self.run(scenario)


class TaskQueueContract(TaskQueueConnectionContract):
    """The whole contract: base class of a pytest class; subclasses say how to open a queue."""

    def test_the_same_batch_published_twice_is_one(self) -> None:
        async def scenario(view: Open) -> None:
            tasks = [task("a"), task("b")]
            name = await view("client").publish(tasks)
            assert await view("again").publish(tasks) == name
            (lease,) = await view("worker").take(10)
            await view("worker").complete(lease, ok("a", "b"))
            assert await view("again").publish(tasks) == name  # after it is complete
            for lease in await view("worker").take(10):
                await view("worker").complete(lease, [TaskResult(id="a", value="twice")])
            assert [(r.id, r.value) for r in await view("client").reader().read()] == [("a", "a"), ("b", "b")]

        self.run(scenario)

    def test_what_is_published_and_has_no_result_is_known_to_everybody(self) -> None:
        async def scenario(view: Open) -> None:
            first, second = await view("client").publish([task("a"), task("b")]), await view("client").publish([task("c")], order=1)
            (lease,) = [each for each in await view("worker").take(3) if each.batch == first]
            await view("worker").complete(lease, ok("a"))
            assert await view("next").published() == {"b": first, "c": second}
            await view("worker").complete(lease, ok("b"))
            assert await view("next").published() == {"c": second}

        self.run(scenario)

    def test_a_lease_that_is_renewed_does_not_expire(self) -> None:
        async def stays(view: Open, id: str) -> bool:
            """Whether every renewal came in time; else this machine stood still, and the lease may have expired."""
            await view("client").publish([task(id)])
            renewed_at = clock()
            (lease,) = await view("worker").take(1)
            for _ in range(16):
                began = clock()
                lost, taken = await view("worker").renew([lease]), await view("other").take(1)
                if clock() - renewed_at > 0.9 * self.lease_s:
                    for each in (lease, *taken):
                        await view("worker").complete(each, ok(id))
                    return False
                assert (lost, taken) == ([], [])
                renewed_at = began
                await asyncio.sleep(self.lease_s / 8)
            return True

        async def scenario(view: Open) -> None:
            ids = (f"t{n}" for n in itertools.count())
            while not await stays(view, next(ids)):
                pass

        def clock() -> float:
            return asyncio.get_running_loop().time()

        self.run(scenario, expires=True)

    def test_a_lease_that_is_given_back_is_free_at_once(self) -> None:
        async def scenario(view: Open) -> None:
            await view("client").publish([task("a"), task("b")])
            for _ in range(4):  # and counts for no vanished executor
                (lease,) = await view("worker").take(1)
                await view("worker").release(lease)
            await view("worker").release(lease)
            (lease,) = await view("other").take(1)
            assert (lease.attempt, len(lease.tasks)) == (1, 2)

        self.run(scenario)

    def test_a_task_that_kills_its_executors_is_dead_and_the_others_are_not(self) -> None:
        async def scenario(view: Open) -> None:
            await view("client").publish([task("a"), task("killer", max_tries=2), task("z")])
            for number in range(1, 9):
                worker = view(f"worker-{number}")
                (lease,) = await self.taken(worker)
                waiting = [t.id for t in lease.tasks]
                if waiting[0] == "a" and lease.is_careful:
                    await worker.complete(lease, ok("a"))
                if "killer" not in waiting:
                    await worker.complete(lease, ok("z"))
                    break
            status = {r.id: r.status for r in await view("client").reader().read()}
            assert status == {"a": "ok", "killer": "dead", "z": "ok"}

        self.run(scenario, expires=True)

    def test_an_edge_that_is_connected_late_finds_its_inputs(self) -> None:
        async def scenario(view: Open) -> None:
            await view("client").publish([task("a", then=("early", "broken")), task("b", then=("broken",), max_tries=1)])
            (lease,) = await view("worker").take(1)
            await view("worker").complete(lease, [*ok("a"), TaskResult(id="b", status="failed", error="E: no")])
            await view("client").connect(TaskEdge(name="early", inputs=1, tasks=(task("c"),)))
            await view("client").connect(TaskEdge(name="broken", inputs=2, tasks=(task("d", then=("after",)),)))
            await view("client").connect(TaskEdge(name="after", inputs=1, tasks=(task("e"),)))
            (lease,) = await view("worker").take(5)
            assert [t.id for t in lease.tasks] == ["c"]
            dead = {r.id: r.error for r in await view("client").reader().read() if r.status == "dead"}
            assert sorted(dead) == ["b", "d", "e"]
            assert "b is dead: E: no" in dead["d"]
            assert "d is dead" in dead["e"]

        self.run(scenario)

    def test_a_dead_input_kills_what_waits_for_it(self) -> None:
        async def scenario(view: Open) -> None:
            await view("client").connect(TaskEdge(name="e1", inputs=2, tasks=(task("next", then=("e2",)),)))
            await view("client").connect(TaskEdge(name="e2", inputs=1, tasks=(task("after"), task("too"))))
            batch = await view("client").publish([task("a", then=("e1",)), task("b", then=("e1",))])
            assert await view("client").cancel(batch, ["b"]) == ["b"]
            (lease,) = await view("worker").take(5)
            assert [t.id for t in lease.tasks] == ["a"]
            await view("worker").complete(lease, ok("a"))
            status = {r.id: r.status for r in await view("client").reader().read()}
            assert status == {"a": "ok", "b": "cancelled", "next": "dead", "after": "dead", "too": "dead"}
            assert await view("worker").take(5) == []

        self.run(scenario)

    def test_edges_that_are_connected_together_are_connected_each(self) -> None:
        async def scenario(view: Open) -> None:
            both = [TaskEdge(name=f"e{n}", inputs=1, tasks=(task(f"next{n}"),)) for n in range(2)]
            await view("client").connect(*both)
            await view("again").connect(*both, TaskEdge(name="e2", inputs=1, tasks=(task("next2"),)))
            await view("client").publish([task("a", then=("e0", "e1", "e2"))])
            (lease,) = await view("worker").take(1)
            await view("worker").complete(lease, ok("a"))
            assert {t.id for lease in await view("worker").take(5) for t in lease.tasks} == {"next0", "next1", "next2"}
            with pytest.raises(JobError, match="e1 is there already"):
                await view("other").connect(both[0], TaskEdge(name="e1", inputs=2, tasks=(task("next1"),)))

        self.run(scenario)

    def test_a_follower_is_leased_with_the_result_that_releases_it(self) -> None:
        async def scenario(view: Open) -> None:
            worker = view("worker")
            await worker.connect(
                TaskEdge(name="sum", inputs=2, tasks=(task("add"),), order=3),
                TaskEdge(name="solo", inputs=1, tasks=(task("alone"),), order=4),
            )
            await view("client").publish([task("a", then=("sum", "solo"))])
            await view("client").publish([task("b", then=("sum",))], order=1)
            of = {lease.tasks[0].id: lease for lease in await worker.take(2)}
            assert (await worker.waiting_for_one(["sum"])).edges == ()
            await worker.complete(of["b"], ok("b"))
            waiting = await worker.waiting_for_one(["sum", "solo", "unknown"])
            assert waiting.edges == (("sum", "solo") if worker.leases_followers else ())
            assert waiting.ready_order is None
            recorded, leases = await worker.complete_and_follow(of["a"], ok("a"), ["sum"])
            assert [r.id for r in recorded] == ["a"]
            assert [t.id for lease in leases for t in lease.tasks] == (["add"] if worker.leases_followers else [])
            for owner in ("worker", "other"):
                assert await view(owner).complete_and_follow(of["a"], ok("a"), ["sum"]) == ([], [])
            taken = {t.id for lease in await view("other").take(5) for t in lease.tasks}
            assert taken == ({"alone"} if worker.leases_followers else {"alone", "add"})
            assert (await worker.waiting_for_one(["sum", "solo"])).edges == ()
            for lease in leases:
                assert [r.id for r in await worker.complete(lease, ok("add"))] == ["add"]

        self.run(scenario)

    def test_a_follower_waits_behind_what_is_ready(self) -> None:
        async def scenario(view: Open) -> None:
            await view("client").connect(TaskEdge(name="next", inputs=1, tasks=(task("b"),), order=7))
            await view("client").publish([task("a", then=("next",))])
            await view("client").publish([task("urgent")], order=5)
            (lease,) = await view("worker").take(1)
            waiting = await view("worker").waiting_for_one(["next"])
            expected = (("next",), 5) if view("worker").leases_followers else ((), None)
            assert (waiting.edges, waiting.ready_order) == expected
            await view("worker").release(lease)

        self.run(scenario)

    def test_cancelling_comes_too_late_for_what_has_a_result(self) -> None:
        async def scenario(view: Open) -> None:
            batch = await view("client").publish([task("a"), task("b"), task("c")])
            (lease,) = await view("worker").take(1)
            await view("worker").complete(lease, ok("a"))
            assert await view("client").cancel(batch, ["a", "b"]) == ["b"]
            assert [r.id for r in await view("worker").complete(lease, ok("b", "c"))] == ["c"]
            assert await view("client").cancel(batch, ["b", "c"]) == ["b"]
            status = {r.id: r.status for r in await view("client").reader().read()}
            assert status == {"a": "ok", "b": "cancelled", "c": "ok"}
            assert (await view("client").depth()).tasks == 0

        self.run(scenario)

    def test_a_member_counts_once(self) -> None:
        async def scenario(view: Open) -> None:
            totals = await asyncio.gather(*(view(f"v{n % 3}").count("c.1", f"m{n % 4}", 2) for n in range(12)))
            assert max(totals) == 8
            assert await view("v0").count("c.1", "m0", 2) == 8
            assert await view("v0").count("c.1", "m9", 5) == 13
            assert await view("v0").count("c", "m9") == 1
            assert await view("v1").count_all({"c": 9, "d": 1}, "m1") == {"c": 2, "d": 1}
            assert await view("v1").count_all({"c": 9}, "m1") == {"c": 2}

        self.run(scenario)

    def test_depth_tells_tasks_executors_and_the_end(self) -> None:
        async def scenario(view: Open) -> None:
            client, worker = view("client"), view("worker")
            await client.publish_all([task(f"t{n}") for n in range(7)], per_batch=3)
            await worker.take(3)
            await worker.announce("e-1")
            await worker.announce("e-2")
            await worker.announce("e-2")
            depth = await client.depth()
            assert (depth.ready + depth.leased, depth.executors, depth.closed) == (7, frozenset({"e-1", "e-2"}), False)
            assert depth.leased in (3, 4)
            await worker.announce("e-1", gone=True)
            await client.finish()
            await worker.take(10)
            assert not worker.is_drained, "leased tasks are in the queue"
            assert (await client.depth()).executors == {"e-2"}
            self.lease_s = short_s
            await view("brief").announce("e-2")
            while True:  # it is silent from now on
                depth = await view("observer").depth()
                if not depth.executors:
                    break
                await asyncio.sleep(self.lease_s / 10)
            assert depth.closed

        short_s = self.lease_s
        self.run(scenario)

    @pytest.mark.parametrize(
        ("tasks", "order"), [([], 0), ([task("a"), task("a")], 0), ([task("a/b")], 0), ([task("a", then=("x y",))], 0), ([task("a")], -1)]
    )
    def test_what_is_no_batch_is_refused(self, tasks: list[TaskSpec], order: int) -> None:
        async def scenario(view: Open) -> None:
            with pytest.raises(JobError):
                await view("client").publish(tasks, order=order)
            assert (await view("client").depth()).tasks == 0

        self.run(scenario)

    @pytest.mark.parametrize("seed", range(4))
    def test_results_are_the_same_for_all_readers_whoever_records_them(self, seed: int) -> None:
        async def scenario(view: Open) -> None:
            rng = random.Random(seed)
            ids = [f"t{n}" for n in range(12)]
            await view("client").publish([task(id) for id in ids])
            (lease,) = await view("w0").take(1)

            async def record(owner: str) -> None:
                left = rng.sample(ids, len(ids))
                while left:
                    some = [left.pop() for _ in range(min(len(left), rng.randint(1, 5)))]
                    await view(owner).complete(lease, [TaskResult(id=id, value=owner) for id in some])
                    early.append({r.id: r.value for r in await view(owner).reader().read()})

            early: list[dict[str, object]] = []
            await asyncio.gather(*(record(f"w{n}") for n in range(3)))
            final = {r.id: r.value for r in await view("client").reader().read()}
            assert sorted(final) == sorted(ids)
            for seen in early:
                assert seen.items() <= final.items()
            assert (await view("client").depth()).tasks == 0

        self.run(scenario)
