"""Local steps: closed forms on quadratics, an independent computation on digits, the same weights after any fault."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")

from training_runs import WORLD, combined, configuration, make_job, real  # noqa: E402

from ephemeron import Task  # noqa: E402
from ephemeron.data import Sampler, Samples, assign, load, plan_split  # noqa: E402
from ephemeron.data.batch_source import ArrayBatchSource  # noqa: E402
from ephemeron.errors import JobError  # noqa: E402
from ephemeron.events import Ended, FaultFired, Progress  # noqa: E402
from ephemeron.training.job import (  # noqa: E402
    DataSpec,
    SchedulerSpec,
    Target,
    TrainingOptions,
    parse_fault,
)
from ephemeron.training.job.generation import ScheduledResize  # noqa: E402
from ephemeron.training.task.program import with_optimizers  # noqa: E402
from ephemeron.training.worker.trainers.torch_trainer import TorchTrainer  # noqa: E402

NESTEROV = Target(target="SGD", options={"lr": 0.7, "momentum": 0.9, "nesterov": True})
AVERAGE = Target(target="average")
RATE = 0.05

# -- closed forms -----------------------------------------------------------------------------------------


class Quadratic(Task):
    """Loss h/2 · (w − y)² of samples (h, y), by gradient descent without momentum."""

    def model(self):
        model = torch.nn.Module()
        model.w = torch.nn.Parameter(torch.tensor([3.0], dtype=torch.float64))
        return model

    def training_step(self, model, batch):
        h, y = batch
        return (h.flatten() / 2 * (model.w - y.flatten()) ** 2).mean()

    def optimizers(self, model):
        return torch.optim.SGD(model.parameters(), lr=RATE)


@dataclasses.dataclass
class Rank:
    """Curvature and minimum of all its samples, and how many it has in an iteration."""

    h: float
    y: float
    samples: int

    def trainer(self, exchange, local_steps, outer, provisional=False):
        task = Quadratic()
        inputs, targets = np.full((self.samples, 1), self.h), np.full((self.samples, 1), self.y)
        nothing = Samples(inputs[:0], targets[:0])

        class All:
            def batch(_, iteration):
                return np.arange(self.samples)

        return TorchTrainer(
            with_optimizers(task, task.model(), TrainingOptions(), find=None, epoch_length=0, epochs=1),
            feed=ArrayBatchSource(Samples(inputs, targets), nothing),
            sampler=All(),
            exchange=exchange,
            seed=0,
            local_steps=local_steps,
            outer=outer,
            provisional=provisional,
        )


RANKS = [Rank(1.0, 0.5, 12), Rank(4.0, -1.0, 12), Rank(9.0, 2.0, 24)]


def trained(iterations, local_steps, outer=AVERAGE, exchange="deltas"):
    """The parameter after each iteration, alike on all ranks."""
    trainers = [r.trainer(exchange, local_steps, outer) for r in RANKS]
    found = []
    for t in range(iterations):
        steps = [trainer.compute(t) for trainer in trainers]
        mean = sum(s.vector.copy() for s in steps) / sum(s.weight for s in steps)
        for trainer in trainers:
            trainer.apply(mean)
        (at,) = {float(trainer.parameters()[0]) for trainer in trainers}
        found.append(at)
    return found


def contraction(local_steps):
    """A and w*: an iteration of averaging takes w to w* + A·(w − w*)."""
    share = np.array([r.samples for r in RANKS]) / sum(r.samples for r in RANKS)
    power = np.array([(1 - RATE * r.h) ** local_steps for r in RANKS])
    a = float(share @ power)
    return a, float(share @ ((1 - power) * [r.y for r in RANKS])) / (1 - a)


@pytest.mark.parametrize("exchange", ["deltas", "parameters"])
@pytest.mark.parametrize("local_steps", [1, 2, 3, 12])
def test_averages_of_local_gradient_steps_have_a_closed_form(local_steps, exchange):
    a, fixed = contraction(local_steps)
    expected = [fixed + a**t * (3.0 - fixed) for t in range(1, 9)]
    np.testing.assert_allclose(trained(8, local_steps, exchange=exchange), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("local_steps", [1, 4])
def test_outer_momentum_has_a_closed_form(local_steps, nesterov):
    """(w − w*, momentum) is multiplied by one matrix in each iteration."""
    a, fixed = contraction(local_steps)
    rate, mu = 0.7, 0.9
    gradient, buffer = np.array([1 - a, 0.0]), np.array([1 - a, mu])
    step = gradient + mu * buffer if nesterov else buffer
    matrix = np.array([[1.0, 0.0] - rate * step, buffer])
    expected = [fixed + (np.linalg.matrix_power(matrix, t) @ [3.0 - fixed, 0.0])[0] for t in range(1, 13)]
    outer = Target(target="SGD", options={"lr": rate, "momentum": mu, "nesterov": nesterov})
    np.testing.assert_allclose(trained(12, local_steps, outer), expected, rtol=0, atol=1e-12)


def test_a_rank_that_lacks_a_version_goes_on_from_its_own_delta_and_takes_it_back():
    """The outer optimiser steps provisionally, here with twice the rank's own delta."""
    rank, local_steps = RANKS[1], 3
    outer = Target(target="SGD", options={"lr": 2.0})
    trainer = rank.trainer("deltas", local_steps, outer, provisional=True)
    power = (1 - RATE * rank.h) ** local_steps

    def delta(w):
        return (1 - power) * (w - rank.y)

    for iteration, start in enumerate([3.0, 3.0 - 2 * delta(3.0)]):
        step = trainer.compute(iteration)
        np.testing.assert_allclose(step.vector / step.weight, [delta(start)], rtol=0, atol=1e-12)
        assert trainer.parameters() == [3.0]
    trainer.apply(np.array([0.5]))
    np.testing.assert_allclose(trainer.parameters(), [2.0])
    step = trainer.compute(2)  # own delta of iteration 1 is still missing, that of iteration 0 is not
    np.testing.assert_allclose(step.vector / step.weight, [delta(2.0 - 2 * delta(3.0 - 2 * delta(3.0)))], atol=1e-12)


