"""Runs whose gradients are sent during the backward pass: the weights are those of runs that send them after it."""

from __future__ import annotations

import dataclasses
import functools

import pytest
from training_runs import make_job, real

from ephemeron.events import FaultFired, Invoked
from ephemeron.functions.simulated import SimulatedPlatform
from ephemeron.training.collectives import direct, direct_two_level
from ephemeron.training.collectives.direct_messages import Division, layout
from ephemeron.training.job import Target, parse_fault

pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")

FOUR = {"channel": "direct", "workers": 4, "aggregators": 4, "batch_size": 64, "checkpoint_every": 5}
WIDE = make_job(model=Target(target="tiny:mlp", options={"hidden": 300}))
"""23,000 parameters: two to three early pieces of each owner."""


@pytest.fixture(autouse=True)
def early(monkeypatch):
    """Pieces of 4 KB that were sent early, by iteration."""
    sent: dict[int, int] = {}

    def counted(base):
        class Counted(base):
            def __init__(self, *args, division, **options):
                super().__init__(*args, division=Division(whole_bytes=0, piece_bytes=4096), **options)

            def submit_piece(self, iteration, number, part, weight, flags=0):
                sent[iteration] = sent.get(iteration, 0) + 1
                super().submit_piece(iteration, number, part, weight, flags)

        return Counted

    monkeypatch.setattr(SimulatedPlatform, "overlaps", True)
    monkeypatch.setattr(direct, "DirectReduce", counted(direct.DirectReduce))
    monkeypatch.setattr(direct_two_level, "TwoLevelReduce", counted(direct_two_level.TwoLevelReduce))
    return sent


def both(monkeypatch, job=WIDE, **how):
    """Hashes of the weights with and without early pieces."""
    ours = real(job, **{**FOUR, **how}).sha
    monkeypatch.setenv("EPHEMERON_DIRECT_OVERLAP", "0")
    return ours, real(job, **{**FOUR, **how}).sha


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"aggregators": 2},
        {"exchange": {"compression": "bf16"}},
        {"sync": "hap", "nonaggregator_batch_size": 80, "aggregators": 2},
        {"exchange": {"ranks_per_machine": 2}},
    ],
)
def test_the_weights_are_the_same(monkeypatch, early, kind):
    ours, theirs = both(monkeypatch, **kind)
    assert ours == theirs
    assert early


def test_after_the_first_iteration_all_but_the_first_piece_of_each_owner_is_early(early):
    run = real(WIDE, **FOUR)
    pieces = len(layout(22_510, 4, 4, piece_bytes=4096))
    assert early == dict.fromkeys(range(1, run.trigger.spec.iterations), 4 * (pieces - 4))


def test_where_time_is_virtual_nothing_is_early_by_itself(monkeypatch, early):
    monkeypatch.setattr(SimulatedPlatform, "overlaps", False)
    assert real(WIDE, **FOUR).sha == undisturbed()
    assert not early


def test_parameters_that_take_no_part_wait(monkeypatch, early):
    job = make_job(model=Target(target="tiny:partly", options={"hidden": 300}))
    ours, theirs = both(monkeypatch, job)
    assert ours == theirs
    assert early


@pytest.mark.parametrize("grad_only", [False, True])
def test_a_gradient_that_is_not_finite_reaches_nobody(early, grad_only):
    job = make_job(model=Target(target="tiny:nan_after", options={"passes": 3, "grad_only": grad_only, "hidden": 300}))
    run = real(job, **FOUR)
    (cause,) = run.ending.causes
    assert "iteration 3 (epoch 0, batch 3 of" in cause
    assert ("the loss is nan" in cause) != grad_only
    assert max(early) == 2


@functools.cache
def undisturbed() -> str:
    """Hash of the weights of `WIDE` that are sent after the backward pass."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EPHEMERON_DIRECT_OVERLAP", "0")
        return real(WIDE, **FOUR).sha


@pytest.mark.parametrize(
    ("ranks", "more", "phase"),
    [
        ((0,), (), "compute"),
        ((0,), (), "upload"),
        ((3,), ("delay:rank=2,factor=3",), "aggregate"),
        ((1, 2), (), "compute"),
        ((1, 2), (), "aggregate"),
        ((1, 2), (), "upload"),
    ],
)
def test_functions_that_die_after_some_pieces_change_no_weight(early, ranks, more, phase):
    kills = [f"kill:rank={rank},iteration=3,phase={phase}" for rank in ranks]
    run = real(WIDE, **FOUR, faults=[parse_fault(text) for text in (*kills, *more)])
    assert len(run.of(FaultFired)) == len(kills)
    assert early[3] > 0
    assert run.sha == undisturbed()


@pytest.mark.slow
def test_hand_offs_change_no_weight(monkeypatch, early):
    job = dataclasses.replace(WIDE, epochs=4)
    run = real(job, **FOUR, function_timeout_s=12.0)
    assert any(e.reason == "relay" for e in run.of(Invoked))
    assert early
    monkeypatch.setenv("EPHEMERON_DIRECT_OVERLAP", "0")
    assert run.sha == real(job, **FOUR).sha
