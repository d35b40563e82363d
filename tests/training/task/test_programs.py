"""Programs as users write them: as plain PyTorch trains them, independent of the number of functions, and after any kill."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")

from torch.utils.data import default_collate  # noqa: E402
from training_runs import WORLD, batch_indices, real  # noqa: E402

from ephemeron.data.split import held_out  # noqa: E402
from ephemeron.errors import JobError  # noqa: E402
from ephemeron.events import Evaluated, FaultFired, Invoked, Measured, Progress  # noqa: E402
from ephemeron.training.driver.launching.programs import job_of  # noqa: E402
from ephemeron.training.job import EarlyStopping, KeepBest, SchedulerSpec, parse_fault  # noqa: E402
from ephemeron.training.task.program import program_of  # noqa: E402
from ephemeron.training.worker.trainers.factory import rank_seed  # noqa: E402

CODE = Path(__file__).parent / "code"
PROGRAMS = ["Gpt", "PlateauResidual", "Gan", "Adapter", "Tabular"]


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(CODE))


def job(name, **options):
    made = job_of(f"programs:{name}", options)
    return dataclasses.replace(made, simulation=WORLD, code=(CODE,))


def settings(workers, **more):
    return {"workers": workers, "aggregators": min(2, workers), "batch_size": 16 // workers, **more}


def reference(made, workers):
    """The same program in plain PyTorch: one optimiser step for each global batch, in one process."""
    run = real(made, **settings(workers))
    spec = run.trigger.spec
    task_program = program_of(spec, folders=made.code, epoch_length=spec.split.iterations, epochs=spec.epochs)
    task, model, optimizers = task_program.task, task_program.model, task_program.optimizers
    data, tests = task.train_data(), task.evaluation_data()
    if isinstance(data, tuple):
        whole = [torch.from_numpy(a) for a in data]
        chosen, tested = held_out(len(whole[0]), 0.2, seed=made.seed)

        def batch_of(indices, among=chosen):
            return tuple(part[among[indices]] for part in whole)

        evaluation = batch_of(np.arange(len(tested)), tested)
    else:
        everything = np.arange(len(data))

        def batch_of(indices):
            return default_collate([data[int(everything[i])] for i in indices])

        evaluation = default_collate([tests[i] for i in range(len(tests))])
    losses = []
    torch.manual_seed(rank_seed(made.seed, 0))
    parameters = [p for p in model.parameters() if p.requires_grad]
    for t in range(spec.iterations):
        model.train()
        number, indices = t % spec.split.iterations, batch_indices(spec, t)
        parts = min(made.accumulate, len(indices))
        turn = {"optimizer_index": t % 2} if task_program.takes_turns else {}
        model.zero_grad()
        pieces = [batch_of(piece) for piece in np.array_split(indices, parts)]
        if turn:
            for p in parameters:
                p.requires_grad_(any(p is q for g in optimizers[t % 2].param_groups for q in g["params"]))
        total = 0.0
        for piece in pieces:
            out = task.training_step(model, piece, **turn)
            loss = out["loss"] if isinstance(out, dict) else out
            (loss / parts if parts > 1 else loss).backward()
            total += float(loss.detach()) / parts
        losses.append(total)
        for p in parameters:
            p.requires_grad_(True)
        if made.clip_norm:
            torch.nn.utils.clip_grad_norm_(parameters, made.clip_norm)
        for i, optimizer in enumerate(optimizers):
            if not turn or i == t % 2:
                optimizer.step()
        for each in task_program.schedulers:
            if each.monitor is None and (each.interval == "step" or number == spec.split.iterations - 1):
                each.scheduler.step()
        if number == spec.split.iterations - 1:
            model.eval()
            with torch.no_grad():
                out = task.evaluation_step(model, evaluation)
            for each in task_program.schedulers:
                if each.monitor is not None:
                    each.scheduler.step(float(out["loss"] if isinstance(out, dict) else out))
    return run, {n: t.numpy() for n, t in model.state_dict().items()}, losses


def weights(run):
    return run.ending.arrays


def loss_curve(run):
    """By iteration, the mean loss over ranks by samples."""
    sums = {}
    for e in run.of(Progress):
        total, samples = sums.get(e.iteration, (0.0, 0))
        sums[e.iteration] = (total + e.loss * e.samples, samples + e.samples)
    return [total / samples for _, (total, samples) in sorted(sums.items())]


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_function_is_plain_pytorch_to_the_last_bit(name, home):
    run, expected, losses = reference(job(name), 1)
    got = weights(run)
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert np.array_equal(got[key], value), key
    assert loss_curve(run) == losses


@pytest.mark.parametrize("name", PROGRAMS)
def test_four_functions_are_one_on_the_same_global_batches(name, home):
    # In float32 Adam makes noise of gradients that are exactly zero, such as those of a key's bias.
    made = job(name, dtype="float64") if name == "Gpt" else job(name)
    if name == "PlateauResidual":  # batch statistics are those of each function's part
        made = dataclasses.replace(made, epochs=1)
    run, expected, _ = reference(made, 4)
    tolerance = {"PlateauResidual": 0.1, "Gpt": 1e-9}.get(name, 2e-5)
    for key, value in expected.items():
        assert np.allclose(weights(run)[key], value, atol=tolerance, rtol=tolerance), key


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_kills_and_hand_offs_do_not_change_a_program(name, home):
    made = job(name)
    more = settings(4, checkpoint_every=2)
    undisturbed = real(made, **more)
    faults = ["kill:rank=0,iteration=3,phase=upload", "kill:rank=3,iteration=5,phase=compute", "kill:rank=1,iteration=6,phase=download"]
    run = real(made, faults=[parse_fault(fault) for fault in faults], **more)
    assert len(run.of(FaultFired)) == len(faults)
    assert run.sha == undisturbed.sha
    assert run.left == undisturbed.left
    assert run.ending.final.metrics == undisturbed.ending.final.metrics
    relayed = real(made, **{**more, "function_timeout_s": 4.0})
    assert [e for e in relayed.of(Invoked) if e.reason == "relay"]
    assert relayed.sha == undisturbed.sha


def test_metrics_of_a_program_are_shown_under_their_names(home):
    run = real(job("Gpt"), **settings(4))
    metrics = run.ending.final.metrics
    assert set(metrics) == {"loss", "token_accuracy", "perplexity"}
    assert metrics["perplexity"] == pytest.approx(np.exp(metrics["loss"]))
    assert {e.iteration: e.metrics for e in run.of(Measured)}[18] == metrics
    assert all("token_accuracy" in e.metrics for e in run.of(Progress))


def test_sums_merge_exactly_over_any_number_of_functions(home):
    one, four = (real(job("Tabular", epochs=1), **settings(w)) for w in (1, 4))
    counts = [sum(e.sums["absolute_error"][1] for e in run.of(Evaluated)) for run in (one, four)]
    assert counts == [24, 24]


def test_frozen_parameters_do_not_travel(home):
    run = real(job("Adapter"), **settings(4, checkpoint_every=2))
    spec = run.trigger.spec
    trained = 4 * (36 * 2 + 2 * 512 + 512 * 10 + 10)
    uploads = max(e.traffic.bytes_up for e in run.of(Progress))
    assert uploads < 3 * trained * spec.iterations
    assert weights(run)["body.weight"].shape == (512, 36), "the result is whole"


@pytest.mark.slow
def test_early_stopping_ends_all_functions_at_one_iteration(home):
    made = job("Tabular", epochs=9, early_stopping=EarlyStopping(monitor="rmse", patience=2, min_delta=10.0))
    more = settings(4, checkpoint_every=2)
    run = real(made, **more)
    assert run.ending.status == "finished"
    assert run.ending.final.iterations == 3 * 6
    assert "rmse has not improved in 2 evaluations" in run.of(Measured)[-1].decision
    killed = real(made, faults=[parse_fault("kill:rank=0,iteration=17,phase=upload")], **more)
    assert killed.of(FaultFired)
    assert (killed.sha, killed.ending.final.iterations) == (run.sha, 18)
    hap = real(made, **{**more, "sync": "hap"})
    assert hap.ending.final.iterations == 18


def test_best_and_last_weights_are_kept(home):
    made = job("Tabular", epochs=4, keep_best=KeepBest(monitor="rmse"), keep_last=2)
    run = real(made, **settings(4))
    assert run.ending.final.kept == (18, 24)
    assert run.ending.final.best == 24
    assert np.array_equal(run.ending.kept[24][0]["0.weight"], weights(run)["0.weight"])
    assert not np.array_equal(run.ending.kept[18][0]["0.weight"], weights(run)["0.weight"])


def test_evaluations_every_so_many_steps(home):
    run = real(job("Tabular", epochs=2, evaluate_every="4 steps"), **settings(2))
    assert sorted({e.iteration for e in run.of(Evaluated)}) == [4, 8, 12]


@pytest.mark.slow
def test_the_moving_average_is_evaluated_and_saved_and_survives_a_kill(home):
    plain, averaged = (real(job("Tabular", ema_decay=d), **settings(2, checkpoint_every=2)) for d in (0.0, 0.9))
    assert plain.sha != averaged.sha
    killed = real(
        job("Tabular", ema_decay=0.9), faults=[parse_fault("kill:rank=1,iteration=9,phase=compute")], **settings(2, checkpoint_every=2)
    )
    assert killed.sha == averaged.sha


@pytest.mark.slow
def test_bf16_autocast_computes_otherwise_and_survives_a_kill(home):
    made = job("Gpt", precision="bf16-mixed")
    more = settings(2, checkpoint_every=2)
    run = real(made, **more)
    assert run.sha != real(job("Gpt"), **more).sha
    assert real(made, faults=[parse_fault("kill:rank=0,iteration=5,phase=compute")], **more).sha == run.sha


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"early_stopping": EarlyStopping(monitor="f1")}, "early_stopping monitors 'f1', which the evaluation does not report"),
        ({"scheduler": SchedulerSpec(target="Nothing")}, "scheduler 'Nothing' is not in torch.optim.lr_scheduler"),
        ({"scheduler": SchedulerSpec(target="StepLR")}, "scheduler StepLR refuses its options"),
        ({"scheduler": SchedulerSpec(target="StepLR", options={"step_size": 1}, warmup_steps=2)}, 'interval = "step"'),
    ],
)
def test_mistakes_are_refused_before_the_start(options, says, home):
    with pytest.raises(JobError) as caught:
        real(job("Tabular", **options), **settings(2))
    assert says in str(caught.value)


def test_decisions_need_functions_that_keep_step(home):
    with pytest.raises(JobError, match="need sync bsp, hap or hsp, not ssp:2"):
        real(job("Gpt"), **settings(4, sync="ssp:2"))


def test_a_run_of_a_function_is_named_after_its_file_and_one_of_a_class_after_the_class(tmp_path, monkeypatch):
    (tmp_path / "adapters.py").write_text(
        "import programs\n\n\ndef task():\n    return programs.Gpt()\n\n\nclass Named(programs.Gpt):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert job_of("adapters:task", {}).name == "adapters"
    assert job_of("adapters:Named", {}).name == "Named"
