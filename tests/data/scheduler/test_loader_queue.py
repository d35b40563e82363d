"""Algorithm 3.3 as a state machine: when it asks, what it brings, and which answers count."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ephemeron.data.scheduler import LoaderQueue


def asked(queue: LoaderQueue, tasks) -> LoaderQueue:
    report = queue.report()
    assert report is not None
    assert queue.sync(report.request, tasks)
    return queue


def test_it_asks_first_works_on_while_it_asks_and_stops_at_2n_results_nobody_confirmed():
    queue = asked(LoaderQueue(batch=2), range(9))
    for _ in range(2):
        queue.take()
        assert queue.report() is None
        queue.finish()
    assert queue.take() is None, "the request comes before the next task"
    report = queue.report()
    assert (report.request, report.done, report.running) == (2, (0, 1), None)
    assert (queue.take(), queue.finish(), queue.take(), queue.finish()) == (2, None, 3, None)
    assert queue.take() is None
    assert queue.report() is None, "one request at a time"
    assert queue.sync(2, range(2, 9))
    assert queue.report().done == (2, 3)
    assert queue.take() == 4


def test_only_the_answer_to_the_request_under_way_counts():
    queue = asked(LoaderQueue(batch=1), [1, 2])
    queue.take()
    queue.finish()
    assert queue.report() is queue.under_way
    assert not queue.sync(1, [7, 8])
    assert queue.sync(2, [2])
    assert not queue.sync(2, [9])
    assert queue.take() == 2


def test_an_answer_does_not_bring_back_what_was_done_meanwhile_but_may_bring_back_what_failed():
    queue = asked(LoaderQueue(batch=2), [1, 2, 3, 4])
    queue.take()
    queue.fail("bad")
    queue.take()
    queue.finish()
    report = queue.report()
    assert (report.failed, report.done) == ({1: "bad"}, (2,))
    assert (queue.take(), queue.finish(), queue.take()) == (3, None, 4)
    queue.sync(report.request, [1, 3, 4, 5])
    queue.finish()
    report = queue.report()
    assert report.done == (3, 4)
    assert report.running is None
    assert queue.take() == 1


def test_what_is_running_is_told_and_what_is_queued_can_be_withdrawn():
    queue = asked(LoaderQueue(batch=1), [1, 2])
    queue.take()
    queue.finish()
    queue.report()
    assert queue.take() == 2
    queue.sync(2, [])
    assert queue.report() is None, "it is not idle"
    queue.finish()
    assert queue.report().done == (2,)


def test_failed_reports_are_not_changed_by_what_follows():
    queue = asked(LoaderQueue(batch=1), [1, 2])
    queue.take()
    queue.fail("bad")
    report = queue.report()
    queue.take()
    queue.fail("bad too")
    assert report.failed == {1: "bad"}


@given(st.integers(1, 5), st.lists(st.sampled_from(["take", "end", "report", "sync"]), max_size=60))
def test_every_task_that_was_taken_is_reported_once(batch, events):
    queue, taken, reported, given_out = LoaderQueue(batch=batch), [], [], 0
    for event in events:
        if event == "take" and (key := queue.take()) is not None:
            taken.append(key)
        elif event == "end" and queue.running is not None:
            queue.finish() if queue.running % 2 else queue.fail("odd is good")
        elif event == "report" and (report := queue.report()) is not None:
            reported += [*report.done, *report.failed]
            assert len(reported) - len(set(reported)) == 0
        elif event == "sync" and queue.under_way is not None:
            queue.sync(queue.under_way.request, range(given_out, given_out + 3))
            given_out += 3
    for _ in range(10):
        if (key := queue.take()) is not None:
            taken.append(key)
        if queue.under_way is not None:
            queue.sync(queue.under_way.request, [])
        if queue.running is not None:
            queue.finish()
        if (report := queue.report()) is not None:
            reported += [*report.done, *report.failed]
    assert sorted(reported) == sorted(taken)
