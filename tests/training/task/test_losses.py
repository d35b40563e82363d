"""Accuracy is counted for classification, and for no other loss."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")

from ephemeron.training.job import Target  # noqa: E402
from ephemeron.training.task.losses import evaluated, make_loss  # noqa: E402


def own(output, target):
    """A user's loss of anything."""
    return torch.zeros(())


def named(name, **options):
    return make_loss(Target(target=name, options=options), lambda target: own)


def scores(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


def test_classes_of_samples():
    output = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    assert named("cross_entropy").answers(output, torch.tensor([1, 0, 0])) == (2, 3)
    assert named("m:own").answers(output, torch.tensor([1, 0, 0])) == (2, 3)


@pytest.mark.parametrize("shape", [(2, 5, 7), (2, 5, 5), (2, 5, 3, 4)])
def test_classes_of_positions_are_in_dimension_one(shape):
    output = scores(*shape)
    targets = output.argmax(1).clone()
    flat = targets.view(-1)
    flat[0] = (flat[0] + 1) % 5
    assert named("cross_entropy").answers(output, targets) == (targets.numel() - 1, targets.numel())


def test_targets_that_the_loss_ignores_are_not_counted():
    output = scores(6, 3)
    targets = output.argmax(1)
    targets[2:4] = -100
    assert named("cross_entropy").answers(output, targets) == (4, 4)
    assert named("cross_entropy", ignore_index=int(targets[0])).answers(output, targets).counted < 4


@pytest.mark.parametrize(
    ("loss", "output", "targets"),
    [
        ("m:own", scores(4, 6, 9), torch.zeros(4, 6, dtype=torch.int64)),  # (B, T, V) of a language model
        ("m:own", scores(4, 6, 6), torch.zeros(4, 6, dtype=torch.int64)),  # as many words as positions
        ("mse_loss", scores(4, 1), scores(4, 1)),
        ("m:own", scores(4), torch.zeros(4, dtype=torch.int64)),
        ("m:own", scores(4, 1), torch.zeros(4, dtype=torch.int64)),
        ("binary_cross_entropy_with_logits", scores(4), torch.ones(4)),
        ("binary_cross_entropy_with_logits", scores(4, 3), torch.ones(4, 3)),
        ("m:own", scores(4, 3), torch.ones(4, 3, dtype=torch.int64)),
        ("m:own", scores(4, 3), torch.tensor([0, 1, 2, 3])),  # embeddings and class numbers
        ("cross_entropy", scores(4, 3), scores(4, 3)),  # probabilities of classes
        ("m:own", (scores(4, 3), scores(4, 3)), torch.zeros(4, dtype=torch.int64)),
        ("m:own", {"logits": scores(4, 3)}, torch.zeros(4, dtype=torch.int64)),
        ("m:own", scores(4, 3), {"labels": torch.zeros(4, dtype=torch.int64)}),
        ("poisson_nll_loss", scores(4, 3), torch.zeros(4, dtype=torch.int64)),
    ],
    ids=str,
)
def test_what_is_no_classification_has_no_accuracy(loss, output, targets):
    assert named(loss).answers(output, targets) is None


def test_one_part_without_answers_is_enough():
    loss = named("m:own")
    good = evaluated(loss, scores(4, 3), torch.zeros(4, dtype=torch.int64), 4)
    odd = evaluated(loss, scores(4, 3), torch.full((4,), 7), 4)
    assert good.sums["accuracy"] is not None
    assert good.plus(odd).sums["accuracy"] is None
    assert good.plus(odd).samples == 8
