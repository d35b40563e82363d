"""Descriptions, single samples, and views."""

from __future__ import annotations

import random
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
from flows import Numbers, flow, noisy, pairs, read

from ephemeron.data.flow import Flow, LocalReader, random_split
from ephemeron.errors import JobError, SampleFailed


def test_steps_see_what_their_transform_shows():
    f = Flow("a/b").dataset(Numbers(5))
    f = f.map_data("double", lambda x: x * 2).map_target("name", lambda t: f"no {t}").map("swap", lambda s: (s[1], s[0]))
    name, data = f.prepare_read().to_mapped()[3]
    assert name == "no 3"
    assert data.tolist() == [6, 6, 6]


def test_a_clone_goes_its_own_way():
    f = flow()
    other = f.clone(version=2).map_data("more", lambda x: x)
    assert [s.name for s in f.steps] == ["noisy"]
    assert [s.name for s in other.steps] == ["noisy", "more"]
    assert (other.name, other.version) == ("test/numbers", 2)


def test_flows_with_a_common_beginning_do_not_disturb_each_other():
    base = Flow("a/b").dataset(Numbers(5))
    double, triple = base.map_data("by", lambda x: x * 2), base.map_data("by", lambda x: x * 3)
    other = base.dataset(Numbers(3))
    assert [f.prepare_read().to_mapped()[2][0].tolist()[0] for f in (base, double, triple)] == [2, 4, 6]
    assert [len(f.prepare_read()) for f in (base, other)] == [5, 3]
    with pytest.raises(FrozenInstanceError):
        base.version = 2


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Flow("numbers"), "namespace/name"),
        (lambda: Flow("a/b", version=0), "version 0"),
        (lambda: Flow("a/b").dataset(3), "flow a/b: int is not a map-style Dataset"),
        (lambda: Flow("a/b").prepare_read(), "no dataset"),
        (lambda: flow().map_data("noisy", abs), "noisy"),
        (lambda: flow().map("x", 3), "is not a function"),
        (lambda: flow().map_data("x", abs, cache_control="always"), "always"),
        (lambda: LocalReader(-1), "workers = -1"),
        (lambda: read().to_shuffled(4, on_error="ignore"), "ignore"),
        (lambda: read().to_shuffled(4, prefetch=0), "prefetch = 0"),
    ],
)
def test_nonsense_is_refused(make, match):
    with pytest.raises(JobError, match=match):
        make()


def test_a_failure_says_where():
    def broken(data):
        if data[0] == 7:
            raise ValueError("no\nsuch colour")
        return data

    f = Flow("vision/birds", version=3).dataset(Numbers(10)).map_data("colour", broken)
    with pytest.raises(SampleFailed) as caught:
        f.prepare_read().to_mapped()[7]
    e = caught.value
    assert (e.flow, e.dataset, e.index, e.step) == ("vision/birds@3", "Numbers", 7, "colour")
    assert "ValueError: no such colour" in str(e)


def test_a_sample_that_cannot_be_read_is_found_among_many():
    class Holes(Numbers):
        def __getitems__(self, indices):
            return [self[i] for i in indices]

        def __getitem__(self, i):
            if i == 4:
                raise OSError("gone")
            return super().__getitem__(i)

    loading = Flow("a/b").dataset(Holes(9)).prepare_read().to_shuffled(9, on_error="skip")
    assert sorted(n for n, _ in pairs(loading)) == [0, 1, 2, 3, 5, 6, 7, 8]
    assert loading.counters.skipped == 1


def test_random_steps_are_fixed_by_seed_epoch_and_index():
    view = read()
    a, b = view.to_mapped(seed=1), view.to_mapped(seed=1)
    assert np.array_equal(a[5][0], b[5][0])
    assert not np.array_equal(a[5][0], a[6][0] - 1)
    b.set_epoch(1)
    assert not np.array_equal(a[5][0], b[5][0])
    assert not np.array_equal(a[5][0], view.to_mapped(seed=2)[5][0])


def test_seeding_leaves_the_callers_generators_alone():
    import torch

    def state():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = state()
    read().to_mapped(seed=3)[4]
    assert state() == before


def test_without_a_seed_random_steps_draw_as_anywhere():
    random.seed(1)
    np.random.seed(1)
    import torch

    torch.manual_seed(1)
    (first, second), (expected, _) = read().to_mapped()[0], (noisy(np.zeros(3, dtype=np.float32)), None)
    assert first.shape == expected.shape
    assert second == 0
    assert not np.array_equal(first, read().to_mapped()[0][0])


def test_what_may_be_cached_is_the_same_in_every_epoch_and_job():
    f = flow().map_data("again", noisy)
    cached = replace(flow(), steps=(replace(f.steps[0], cache="can-cache"),))
    view = cached.prepare_read()
    assert cached.cached_steps == 1
    assert np.array_equal(view.to_mapped(seed=1, epoch=0)[3][0], view.to_mapped(seed=2, epoch=5)[3][0])


