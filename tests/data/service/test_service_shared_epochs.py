"""Orders drawn together: each sample once per epoch for every job, whoever restarts, resumes or comes late."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ephemeron.data.service import shared_epochs
from ephemeron.data.service.messages import JoinRequest, MarkReply, MarkRequest, TraverseRequest
from ephemeron.data.service.shared_epochs import SharedEpochs
from ephemeron.errors import JobError


class Ranks:
    """The ranks of a job, as `SharedStream` behaves towards a router."""

    def __init__(
        self,
        job: str,
        *,
        samples: int,
        batch: int,
        world_size: int = 1,
        remainder: str = "keep",
        seed: int = 0,
        chosen: list[int] | None = None,
        epoch: int = 0,
        consumed: str = "",
        attempt: int = 0,
    ) -> None:
        self.terms = {
            "job": job,
            "samples": samples,
            "seed": seed,
            "batch": batch,
            "world_size": world_size,
            "remainder": remainder,
            "epoch": epoch,
            "consumed": consumed,
        }
        self.chosen, self.attempt = chosen, attempt
        self.steps = dict.fromkeys(range(world_size), 0)
        self.epochs = dict.fromkeys(range(world_size), epoch)
        self.got: list[tuple[int, int, list[int]]] = []

    @property
    def all(self) -> list[int]:
        return list(range(self.terms["samples"])) if self.chosen is None else self.chosen

    def join(self, where: SharedEpochs, rank: int) -> str:
        reader = f"{self.terms['job']}/{self.attempt}/{rank}"
        return where.join(JoinRequest(**self.terms, rank=rank, reader=reader), self.chosen, now=0.0).job

    def step(self, where: SharedEpochs, rank: int, count: int = 1) -> bool:
        """The rank's next batches. False: its epoch is over, and the next one has begun."""
        name = self.join(where, rank)
        epoch, sequence = self.epochs[rank], self.steps[rank]
        request = TraverseRequest(job=name, rank=rank, epoch=epoch, sequence=sequence, acked=0, count=count)
        found = where.request(request, now=0.0)
        assert len(found.batches) == min(count, found.left - sequence)
        self.got += [(epoch, rank, list(batch)) for batch in found.batches]
        self.steps[rank] += len(found.batches)
        if found.batches:
            return True
        self.epochs[rank], self.steps[rank] = epoch + 1, 0
        return False

    def mark(self, where: SharedEpochs, epoch: int, steps: int) -> MarkReply:
        return where.mark(MarkRequest(job=self.join(where, 0), epoch=epoch, steps=steps), now=0.0)

    def counted(self, epoch: int) -> Counter[int]:
        return Counter(index for e, _, batch in self.got if e == epoch for index in batch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "traversals"


def opened(folder: Path, window: int = 8, now: float = 0.0) -> SharedEpochs:
    return SharedEpochs(folder, window=window, now=now)


JOBS = st.lists(
    st.fixed_dictionaries(
        {
            "samples": st.sampled_from([1, 2, 5, 7, 12, 13, 31]),
            "batch": st.integers(1, 9),
            "world_size": st.integers(1, 3),
            "remainder": st.sampled_from(["keep", "even", "drop", "pad"]),
            "seed": st.integers(0, 3),
            "view": st.sampled_from(["all", "some", "turned"]),
        }
    ),
    min_size=1,
    max_size=3,
)


def ranks_of(number: int, plan: dict[str, Any]) -> Ranks:
    plan = dict(plan)
    view, samples = plan.pop("view"), plan["samples"]
    chosen = {"all": None, "some": list(range(3, 3 + 2 * samples, 2)), "turned": list(range(samples))[::-1]}[view]
    return Ranks(f"job{number}", chosen=chosen, **plan)


@settings(max_examples=25)
@given(JOBS, st.integers(0, 2**32), st.floats(0, 0.3), st.integers(1, 40))
def test_exactly_once_whatever_restarts(plans: list[dict[str, Any]], seed: int, restarts: float, every: int) -> None:
    """Two routers get the same calls, and one of them is killed again and again."""
    rng, epochs = random.Random(seed), 3
    with TemporaryDirectory() as one, TemporaryDirectory() as two, pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_epochs, "SNAPSHOT_EVERY", every)
        steady, mortal = opened(Path(one)), opened(Path(two))
        calm, hurt = ([ranks_of(n, plan) for n, plan in enumerate(plans)] for _ in range(2))
        open_ranks = [(n, rank) for n, plan in enumerate(plans) for rank in range(plan["world_size"])]
        while open_ranks:
            number, rank = chosen = rng.choice(open_ranks)
            count = rng.randint(1, 4)
            assert calm[number].step(steady, rank, count) == hurt[number].step(mortal, rank, count)
            assert calm[number].got == hurt[number].got, "as if nothing had happened"
            if hurt[number].epochs[rank] == epochs:
                open_ranks.remove(chosen)
            if rng.random() < restarts:
                journal = mortal._journal
                if journal.exists() and rng.random() < 0.5:
                    with journal.open("ab") as file:  # killed in the middle of a line, before anybody was answered
                        file.write(b'["take", "job0#0", 3')
                mortal = opened(Path(two))
        for job, plan in zip(hurt, plans, strict=True):
            for epoch in range(epochs):
                counted = job.counted(epoch)
                assert set(counted) <= set(job.all)
                if plan["remainder"] == "keep":
                    assert counted == Counter(job.all)
                elif plan["remainder"] == "drop":
                    size = plan["batch"] * plan["world_size"]
                    assert counted.total() == plan["samples"] // size * size
                    assert set(counted.values()) <= {1}
                else:
                    assert set(counted) == set(job.all)


