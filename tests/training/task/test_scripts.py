"""Scripts with a training loop of their own: alone, on functions, after kills."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")

from script_runs import EXACT, LOOP, SCRIPT, job, run, script, trials_once  # noqa: E402, F401

import ephemeron  # noqa: E402
from ephemeron.errors import UserError  # noqa: E402
from ephemeron.events import FaultFired, Invoked, Progress  # noqa: E402
from ephemeron.training.job import EarlyStopping, parse_fault  # noqa: E402
from ephemeron.training.task.script import Run  # noqa: E402
from ephemeron.training.task.script_state import Registered  # noqa: E402
from warm_processes import warm  # noqa: E402


def alone(tmp_path, *arguments):
    """Weights and losses of `python script.py`."""
    out = tmp_path / "alone.npz"
    command = [sys.executable, str(SCRIPT), "--out", str(out), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(np.load(out)), json.loads(Path(f"{out}.json").read_text())


def losses(finished):
    """By iteration, the mean loss over ranks by samples."""
    sums = {}
    for e in finished.of(Progress):
        total, samples = sums.get(e.iteration, (0.0, 0))
        sums[e.iteration] = (total + e.loss * e.samples, samples + e.samples)
    return [total / samples for _, (total, samples) in sorted(sums.items())]


def same(arrays, expected, tolerance=0.0):
    assert arrays.keys() == expected.keys()
    for name, value in expected.items():
        assert np.allclose(arrays[name], value, rtol=tolerance, atol=tolerance), name


@pytest.mark.slow
def test_one_function_is_the_script_alone_to_the_last_bit(tmp_path):
    weights, curve = alone(tmp_path)
    finished = run(1)
    same(finished.ending.arrays, weights)
    assert losses(finished) == curve
    assert len(curve) == 18


@pytest.mark.slow
def test_any_number_of_functions_is_the_script_alone(tmp_path):
    with warm():
        weights, curve = alone(tmp_path, *EXACT)
    for workers in (2, 4):
        finished = run(workers, *EXACT)
        same(finished.ending.arrays, weights, 1e-12)
        assert np.allclose(losses(finished), curve, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("--flat",)])
def test_kills_and_hand_offs_do_not_change_a_script(arguments):
    undisturbed = run(4, *arguments)
    faults = [
        "kill:rank=0,iteration=3,phase=upload",
        "kill:rank=3,iteration=6,phase=compute",
        "kill:rank=1,iteration=11,phase=download",
        "kill:rank=2,iteration=17,phase=compute",
    ]
    killed = run(4, *arguments, faults=faults)
    assert len(killed.of(FaultFired)) == len(faults)
    assert killed.sha == undisturbed.sha
    assert killed.left == undisturbed.left
    assert killed.ending.final.metrics == undisturbed.ending.final.metrics
    relayed = run(4, *arguments, function_timeout_s=4.0)
    assert [e for e in relayed.of(Invoked) if e.reason == "relay"]
    assert relayed.sha == undisturbed.sha


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["hap", "ssp:2"])
def test_updates_that_come_late_have_the_learning_rate_of_their_iteration(sync):
    undisturbed = run(3, sync=sync)
    killed = run(3, sync=sync, faults=["kill:rank=2,iteration=9,phase=compute"])
    assert killed.of(FaultFired)
    ended = [dict(undisturbed.ending.final.metrics), dict(killed.ending.final.metrics)]
    assert ended[0]["accuracy"] > 0.7
    if sync == "hap":
        assert killed.sha == undisturbed.sha
        assert ended[0] == ended[1]


@pytest.mark.slow
def test_metrics_are_those_of_the_script(tmp_path):
    finished = run(4)
    assert set(finished.ending.final.metrics) == {"loss", "accuracy"}
    assert all(0 <= e.metrics["accuracy"] <= 1 for e in finished.of(Progress))
    stopped = run(2, options={"early_stopping": EarlyStopping(patience=1, min_delta=10.0)})
    assert stopped.ending.final.iterations == 12, "logged metrics decide"


ITERABLE = """
class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(inputs, targets))

