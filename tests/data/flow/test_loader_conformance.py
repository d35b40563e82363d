"""What loops see of a loader: a flow's beside PyTorch's and torchdata's, by the same scripts."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torchdata", reason="torchdata is not installed: pip install torchdata")

from loader_kinds import BATCH, KINDS, SAMPLES, Table, ids, loader, read

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's
Passes = list[list[list[int]]]


def whole_epochs(made: Any) -> Passes:
    return [read(made) for _ in range(3)]


def as_many_as_len(made: Any) -> Passes:
    return [[ids(b) for _, b in zip(range(len(made)), made, strict=False)] for _ in range(4)]


def len_the_other_way_round(made: Any) -> Passes:
    return [[ids(b) for b, _ in zip(made, range(len(made)), strict=False)] for _ in range(3)]


def slices(made: Any) -> Passes:
    return [read(itertools.islice(made, n)) for n in (2, 6, 0, 1, 9)]


def breaks(made: Any) -> Passes:
    passes: Passes = []
    for stop in (1, 3, 6, None):
        passes.append([])
        for number, batch in enumerate(made, 1):
            passes[-1].append(ids(batch))
            if number == stop:
                break
    return passes


def two_at_once(made: Any) -> Passes:
    both = [(ids(a), ids(b)) for a, b in zip(made, made, strict=True)]
    return [[a for a, _ in both], [b for _, b in both], read(made)]


def one_inside_the_other(made: Any) -> Passes:
    outer, inner = [], []
    for batch in made:
        outer.append(ids(batch))
        if len(outer) == 2:
            inner = read(made)
    return [outer, inner, read(made)]


def iterators_that_nobody_asks(made: Any) -> Passes:
    for _ in range(3):
        iter(made)
    return [read(made), read(made)]


def an_iterator_that_was_ended_by_hand(made: Any) -> Passes:
    iterator = iter(made)
    first = [ids(next(iterator))]
    del iterator
    return [first, read(made)]


def after_the_end(made: Any) -> Passes:
    iterator = iter(made)
    got = read(iterator)
    assert next(iterator, None) is None
    return [got, read(made)]


SCRIPTS = (
    whole_epochs,
    as_many_as_len,
    len_the_other_way_round,
    slices,
    breaks,
    two_at_once,
    one_inside_the_other,
    iterators_that_nobody_asks,
    an_iterator_that_was_ended_by_hand,
    after_the_end,
)


CASES = (*((script, 0) for script in SCRIPTS), (breaks, 1), (two_at_once, 1))
"""With processes: those scripts in which they are under way when the loop is left."""


@pytest.mark.slow
@pytest.mark.parametrize(("script", "workers"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_the_same_script_sees_the_same_batches(script: Callable[[Any], Passes], workers: int) -> None:
    ordered = script(loader("torch"))
    assert sum(len(batches) for batches in ordered) > 0
    for kind in KINDS:
        for drop in (False, True):
            expected = [[b for b in batches if not drop or len(b) == BATCH] for batches in ordered]
            if drop and script in (slices, breaks):
                continue  # they count batches
            made = loader(kind, workers=workers, drop=drop)
            assert len(made) == SAMPLES // BATCH + (not drop)
            assert script(made) == expected, f"{kind}, drop={drop}"
            assert len(made) == SAMPLES // BATCH + (not drop), "also afterwards"
            if kind == "flow":
                made.close()
        shuffled = script(loader(kind, shuffle=True))
        assert [list(map(len, batches)) for batches in shuffled] == [list(map(len, batches)) for batches in ordered]
        for batches in shuffled:
            seen = [i for batch in batches for i in batch]
            assert len(set(seen)) == len(seen), f"{kind}: no sample twice in an epoch"
        entire = [batches for batches in shuffled if len(batches) == len(ordered[0])]
        if len(entire) > 1:
            assert entire[0] != entire[1], f"{kind}: each epoch has an order of its own"


def moved(state: Any) -> Any:
    """As it comes out of a checkpoint."""
    return copy.deepcopy(state)


def resumed_after(count: int | None) -> Callable[[Callable[[], Any]], Passes]:
    def script(make: Callable[[], Any]) -> Passes:
        first = make()
        before = []
        for batch in first:
            before.append(ids(batch))
            if len(before) == count:
                break
        state = moved(first.state_dict())
        second = make()
        second.load_state_dict(state)
        return [before, read(second), read(second), read(second)]

    script.__name__ = f"resumed_after_{count}"
    return script


def saved_inside_the_loop(make: Callable[[], Any]) -> Passes:
    first = make()
    before, states = [], []
    for batch in first:
        before.append(ids(batch))
        states.append(moved(first.state_dict()))
    rest = []
    for state in states:
        second = make()
        second.load_state_dict(state)
        rest.append([i for batch in second for i in ids(batch)])
    return [before, rest]


def saved_before_anything(make: Callable[[], Any]) -> Passes:
    first = make()
    state = moved(first.state_dict())
    second = make()
    second.load_state_dict(state)
    return [read(first), read(second), read(second)]


def resumed_by_len(make: Callable[[], Any]) -> Passes:
    first = make()
    before = read(itertools.islice(first, 4))
    second = make()
    second.load_state_dict(moved(first.state_dict()))
    return [before, *([ids(b) for _, b in zip(range(len(second)), second, strict=False)] for _ in range(3))]


def resumed_twice(make: Callable[[], Any]) -> Passes:
    passes, state = [], None
    for count in (2, 3, 99):
        made = make()
        if state is not None:
            made.load_state_dict(state)
        passes.append(read(itertools.islice(made, count)))
        state = moved(made.state_dict())
    return passes


def loaded_into_the_same_one_in_mid_epoch(make: Callable[[], Any]) -> Passes:
    made = make()
    before, after, state = [], [], None
    for batch in made:
        before.append(ids(batch))
        if len(before) == 2:
            state = moved(made.state_dict())
        if len(before) == 4:
            made.load_state_dict(state)
            break
    after = read(made)
    return [before, after, read(made)]


def an_abandoned_epoch_keeps_its_state(make: Callable[[], Any]) -> Passes:
    first = make()
    before = read(itertools.islice(first, 2))
    state = moved(first.state_dict())
    following = read(first)
    second = make()
    second.load_state_dict(state)
    return [before, following, read(second)]


def states_of_the_latest(make: Callable[[], Any]) -> Passes:
    first = make()
    one, other = iter(first), iter(first)
    seen = [[ids(next(one)), ids(next(one)), ids(next(one))], [ids(next(other))]]
    state = moved(first.state_dict())
    second = make()
    second.load_state_dict(state)
    return [*seen, read(second)]


STATEFUL = (
    *map(resumed_after, (1, 3, 5, 6, None)),
    saved_inside_the_loop,
    saved_before_anything,
    resumed_by_len,
    resumed_twice,
    loaded_into_the_same_one_in_mid_epoch,
    an_abandoned_epoch_keeps_its_state,
    states_of_the_latest,
)


@pytest.mark.parametrize("script", STATEFUL, ids=lambda s: s.__name__)
def test_the_same_script_resumes_alike(script: Callable[[Callable[[], Any]], Passes]) -> None:
    ordered = script(lambda: loader("stateful"))
    assert script(lambda: loader("flow")) == ordered
    shuffled, ours = (script(lambda kind=kind: loader(kind, shuffle=True)) for kind in ("stateful", "flow"))
    sizes = [list(map(len, batches)) for batches in ordered]
    assert [list(map(len, batches)) for batches in shuffled] == sizes
    assert [list(map(len, batches)) for batches in ours] == sizes


@pytest.mark.parametrize("count", [1, 3, 5])
def test_a_shuffled_epoch_goes_on_with_the_samples_that_were_left(count: int) -> None:
    """Of which torchdata's keeps the generator, and ours seed and epoch."""
    for kind in ("stateful", "flow"):
        before, rest, *_ = resumed_after(count)(lambda kind=kind: loader(kind, shuffle=True))
        assert sorted(i for batch in (*before, *rest) for i in batch) == list(range(SAMPLES)), kind


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_that_is_set_again_keeps_the_position(workers: int) -> None:
    first = loader("flow", shuffle=True)
    epochs = [read(first), read(first), read(first)]
    for batch in (one := loader("flow", shuffle=True)):
        assert ids(batch)
        break
    state = one.state_dict()
    with loader("flow", shuffle=True, workers=workers) as made:
        made.load_state_dict(state)
        made.set_epoch(0)
        made.sampler.set_epoch(0)
        made.batch_sampler.set_epoch(0)
        assert (made.epoch, made.batches_left) == (0, 5)
        assert read(made) == epochs[0][1:]
        made.set_epoch(2)
        assert (made.epoch, made.batches_left) == (2, 6)
        assert read(made) == epochs[2]
        made.set_epoch(1)
        made.set_epoch(1)
        assert read(made) == epochs[1]
        assert read(made) == epochs[2], "the following one"
        for epoch in range(3):  # as with a DistributedSampler
            made.set_epoch(epoch)
            assert read(made) == epochs[epoch]
        for number, _ in enumerate(made):
            if number == 2:
                made.set_epoch(made.epoch)
                assert (made.epoch, made.batches_left) == (3, 3), "the epoch under way is as it was"
        made.load_state_dict(state)
        made.set_epoch(1)
        assert read(made) == epochs[1], "from its beginning"