@settings(max_examples=25)
@given(
    st.sampled_from([1, 2, 7, 13, 30]),
    st.sampled_from(["all", "some", "turned"]),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3), st.integers(0, 4)), min_size=1, max_size=3),
    st.booleans(),
)
def test_resumed_again_and_again(samples: int, view: str, attempts: list[tuple[int, int, int]], restart: bool) -> None:
    """Each time with other ranks and batches, some steps further; then to the end, and another epoch."""
    with TemporaryDirectory() as place:
        where = opened(Path(place))
        beside = Ranks("beside", samples=30, batch=4)
        used: Counter[int] = Counter()
        consumed, ranks = "", None
        for attempt, (batch, world_size, steps) in enumerate([*attempts, (3, 2, 10**6)]):
            plan = {"samples": samples, "batch": batch, "world_size": world_size, "remainder": "keep", "seed": 1}
            ranks = ranks_of(0, {**plan, "view": view})
            ranks.terms["consumed"], ranks.attempt = consumed, attempt
            took = 0
            for _ in range(steps):
                over = [not ranks.step(where, rank) for rank in range(world_size)]
                if any(over):
                    break
                took += 1
                beside.step(where, 0)
            used += ranks.counted(0)
            if restart:
                where = opened(Path(place))
            if attempt < len(attempts):
                mark = ranks.mark(where, 0, took)
                assert mark.count == used.total()
                consumed = mark.consumed
        assert ranks is not None
        assert used == Counter(ranks.all), "exactly once over all attempts"
        while set(ranks.epochs.values()) != {2}:
            for rank in ranks.epochs:
                if ranks.epochs[rank] < 2:
                    ranks.step(where, rank)
        assert ranks.counted(1) == Counter(ranks.all), "and so is the next epoch"


