"""What a pipeline gives, keeps and refuses; all devices in one process."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")

from cutting_worlds import optimizer  # noqa: E402
from training_worlds import batches, furthest, loss, parts_of, traced, train_whole  # noqa: E402

from ephemeron.errors import JobError, StageFailed  # noqa: E402
from ephemeron.partition import Schedule  # noqa: E402
from ephemeron.partition.costs import Throttle  # noqa: E402
from ephemeron.partition.runtime import Pipeline, boundary_bytes, stage_boundaries  # noqa: E402

SCHEDULE = Schedule(kind="1f1b", micro_batches=3)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def made(name: str, parts: int = 3, **options: Any) -> Pipeline:
    cutting = {k: options.pop(k) for k in ("ties", "pipeline", "seed_of_cut") if k in options}
    settings = {"schedule": SCHEDULE, "optimizer": optimizer, "loss": loss, **options}
    return Pipeline(parts_of(name, parts, **cutting), **settings)


def test_a_step_has_loss_metrics_and_spans():
    e, _ = traced("u-net")
    (args, kwargs), *_ = batches("u-net", e)
    with made("u-net", metrics=lambda result, targets: {"mean": result.mean().item()}) as pipe:
        step = pipe.step(args, kwargs=kwargs, results=True)
        assert step.iteration == 0
        assert [tuple(r.shape) for r in step.results] == [(3, 2, 12, 12), (2, 2, 12, 12), (2, 2, 12, 12)]
        assert step.metrics["mean"] == pytest.approx(torch.cat(step.results).mean().item())
        assert not any(r.requires_grad for r in step.results)
        passes = [(s.what, s.direction, s.micro_batch) for s in step.spans if s.what != "update"]
        assert len(passes) == len(set(passes)) == 2 * 3 * 3
        assert all(0 <= s.start_s <= s.end_s <= step.took_s for s in step.spans)
        assert set(step.busy_s) == set(pipe.split.devices)


def test_skip_connections_are_sent_directly():
    """U-Net in four stages: what the first makes is read by the last, and goes through no other."""
    every = stage_boundaries(parts_of("u-net", 4, seed="3"))
    assert any(target > b.stage + 1 for b in every for target in b.sent)
    for b in every:
        for target, names in b.sent.items():
            assert every[target].received[b.stage] == names
    forwards = {k: f for k, (f, _) in boundary_bytes(parts_of("u-net", 4, seed="3")).items()}
    assert all(f > 0 for f in forwards.values())


@pytest.mark.slow
def test_devices_of_one_process_may_be_anywhere():
    e, _ = traced("gpt-2")
    todo = batches("gpt-2", e)
    with made("gpt-2", devices={"d0": "cpu:0"}) as pipe:
        for args, kwargs in todo:
            pipe.step(args, kwargs=kwargs)
        assert furthest(pipe.state_dict(), train_whole("gpt-2", todo, 3)[0]) <= 1e-10


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_cuda_device_trains_as_this_processor_does():
    e, _ = traced("resnet")
    todo = batches("resnet", e)
    with made("resnet", devices=dict.fromkeys(parts_of("resnet", 3).devices, "cuda:0")) as pipe:
        for args, kwargs in todo:
            pipe.step(args, kwargs=kwargs)
        assert furthest(pipe.state_dict(), train_whole("resnet", todo, 3)[0]) <= 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-2", "frozen-parameters"])
def test_a_checkpoint_goes_on_in_another_placement(name, tmp_path):
    """Optimiser state, options and random draws included, tied and frozen parameters too."""
    e, _ = traced(name)
    todo = batches(name, e, steps=8)
    with made(name, ties="apart", optimizer=adam) as pipe:
        for k, (args, kwargs) in enumerate(todo):
            if k == 4:
                pipe.set_options(lr=0.003)
                pipe.save(tmp_path)
            pipe.step(args, kwargs=kwargs)
        expected = pipe.state_dict()
    with made(name, 2, optimizer=adam) as pipe:
        pipe.load(tmp_path)
        assert pipe.iteration == 4
        for args, kwargs in todo[4:]:
            pipe.step(args, kwargs=kwargs)
        assert furthest(pipe.state_dict(), expected) <= 1e-10


def test_a_checkpoint_loads_into_the_original_model(tmp_path):
    from safetensors.torch import load_file

    e, _ = traced("gpt-2")
    (args, kwargs), *_ = batches("gpt-2", e)
    with made("gpt-2") as pipe:
        pipe.step(args, kwargs=kwargs)
        pipe.save(tmp_path)
        state = pipe.state_dict()
    stored = load_file(tmp_path / "model.safetensors")
    e.model.load_state_dict(stored, strict=True)
    assert furthest(stored, state) == 0


def test_a_state_can_be_given():
    e, _ = traced("gpt-2")
    other = {n: t + 1 for n, t in e.model.state_dict().items()}
    with made("gpt-2", ties="apart") as pipe:
        pipe.load_state_dict(other)
        assert furthest(pipe.state_dict(), other) == 0
        with pytest.raises(JobError, match=r"load: wte\.weight is absent in the state"):
            pipe.load_state_dict({n: t for n, t in other.items() if n != "wte.weight"})
        with pytest.raises(JobError, match=r"load: more is \(1,\) in the state and absent in the model"):
            pipe.load_state_dict({**other, "more": torch.ones(1)})


def test_a_torn_checkpoint_is_refused(tmp_path):
    with made("gpt-2") as pipe:
        pipe.save(tmp_path)
        before = (tmp_path / "optimizer.safetensors").read_bytes()
        e, _ = traced("gpt-2")
        pipe.step(*batches("gpt-2", e)[0][0])
        pipe.save(tmp_path)
        (tmp_path / "optimizer.safetensors").write_bytes(before)
        with pytest.raises(JobError, match="the model is of iteration 1, its optimiser of 0"):
            pipe.load(tmp_path)
        (tmp_path / "model.safetensors").write_bytes(b"nonsense")
        with pytest.raises(JobError, match=r"model\.safetensors cannot be read"):
            pipe.load(tmp_path)
        with pytest.raises(JobError, match="cannot be read"):
            pipe.load(tmp_path / "nowhere")


def test_another_seed_is_refused(tmp_path):
    with made("gpt-2") as pipe:
        pipe.save(tmp_path)
    with made("gpt-2", seed=5) as pipe, pytest.raises(JobError, match=r"trained with seed 0.*make the pipeline with seed=0"):
        pipe.load(tmp_path)


def test_a_failing_operator_is_named_and_ends_the_pipeline():
    e, _ = traced("gpt-2")
    (args, _), *_ = batches("gpt-2", e)
    with made("gpt-2") as pipe:
        with pytest.raises(
            StageFailed, match=r"stage \d on device d\d, forward of micro-batch 2, operator embedding \(aten::embedding, in wte\)"
        ) as raised:
            pipe.step(torch.where(torch.arange(7)[:, None] < 5, args[0], 99))
        assert raised.value.device == pipe.split.stages[raised.value.stage].spec.device
        assert raised.value.iteration == 0
        with pytest.raises(JobError, match="this pipeline has ended"):
            pipe.step(args)


def test_a_failing_loss_is_distinguished_from_an_operator():
    def wrong(result: Any, targets: Any) -> torch.Tensor:
        raise RuntimeError("no such class")

    e, _ = traced("resnet")
    (args, _), *_ = batches("resnet", e)
    with made("resnet", loss=wrong) as pipe, pytest.raises(StageFailed, match="RuntimeError: no such class") as raised:
        pipe.step(args)
    assert raised.value.stage == len(pipe.split.stages) - 1
    assert raised.value.operator == ""


def test_a_loss_that_is_no_number_is_refused():
    e, _ = traced("resnet")
    with (
        made("resnet", loss=lambda result, targets: result.sum(1)) as pipe,
        pytest.raises(StageFailed, match=r"loss gave \(3,\) instead of one number; return the mean"),
    ):
        pipe.step(*batches("resnet", e)[0][0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": {"x": "cpu"}}, "devices has 'x', which has no stage; use d0"),
        ({"where": "cloud"}, "where = 'cloud' is not known; use here or processes"),
        ({"links": {("d0", "d1"): Throttle(latency_s=1)}}, "links have delays between processes only"),
        ({"links": {("d0", "x"): Throttle()}, "where": "processes"}, "links has d0 → x, which is no pair"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(JobError, match=message):
        made("resnet", **options)


def test_a_wrong_batch_is_refused_and_harms_nothing():
    e, _ = traced("resnet")
    (args, _), *_ = batches("resnet", e)
    with made("resnet") as pipe:
        with pytest.raises(JobError, match="was traced as"):
            pipe.step(torch.ones(4, 3))
        with pytest.raises(JobError, match="has no option 'momentums'; use one of"):
            pipe.set_options(momentums=1)
        assert pipe.step(args).iteration == 0