def test_views_of_views():
    view = read().subset([5, 3, 8]).subset([2, 0])
    assert len(view) == 2
    assert [view.to_mapped()[i][1] for i in (0, 1)] == [8, 5]
    with pytest.raises(IndexError):
        view.to_mapped()[2]
    with pytest.raises(IndexError):
        view.subset([2])


@pytest.mark.parametrize("kind", ["list", "numpy", "torch"])
def test_a_mask_chooses_those_that_are_true(kind):
    import torch

    mask = [False, True, True, False, True]
    given = {"list": mask, "numpy": np.array(mask), "torch": torch.tensor(mask)}[kind]
    view = read(5).subset(given)
    assert [view.index(i) for i in range(len(view))] == [1, 2, 4]
    again = view.subset([True, False, True])
    assert [again.index(i) for i in range(len(again))] == [1, 4]
    assert len(read(5).subset([])) == 0
    whole = read(5).subset({"list": [3, 1], "numpy": np.array([3, 1]), "torch": torch.tensor([3, 1])}[kind])
    assert [whole.index(i) for i in range(2)] == [3, 1]


def test_what_is_neither_places_nor_a_mask_is_refused():
    for given, match in (([True, False], "a mask of 2 for a view of 5"), ([True, 2, 3], "1 of 3 indices are True or False")):
        with pytest.raises(JobError, match=match):
            read(5).subset(given)
    with pytest.raises(TypeError, match="float"):
        read(5).subset([1.5])


@pytest.mark.parametrize("workers", [0, 2])
def test_local_map_draws_by_seed_epoch_and_sample_and_leaves_the_generators_alone(workers):
    import torch

    def drawn(view, state, batch):
        random.seed(state)
        np.random.seed(state)
        torch.manual_seed(state)
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        with view.to_shuffled(batch, seed=3) as loader:
            epochs = [dict(pairs(loader)), dict(pairs(loader))]
        assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
        return epochs

    view = read(24, workers).local_map(lambda s: (noisy(s[0]), s[1]))
    one, other = drawn(view, 1, 4), drawn(view, 2, 5)
    assert one == other
    assert len({one[0][i] for i in range(24)}) == 24
    assert all(one[0][i] != one[1][i] for i in range(24))
    twice = read(24).local_map(lambda s: (noisy(s[0]), s[1])).local_map(lambda s: (noisy(s[0]), s[1]))
    data = {int(t): d for d, t in map(twice.to_mapped(seed=3).__getitem__, range(24))}
    plain = {int(t): d for d, t in map(read(24).to_mapped(seed=3).__getitem__, range(24))}
    steps = [np.asarray(data[i] - plain[i]) for i in range(24)]
    once = {i: np.frombuffer(one[0][i], dtype=np.float32) - plain[i] for i in range(24)}
    assert not any(np.allclose(steps[i], 2 * once[i]) for i in range(24)), "each function has numbers of its own"


def test_local_map_hands_out_a_generator_and_seeds_those_that_are_kept():
    kept = np.random.default_rng()
    view = read(8).local_map(lambda s, rng: (s[0], s[1], rng.random())).local_map(lambda s: (*s, kept.random()))
    one, other = ([view.to_mapped(seed=3)[i][2:] for i in order] for order in (range(8), range(7, -1, -1)))
    assert one == other[::-1]
    assert len({x for pair in one for x in pair}) == 16
    assert view.to_mapped()[0][2:] != view.to_mapped()[0][2:], "without a seed, drawn anew"


def test_local_map_runs_here():
    seen = []
    view = read(workers=2).local_map(lambda s: (seen.append(s[1]), s)[1])
    with view.to_shuffled(8) as batches:
        got = pairs(batches)
    assert sorted(seen) == sorted(n for n, _ in got) == list(range(40))


def test_random_split_is_disjoint_and_whole():
    train, val = random_split([read(), flow().clone(name="test/val").prepare_read()], [0.8, 0.2], seed=4)
    a, b = ({view.index(i) for i in range(len(view))} for view in (train, val))
    assert (len(a), len(b)) == (32, 8)
    assert not a & b
    assert val.loading.flow.name == "test/val"
    again, _ = random_split([read(), read()], [32, 8], seed=4)
    assert {again.index(i) for i in range(32)} == a


def test_random_split_of_one_flow_gives_every_part():
    for flows in ([read()], read()):
        parts = random_split(flows, [0.5, 0.25, 0.25], seed=3)
        assert [len(part) for part in parts] == [20, 10, 10]
        assert sorted(part.index(i) for part in parts for i in range(len(part))) == list(range(40))
    with pytest.raises(JobError, match="2 flows for 3 lengths"):
        random_split([read(), read()], [0.5, 0.25, 0.25])
    for lengths in ([0.5, 0.6], [], [-0.5, 1.5]):
        with pytest.raises(JobError):
            random_split([read()], lengths)
    with pytest.raises(JobError, match="samples"):
        random_split([read(4), read(5)], [0.5, 0.5])


def test_it_is_a_dataset_for_dataloader():
    from torch.utils.data import DataLoader

    loader = DataLoader(read().to_mapped(seed=0), batch_size=16, num_workers=0)
    assert sorted(n for n, _ in pairs(loader)) == list(range(40))
