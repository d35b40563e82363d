"""The same on a CUDA device: stages that are traced, measured and trained there."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from random import Random  # noqa: E402

from cutting_worlds import optimizer, placed, to  # noqa: E402
from models import MODELS  # noqa: E402
from torch.utils._pytree import tree_map  # noqa: E402
from training_worlds import batches, furthest, loss  # noqa: E402

from ephemeron.partition import Schedule  # noqa: E402
from ephemeron.partition.costs.profile import profile_model  # noqa: E402
from ephemeron.partition.runtime import Pipeline, cut  # noqa: E402
from ephemeron.partition.tracing import graph_of, mean_square, split, trace  # noqa: E402

MICRO_BATCHES = 3
NAMES = ("resnet", "u-net", "gpt-2", "llama", "lstm", "siamese", "data-dependent-branch", "custom-autograd-function")
CASES = {
    "plain": Schedule(),
    "gpipe": Schedule(kind="gpipe", micro_batches=MICRO_BATCHES),
    "1f1b": Schedule(kind="1f1b", micro_batches=MICRO_BATCHES),
}


def there(thing):
    return tree_map(lambda t: to(t, torch.float64).cuda() if isinstance(t, torch.Tensor) else t, thing)


@pytest.fixture(scope="module", params=NAMES)
def example(request):
    torch.manual_seed(0)
    e = MODELS[request.param]()
    tracing = trace(e.model.to(torch.float64).cuda(), there(e.args), there(e.kwargs), steps=1)
    return request.param, e, tracing.model


def trained_whole(model, todo, micro_batches):
    model = copy.deepcopy(model).train()
    opt = optimizer([p for p in model.parameters() if p.requires_grad])
    for k, (args, kwargs) in enumerate(todo):
        opt.zero_grad()
        for m, part in enumerate(cut(args, kwargs, None, micro_batches)):
            model.draw_from(0, iteration=k, micro_batch=m)
            (mean_square(model(*part.args, **part.kwargs)) * part.weight).backward()
        opt.step()
    return model.original_state()


@pytest.mark.parametrize("case", CASES)
def test_stages_train_as_the_unsplit_model_does(example, case):
    name, e, model = example
    todo = there(batches(name, e))
    parts = split(model, placed(graph_of(model), 2, Random(name)))
    devices = {stage.spec.device: "cuda:0" for stage in parts.stages}
    with Pipeline(parts, schedule=CASES[case], optimizer=optimizer, loss=loss, devices=devices) as pipe:
        for args, kwargs in todo:
            pipe.step(args, kwargs=kwargs)
        state = pipe.state_dict()
    assert all(t.device.type == "cpu" for t in state.values())
    expected = {n: t.cpu() for n, t in trained_whole(model, todo, CASES[case].micro_batches).items()}
    assert furthest(state, expected) <= 1e-9


def test_operators_are_measured_where_they_will_run(example):
    _, e, model = example
    profile = profile_model(model, there(e.args), there(e.kwargs), optimizer=torch.optim.Adam, repeats=3)
    assert sum(node.forward_s["cuda"] for node in profile.graph.nodes) > 0