def test_the_fixed_point_is_that_of_one_step_only_where_curvatures_are_equal():
    """Known of local SGD: with several steps, ranks with small curvature pull less than in the mean of the losses."""
    minimum = sum(r.samples * r.h * r.y for r in RANKS) / sum(r.samples * r.h for r in RANKS)
    assert contraction(1)[1] == pytest.approx(minimum)
    assert abs(contraction(12)[1] - minimum) > 0.1


# -- an independent computation ---------------------------------------------------------------------------


def reference(job, c, outer=None):
    """Plain PyTorch: a copy of the model for each rank, with its own optimiser; averages; the outer step."""
    import sys

    sys.path.insert(0, str(job.code[0]))
    import tiny

    data = load(job.data, seed=job.seed).train
    split = plan_split(len(data), [c.batch_of(r) * c.exchange.local_steps for r in range(c.workers)])
    owned = assign(len(data), split, job.seed)
    torch.manual_seed(job.seed)
    whole = tiny.mlp(**job.model.options).double()
    outer_optimizer = getattr(torch.optim, outer.target)(whole.parameters(), **outer.options) if outer else None
    ranks = []
    for r in range(c.workers):
        model = tiny.mlp(**job.model.options).double()
        optimizer = getattr(torch.optim, job.optimizer.target)(model.parameters(), **job.optimizer.options)
        decay = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        ranks.append((model, optimizer, decay, Sampler(split, r, job.seed), data.take(owned[r])))
    for t in range(split.iterations * job.epochs):
        changed, samples = [torch.zeros_like(p) for p in whole.parameters()], 0
        for model, optimizer, decay, sampler, own in ranks:
            model.load_state_dict(whole.state_dict())
            index = sampler.batch(t)
            parts = np.array_split(index, min(c.exchange.local_steps, len(index))) if len(index) else []
            for part in parts:
                batch = own.take(part)
                loss = torch.nn.functional.cross_entropy(model(torch.tensor(batch.inputs).double()), torch.tensor(batch.targets))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                decay.step()
            for _ in range(len(parts), c.exchange.local_steps):
                decay.step()
            samples += len(index)
            for total, before, p in zip(changed, whole.parameters(), model.parameters(), strict=True):
                total += len(index) * (p.detach() - before.detach())
        with torch.no_grad():
            for total, p in zip(changed, whole.parameters(), strict=True):
                if outer_optimizer is None:
                    p += total / samples
                else:
                    p.grad = -total / samples
        if outer_optimizer is not None:
            outer_optimizer.step()
    return {n: p.detach().numpy() for n, p in whole.state_dict().items()}