def test_what_frameworks_read_of_a_data_loader_is_there() -> None:
    """Everything of a `DataLoader` that can be read of one, with values of the same kind."""
    ours, theirs = loader("flow"), loader("torch")
    for name in (
        "batch_size",
        "drop_last",
        "num_workers",
        "prefetch_factor",
        "pin_memory",
        "pin_memory_device",
        "timeout",
        "persistent_workers",
        "in_order",
        "worker_init_fn",
        "multiprocessing_context",
    ):
        assert getattr(ours, name) == getattr(theirs, name), name
    public = {name for name in vars(theirs) if not name.startswith("_")}
    assert not {name for name in public - {"generator"} if not hasattr(ours, name)}
    assert ours.generator is None
    assert len(ours.dataset) == len(theirs.dataset) == SAMPLES
    assert ids([None, [ours.dataset[5][1]]]) == [5]
    assert len(ours.sampler) == len(theirs.sampler) == SAMPLES
    assert len(ours.batch_sampler) == len(theirs.batch_sampler) == len(ours)
    assert ours.batch_sampler.sampler is ours.sampler
    assert (ours.batch_sampler.batch_size, ours.batch_sampler.drop_last) == (BATCH, False)
    assert [list(b) for b in ours.batch_sampler] == [list(b) for b in theirs.batch_sampler]
    assert list(ours.sampler) == list(theirs.sampler)
    assert ours.collate_fn([Table()[1], Table()[2]])[1].tolist() == [1, 2]
    with loader("flow", workers=2) as other:
        assert (other.num_workers, other.prefetch_factor) == (2, 2)
