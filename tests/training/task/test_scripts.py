"""Scripts with a training loop of their own: alone, on functions, after kills; and what their trial finds."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")

from training_runs import WORLD, real  # noqa: E402

import ephemeron  # noqa: E402
from ephemeron.errors import JobError  # noqa: E402
from ephemeron.events import FaultFired, Invoked, Progress  # noqa: E402
from ephemeron.training.driver import prepare, script_trial  # noqa: E402
from ephemeron.training.driver.programs import job_of  # noqa: E402
from ephemeron.training.job import EarlyStopping, parse_fault  # noqa: E402

SCRIPT = Path(__file__).parent / "scripts/points.py"
EXACT = ("--double", "--no-dropout")
"""Arguments with which numbers do not depend on the number of workers beyond rounding."""
_TRIALS: dict[object, object] = {}


@pytest.fixture(autouse=True)
def trials_once(monkeypatch, home):
    """The trial of a script takes seconds, and is the same for every fault."""

    def known(job, code, configuration):
        key = (job.script, code, configuration.workers, job.options.decides)
        if key not in _TRIALS:
            _TRIALS[key] = script_trial.script_trial(job, code, configuration)
        return _TRIALS[key]

    monkeypatch.setattr(prepare, "script_trial", known)


def job(*arguments, script=SCRIPT, **options):
    made = job_of(script, {"arguments": tuple(arguments), **options})
    return dataclasses.replace(made, simulation=WORLD)


def run(workers, *arguments, script=SCRIPT, faults=(), options=None, **more):
    made = job(*arguments, script=script, **(options or {}))
    return real(
        made, workers=workers, aggregators=min(2, workers), checkpoint_every=2, faults=list(map(parse_fault, faults)), **more
    )  # fmt: skip


def alone(tmp_path, *arguments):
    """Weights and losses of `python script.py`."""
    out = tmp_path / "alone.npz"
    command = [sys.executable, str(SCRIPT), "--out", str(out), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": ""})
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


def script(tmp_path, body, *, before="", register="model=model, optimizer=optimizer"):
    """A script of few lines in a folder of its own."""
    folder = tmp_path / "code"
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(f"""\
import copy
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
import ephemeron

torch.manual_seed(1)
inputs, targets = torch.randn(26, 4), torch.randn(26, 1)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=8)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
run = ephemeron.current()
{before}
run.register({register})
{body}
""")
    return folder / "mine.py"


LOOP = """
for x, y in run.steps(loader, epochs=2):
    loss = functional.mse_loss(model(x), y)
    loss.backward()
    run.step(optimizer, loss)
"""


@pytest.mark.slow
def test_one_function_is_the_script_alone_to_the_last_bit(tmp_path):
    weights, curve = alone(tmp_path)
    finished = run(1)
    same(finished.ending.arrays, weights)
    assert losses(finished) == curve
    assert len(curve) == 18


@pytest.mark.slow
def test_any_number_of_functions_is_the_script_alone(tmp_path):
    weights, curve = alone(tmp_path, *EXACT)
    for workers in (2, 4):
        finished = run(workers, *EXACT)
        same(finished.ending.arrays, weights, 1e-12)
        assert np.allclose(losses(finished), curve, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("--flat",)])
def test_kills_and_hand_offs_do_not_change_a_script(arguments):
    undisturbed = run(4, *arguments)
    assert run(4, *arguments).sha == undisturbed.sha, "two runs are bit-identical"
    for fault in (
        "kill:rank=0,iteration=3,phase=upload", "kill:rank=3,iteration=6,phase=compute", "kill:rank=1,iteration=11,phase=download",
        "kill:rank=2,iteration=17,phase=compute",
    ):  # fmt: skip
        killed = run(4, *arguments, faults=[fault])
        assert killed.of(FaultFired)
        assert killed.sha == undisturbed.sha, fault
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


TEACHER = "teacher = copy.deepcopy(model)"
EMA = """
for x, y in run.steps(loader, epochs=2):
    loss = functional.mse_loss(model(x), y)
    loss.backward()
    run.step(optimizer, loss)
    with torch.no_grad():
        for p, q in zip(teacher.parameters(), model.parameters()):
            p.lerp_(q, 0.1)
"""
NOISE = """
for x, y in run.steps(loader, epochs=2):
    loss = functional.mse_loss(model(x + torch.randn(x.shape, generator=noise)), y)
    loss.backward()
    run.step(optimizer, loss)
"""
COUNTER = """
scale = 1.0
for x, y in run.steps(loader, epochs=2):
    loss = scale * functional.mse_loss(model(x), y)
    loss.backward()
    run.step(optimizer, loss)
    scale = scale * 0.9
"""
TOTAL = """
total = 0.0
for x, y in run.steps(loader, epochs=2):
    loss = functional.mse_loss(model(x), y)
    loss.backward()
    run.step(optimizer, loss)
    total += loss.item()
"""
IN_FUNCTION = f"""
def main():
    {TEACHER}
    {EMA.strip().replace(chr(10), chr(10) + "    ")}