MOMENTUM = Target(target="SGD", options={"lr": 0.05, "momentum": 0.9})
DECAY = SchedulerSpec(target="StepLR", options={"step_size": 3, "gamma": 0.9}, interval="step")


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(
    ("how", "outer"),
    [
        ({"exchange": {"local_steps": 3}}, None),
        ({"exchange": {"local_steps": 3, "quantity": "parameters"}, "workers": 3}, None),
        ({"exchange": {"local_steps": 5}, "workers": 3, "batch_size": 7, "nonaggregator_batch_size": 19}, NESTEROV),
        ({"exchange": {"local_steps": 4}, "pattern": "pipelined", "workers": 2}, Target(target="Adam", options={"lr": 0.01})),
        ({"exchange": {"local_steps": 4}, "pattern": "parameter-server", "workers": 2}, NESTEROV),
        ({"exchange": {"local_steps": 8}, "workers": 1, "pattern": "standalone"}, None),
        ({"exchange": {"quantity": "deltas"}}, NESTEROV),
    ],
    ids=str,
)
def test_weights_are_those_of_plain_pytorch(how, outer):
    job = make_job(dtype="float64", optimizer=MOMENTUM, scheduler=DECAY, epochs=2, accumulate=2)
    run = real(job, **combined(how, {"exchange": {"outer_optimizer": outer}} if outer else {}))
    expected = reference(job, configuration(**how), outer)
    for name, value in expected.items():
        np.testing.assert_allclose(run.ending.arrays[name], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("model", ["with_batch_norm", "mlp"])
def test_one_function_does_the_same_steps_however_many_are_local(model):
    """Random numbers, buffers, clipping and schedulers go on from step to step."""
    job = make_job(
        model=Target(target=f"tiny:{model}", options={"dropout": 0.3} if model == "mlp" else {}),
        clip_norm=0.5,
        epochs=2,
        data=DataSpec(last_batch="drop"),
        optimizer=MOMENTUM,
        scheduler=DECAY,
    )
    alone = {"workers": 1, "aggregators": 1, "batch_size": 13}
    runs = [real(job, **alone, exchange={"quantity": "parameters", "local_steps": h}) for h in (1, 5)]
    assert [run.ending.final.iterations for run in runs] == [220, 44]
    assert runs[0].sha == runs[1].sha


def test_an_iteration_is_one_exchange_of_as_many_batches():
    job = make_job()
    run = real(job, exchange={"local_steps": 4})
    samples = len(load(job.data, seed=job.seed).train)
    assert run.ending.final.iterations == -(-samples // (4 * 4 * 16))
    assert {e.samples for e in run.of(Progress) if e.iteration == 0} == {4 * 16}
    puts = [run.trigger.ledger.traffic.puts for run in (run, real(job))]
    assert puts[0] < puts[1] / 3


# -- faults -----------------------------------------------------------------------------------------------

DROPOUT = make_job(
    model=Target(target="tiny:mlp", options={"dropout": 0.3}), optimizer=Target(target="Adam", options={"lr": 0.003}), epochs=3
)
HOW = {"exchange": {"local_steps": 3, "outer_optimizer": NESTEROV}, "checkpoint_every": 5}


@pytest.fixture(scope="module")
def undisturbed():
    found = {}

    def sha(**how):
        key = str(sorted(how.items()))
        if key not in found:
            found[key] = real(DROPOUT, **combined(HOW, how)).sha
        return found[key]

    return sha


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [{}, {"sync": "hap"}, {"exchange": {"compression": "int8"}}, {"exchange": {"quantity": "parameters", "outer_optimizer": AVERAGE}}],
    ids=str,
)
@pytest.mark.parametrize("phase", ["compute", "upload", "aggregate", "download"])
def test_a_function_is_killed(phase, how, undisturbed):
    """Own optimiser state is in checkpoints, and local steps are repeated with it."""
    ranks = [(0, 13)] if phase == "aggregate" else [(3, 8), (0, 13)]
    kills = [parse_fault(f"kill:rank={rank},iteration={iteration},phase={phase}") for rank, iteration in ranks]
    run = real(DROPOUT, **combined(HOW, how), faults=kills)
    assert len(run.of(FaultFired)) == len(kills)
    assert run.sha == undisturbed(**how)


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["bsp", pytest.param("hap", marks=pytest.mark.slow)])
def test_hand_offs_take_own_optimizer_state_along(sync, undisturbed):
    job = dataclasses.replace(DROPOUT, simulation=dataclasses.replace(WORLD, cold_start_s=0.05))
    run = real(job, **HOW, sync=sync, function_timeout_s=12.0)
    assert "relayed" in [e.outcome for e in run.of(Ended)]
    assert run.sha == undisturbed(sync=sync)


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["ssp:2", "asp", "hsp"])
def test_asynchronous_runs_survive_a_kill_and_learn(sync):
    job = make_job(model=Target(target="tiny:mlp", options={"hidden": 64}), optimizer=MOMENTUM, epochs=6)
    kill = parse_fault("kill:rank=2,iteration=13,phase=compute")
    run = real(job, exchange={"local_steps": 4}, sync=sync, checkpoint_every=5, faults=[kill])
    assert run.of(FaultFired)
    assert run.ending.final.metrics["accuracy"] > 0.92


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["bsp", "hap"])
def test_functions_that_change_during_the_run_may_be_killed(sync):
    """Each generation begins with rank 0's optimiser state on all ranks."""
    changes = (ScheduledResize(from_epoch=1, workers=2), ScheduledResize(from_epoch=2, workers=3, aggregators=1))
    runs = [
        real(DROPOUT, **HOW, sync=sync, resize={"schedule": changes}, faults=[*map(parse_fault, faults)])
        for faults in ([], ["kill:rank=1,iteration=7,phase=download", "kill:rank=2,iteration=30,phase=upload"])
    ]
    assert len(runs[1].of(FaultFired)) == 2
    assert runs[0].sha == runs[1].sha


