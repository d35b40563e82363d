"""`FunctionExecutor` in virtual time: every form of work, errors, cancellation, budget."""

from __future__ import annotations

import concurrent.futures
import functools
import sys
import time

import numpy as np
import pytest

from ephemeron.errors import BudgetReached, JobError, TaskFailed
from ephemeron.executor import FunctionExecutor


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def pool(**options):
    return FunctionExecutor(platform="simulated", **{"max_workers": 4, **options})


def square(x):
    return x * x


def test_results_come_in_order_with_a_bill():
    with pool() as executor:
        assert list(executor.map(square, range(300))) == [x * x for x in range(300)]
        assert list(executor.map(lambda a, b: (a, b), "abc", [1, 2])) == [("a", 1), ("b", 2)]
        assert list(executor.map("math:sqrt", [4.0, 9.0])) == [2.0, 3.0]
        assert list(executor.map(square, [])) == []
        assert executor.submit(functools.partial(int, base=2), "101").result() == 5
        assert executor.submit(dict, a=1).result() == {"a": 1}
        bill = executor.bill()
    assert bill.tasks == 306
    assert 0 < bill.functions_usd < bill.cost_usd
    assert bill.invocations >= 4


def test_a_folder_of_code_is_sent_along(tmp_path):
    (tmp_path / "sent_along.py").write_text("K = 4\n")

    def uses_it(x):
        import sent_along

        return x * sent_along.K

    with pool(code=[tmp_path], progress=True) as executor:
        sys.path.insert(0, str(tmp_path))  # a simulated function is in this process, and unpacks nothing
        try:
            assert executor.submit(uses_it, 2).result() == 8
            assert any("bundle" in key for key in executor._shipper.ship(uses_it).objects)
        finally:
            sys.path.remove(str(tmp_path))


def test_chunks_are_one_task_each():
    with pool() as executor:
        assert list(executor.map(square, range(10), chunksize=4)) == [x * x for x in range(10)]
        assert [f.result() for f in executor.map_futures(square, range(5), chunksize=2)] == [[0, 1], [4, 9], [16]]


def test_its_futures_are_those_of_the_standard_library():
    with pool() as executor:
        futures = [executor.submit(square, x) for x in range(20)]
        done, left = concurrent.futures.wait(futures, timeout=60)
        assert not left
        assert sorted(f.result() for f in concurrent.futures.as_completed(done)) == [x * x for x in range(20)]
        assert all(f.tries == 1 for f in futures)


@pytest.mark.parametrize(
    ("count", "chunksize", "fan_in"),
    [(1, 1, 2), (3, 5, 2), (27, 1, 3), (100, 7, 4), (64, 1, 64), pytest.param(900, 1, 2, marks=pytest.mark.slow)],
)
def test_trees_combine_in_order(count, chunksize, fan_in):
    with pool() as executor:
        words = [f"<{n}>" for n in range(count)]
        joined = executor.map_reduce(str, words, lambda a, b: a + b, chunksize=chunksize, fan_in=fan_in)
        assert joined.result() == "".join(words)
        assert executor.reduce(max, range(count), fan_in=fan_in).result() == count - 1


def test_large_arguments_and_results_go_by_reference():
    big = np.arange(60_000.0)
    with pool() as executor:
        futures = [executor.submit(np.multiply, big, k) for k in (1, 2)]
        for k, future in zip((1, 2), futures, strict=True):
            assert (future.result() == big * k).all()
        assert executor.submit(np.sum, big).result() == big.sum()


def broken(x):
    if x == 3:
        raise ValueError("no threes")
    return x


def test_a_task_that_fails_has_its_own_traceback():
    with pool(retries=1) as executor:
        futures = executor.map_futures(broken, range(5))
        assert [f.result() for f in futures if f is not futures[3]] == [0, 1, 2, 4]
        with pytest.raises(TaskFailed, match="no threes") as failed:
            futures[3].result()
        assert failed.value.tries == futures[3].tries == 2
        assert 'raise ValueError("no threes")' in failed.value.traceback
        assert "broken" in failed.value.traceback
        assert any("no threes" in note for note in failed.value.__notes__)
        with pytest.raises(TaskFailed, match="no threes"):
            executor.map_reduce(broken, range(9), lambda a, b: a, chunksize=2, fan_in=2).result()


