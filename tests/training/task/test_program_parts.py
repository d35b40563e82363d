"""Models, losses and optimisers of a job: what they are made of, and which cannot be."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")

from torch import nn  # noqa: E402
from torch_trainers import linear, no_code, program  # noqa: E402

from ephemeron.errors import JobError  # noqa: E402
from ephemeron.training.job import Target  # noqa: E402
from ephemeron.training.task.losses import make_loss  # noqa: E402
from ephemeron.training.task.program import (  # noqa: E402
    built,
    make_model,
    optimizer_over,
    trainable,
)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (Target(target="Sgd"), ["'Sgd' is not in torch.optim", "use one of", "SGD"]),
        (Target(target="lr_scheduler"), ["'lr_scheduler' is not in torch.optim"]),
        (Target(target="LBFGS"), ["'LBFGS'", "use a first-order optimiser"]),
        (Target(target="SparseAdam"), ["'SparseAdam' takes sparse gradients only", "use Adam"]),
        (Target(target="SGD", options={"momentun": 0.9}), ["SGD refuses its options", "momentun"]),
        (Target(target="SGD", options={"lr": -1.0}), ["SGD refuses its options", "-1.0"]),
        (Target(target="Adam", options={"lr": "fast"}), ["Adam refuses its options"]),
    ],
)
def test_optimizers_that_cannot_be(target, says):
    with pytest.raises(JobError) as caught:
        optimizer_over(target, list(linear().parameters()))
    for part in says:
        assert part in str(caught.value)


@pytest.mark.parametrize("build", [lambda: linear().requires_grad_(False), nn.ReLU], ids=["frozen", "none at all"])
def test_a_model_without_anything_to_train(build):
    with pytest.raises(JobError, match="the model has no trainable parameter"):
        trainable(build())
    with pytest.raises(JobError, match="the model has no trainable parameter"):
        program(build())


def test_losses():
    output, wanted = torch.zeros(2, 3), torch.tensor([0, 2])
    smooth = make_loss(Target(target="cross_entropy", options={"label_smoothing": 0.5}), no_code)
    assert torch.equal(smooth(output, wanted), nn.functional.cross_entropy(output, wanted, label_smoothing=0.5))
    own = make_loss(Target(target="mine:loss", options={"factor": 3}), {"mine:loss": lambda o, w, factor: factor}.get)
    assert own(output, wanted) == 3
    with pytest.raises(JobError, match=r"loss 'crossentropy' is not in torch.nn.functional; name one of .*; or module:"):
        make_loss(Target(target="crossentropy"), no_code)


def build_with(function, *, seed=0, dtype="float32", **options):
    return make_model(Target(target="m:f", options=options), {"m:f": function}.get, seed=seed, dtype=dtype)


def test_a_model_is_the_same_on_all_ranks_and_follows_the_seed():
    torch.manual_seed(1)
    first = build_with(linear, seed=5)
    torch.manual_seed(2)
    outside = torch.get_rng_state()
    again, other = build_with(linear, seed=5), build_with(linear, seed=6)
    assert torch.equal(torch.get_rng_state(), outside)
    assert torch.equal(first[1].weight, again[1].weight)
    assert not torch.equal(first[1].weight, other[1].weight)


@pytest.mark.parametrize("seed", [-1, 0, 2**63, 2**64 + 5, -(2**70)])
def test_any_integer_is_a_seed(seed):
    assert torch.equal(build_with(linear, seed=seed)[1].weight, build_with(linear, seed=seed)[1].weight)


def test_a_model_takes_its_options_and_the_jobs_dtype():
    model = build_with(lambda width: nn.Linear(width, 1), width=3, dtype="float64")
    assert model.weight.shape == (1, 3)
    assert model.weight.dtype == torch.float64


def test_a_model_that_is_none():
    with pytest.raises(JobError, match=r"model m:f returned dict; return a torch.nn.Module"):
        build_with(dict)
    with pytest.raises(JobError, match=r"model m:f raised TypeError: .*width"):
        build_with(linear, width=3)

    def broken():
        raise RuntimeError("no such file")

    outside = torch.get_rng_state()
    with pytest.raises(JobError, match="model m:f raised RuntimeError: no such file"):
        build_with(broken)
    assert torch.equal(torch.get_rng_state(), outside)


def test_a_model_whose_parameters_have_no_shape_yet_is_refused() -> None:
    """It was a traceback."""
    with pytest.raises(JobError, match=r"parameter 0\.weight of lazy has no shape yet.*input size"):
        built(lambda: nn.Sequential(nn.LazyLinear(2)), "lazy", seed=0, dtype="float32")
