"""The trial of a script before its launch: what it finds, and what is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")

from script_runs import EXACT, LOOP, SCRIPT, job, run, script, trials_once  # noqa: E402, F401
from training_runs import configuration  # noqa: E402

import ephemeron  # noqa: E402
from ephemeron.communication.channels.memory import MemoryChannel  # noqa: E402
from ephemeron.communication.keys import Keys  # noqa: E402
from ephemeron.errors import JobError  # noqa: E402
from ephemeron.events import FaultFired  # noqa: E402
from ephemeron.functions.base import Limits  # noqa: E402
from ephemeron.prices import load_prices  # noqa: E402
from ephemeron.runs import probe_process  # noqa: E402
from ephemeron.training.driver.launching import prepare, script_trial  # noqa: E402
from ephemeron.training.driver.launching.programs import job_of  # noqa: E402
from ephemeron.training.driver.renewal import renewed  # noqa: E402

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
        (
            "other = torch.optim.SGD(model.parameters(), lr=1.0)",
            TWO_OPTIMIZERS,
            "an optimizer (SGD) that is not registered; call run.register",
        ),
        ("", RAISES, "ValueError: no luck (mine.py, line 18)"),
        ("", EMPTY_EPOCHS, "write `for epoch in run.epochs(N)`"),
        ("import absent_module", LOOP, "No module named 'absent_module'"),
        ("run.register(best=0.5)", LOOP, "run.register(best=…) got a float, which has no state_dict()"),
        ("import sys; sys.exit(3)", LOOP, "it ended with exit code 3"),
    ],
)
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


def test_scripts_are_not_profiled():
    with pytest.raises(JobError, match=r"script points\.py cannot be profiled"):
        ephemeron.profile_job(job())


def test_only_scripts_take_arguments():
    with pytest.raises(JobError, match="takes no arguments"):
        job_of(Path(__file__).parents[3] / "examples/digits/job.toml", {"arguments": ["--fast"]})


@pytest.mark.slow
@pytest.mark.cold_start
def test_a_dry_run_does_two_steps_after_a_trial_in_a_fresh_process(monkeypatch):
    monkeypatch.setattr(prepare, "script_trial", script_trial.script_trial)
    found = ephemeron.training.driver.dry_run(SCRIPT, workers=2)
    details = found.details
    assert [details[name] for name in ("program", "iterations", "epochs", "samples")] == ["points.py", 18, 3, 90]
    assert len(details["first_steps"]["losses"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("lr=0.05", "lr=0.01"), ""),
        (("Linear(4, 1)", "Linear(4, 1, bias=False)"), "checkpoints do not fit the model any more"),
        (("epochs=2", "epochs=3"), "has 3 epochs of 4 batches of 8 now, not 2 of 4 of 8"),
        (("loss.backward()", "loss.sideways()"), "has no attribute 'sideways'"),
    ],
)
def test_a_resumed_run_takes_a_changed_script_that_fits(tmp_path, change, says):
    path = script(tmp_path, LOOP)
    prepared = prepare.prepare(job(script=path), configuration(workers=2), run_id="run", limits=Limits(), prices=load_prices("objects"))
    path.write_text(path.read_text().replace(*change))

    async def asked():
        store = MemoryChannel()
        await store.put(Keys("run").code, prepared.objects["run/code"])
        return await renewed(store, prepared.source, prepared.spec)

    if not says:
        assert asyncio.run(asked()).changed == ("mine.py",)
        return
    with pytest.raises(JobError, match=says):
        asyncio.run(asked())


def test_what_a_trial_does_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(script_trial, "_SAY_EVERY_S", 0.0)
    monkeypatch.setattr(probe_process, "_WAIT_S", 0.001)
    made, told = job(script=script(tmp_path, LOOP)), []
    script_trial.script_trial(made, prepare.bundled(made), configuration(workers=2), told.append)
    assert told[0].startswith("checking mine.py: two steps, which are repeated from its registered state")
    stages = ("starting", "what comes before its loop", "its first two steps", "the same steps", "what comes after")
    assert told[1:]
    assert all(line.removeprefix("checking mine.py: ").startswith(stages) for line in told[1:])