main()
"""
NO_STEP = "for x, y in run.steps(loader): pass"
TWICE = LOOP + "    run.step(optimizer, loss)"
TWO_OPTIMIZERS = LOOP.replace("run.step(optimizer", "run.step(other")
RAISES = LOOP.replace("loss.backward()", "raise ValueError('no luck')")
EMPTY_EPOCHS = """
for epoch in range(2):
    count = 0
    for x, y in run.steps(loader):
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        run.step(optimizer, loss)
        count += 1
    print(1 / count)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "body", "says"),
    [
        (TEACHER, EMA, "the loop changes teacher (Linear), which is not registered; call run.register(teacher=teacher)"),
        ("", IN_FUNCTION, "the loop changes teacher (Linear), which is not registered"),
        ("noise = torch.Generator().manual_seed(3)", NOISE, "the loop changes noise (Generator), which is not registered"),
        ("", COUNTER, "what has changed and is not registered: scale (float)"),
        ("", "print('nothing')", "it ended without a loop over run.steps"),
        ("", NO_STEP, "a batch of run.steps was left without run.step"),
        ("", TWICE, "run.step was called twice for one batch"),
        ("other = torch.optim.SGD(model.parameters(), lr=1.0)", TWO_OPTIMIZERS, "an optimizer (SGD) that is not registered; call run.register"),
        ("", RAISES, "ValueError: no luck (mine.py, line 18)"),
        ("", EMPTY_EPOCHS, "write `for epoch in run.epochs(N)`"),
        ("import absent_module", LOOP, "No module named 'absent_module'"),
        ("run.register(best=0.5)", LOOP, "run.register(best=…) got a float, which has no state_dict()"),
        ("import sys; sys.exit(3)", LOOP, "it ended with exit code 3"),
    ],
)  # fmt: skip
def test_the_trial_says_what_is_wrong(tmp_path, before, body, says):
    with pytest.raises(JobError) as caught:
        run(2, script=script(tmp_path, body, before=before))
    assert says in str(caught.value)


@pytest.mark.slow
def test_a_registered_teacher_and_generator_survive_a_kill(tmp_path):
    body = EMA.replace("model(x)", "model(x + torch.randn(x.shape, generator=noise))")
    before = f"{TEACHER}\nnoise = torch.Generator().manual_seed(3)"
    register = "model=model, optimizer=optimizer, teacher=teacher, noise=noise"
    path = script(tmp_path, body, before=before, register=register)
    undisturbed = run(2, script=path)
    killed = run(2, script=path, faults=["kill:rank=0,iteration=5,phase=compute"])
    assert killed.of(FaultFired)
    assert killed.sha == undisturbed.sha
    assert set(undisturbed.ending.arrays) == {"model.weight", "model.bias", "teacher.weight", "teacher.bias"}


@pytest.mark.slow
def test_numbers_that_change_are_remarked_upon(tmp_path):
    finished = run(2, script=script(tmp_path, TOTAL))
    assert finished.ending.status == "finished"
    (note,) = finished.trigger.notes
    assert note.startswith("total changes in the loop")


@pytest.mark.slow
def test_an_error_of_the_script_names_rank_and_iteration(tmp_path):
    body = LOOP.replace(
        "loss.backward()", "loss.backward()\n    if run.iteration == 3 and run.rank == 1: raise ValueError('no luck')"
    )
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


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"clip_norm": 1.0}, "clip_norm is not an option of a script"),
        ({"dtype": "float64"}, "dtype is not an option of a script"),
        ({"epochs": 3}, "epochs is not an option of a script"),
    ],
)
def test_options_of_the_script_are_refused(options, says):
    with pytest.raises(JobError, match=says):
        run(2, options=options)


def test_only_scripts_take_arguments():
    with pytest.raises(JobError, match="takes no arguments"):
        job_of(Path(__file__).parents[3] / "examples/digits/job.toml", {"arguments": ["--fast"]})


def test_alone_the_current_run_has_one_worker():
    made = ephemeron.current()
    assert (made.rank, made.world, made.is_main) == (0, 1, True)
    assert ephemeron.current() is made


@pytest.mark.slow
def test_local_functions_end_with_the_weights_of_simulated_ones():
    expected = run(3)
    result = ephemeron.train(
        SCRIPT,
        workers=3,
        aggregators=2,
        checkpoint_every=2,
        faults=[parse_fault("kill:rank=1,iteration=8,phase=compute")],
    )
    assert result.summary.invocations > 3
    assert result.summary.weights_sha256 == expected.sha
    same(dict(result.state_dict()), expected.ending.arrays)


@pytest.mark.slow
def test_the_example_learns_alike_on_any_number_of_functions():
    pytest.importorskip("sklearn", reason="no scikit-learn; pip install 'ephemeron[digits]'")
    example = Path(__file__).parents[3] / "examples/script/train.py"
    one, four = (run(w, "--epochs", "2", script=example) for w in (1, 4))
    assert one.ending.final.metrics["accuracy"] > 0.85
    assert four.ending.final.metrics["accuracy"] == pytest.approx(one.ending.final.metrics["accuracy"], abs=0.03)


@pytest.mark.slow
def test_a_dry_run_does_two_steps():
    found = ephemeron.training.driver.dry_run(SCRIPT, workers=2)
    assert (found.program, found.iterations, found.epochs, found.samples) == ("points.py", 18, 3, 90)
    assert len(found.rehearsal.losses) == 2
