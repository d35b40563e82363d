"""Random numbers by seed, epoch and sample."""

from __future__ import annotations

import os
import random
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

from ephemeron.data.randomness import (
    Watch,
    batch_seed,
    generator_argument,
    generator_parameter,
    generators_in,
    kept,
    sample_seed,
    seed_everything,
    seeded,
    stage_seed,
)

torch = pytest.importorskip("torch")
MODULE_RNG = np.random.default_rng(0)


def draws() -> tuple[float, ...]:
    """From each global generator; a normal one too, of which NumPy keeps a second in hand."""
    return random.random(), float(np.random.random()), float(np.random.randn()), float(torch.rand(()))


def test_seeds_differ_in_every_argument() -> None:
    seeds = {sample_seed(s, e, i) for s in range(12) for e in range(12) for i in range(200)}
    assert len(seeds) == 12 * 12 * 200
    bits = np.unpackbits(np.array([sample_seed(0, 0, i) for i in range(4000)], dtype=np.uint64).view(np.uint8))
    assert abs(bits.reshape(4000, 64).mean(axis=0) - 0.5).max() < 0.05
    low = {sample_seed(1, 1, i) % 2**32 for i in range(20_000)}
    assert len(low) > 19_990, "NumPy takes 32 bits of it"
    assert len({stage_seed(sample_seed(1, 2, 3), stage) for stage in range(-2, 50)}) == 52
    assert sample_seed(-1, 0, 0) == sample_seed(2**64 - 1, 0, 0)


def test_seeds_are_the_same_on_every_machine() -> None:
    assert (sample_seed(1, 2, 3), stage_seed(4, 5), batch_seed(1, 2, [3, 4])) == (
        sample_seed(np.int64(1), np.int32(2), np.intp(3)),
        stage_seed(4, 5),
        batch_seed(1, 2, np.array([3, 4])),
    )
    assert batch_seed(0, 0, [1, 2]) != batch_seed(0, 0, [2, 1]) != batch_seed(0, 1, [2, 1])


def test_the_callers_generators_stay_as_they_were() -> None:
    def after(disturb: bool) -> list[tuple[float, ...]]:
        seed_everything(11)
        out = [draws()]
        if disturb:
            with seeded(1, 2, 3):
                draws()
                with seeded(1, 2, 4):
                    draws()
            with pytest.raises(KeyError), seeded(1, 2, 3):
                raise KeyError
        return [*out, draws(), draws()]

    assert after(True) == after(False)


def test_equal_names_draw_equally() -> None:
    def drawn(*name: int, **options: Any) -> tuple[float, ...]:
        with seeded(*name, **options):
            return draws()

    assert drawn(1, 2, 3) == drawn(1, 2, 3)
    different = [drawn(1, 2, 3), drawn(1, 2, 4), drawn(1, 3, 3), drawn(2, 2, 3), drawn(1, 2, 3, stage=0)]
    for place in range(4):
        assert len({each[place] for each in different}) == len(different)


class Holder:
    """As datasets and transforms keep generators."""

    def __init__(self) -> None:
        self.own = np.random.default_rng(1)
        self.parts = [{"old": np.random.RandomState(2)}, (random.Random(3),)]
        torch_own = torch.Generator()
        self.function = lambda x, g=torch_own: x + torch.rand((), generator=g)
        self.partial = partial(draws)
        self.again = self.own

    def __getitem__(self, i: int) -> float:
        return MODULE_RNG.random()


def held_draws(held: tuple[Any, ...]) -> list[float]:
    return [float(torch.rand((), generator=g)) if isinstance(g, torch.Generator) else g.random() for g in held]


def test_generators_that_user_code_keeps_are_found_and_seeded() -> None:
    holder = Holder()
    held = generators_in(holder)
    assert sorted(type(g).__name__ for g in held) == ["Generator", "Generator", "Generator", "Random", "RandomState"]
    assert held[0] is holder.own
    assert held[1] is MODULE_RNG
    seed_everything(5, held)
    first = held_draws(held)
    seed_everything(5, held)
    assert held_draws(held) == first
    seed_everything(6, held)
    assert not set(held_draws(held)) & set(first)
    assert len(set(first)) == len(first), "two of one kind do not draw the same"
    assert generators_in(random.random, np.random.random, draws, [1, "a"], np.zeros(3)) == ()
    before = [g.bit_generator.state for g in held[:2]]
    with kept(held):
        seed_everything(7, held)
        watch = Watch(held)
        watch.begin()
        with kept(held[:1]):
            held[0].random()
        assert watch.drew(), "put back by the outermost only"
        held_draws(held)
    assert [g.bit_generator.state for g in held[:2]] == before


def test_a_walk_ends() -> None:
    table = {i: [[j] for j in range(400)] for i in range(400)}
    last = np.random.default_rng(0)
    assert generators_in([table, {"transform": last}]) == (last,), "what is near is found before what is large"
    knot: list[Any] = []
    knot.append(knot)
    assert generators_in(knot, list(range(100_000)), {i: object() for i in range(100_000)}) == ()


@pytest.mark.parametrize("draw", [random.random, np.random.random, lambda: torch.rand(()), lambda: np.random.randn(), MODULE_RNG.random])
def test_a_draw_is_seen(draw: Any) -> None:
    watch = Watch([MODULE_RNG])
    with kept([MODULE_RNG]):
        seed_everything(1, [MODULE_RNG])
        watch.begin()
        assert not watch.drew()
        draw()
        assert watch.drew()


def test_functions_ask_for_generators_by_name() -> None:
    def numpy_wise(x: Any, rng: Any) -> Any: ...
    def torch_wise(x: Any, *, generator: Any = None) -> Any: ...
    def neither(x: Any, **more: Any) -> Any: ...

    assert [generator_parameter(f) for f in (numpy_wise, torch_wise, neither, dict, partial(numpy_wise, rng=1))] == [
        "rng",
        "generator",
        None,
        None,
        None,
    ]
    assert (
        generator_argument("rng", 3)["rng"].random()
        == generator_argument("rng", 3)["rng"].random()
        != generator_argument("rng", 4)["rng"].random()
    )
    assert isinstance(generator_argument("generator", 2**64 - 1)["generator"], torch.Generator)


def test_one_thread_at_a_time_has_the_generators() -> None:
    entered, leave, order = threading.Event(), threading.Event(), []

    def first() -> None:
        with seeded(0, 0, 0):
            entered.set()
            leave.wait(60)
            order.append(draws())

    def second() -> None:
        entered.wait(60)
        leave.set()
        with seeded(0, 0, 0):
            order.append(draws())

    before = random.getstate()
    threads = [threading.Thread(target=f) for f in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(order) == 2
    assert order[0] == order[1]
    assert random.getstate() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_forked_while_another_thread_draws_can_draw() -> None:
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with kept():
            inside.set()
            leave.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(60)
    pid = os.fork()
    if pid == 0:
        with seeded(1, 1, 1):
            os._exit(7)
    leave.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
