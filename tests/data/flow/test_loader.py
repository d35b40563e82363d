"""Exactly once, whatever dies; the same bytes, however many loaders."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
from flows import Numbers, Once, flow, pairs, read

from ephemeron.data.flow import Flow, LocalReader
from ephemeron.data.flow.epoch import Epoch
from ephemeron.errors import LoadersLost, SampleFailed


def pids(shuffled):
    """Of its loader processes."""
    return [pid for pool in shuffled._pools._all() for pid in pool.pids]


@pytest.fixture(scope="module")
def undisturbed():
    """Two epochs of 101 samples, loaded in this process."""
    shuffled = read(101).to_shuffled(8, seed=5)
    return [pairs(shuffled), pairs(shuffled)]


def test_each_epoch_has_every_sample_once_in_an_order_of_its_own(undisturbed):
    first, second = ([n for n, _ in epoch] for epoch in undisturbed)
    assert sorted(first) == sorted(second) == list(range(101))
    assert first != second


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_loaders_change_nothing(workers, undisturbed):
    with read(101, workers).to_shuffled(8, seed=5) as shuffled:
        assert len(shuffled) == 13
        assert [pairs(shuffled), pairs(shuffled)] == undisturbed
        assert shuffled.counters.samples == 202
        assert shuffled.counters.lost_loaders == 0


@pytest.mark.parametrize("samples", [0, 1, 7, 13])
def test_small_and_prime(samples):
    with read(samples, 2).to_shuffled(8) as shuffled:
        assert sorted(n for n, _ in pairs(shuffled)) == list(range(samples))


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("times", [1, 2])
def test_loaders_that_die_or_stand_still_lose_and_double_nothing(tmp_path, undisturbed, times, sign):
    f = flow(101).map("harm", Once(tmp_path, 50, times, sign))
    lease_s = 0.3 if sign == signal.SIGSTOP else 60.0  # the dead are seen at once, and a slow one is not lost
    with f.prepare_read(LocalReader(2, lease_s=lease_s)).to_shuffled(8, seed=5) as shuffled:
        assert [pairs(shuffled), pairs(shuffled)] == undisturbed
        if sign == signal.SIGKILL:
            assert shuffled.counters.lost_loaders == times
    assert len(list(tmp_path.iterdir())) == times


def test_killing_every_loader_at_every_batch(undisturbed):
    with read(101, 3).to_shuffled(8, seed=5) as shuffled:
        got = []
        for batch in shuffled:
            got += pairs([batch])
            for pid in pids(shuffled):
                with suppress(ProcessLookupError):  # killed after an earlier batch, and not yet replaced
                    os.kill(pid, signal.SIGKILL)
        assert got == undisturbed[0]
        assert shuffled.counters.lost_loaders > 3


@pytest.mark.parametrize(("policy", "left"), [("skip", 100), ("fail", None)])
def test_a_sample_that_always_kills_its_loader_is_found(tmp_path, policy, left):
    f = flow(101).map("harm", Once(tmp_path, 50, 1000))
    with f.prepare_read(LocalReader(2)).to_shuffled(8, seed=5, on_error=policy) as shuffled:
        if left is None:
            with pytest.raises(SampleFailed, match="killed its loader"):
                pairs(shuffled)
        else:
            assert sorted(n for n, _ in pairs(shuffled)) == [i for i in range(101) if i != 50]
            assert shuffled.counters.skipped == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_in_mid_epoch_with_other_loaders_ranks_and_batches(workers, undisturbed):
    with read(101, workers).to_shuffled(8, seed=5) as first:
        got = pairs(itertools.islice(first, 5))
        state = json.loads(json.dumps(first.state_dict()))
    assert state["consumed"] == 40
    for rank in range(3):
        with read(101, 2 - workers).to_shuffled(4, seed=5, rank=rank, world_size=3, remainder="keep") as other:
            other.load_state_dict(state)
            steps = other.batches_left
            mine = list(other)
            assert len(mine) == steps == 6
            assert len(other) == other.batches_left == 9
            got += pairs(mine)
    assert sorted(got) == sorted(undisturbed[0])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("remainder", ["even", "keep"])
def test_fewer_samples_left_than_ranks(remainder, workers):
    with read(10).to_shuffled(9) as first:
        for _ in itertools.islice(first, 1):
            state = first.state_dict()
    got = []
    for rank in range(3):
        with read(10, workers).to_shuffled(4, rank=rank, world_size=3, remainder=remainder) as other:
            assert f"remainder={remainder!r}" in repr(other)
            other.load_state_dict(state)
            got.append(list(other))
    assert [len(mine) for mine in got] == [1, 1, 1]
    assert [mine[0] is None for mine in got] == [False, remainder == "keep", remainder == "keep"]


@pytest.mark.parametrize("samples", [5, 9, 10, 11])
@pytest.mark.parametrize("batch", [1, 4])
def test_the_documented_loop_ends_on_all_ranks_together(samples, batch):
    seen = []
    for rank in range(3):
        shuffled = read(samples).to_shuffled(batch, rank=rank, world_size=3)
        sizes = []
        for data, targets in shuffled:
            assert len(data) == len(targets) > 0
            sizes.append(len(targets))
        assert len(sizes) == len(shuffled)
        assert sum(sizes) == len(list(shuffled.sampler)) == len(shuffled.sampler)
        seen.append(sizes)
    assert seen[0] == seen[1] == seen[2]


def test_a_whole_epoch_resumed_begins_the_next_one(undisturbed):
    first = read(101).to_shuffled(8, seed=5)
    pairs(first)
    second = read(101).to_shuffled(8, seed=5)
    second.load_state_dict(first.state_dict())
    assert second.epoch == 1
    assert pairs(second) == undisturbed[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iteration_that_was_left_is_followed_by_the_next_epoch_and_its_state_goes_on(workers, undisturbed):
    with read(101, workers).to_shuffled(8, seed=5) as shuffled, read(101).to_shuffled(8, seed=5) as other:
        got = []
        for batch in shuffled:
            got += pairs([batch])
            if len(got) == 24:
                break
        state = shuffled.state_dict()
        assert (shuffled.epoch, shuffled.batches_left, len(shuffled)) == (0, 10, 13)
        assert pairs(shuffled) == undisturbed[1]
        other.load_state_dict(state)
        assert got + pairs(other) == undisturbed[0]
        assert pairs(other) == undisturbed[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_two_iterations_at_once_do_not_meet(workers, undisturbed):
    with read(101, workers).to_shuffled(8, seed=5) as shuffled:
        one, two = iter(shuffled), iter(shuffled)
        first, second = [], []
        for a, b in zip(one, two, strict=True):
            first.append(a)
            second.append(b)
            assert shuffled.epoch == 1, "the state is that of the latest one"
        assert [pairs(first), pairs(second)] == undisturbed
        assert shuffled.epoch == 2
        assert len(pids(shuffled)) == workers, "those of one iteration have been ended"


@pytest.mark.parametrize("workers", [0, 2])
def test_closing_in_the_middle_ends_all_loaders(workers, undisturbed):
    shuffled = read(101, workers).to_shuffled(8, seed=5)
    one = iter(shuffled)
    next(one)
    assert len(pids(shuffled)) == workers
    shuffled.close()
    assert pids(shuffled) == []
    if workers:
        with pytest.raises(LoadersLost, match="closed"):
            list(one)
    assert pairs(shuffled) == undisturbed[1], "another iteration starts new ones"
    shuffled.close()


def test_where_loaders_cannot_be_started_no_epoch_is_used_up(monkeypatch, undisturbed):
    with read(101, 2).to_shuffled(8, seed=5) as shuffled:
        make = shuffled.read.loaders.pool

        def refused(*args, **options):
            monkeypatch.setattr(shuffled.read.loaders, "pool", make)
            raise LoadersLost("no loader process can be started")

        monkeypatch.setattr(shuffled.read.loaders, "pool", refused)
        with pytest.raises(LoadersLost):
            next(iter(shuffled))
        assert pairs(shuffled) == undisturbed[0]


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["loader", "iterator"])
def test_a_program_that_ends_in_mid_epoch_leaves_no_loaders(tmp_path, kept):
    script = tmp_path / "ends.py"
    script.write_text(
        "from flows import read\n"
        "loader = read(101, 2).to_shuffled(8)\n"
        "iterator = iter(loader)\n"
        "next(iterator)\n"
        "print(*[pid for pool in loader._pools._all() for pid in pool.pids], flush=True)\n"
        f"del {'iterator' if kept == 'loader' else 'loader'}\n"
    )
    paths = [str(Path(__file__).parent), *sys.path]
    ended = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        timeout=60,
        check=True,
        capture_output=True,
        text=True,
    )
    assert ended.stderr == ""
    assert len(ended.stdout.split()) == 2
    assert not any(psutil.pid_exists(int(pid)) and is_loader(int(pid)) for pid in ended.stdout.split())


def is_loader(pid):
    """Whether this process lives, and is no zombie."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_ranks_share_an_epoch(undisturbed):
    got = []
    for rank in range(2):
        got += pairs(read(101).to_shuffled(4, seed=5, rank=rank, world_size=2, remainder="keep"))
    assert sorted(got) == sorted(undisturbed[0])


