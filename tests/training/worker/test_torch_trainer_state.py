"""A successor compared with its predecessor, and random states."""

from __future__ import annotations

import random

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")

from torch_trainers import (  # noqa: E402
    DATA,
    OPTIMIZERS,
    Batches,
    Frozen,
    Mixed,
    everything,
    half,
    handed_over,
    iterate,
    trainer,
)

from ephemeron.data.batch_source import ArrayBatchSource  # noqa: E402
from ephemeron.training.tensors import decode_state, digest, encode_state  # noqa: E402
from ephemeron.training.worker.trainers.torch_trainer import TorchTrainer  # noqa: E402

# -- state ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("build", [everything, half, Mixed, Frozen])
def test_a_successor_goes_on_to_the_last_bit(build, optimizer):
    straight = trainer(build, optimizer)
    expected = iterate(straight, range(7))
    first = trainer(build, optimizer)
    losses = iterate(first, range(4))
    second = handed_over(first, build=build, optimizer=optimizer)
    losses += iterate(second, range(4, 7))
    assert losses == expected
    assert digest(second.weights()[0]) == digest(straight.weights()[0])
    (arrays, meta), (wanted, notes) = (decode_state(encode_state(*t.state())) for t in (second, straight))
    assert digest(arrays) == digest(wanted)
    assert sorted(meta.pop("bf16")) == sorted(notes.pop("bf16"))
    assert meta == notes


@pytest.mark.parametrize("exchange", ["parameters", "changes", "deltas"])
def test_a_successor_goes_on_whatever_is_exchanged(exchange):
    straight = trainer(everything, exchange=exchange)
    first = trainer(everything, exchange=exchange)
    for iteration in range(3):
        for t in (straight, first):
            t.compute(iteration)
            t.apply(t.parameters())
    second = handed_over(first, build=everything, exchange=exchange)
    for t in (straight, second):
        t.compute(3)
    assert digest(second.state()[0]) == digest(straight.state()[0])


def test_a_state_is_a_copy():
    t = trainer(everything, OPTIMIZERS["Adam"])
    iterate(t, range(2))
    arrays, _ = t.state()
    before = digest(arrays)
    iterate(t, range(2, 4))
    assert digest(arrays) == before
    assert digest(t.state()[0]) != before


def test_buffers_and_numbers_without_shape_are_part_of_the_weights():
    t = trainer(everything)
    iterate(t, range(3))
    arrays, _ = t.weights()
    assert arrays["1.num_batches_tracked"].shape == ()
    assert arrays["1.num_batches_tracked"] == 3
    assert arrays["1.running_mean"].any()


def test_initial_weights_can_be_loaded_without_an_optimizer():
    source, t = trainer(half, weights=5), trainer(half, weights=1)
    arrays, notes = source.weights()
    t.load(*decode_state(encode_state(arrays, notes)))
    assert digest(t.weights()[0]) == digest(arrays)
    assert t.model[0].weight.dtype == torch.bfloat16


def test_bf16_travels_as_its_own_bits():
    t = trainer(half)
    arrays, notes = t.weights()
    assert set(notes["bf16"]) == {n for n, p in t.model.state_dict().items() if p.dtype == torch.bfloat16}
    assert arrays["0.weight"].dtype == np.uint16
    restored = torch.from_numpy(arrays["0.weight"]).view(torch.bfloat16)
    assert torch.equal(restored, t.model[0].weight.detach())


def test_parameters_are_a_copy():
    t = trainer()
    vector = t.parameters()
    vector[:] = 0
    assert t.parameters().any()


# -- random numbers ---------------------------------------------------------------------------------------


def states():
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


def test_a_trainer_does_not_change_global_random_states():
    t = trainer(everything)
    before = states()
    iterate(t, range(3))
    t.evaluate()
    trainer_again = TorchTrainer(t.program, feed=ArrayBatchSource(DATA, DATA), sampler=Batches(), exchange="gradients", seed=3)
    trainer_again.evaluate()
    assert states() == before


def test_two_trainers_that_take_turns_draw_what_each_would_have_drawn_alone():
    alone = [trainer(everything, seed=seed) for seed in (1, 2)]
    for t in alone:
        iterate(t, range(4))
    turns = [trainer(everything, seed=seed) for seed in (1, 2)]
    for iteration in range(4):
        for t in turns:
            iterate(t, [iteration])
    assert digest(turns[0].weights()[0]) == digest(alone[0].weights()[0])
    assert digest(turns[1].weights()[0]) == digest(alone[1].weights()[0])
    assert digest(alone[0].weights()[0]) != digest(alone[1].weights()[0]), "dropout has to differ between ranks"
