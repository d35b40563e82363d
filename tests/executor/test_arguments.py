"""Large arguments are pickled, stored and fetched once, and tasks get what they would without that."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from ephemeron.errors import JobError
from ephemeron.executor import FunctionExecutor
from ephemeron.executor.arguments import ArgumentPickler, SharedArguments
from ephemeron.user_code import unpickled


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))


def pool(**options):
    return FunctionExecutor(platform="simulated", **{"max_workers": 2, **options})


LARGE = np.arange(250_000.0)


def total(x, n=0, **more):
    return float(np.sum(x)) + n


def stored(executor):
    return [key for key in executor._session._stored if ".in/" in key]


@pytest.mark.parametrize("chunksize", [1, 7])
def test_a_repeated_argument_is_stored_and_fetched_once(chunksize):
    with pool() as executor:
        found = list(executor.map(total, [LARGE] * 40, range(40), chunksize=chunksize))
        assert found == [total(LARGE, n) for n in range(40)]
        assert len(stored(executor)) == 1
    assert executor.traffic.bytes_down < 7 * LARGE.nbytes  # two or three times for each of two functions


@pytest.mark.parametrize("value", [LARGE, LARGE.tobytes(), "x" * 100_000, [1.0] * 100_000, {"a": LARGE, "b": [LARGE]}, Ellipsis])
def test_every_kind_that_is_repeated_within_items_arguments_and_options(value):
    def same(x, n, more=None):
        return type(x).__name__, n

    repeated = {"a": value} if value is Ellipsis else value
    with pool() as executor:
        found = list(executor.map(same, [repeated] * 5, range(5)))
        assert found == [(type(repeated).__name__, n) for n in range(5)]
        assert len(stored(executor)) == (0 if value is Ellipsis else 1)


@pytest.mark.parametrize("beside", [None, object])
def test_what_was_pickled_is_released_without_the_garbage_collector(beside):
    gc.collect()
    gc.disable()
    try:
        value = np.zeros(100_000)
        made = ArgumentPickler("p/", SharedArguments(), what="x").pickled(((value, beside), {}))
        left = [weakref.ref(value), *map(weakref.ref, made.objects.values())]
        assert len(left) == 2
        del value, made
        assert [each() for each in left] == [None, None]
    finally:
        gc.enable()


def test_arrays_within_items_are_apart_wherever_they_are():
    items = [{"data": (LARGE, n), "more": [LARGE]} for n in range(6)]
    with pool() as executor:
        found = list(executor.map(lambda item: (total(*item["data"]), item["data"][0] is item["more"][0]), items))
        assert found == [(total(LARGE, n), True) for n in range(6)]
        assert len(stored(executor)) == 1


def test_equal_values_by_several_submits_are_stored_once_and_changes_are_seen():
    value = LARGE.copy()
    with pool() as executor:
        futures = [executor.submit(total, value, n) for n in range(3)]
        futures += [executor.submit(total, value.copy(), n) for n in range(3)]
        value[0] = 7.0
        futures.append(executor.submit(total, n=1, x=value))
        assert [f.result(60) for f in futures] == [total(LARGE, n) for n in (0, 1, 2, 0, 1, 2)] + [total(value, 1)]
        assert len(stored(executor)) == 2


def test_equal_objects_stay_two_and_one_object_stays_one():
    def changed(a, b):
        a[0] = 5.0
        return float(b[0])

    with pool() as executor:
        assert executor.submit(changed, LARGE, LARGE.copy()).result(60) == 0.0
        assert executor.submit(changed, LARGE, LARGE).result(60) == 5.0
        assert list(executor.map(changed, [LARGE] * 2, [LARGE.copy()] * 2)) == [0.0, 0.0]
        assert len(stored(executor)) == 1


def test_a_large_closure_is_sent_once():
    held = LARGE.copy()
    with pool() as executor:
        assert list(executor.map(lambda n: total(held, n), range(30))) == [total(LARGE, n) for n in range(30)]
        code = [key for key in executor._session._stored if ".code/function" in key]
        assert len(code) == 1


def test_what_waits_shares_its_bytes_and_what_was_sent_is_let_go():
    shared = SharedArguments()
    pickler = ArgumentPickler("k/", shared, [(LARGE, 1), (LARGE, 2)], what="an argument")
    made = [pickler.pickled(((LARGE, n), {})) for n in (1, 2)]
    assert [len(m.payload) < 1000 for m in made] == [True, True]
    assert made[0].inputs == made[1].inputs
    (key,) = made[0].inputs
    assert made[0].objects[key] is made[1].objects[key]
    (again, n), _ = unpickled(made[1].payload, [made[1].objects[key]])
    np.testing.assert_array_equal(again, LARGE)
    assert n == 2
    del made, pickler
    gc.collect()
    assert not shared.contents


def test_arguments_that_hold_themselves():
    cyclic: list[object] = [1, LARGE]
    cyclic.append(cyclic)
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pool() as executor:
        assert executor.submit(lambda x: (x[2] is x, total(x[1])), cyclic).result(60) == (True, total(LARGE))
        assert list(executor.map(lambda x, n: x[2] is x, [cyclic] * 3, range(3))) == [True] * 3
        with pytest.raises(JobError, match=r"an argument of .*total cannot be sent to a function: .*recursi"):
            executor.submit(total, deep)


class Table:
    """A large object without arrays of numbers, beside one."""

    def __init__(self, first, beside=None):
        self.words = [first, *(f"word {n}" for n in range(20_000))]
        self.beside = beside


def made_of(shared, *arguments, **named):
    """The arguments of a `submit`, and what its task gets."""
    made = ArgumentPickler("k/", shared, what="an argument").pickled((arguments, named))
    inputs = [made.objects[key] for key in made.inputs]
    return made, unpickled(made.payload, inputs) if made.payload else unpickled(inputs[0], inputs[1:])


@pytest.mark.parametrize("beside", [None, LARGE])
def test_a_large_object_of_several_submits_is_stored_once_and_its_changes_are_seen(beside):
    shared, table = SharedArguments(), Table("a", beside)
    first, ((same, one), named) = made_of(shared, table, 1, other=table)
    second, _ = made_of(shared, table, 2)
    equal, _ = made_of(shared, Table("a", beside), 3)
    assert (named["other"], one, same.words, same.beside is None) == (same, 1, table.words, beside is None)
    assert len(first.inputs) == 1
    assert first.inputs == second.inputs == equal.inputs
    assert max(len(made.payload) for made in (first, second, equal)) < 300
    table.words[0] = "b"
    changed, ((new, _), _) = made_of(shared, table, 4)
    assert new.words[0] == "b"
    assert changed.inputs != first.inputs
    table.words, table.beside = ["c"], None
    small, ((new, _), _) = made_of(shared, table, 5)
    assert (small.inputs, new.words) == ((), ["c"])


def test_objects_that_differ_but_for_a_large_array_share_it():
    shared = SharedArguments()
    made = [made_of(shared, Table(n, LARGE).__dict__ | {"words": n}) for n in range(4)]
    assert {each.inputs for each, _ in made} == {made[0][0].inputs}
    assert len(made[0][0].inputs) == 1
    assert [got[0][0]["words"] for _, got in made] == [0, 1, 2, 3]


def test_arrays_that_are_too_large_together_are_stored_once_where_they_are_repeated():
    shared = SharedArguments()
    fixed = [np.arange(3000) + n for n in range(2)]  # 24 kB each
    made = [made_of(shared, n, fixed, np.full(2000, n)) for n in range(5)]
    assert [(got[0][0], got[0][2][0]) for _, got in made] == [(n, n) for n in range(5)]
    assert all(np.array_equal(got[0][1], fixed) for _, got in made)
    assert [len(each.inputs) for each, _ in made] == [1, 2, 2, 2, 2]
    assert all(15_000 < len(each.payload) < 20_000 for each, _ in made[1:])
    assert not {key for each, _ in made[1:] for key in each.inputs} & set(made[0][0].inputs)
    assert len({each.inputs for each, _ in made[1:]}) == 1
    alone, _ = made_of(shared, fixed[0])
    assert alone.inputs == ()


def test_large_objects_are_found_again_where_functions_run():
    with pool() as executor:
        futures = [executor.submit(lambda table, n: table.words[n], Table("a"), n) for n in range(3)]
        assert [f.result(60) for f in futures] == ["a", "word 0", "word 1"]