# -- programs ---------------------------------------------------------------------------------------------


def test_a_parameter_without_gradient_is_passed_over_by_the_outer_optimizer():
    """Weight decay of the outer optimiser would move it."""
    job = make_job(model=Target(target="tiny:unused"))
    runs = [
        real(dataclasses.replace(job, epochs=epochs), exchange={"local_steps": 2, "outer_optimizer": Target(target="AdamW")})
        for epochs in (1, 2)
    ]
    first, second = (run.ending.arrays for run in runs)
    assert (first["unused.weight"] == second["unused.weight"]).all()
    assert (first["last.weight"] != second["last.weight"]).any()


def test_optimizers_take_turns_within_an_iteration_and_hooks_follow_each_step():
    calls = []

    class Turns(Task):
        def model(self):
            return torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))])

        def training_step(self, model, batch, optimizer_index):
            calls.append((self.global_step, optimizer_index))
            return ((model[optimizer_index] - 1) ** 2).sum() / 2

        def optimizers(self, model):
            return [torch.optim.SGD([model[0]], lr=0.5), torch.optim.SGD([model[1]], lr=0.25)]

        def on_step_end(self, model):
            calls.append(self.global_step)

    task, data = Turns(), Samples(np.zeros((6, 1)), np.zeros((6, 1)))

    class All:
        def batch(self, iteration):
            return np.arange(6)

    trainer = TorchTrainer(
        with_optimizers(task, task.model(), TrainingOptions(), find=None, epoch_length=0, epochs=1),
        feed=ArrayBatchSource(data, Samples(data.inputs[:0], data.targets[:0])),
        sampler=All(),
        exchange="deltas",
        seed=0,
        local_steps=3,
    )
    for t in range(2):
        step = trainer.compute(t)
        assert (trainer.parameters() == ([0, 0] if t == 0 else [0.75, 0.25])).all(), "of the version before"
        trainer.apply(step.vector / step.weight)
    assert calls == [(0, 0), 1, (1, 1), 2, (2, 0), 3, (3, 1), 4, (4, 0), 5, (5, 1), 6]
    np.testing.assert_allclose(trainer.parameters(), [1 - 0.5**3, 1 - 0.75**3])