loader = DataLoader(Stream(), batch_size=8)
"""
ONE_BY_ONE = "loader = [(inputs[i : i + 8], targets[i : i + 8]) for i in range(0, 26, 8)]"


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", ITERABLE, ONE_BY_ONE], ids=["dataset", "iterable dataset", "list"])
def test_batches_are_divided_whatever_yields_them(tmp_path, before):
    """The last of the four batches has two samples for three functions."""
    path = script(tmp_path, LOOP, before=before)
    one, three = (run(w, script=path) for w in (1, 3))
    same(three.ending.arrays, one.ending.arrays, 2e-6)
    assert one.trigger.spec.iterations == three.trigger.spec.iterations == 8
    killed = run(3, script=path, faults=["kill:rank=1,iteration=6,phase=compute"])
    assert killed.sha == three.sha


@pytest.mark.slow
def test_loaders_of_each_worker_as_in_ddp(tmp_path):
    path = script(tmp_path, LOOP.replace("epochs=2", "epochs=2, per_worker=True"))
    finished = run(3, script=path)
    assert finished.trigger.spec.iterations == 4, "two rounds of three batches, of which the second has one"
    by_iteration = [e.samples for e in sorted(finished.of(Progress), key=lambda e: (e.iteration, e.rank))]
    assert by_iteration[:6] == [8, 8, 8, 2, 0, 0]


@pytest.mark.slow
def test_an_error_of_the_script_names_rank_and_iteration(tmp_path):
    body = LOOP.replace("loss.backward()", "loss.backward()\n    if run.iteration == 3 and run.rank == 1: raise ValueError('no luck')")
    finished = run(2, script=script(tmp_path, body))
    assert finished.ending.status == "failed"
    causes = "\n".join(finished.ending.causes)
    assert "ValueError: no luck" in causes
    assert "rank 1" in causes
    assert "iteration 3" in causes


@pytest.mark.slow
def test_a_loop_that_is_left_early_is_an_error(tmp_path):
    body = LOOP + "    if run.iteration == 6: break"
    finished = run(2, script=script(tmp_path, body))
    assert finished.ending.status == "failed"
    assert "ended before iteration 6 of 8" in "\n".join(finished.ending.causes)


WEIGHED = """
import sys
labelled = torch.arange(26) < 3  # batches 2 to 4 have no label
loader = DataLoader(TensorDataset(inputs.double(), targets.double(), labelled), batch_size=8)
for x, y, of in run.steps(loader, epochs=2):
    terms = (model(x) - y).square()[:, 0]
    how = "{how}"
    if how == "mean":
        loss = (terms * of).sum() / of.sum()  # 0/0 where there is none
        loss.backward()
        run.step(optimizer, loss, weight=of.sum(), error=loss)
    else:
        loss = functional.mse_loss(model(x), y, reduction="sum") if how == "sum" else terms.mean()
        loss.backward()
        run.step(optimizer, loss)
if run.world == 1 and len(sys.argv) > 1:
    torch.save(model.state_dict(), sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["mean", "sum"])
def test_a_script_is_merged_by_the_weights_that_it_gives(how, tmp_path):
    """A batch whose weights sum to 0 is a step with zero gradient, alone as on any number of functions."""
    made = script(tmp_path, WEIGHED.replace("{how}", how), before="model.double()")
    out = tmp_path / "alone.pt"
    with warm():
        subprocess.run([sys.executable, str(made), str(out)], cwd=tmp_path, check=True)
    expected = {name: value.numpy() for name, value in torch.load(out).items()}
    assert all(np.isfinite(value).all() for value in expected.values())
    for workers in (1, 2, 4):
        finished = run(workers, script=made)
        assert finished.ending.status == "finished", finished.ending.causes
        same(finished.ending.arrays, expected, 1e-12)


@pytest.mark.parametrize("weight", [-1, float("nan")])
def test_a_weight_that_is_no_number_of_terms_is_refused(weight):
    made, model = Run(), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made.register(model=model, optimizer=optimizer)
    batch = next(iter(made.steps([torch.ones(3, 2)])))
    with pytest.raises(UserError, match=r"run\.step reports weight"):
        made.step(optimizer, model(batch).mean(), weight=weight)


@pytest.mark.slow
def test_local_functions_end_with_the_weights_of_simulated_ones():
    expected = run(3)
    result = ephemeron.train(
        SCRIPT, workers=3, aggregators=2, checkpoint_every=2, faults=[parse_fault("kill:rank=1,iteration=8,phase=compute")]
    )
    assert result.summary.invocations > 3
    assert result.summary.weights_sha256 == expected.sha
    same({name: t.numpy() for name, t in result.state_dict().items()}, expected.ending.arrays)
    with pytest.raises(UserError, match=r"made by the script.*result\.state_dict"):
        result.model()