class Flaky:
    """Fails the first time for some samples."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, sample):
        mark = self.folder / str(sample[1])
        if sample[1] % 10 == 3 and not mark.exists():
            mark.touch()
            raise OSError("try again")
        return sample


@pytest.mark.parametrize("workers", [0, 2])
def test_retried(tmp_path, workers):
    f = flow(40).map("flaky", Flaky(tmp_path))
    with f.prepare_read(LocalReader(workers)).to_shuffled(8, on_error="retry:1") as shuffled:
        assert sorted(n for n, _ in pairs(shuffled)) == list(range(40))
        assert shuffled.counters.retried == 4


def test_a_batch_of_nothing_but_failures_fails():
    def broken(data):
        raise ValueError("never")

    f = Flow("a/b").dataset(Numbers(8)).map_data("broken", broken)
    with pytest.raises(SampleFailed, match="never"):
        list(f.prepare_read().to_shuffled(4, on_error="skip"))


def test_what_cannot_be_sent_says_so():
    f = Flow("a/b").dataset(Numbers(8)).map_data("local", lambda x: lambda: x)
    with f.prepare_read(LocalReader(1)).to_shuffled(4) as shuffled, pytest.raises(SampleFailed, match="cannot be sent"):
        list(shuffled)


def test_what_is_loaded_ahead_is_bounded_in_bytes():
    held = []

    class Watched(Epoch):
        def _take(self, done):
            super()._take(done)
            held.append(self.nbytes)

    def large(data):
        return np.zeros(250_000, dtype=np.float32)  # a megabyte

    f = Flow("a/b").dataset(Numbers(64)).map_data("large", large)
    with f.prepare_read(LocalReader(2)).to_shuffled(4, prefetch=16, prefetch_mb=9) as shuffled:
        epoch = Watched(shuffled._terms, shuffled._cursor.begin()[1], shuffled._pools.lend(shuffled._pool))
        samples = sum(len(targets) for (_, targets), _ in epoch)
    assert samples == 64
    assert 4e6 <= max(held) <= 9e6 + 4 * 1.1e6  # the next batch is loaded in any case


def test_tensors_keep_their_types():
    import torch

    def as_tensor(data):
        return {"f": torch.from_numpy(data), "b": torch.tensor([True]), "h": torch.zeros(2, dtype=torch.bfloat16), "s": "x"}

    f = Flow("a/b").dataset(Numbers(8)).map_data("tensor", as_tensor)
    with f.prepare_read(LocalReader(1)).to_shuffled(8, shuffle=False) as shuffled:
        ((data, targets),) = list(shuffled)
    assert data["f"].tolist() == [[float(i)] * 3 for i in range(8)]
    assert (data["b"].dtype, data["h"].dtype, data["s"]) == (torch.bool, torch.bfloat16, ["x"] * 8)
    assert targets.tolist() == list(range(8))


def test_counters_name_the_stage_that_bounds():
    def slow(data):
        total = 0.0
        for i in range(100_000):
            total += i
        return data

    f = Flow("a/b").dataset(Numbers(32)).map_data("slow", slow).map_data("quick", lambda x: x)
    shuffled = f.prepare_read().to_shuffled(8)
    list(shuffled)
    told = shuffled.counters.to_dict()
    assert told["bound_by"] == "slow"
    assert "slow" in told["advice"]
    assert told["samples"] == 32
    assert 0 < told["waited_s"] <= told["elapsed_s"]
    assert set(told["stages_s"]) == {"read", "slow", "quick", "collate"}