@pytest.mark.parametrize(
    ("says", "how"),
    [
        ("local_steps = 2 with exchange 'gradients'", {"exchange": {"local_steps": 2, "quantity": "gradients"}}),
        ("steps with merged deltas, and exchange is 'gradients'", {"exchange": {"outer_optimizer": NESTEROV}}),
        (
            "steps with merged deltas, and exchange is 'parameters'",
            {"exchange": {"outer_optimizer": NESTEROV, "quantity": "parameters", "local_steps": 2}},
        ),
        ("has no options", {"exchange": {"local_steps": 2, "outer_optimizer": Target(target="average", options={"lr": 1})}}),
        ("'Nadam' is not in torch.optim", {"exchange": {"local_steps": 2, "outer_optimizer": Target(target="Nadam")}}),
        ("refuses its options", {"exchange": {"local_steps": 2, "outer_optimizer": Target(target="SGD", options={"rate": 1})}}),
        ("an asynchronous parameter server", {"exchange": {"local_steps": 2}, "pattern": "parameter-server", "sync": "asp"}),
        ("local steps are not for a model on several functions", {"exchange": {"local_steps": 2}, "stages": {"count": 2}}),
    ],
    ids=str,
)
def test_what_has_no_meaning_is_refused(says, how):
    with pytest.raises(JobError) as refused:
        real(make_job(), **how)
    assert says in str(refused.value)


@pytest.mark.slow
def test_local_steps_learn_as_well_with_a_quarter_of_the_exchanges():
    job = make_job(model=Target(target="tiny:mlp", options={"hidden": 64}), optimizer=MOMENTUM, epochs=8)
    bsp, local = (real(job, **how).ending.final for how in ({}, {"exchange": {"local_steps": 4}}))
    assert local.iterations < bsp.iterations / 3.5
    assert bsp.metrics["accuracy"] > 0.96
    assert local.metrics["accuracy"] > bsp.metrics["accuracy"] - 0.01


@pytest.mark.slow
def test_functions_that_are_killed_on_this_machine_leave_the_weights_as_they_are(home):
    """Real processes that really die."""
    from ephemeron.training.driver import configure, train

    job = dataclasses.replace(DROPOUT, epochs=2)
    how = {"platform": "local", "workers": 3, "aggregators": 2, "memory_mb": 704, "batch_size": 8, **HOW}
    faults = ["kill:rank=0,iteration=13,phase=aggregate", "kill:rank=2,iteration=7,phase=upload"]
    fired = []
    calm = train(job, configure(job, **how)).summary
    run = train(job, configure(job, **how), faults=[*map(parse_fault, faults)], on_event=fired.append).summary
    assert len([e for e in fired if isinstance(e, FaultFired)]) == 2
    assert run.weights_sha256 == calm.weights_sha256