@pytest.mark.slow
def test_the_example_learns_alike_on_any_number_of_functions():
    pytest.importorskip("sklearn", reason="no scikit-learn; pip install 'ephemeron[digits]'")
    example = Path(__file__).parents[3] / "examples/script/train.py"
    one, four = (run(w, "--epochs", "2", script=example) for w in (1, 4))
    assert one.ending.final.metrics["accuracy"] > 0.85
    assert four.ending.final.metrics["accuracy"] == pytest.approx(one.ending.final.metrics["accuracy"], abs=0.03)


@pytest.mark.slow
def test_the_command_passes_arguments_on():
    pytest.importorskip("click")
    from click.testing import CliRunner

    from ephemeron.cli.main import main

    done = CliRunner().invoke(
        main, ["train", str(SCRIPT), "--platform", "simulated", "--workers", "2", "--json", "--", "--epochs", "1", "--flat"]
    )
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert (result["iterations"], set(result["metrics"])) == (6, {"loss", "accuracy"})
    assert "epochs is not an option" in CliRunner().invoke(main, ["train", str(SCRIPT), "--workers", "2", "--epochs", "1"]).output


def test_alone_the_current_run_has_one_worker_and_another_one_follows():
    for _ in range(2):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        made = ephemeron.current()
        assert (made.rank, made.world, made.is_main) == (0, 1, True)
        made.register(model=model, optimizer=optimizer)
        seen = []
        for epoch in made.epochs(2):
            for batch in made.steps([torch.ones(3, 2), torch.zeros(3, 2)]):
                assert ephemeron.current() is made
                loss = model(batch).square().mean()
                loss.backward()
                made.step(optimizer, loss)
                seen.append((epoch, made.iteration))
        assert seen == [(0, 1), (0, 2), (1, 3), (1, 4)]


def test_a_model_beside_modules_without_parameters_keeps_its_names():
    registered = Registered()
    registered.add({"model": torch.nn.Linear(2, 1), "norm": torch.nn.BatchNorm1d(2, affine=False)})
    assert {"weight", "bias", "norm.running_mean"} <= registered.weights().keys()


ACCUMULATED = """
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
run.register(scheduler=scheduler)
batches = [(x, y) for x, y in DataLoader(TensorDataset(inputs[:24], targets[:24]), batch_size=6)]
lowest = float("inf")
for epoch in run.epochs(2):
    for number, (x, y) in enumerate(run.steps(batches)):
        parts = [(x[i::3], y[i::3]) for i in range(3)]
        losses = [functional.mse_loss(model(a), b) / 3 for a, b in parts]
        for loss in losses:
            loss.backward()
        run.step(optimizer, sum(losses).detach(), clip_norm=1.0)
        scheduler.step()
        if number % 2:
            with torch.no_grad():
                run.log(val=functional.mse_loss(model(inputs), targets))
    value = float(functional.mse_loss(model(inputs), targets).detach())
    run.log(test=value)
    if run.is_main and value < lowest:
        lowest = value
        torch.save(model.state_dict(), run.output_dir / "best.pt")
"""


def test_accumulation_a_schedule_and_own_checkpoints_are_those_of_the_plain_loop(tmp_path):
    finished = run(1, script=script(tmp_path, ACCUMULATED))
    torch.manual_seed(1)
    inputs, targets = torch.randn(26, 4), torch.randn(26, 1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    curve, held = [], []
    for i in [0, 6, 12, 18] * 2:
        x, y = inputs[i : i + 6], targets[i : i + 6]
        parts = [torch.nn.functional.mse_loss(model(x[j::3]), y[j::3]) / 3 for j in range(3)]
        for part in parts:
            part.backward()
        curve.append(float(sum(parts)))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        held.append(float(torch.nn.functional.mse_loss(model(inputs), targets)))
    assert losses(finished) == curve
    # What is logged after a step belongs to the next iteration; what is logged after an epoch, to the evaluation.
    logged = {e.iteration: e.metrics["val"] for e in finished.of(Progress) if "val" in e.metrics}
    assert logged == {2: held[1], 6: held[5]}
    assert finished.ending.final.metrics["test"] == held[-1]
    assert finished.ending.final.metrics["val"] == held[-1]
    assert list(finished.ending.files) == ["files/best.pt"]