def test_a_snapshot_keeps_the_order_of_a_view(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a mark says is by places in the view, also where that is all samples in another order."""
    monkeypatch.setattr(shared_epochs, "SNAPSHOT_EVERY", 1)
    where, ranks = opened(folder), Ranks("a", samples=6, batch=2, chosen=[5, 3, 1, 0, 2, 4])
    ranks.step(where, 0)
    before = ranks.mark(where, 0, 1)
    where = opened(folder)
    assert ranks.mark(where, 0, 1) == before
    again = Ranks("a", samples=6, batch=4, chosen=ranks.chosen, consumed=before.consumed, attempt=1)
    again.step(where, 0)
    assert again.counted(0) + ranks.counted(0) == Counter(range(6))


def test_a_line_cut_short_hides_nothing_that_comes_after(folder: Path) -> None:
    where, ranks = opened(folder), Ranks("a", samples=9, batch=2)
    ranks.step(where, 0)
    with where._journal.open("ab") as file:
        file.write(b'["take", "a#0"')
    where = opened(folder)
    ranks.step(where, 0)
    where = opened(folder)
    while ranks.step(where, 0):
        pass
    assert ranks.counted(0) == Counter(range(9))


def test_what_is_refused_is_not_written_down(folder: Path) -> None:
    where = opened(folder)
    for chosen in ([1, 1], [-1, 2]):
        with pytest.raises(JobError, match="a sample twice"):
            Ranks("a", samples=2, batch=1, chosen=chosen).join(where, 0)
    with pytest.raises(JobError, match="not of 20 samples"):
        Ranks("a", samples=20, batch=1, consumed="AAAA" * 9).join(where, 0)
    with pytest.raises(JobError, match="remainder"):
        Ranks("a", samples=20, batch=1, remainder="some").join(where, 0)
    where = opened(folder)  # would fail if it were there
    ranks = Ranks("a", samples=2, batch=1)
    assert ranks.step(where, 0)


def test_a_restart_forgets_nobody(folder: Path) -> None:
    where, ranks = opened(folder, now=5.0), Ranks("a", samples=4, batch=2)
    ranks.step(where, 0)
    later = 10 * shared_epochs.FORGOTTEN_S
    where = opened(folder, now=later)
    where.remove_silent(alive=set(), now=later + 1)
    assert ranks.step(where, 0)
    assert ranks.counted(0) == Counter(range(4))


def test_who_reads_without_drawing_is_not_forgotten(folder: Path) -> None:
    where, slow, gone = opened(folder), Ranks("slow", samples=4, batch=2), Ranks("gone", samples=4, batch=2)
    slow.step(where, 0)
    gone.step(where, 0)
    where.remove_silent(alive={"slow"}, now=shared_epochs.FORGOTTEN_S + 1)
    names = set(where._jobs)
    assert names == {"slow#0"}
    with pytest.raises(JobError, match="no job 'gone#1' draws here any more"):
        where.request(TraverseRequest(job="gone#1", rank=0, epoch=0, sequence=0, acked=0, count=1), now=0.0)
    with pytest.raises(JobError, match="no job 'gone#1'"):
        where.mark(MarkRequest(job="gone#1", epoch=0, steps=0), now=0.0)


def test_the_same_state_can_be_resumed_twice(folder: Path) -> None:
    """The first attempt goes far beyond it, and crashes: the second must not get what is left of that."""
    where, ranks = opened(folder), Ranks("a", samples=10, batch=3, world_size=2)
    for rank in range(2):
        ranks.step(where, rank)
    state = ranks.mark(where, 0, 1)
    for attempt in (1, 2, 3):
        again = Ranks("a", samples=10, batch=3, world_size=2, consumed=state.consumed, attempt=attempt)
        while min(again.epochs.values()) < 4:
            for rank in (0, 1):
                again.step(where, rank)
        assert ranks.counted(0) + again.counted(0) == Counter(range(10))
        assert all(again.counted(epoch) == Counter(range(10)) for epoch in (1, 2, 3))


def test_ranks_of_different_speed(folder: Path) -> None:
    """One is three epochs behind: its samples are kept for it."""
    where, ranks = opened(folder), Ranks("a", samples=11, batch=2, world_size=2)
    for rank in (0, 1):
        while ranks.epochs[rank] < 4:
            ranks.step(where, rank)
    for epoch in range(4):
        assert ranks.counted(epoch) == Counter(range(11))


def test_what_is_over_is_said_to_be_over(folder: Path) -> None:
    where, ranks = opened(folder), Ranks("a", samples=4, batch=2)
    while ranks.epochs[0] < 4:
        ranks.step(where, 0)
    name = ranks.join(where, 0)
    ask = {"job": name, "rank": 0, "sequence": 0, "acked": 0, "count": 1}
    with pytest.raises(JobError, match="resume from a state"):
        where.request(TraverseRequest(**ask, epoch=0), now=0.0)
    with pytest.raises(JobError, match="epoch 1 of job a#0 is over"):
        ranks.mark(where, 1, 1)
    where = opened(folder)
    assert len(where.request(TraverseRequest(**ask, epoch=5), now=0.0).batches) == 1, "ahead it may jump"
    assert Counter(where._jobs[name].orders[4]) == Counter(range(4))


def test_ranks_that_do_not_agree(folder: Path) -> None:
    where = opened(folder)
    Ranks("a", samples=8, batch=2, world_size=2).join(where, 0)
    for other in ({"batch": 3, "world_size": 2}, {"batch": 2, "world_size": 3}, {"batch": 2, "world_size": 2, "seed": 9}):
        with pytest.raises(JobError, match="all its ranks the same numbers"):
            Ranks("a", samples=8, **other).join(where, 1)  # type: ignore[arg-type]
    assert Ranks("a", samples=8, batch=2, world_size=2).join(where, 1) == "a#0"
    assert Ranks("a", samples=5, batch=2, world_size=2, attempt=1).join(where, 1) == "a#1", "another view of the same flow"


def test_a_job_that_starts_over_begins_anew(folder: Path) -> None:
    where = opened(folder)
    for attempt in range(3):
        ranks = Ranks("a", samples=7, batch=2, world_size=2, attempt=attempt)
        names = {ranks.join(where, rank) for rank in (1, 0)}
        assert names == {f"a#{attempt}"}, "its ranks find each other"
        for rank in (0, 1):
            while ranks.step(where, rank):
                pass
        assert ranks.counted(0) == Counter(range(7))


@pytest.mark.parametrize("samples", [0, 1])
def test_hardly_anything(folder: Path, samples: int) -> None:
    where, ranks = opened(folder, window=1), Ranks("a", samples=samples, batch=4)
    for _ in range(3):
        while ranks.step(where, 0):
            pass
    assert [ranks.counted(e).total() for e in range(3)] == [samples] * 3
    assert ranks.mark(where, 3, 0).count == 0
    where.remove_silent(alive=set(), now=shared_epochs.FORGOTTEN_S + 1)
    assert not where._jobs
    assert json.loads((folder / "state.json").read_text())["jobs"] == {}, "nobody: the journal is shortened"
    assert opened(folder)._jobs == {}


def test_the_journal_stays_short(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_epochs, "SNAPSHOT_EVERY", 10)
    where, ranks = opened(folder), Ranks("a", samples=20, batch=1)
    sizes = []
    for _ in range(20):
        while ranks.step(where, 0):
            pass
        sizes.append(sum(file.stat().st_size for file in folder.iterdir()))
    assert len(list(folder.iterdir())) == 2
    assert max(sizes[10:]) <= 1.2 * max(sizes[2:10])


@pytest.mark.parametrize("remainder", ["even", "drop", "pad"])
def test_ranks_that_draw_together_get_equally_many_samples(folder: Path, remainder: str) -> None:
    """Of 23 in steps of 12: with `even`, one comes twice."""
    where = opened(folder)
    three = Ranks("three", samples=23, batch=4, world_size=3, remainder=remainder)
    for epoch in range(2):
        for rank in range(3):
            while three.step(where, rank):
                pass
        sizes = [[len(batch) for e, r, batch in three.got if (e, r) == (epoch, rank)] for rank in range(3)]
        assert sizes[0] == sizes[1] == sizes[2]
        assert sizes[0] == ([4] if remainder == "drop" else [4, 4])
        counted = three.counted(epoch)
        assert sorted(counted.values()) == [1] * (12 if remainder == "drop" else 22) + [2] * (remainder != "drop")
