"""QMOWS by example, and random schedules in which every invariant is checked after every step."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ephemeron.data.scheduler import LoaderQueue, LoaderReport, QueueOptions, Scheduler, TaskRetryPolicy, TaskStatus
from ephemeron.errors import JobError

OPTIONS = QueueOptions(window=4, batch=2, copies=2, lease_s=10, stuck_s=50, unresponsive_s=5)


def scheduler(*loaders: str, tasks: int = 0, options: QueueOptions = OPTIONS, **policy: object) -> Scheduler:
    made = Scheduler(options)
    for loader in loaders:
        made.add_loader(loader, now=0)
    made.submit(range(tasks), policy=TaskRetryPolicy(**policy))  # type: ignore[arg-type]
    return made


def ask(made: Scheduler, loader: str, request: int, done=(), *, failed=None, running=None, now: float = 0):
    reply = made.sync(loader, LoaderReport(request=request, done=tuple(done), failed=failed or {}, running=running), now=now)
    made.validate()
    return reply


def test_a_reply_is_a_window_of_k_tasks_that_slides():
    made = scheduler("a", tasks=9)
    assert ask(made, "a", 1).tasks == (0, 1, 2, 3)
    reply = ask(made, "a", 2, [0, 1], running=2)
    assert reply.tasks == (2, 3, 4, 5)
    assert reply.accepted == (0, 1)
    assert [made.tasks[key].status for key in (0, 2, 6)] == [TaskStatus.DONE, TaskStatus.LOADING, TaskStatus.READY]


def test_a_repeated_request_gets_the_queue_of_then_and_counts_no_failure_twice():
    made = scheduler("a", tasks=6, retries=1)
    ask(made, "a", 1)
    first = ask(made, "a", 2, [1], failed={0: "broken"})
    again = ask(made, "a", 2, [1], failed={0: "broken"})
    assert first.tasks == again.tasks == (0, 2, 3, 4)
    assert (first.accepted, again.accepted) == ((1,), ())
    assert made.tasks[0].attempts == 1
    old = ask(made, "a", 1, [])
    assert old.tasks == (0, 2, 3, 4)


def test_the_idle_are_held_and_dealt_to():
    made = scheduler("a")
    assert ask(made, "a", 1).hold
    assert made.idle_loaders() == ("a",)
    assert made.assign("a", now=1).hold
    made.submit(["x"])
    reply = made.assign("a", now=2)
    assert (reply.request, reply.tasks, reply.hold) == (1, ("x",), False)
    assert made.idle_loaders() == ()


def test_an_urgent_task_displaces_a_prefetched_one_which_stays_in_the_mirror():
    made = scheduler("a", tasks=4)
    ask(made, "a", 1)
    made.submit(["now"], urgent=True)
    assert ask(made, "a", 2, [0]).tasks == ("now", 1, 2, 3)
    made.submit(["soon"], urgent=True)
    assert ask(made, "a", 3).tasks == ("now", "soon", 1, 2)
    assert list(made.loaders["a"].uncommitted) == [3]
    assert ask(made, "a", 4, ["now", "soon"]).tasks == (1, 2, 3)


def test_a_task_that_becomes_urgent_moves_up_wherever_it_is():
    made = scheduler("a", tasks=8)
    ask(made, "a", 1)
    made.submit([6, 3], urgent=True)
    assert ask(made, "a", 2).tasks == (3, 6, 0, 1)
    assert list(made.loaders["a"].uncommitted) == [2]
    made.submit([2], urgent=True)
    assert made.tasks[2].owner is None, "set aside it would wait for this one loader"
    made.add_loader("b", now=0)
    assert ask(made, "b", 1).tasks[0] == 2


def test_a_loader_with_less_than_n_robs_the_fullest_of_half_the_difference_from_the_tail():
    made = scheduler("a", "b", "c", tasks=6)
    ask(made, "a", 1)
    ask(made, "b", 1)
    stolen = ask(made, "c", 1).tasks
    assert stolen == (2, 3)
    assert ask(made, "a", 2).tasks == (0, 1), "the robbed learns of it in its next answer"
    made.add_loader("d", now=0)
    assert ask(made, "d", 1).tasks == (1,), "half of two, and never what is in front"
    made.add_loader("e", now=0)
    assert ask(made, "e", 1).tasks == (5,)
    made.add_loader("f", now=0)
    assert ask(made, "f", 1).tasks == (3,)
    made.add_loader("g", now=0)
    assert ask(made, "g", 1).hold, "one task each: nothing can be stolen, and that is an end"


def test_theft_prefers_what_a_trainer_waits_for():
    made = scheduler("a", "b", tasks=4)
    ask(made, "a", 1)
    made.submit([1], urgent=True)
    made.submit([0], urgent=True)
    assert ask(made, "a", 2).tasks == (0, 1, 2, 3)
    assert ask(made, "b", 1).tasks == (1, 3)


def test_a_silent_loader_can_be_robbed_of_everything_but_only_once():
    made = scheduler("a", "b", "c", tasks=1)
    ask(made, "a", 1)
    assert ask(made, "b", 1).hold
    made.heartbeat("a", now=5)
    assert made.assign("b", now=5).tasks == (0,)
    made.validate()
    assert ask(made, "c", 1, now=10).hold, "two have it already"
    assert ask(made, "b", 2, [0], now=10).accepted == (0,)
    assert ask(made, "a", 2, [0], now=11).accepted == (), "the first result wins"


def test_a_late_answer_restarts_the_timeout():
    made = scheduler("a", "b")
    ask(made, "a", 1, now=0)
    ask(made, "b", 1, now=0)
    made.submit([0])
    assert made.assign("a", now=9).tasks == (0,)
    assert made.assign("b", now=10).hold


def test_a_loader_beyond_its_lease_loses_its_tasks_and_a_late_result_is_still_good():
    made = scheduler("a", "b", tasks=3)
    ask(made, "a", 1, now=1)
    assert made.deadline() == 10, "b was heard at 0"
    made.heartbeat("b", now=9)
    assert made.tick(now=11).loaders == ()
    assert made.tick(now=11.5).loaders == ("a",)
    made.validate()
    reply = ask(made, "a", 2, [0], now=12)
    assert (reply.rejoin, reply.accepted) == (True, (0,))
    assert ask(made, "b", 1, [0], now=12).accepted == ()
    made.add_loader("a", now=13)
    assert not ask(made, "a", 3, now=13).rejoin


def test_an_unknown_loader_is_told_to_join():
    made = scheduler(tasks=1)
    assert not made.heartbeat("ghost", now=0)
    assert ask(made, "ghost", 7).rejoin
    assert made.loaders == {}


def test_heartbeats_do_not_excuse_a_loader_that_never_ends():
    made = scheduler("a", "idle", tasks=1)
    ask(made, "a", 1)
    ask(made, "idle", 1)
    for now in range(0, 50, 5):
        assert made.heartbeat("a", now=now)
        assert made.heartbeat("idle", now=now)
        assert made.tick(now=now).loaders == ()
    made.heartbeat("a", now=51)
    made.heartbeat("idle", now=51)
    assert made.tick(now=51).loaders == ("a",), "the idle one has nothing to be stuck with"


def test_leaving_in_good_order_is_held_against_nothing():
    made = scheduler("a", tasks=2)
    ask(made, "a", 1)
    made.remove_loader("a")
    made.remove_loader("a")
    made.validate()
    assert not any(task.suspect for task in made.tasks.values())
    made.add_loader("b", now=0)
    assert ask(made, "b", 1).tasks == (0, 1)


@pytest.mark.parametrize(("then", "status"), [("fail", TaskStatus.FAILED), ("skip", TaskStatus.SKIPPED)])
@pytest.mark.parametrize("retries", [0, 1, 3])
def test_a_failing_task_gets_its_retries_and_then_its_verdict(retries, then, status):
    made = scheduler("a", tasks=2, retries=retries, then=then)
    ask(made, "a", 1)
    for attempt in range(retries):
        reply = ask(made, "a", 2 + attempt, failed={0: "no such file"})
        assert reply.failures == ()
        assert reply.tasks[0] == 0
    reply = ask(made, "a", 2 + retries, failed={0: "no such file"})
    assert [(v.key, v.status, v.reason) for v in reply.failures] == [(0, status, "no such file")]
    assert reply.tasks == (1,)
    assert ask(made, "a", 3 + retries, [0]).accepted == (), "a verdict is final"
    assert made.skipped == (then == "skip")


def test_a_poisoned_task_costs_retries_and_two_loaders_and_no_other_task():
    made = scheduler(tasks=6, retries=1)
    killed, asked, verdicts = [], 0, []
    queues: dict[str, LoaderQueue] = {}
    while made.unsettled:
        name = f"loader-{len(killed)}"
        if name not in queues:
            queues[name] = LoaderQueue(batch=2)
            made.add_loader(name, now=0)
        queue = queues[name]
        if (report := queue.report()) is not None:
            reply = ask(made, name, report.request, report.done, running=report.running)
            queue.sync(reply.request, reply.tasks)
            asked += 1
        key = queue.take()
        if key == 2:
            killed.append(name)
            verdicts += made.fail_loader(name)
            made.validate()
        elif key is not None:
            queue.finish()
        assert asked < 50
    assert len(killed) == 3
    assert [(v.key, v.status) for v in verdicts] == [(2, TaskStatus.FAILED)]
    assert [task.status is TaskStatus.DONE for task in made.tasks.values()] == [True, True, False, True, True, True]


def test_a_suspect_is_loaded_alone_after_its_loader_has_nothing_else_in_hand():
    made = scheduler("a", "b", tasks=5)
    ask(made, "a", 1)
    assert ask(made, "b", 1).tasks == (3, 4), "what nobody had, and half the difference to a's"
    made.fail_loader("b")
    assert {key for key, task in made.tasks.items() if task.suspect} == {3, 4}
    made.submit([5, 6])
    assert ask(made, "a", 2, [0], running=1).tasks == (1, 2), "it ends what it has"
    assert ask(made, "a", 3, [1]).tasks == (2,), "and goes on to nothing that comes after the suspect"
    assert ask(made, "a", 4, [2]).tasks == (3,)
    made.add_loader("c", now=0)
    assert ask(made, "c", 1).tasks == (4,)
    assert ask(made, "a", 5, [3]).tasks == (5, 6)


def test_a_suspect_set_aside_can_be_had_by_the_idle():
    made = scheduler("a", "b", tasks=4)
    ask(made, "a", 1)
    made.submit([4, 5])
    ask(made, "a", 2, [0, 1], running=2)
    assert ask(made, "b", 1).tasks == (4, 5)
    assert ask(made, "a", 3, running=2).tasks == (2, 3)
    assert made.loaders["a"].in_hand == {2, 3, 4, 5}, "it may be at what was stolen until it has seen the answer"
    ask(made, "a", 4, running=2)
    made.fail_loader("a")
    assert ask(made, "b", 2, running=4).tasks == (4, 5), "the suspects come first, so it gets nothing new"
    assert list(made.loaders["b"].uncommitted) == [2]
    for name, key in (("c", 3), ("d", 2)):
        made.add_loader(name, now=0)
        assert ask(made, name, 1).tasks == (key,)
    assert ask(made, "b", 3, [4, 5]).hold


def test_a_death_with_several_in_hand_is_no_failure_of_any():
    made = scheduler("a", tasks=4, retries=0)
    ask(made, "a", 1)
    assert made.fail_loader("a") == ()
    assert all(task.attempts == 0 and task.suspect for task in made.tasks.values())
    assert made.fail_loader("a") == ()


def test_a_death_with_several_suspects_in_hand_is_no_failure_of_any():
    made = scheduler("a", "b", tasks=4, retries=0)
    ask(made, "a", 1)
    assert ask(made, "b", 1).tasks == (2, 3)
    assert made.fail_loader("b") == made.fail_loader("a") == ()
    assert [task.attempts for task in made.tasks.values()] == [0, 0, 0, 0]
    assert all(task.suspect for task in made.tasks.values())


def test_what_a_loader_says_it_is_at_is_in_its_hands_though_it_was_stolen():
    made = scheduler("a", "b", tasks=2)
    ask(made, "a", 1)
    assert ask(made, "b", 1).tasks == (1,)
    assert ask(made, "a", 2, [0]).tasks == ()
    assert not ask(made, "a", 3, running=1).hold, "it is not idle"
    made.fail_loader("a")
    assert made.tasks[1].suspect


def test_forgotten_tasks_vanish_and_their_results_are_dropped():
    made = scheduler("a", tasks=6)
    ask(made, "a", 1)
    made.forget([1, 5, "never heard of"])
    made.validate()
    reply = ask(made, "a", 2, [0, 1])
    assert reply.accepted == (0,)
    assert reply.tasks == (2, 3, 4)
    made.forget([0])
    made.submit([0])
    assert ask(made, "a", 3, [0]).accepted == (0,), "wanted again, and the bytes are the same"


def test_the_queue_of_ready_tasks_does_not_grow_with_what_left_it():
    made = scheduler()
    for i in range(2000):
        made.submit([i])
        made.submit([i], urgent=True)
        made.forget([i])
    assert len(made.ready._heap) < 200
    assert made.tasks == {}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"window": 0}, "window = 0"),
        ({"batch": -1}, "batch = -1"),
        ({"lease_s": 0}, "lease_s = 0"),
        ({"copies": 0}, "copies = 0"),
        ({"unresponsive_s": float("nan")}, "unresponsive_s = nan"),
    ],
)
def test_mistakes_in_options(wrong, message):
    with pytest.raises(JobError, match=message):
        QueueOptions(**wrong)


def test_mistakes_in_policies():
    with pytest.raises(JobError, match="retries = -1"):
        TaskRetryPolicy(retries=-1)
    with pytest.raises(JobError, match="then = 'explode'"):
        TaskRetryPolicy(then="explode")  # type: ignore[arg-type]


# -- random schedules -------------------------------------------------------------------------------------


class Schedules(RuleBasedStateMachine):
    """Loaders that run algorithm 3.3, over a network that loses and repeats; deaths, theft and silence at random."""

    @initialize(
        window=st.integers(1, 6),
        batch=st.integers(1, 4),
        copies=st.integers(1, 3),
        retries=st.integers(0, 2),
        then=st.sampled_from(["fail", "skip"]),
    )
    def begin(self, window, batch, copies, retries, then):
        options = QueueOptions(window=window, batch=batch, copies=copies, lease_s=10, stuck_s=30, unresponsive_s=3)
        self.made = Scheduler(options)
        self.policy = TaskRetryPolicy(retries=retries, then=then)
        self.batch = batch
        self.now = 0.0
        self.loaders: dict[str, LoaderQueue] = {}
        self.names = 0
        self.accepted: Counter[int] = Counter()
        self.failures: Counter[int] = Counter()
        self.sent: list[tuple[str, LoaderReport]] = []

    def pick(self, data) -> str:
        return data.draw(st.sampled_from(sorted(self.loaders)))

    def hear(self, verdicts):
        self.failures.update(v.key for v in verdicts)

    def deliver(self, name: str, report: LoaderReport, *, lost: bool = False):
        mirror = self.made.loaders.get(name)
        is_new = mirror is not None and report.request > mirror.request
        reply = self.made.sync(name, report, now=self.now)
        self.accepted.update(reply.accepted)
        self.hear(reply.failures)
        assert len(reply.tasks) <= self.made.options.window
        urgent = [self.made.tasks[key].urgent for key in reply.tasks if key in self.made.tasks]
        assert not is_new or urgent == sorted(urgent, reverse=True), "what a trainer waits for comes first"
        queue = self.loaders.get(name)
        if lost or queue is None or reply.hold:
            return
        if reply.rejoin:
            self.made.add_loader(name, now=self.now)
        queue.sync(reply.request, reply.tasks)

    @rule(keys=st.lists(st.integers(0, 25), max_size=8), urgent=st.booleans())
    def submit(self, keys, urgent):
        self.made.submit(keys, urgent=urgent, policy=self.policy)

    @rule(keys=st.lists(st.integers(0, 25), max_size=2))
    def forget(self, keys):
        self.made.forget(keys)
        for key in keys:
            self.accepted.pop(key, None)
            self.failures.pop(key, None)

    @precondition(lambda self: len(self.loaders) < 5)
    @rule()
    def join(self):
        self.names += 1
        self.loaders[f"l{self.names}"] = LoaderQueue(batch=self.batch)
        self.made.add_loader(f"l{self.names}", now=self.now)

    @precondition(lambda self: self.loaders)
    @rule(data=st.data(), steps=st.integers(1, 4), fails=st.booleans())
    def work(self, data, steps, fails):
        queue = self.loaders[self.pick(data)]
        for _ in range(steps):
            if queue.running is not None:
                queue.fail("bad") if fails else queue.finish()
            queue.take()

    @precondition(lambda self: self.loaders)
    @rule(data=st.data(), lost=st.sampled_from(["no", "no", "no", "request", "reply"]))
    def ask(self, data, lost):
        name = self.pick(data)
        report = self.loaders[name].report() or self.loaders[name].under_way
        if report is not None:
            self.sent.append((name, report))
            if lost != "request":
                self.deliver(name, report, lost=lost == "reply")

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def an_old_request_comes_again(self, data):
        self.deliver(*data.draw(st.sampled_from(self.sent)), lost=True)

    @rule()
    def deal(self):
        for name in self.made.idle_loaders():
            reply = self.made.assign(name, now=self.now)
            if not reply.hold and name in self.loaders:
                self.loaders[name].sync(reply.request, reply.tasks)

    @precondition(lambda self: self.loaders)
    @rule(data=st.data(), cleanly=st.booleans(), known=st.booleans())
    def end(self, data, cleanly, known):
        name = self.pick(data)
        del self.loaders[name]
        if cleanly:
            self.made.remove_loader(name)
        elif known:
            self.hear(self.made.fail_loader(name))

    @rule(seconds=st.sampled_from([0.5, 2.0, 8.0]))
    def wait(self, seconds):
        self.now += seconds
        for name in sorted(self.loaders):
            self.made.heartbeat(name, now=self.now)
        self.hear(self.made.tick(now=self.now).failures)

    @rule()
    def freeze(self):
        self.now += 11
        self.hear(self.made.tick(now=self.now).failures)
        assert self.made.loaders == {}

    @invariant()
    def holds(self):
        if hasattr(self, "made"):
            self.made.validate()
            assert not self.accepted or max(self.accepted.values()) == 1, "a result is accepted once"
            assert not self.failures or max(self.failures.values()) == 1
            assert not self.accepted.keys() & self.failures.keys()
            for key, task in self.made.tasks.items():
                assert (task.status is TaskStatus.DONE) == (key in self.accepted)
                assert (task.status in (TaskStatus.FAILED, TaskStatus.SKIPPED)) == (key in self.failures)

    def teardown(self):
        """However things stand: two honest loaders, and everything ends."""
        if not hasattr(self, "made"):
            return
        self.loaders = {"x": LoaderQueue(batch=self.batch), "y": LoaderQueue(batch=self.batch)}
        for name in self.loaders:
            self.made.add_loader(name, now=self.now)
        for _ in range(500):
            if not self.made.unsettled:
                return
            self.now += 0.5
            self.hear(self.made.tick(now=self.now).failures)
            for name, queue in self.loaders.items():
                self.made.heartbeat(name, now=self.now)
                if (report := queue.report()) is not None:
                    self.deliver(name, report)
                if queue.take() is not None:
                    queue.finish()
            self.deal()
            self.holds()
        pytest.fail(f"{self.made.unsettled} tasks are left")


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