def test_a_task_is_tried_again(tmp_path):
    def second_time(x, folder):
        try:
            (folder / str(x)).touch(exist_ok=False)
        except FileExistsError:
            return x
        raise OSError("the first time")

    with pool() as executor:
        futures = [executor.submit(second_time, x, tmp_path) for x in range(8)]
        assert [f.result() for f in futures] == list(range(8))
        assert {f.tries for f in futures} == {2}


def test_a_cancelled_task_has_no_result_and_the_others_have():
    with pool() as executor:
        futures = executor.map_futures(square, range(50))
        assert futures[40].cancel()
        assert futures[40].cancel(), "it stays cancelled"
        assert futures[40].cancelled()
        assert [f.result() for f in futures if f is not futures[40]] == [x * x for x in range(50) if x != 40]
        assert not futures[0].cancel()


def test_an_executor_that_is_left_by_an_error_ends_at_once():
    ran = []

    def noted(x):
        ran.append(x)
        time.sleep(0.01)
        return x

    def leave():
        with pool(max_workers=1) as executor:
            futures.append(executor.map_reduce(noted, range(3000), max, chunksize=1))
            futures.append(executor.submit(noted, -1))
            raise KeyError

    futures = []
    with pytest.raises(KeyError):
        leave()
    tree, single = futures
    assert tree.cancelled()
    assert single.cancelled()
    assert len(ran) < 3000


def test_the_budget_stops_what_is_left():
    def slow(x):
        end = time.thread_time() + 0.01
        while time.thread_time() < end:
            pass
        return x

    with pool(budget_usd=2.5e-4, max_workers=2) as executor:
        futures = executor.map_futures(slow, range(400))
        with pytest.raises(BudgetReached, match=r"of 400 tasks are done, the rest is cancelled") as reached:
            [future.result() for future in futures]
        assert 0 < reached.value.done < 400
        with pytest.raises(BudgetReached):
            executor.submit(square, 1)
    assert executor.bill().cost_usd < 1e-3


def test_a_result_that_takes_too_long_is_a_timeout():
    with pool() as executor, pytest.raises(TimeoutError):
        list(executor.map(square, range(10), timeout=1e-9))


def test_nothing_is_taken_after_the_end():
    executor = pool()
    executor.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        executor.submit(square, 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"platform": "moon"}, "platform 'moon'"),
        ({"max_workers": -1}, "max_workers = -1"),
        ({"max_workers": 10**6}, "max_workers = 1000000, and simulated runs 1000"),
        ({"memory_mb": 1}, "memory_mb = 1 is outside 128 to 10240"),
        ({"retries": -1}, "retries = -1"),
        ({"channel": "file://objects"}, "file://objects is not a folder on this machine"),
        ({"channel": "objects"}, "channel 'objects' is of no known kind"),
        ({"timeout_s": 0}, "timeout_s = 0"),
        ({"budget_usd": -1.0}, "budget_usd"),
        ({"function_timeout_s": 1e6}, "function_timeout_s = 1e"),
        ({"code": ["/nowhere"]}, "code = '/nowhere'"),
        ({"platform": "local", "settings": 3}, "int is not for platform local"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_begins(home, options, said):
    with pytest.raises(JobError, match=said):
        FunctionExecutor(**{"platform": "simulated", **options})
    assert not home.exists()


def test_what_cannot_be_sent_is_named_before_anything_begins(home, tmp_path):
    with pool() as executor:
        with (tmp_path / "f").open("w") as file, pytest.raises(JobError, match=r"an argument of .*square"):
            executor.submit(square, file)
        with pytest.raises(JobError, match="chunksize = 0"):
            executor.map(square, [1], chunksize=0)
        with pytest.raises(JobError, match="no items to combine"):
            executor.reduce(max, [])
        with pytest.raises(JobError, match="has no name 'nothing'"):
            executor.map("math:nothing", [1])
    assert list((home / "runs").iterdir()) == [], "an executor that ran nothing leaves nothing"


def test_functions_are_in_proportion_to_tasks():
    def waited(x):
        return x

    with pool(max_workers=8, autoscaling_factor=0.25) as executor:
        assert list(executor.map(waited, range(8))) == list(range(8))
        assert executor.bill().invocations <= 2
    for name, value in (("autoscaling_factor", 0), ("idle_timeout_s", -1)):
        with pytest.raises(JobError, match=name):
            pool(**{name: value})
