"""What a function needs of memory is estimated before it is started, and a default quota grows with it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from training_runs import configuration, make_job, real

from ephemeron.events import Ended, RunStarted
from ephemeron.functions.base import Limits
from ephemeron.prices import load_prices
from ephemeron.training.driver import configure
from ephemeron.training.driver.launching.memory import Activations, estimate, measured, quota_for
from ephemeron.training.driver.launching.prepare import prepare
from ephemeron.training.driver.supervisor import Fail, RunSupervisor
from ephemeron.training.job import Target

MIB = 2**20


def of(c=None, **sizes):
    values = {"activations": Activations(), "state_bytes": 0, "vector_bytes": 0, "optimizer_copies": 0, "data_bytes": 0, "test_samples": 0}
    return estimate(c or configuration(workers=4, aggregators=2), **{**values, **sizes})


def test_a_model_is_there_several_times():
    small, large = of(), of(state_bytes=45 * MIB, vector_bytes=45 * MIB, optimizer_copies=1)
    # Parameters, gradients, momentum; received, merged, applied, sent; shards of a half on their way; a checkpoint of two, thrice.
    assert large.total_mb - small.total_mb == pytest.approx(45 * (3 + 4 + 5 / 2 + 6))
    assert large.largest[0] == "a checkpoint"


def test_members_of_a_direct_channel_keep_versions_for_others():
    def exchange(**options):
        sizes = {"state_bytes": 10 * MIB, "vector_bytes": 10 * MIB}
        return of(configuration(workers=4, aggregators=4, **options), **sizes).exchange

    store = exchange()
    assert exchange(channel="direct") - store == pytest.approx(10 * (1 + 2 * 3 - 4))
    assert exchange(channel="direct", sync="asp") == exchange(sync="asp"), "what is in the store is not kept"
    behind = exchange(channel="direct", sync="hap", checkpoint_every=25)
    assert behind - store == pytest.approx(10 * (1 + 2 * 3 + 2 * 25 - 4)), "until no checkpoint needs them"


def test_the_largest_of_what_comes_one_after_the_other_counts():
    wide = of(activations=Activations(kept=MIB, widest=MIB / 2), test_samples=1000)
    assert wide.largest == ("an evaluation", pytest.approx(256 * 4 / 2))
    assert of(activations=Activations(kept=MIB, widest=MIB / 2), test_samples=3).largest[0] == "a training step"


def test_activations_are_counted_once_and_without_parameters():
    model, found = nn.Sequential(nn.Linear(100, 50), nn.Tanh(), nn.Linear(50, 10)), Activations()
    x = torch.ones(8, 100)
    with measured(model, 8, found):
        model(x).sum().backward()
    assert found.kept == 4 * (100 + 50)  # the input, and what tanh made, which the next layer keeps too
    assert found.widest == 4 * (100 + 50)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_are_no_obstacle():
    model, found = nn.Sequential(torch.jit.script(nn.Linear(100, 50)), nn.Tanh()), Activations()
    with measured(model, 8, found):
        model(torch.ones(8, 100)).sum().backward()
    assert found.widest == 4 * (50 + 50)


@pytest.mark.parametrize(("is_default", "most", "quota"), [(True, 2000, 768), (True, 700, 512), (False, 2000, 512)])
def test_a_default_grows_and_a_choice_stays_and_is_questioned(is_default, most, quota):
    c = configuration(workers=4, aggregators=2, memory_mb=512, memory_is_default=is_default)
    found = of(c, data_bytes=400 * MIB)
    got, note = quota_for(found, c, most_mb=most)
    assert got == quota
    assert "estimated to need 650 MB" in note
    assert quota_for(of(c), c, most_mb=most) == (512, "")


def test_a_run_gets_what_its_model_needs():
    job = make_job(model=Target(target="tiny:bulky", options={"width": 1024, "layers": 16}))
    c = configure(job, platform="local", workers=4)
    made = prepare(job, c, run_id="run", limits=Limits(), prices=load_prices("objects"))
    assert c.memory_is_default
    assert made.spec.configuration.memory_mb > c.memory_mb
    assert made.notes[0].startswith(f"memory is {made.spec.configuration.memory_mb} MB instead of {c.memory_mb} MB")
    chosen = configure(job, platform="local", workers=4, memory_mb=c.memory_mb)
    kept = prepare(job, chosen, run_id="run", limits=Limits(), prices=load_prices("objects"))
    assert kept.spec.configuration.memory_mb == c.memory_mb
    assert f"its quota is {c.memory_mb} MB" in kept.notes[0]


def test_where_time_is_virtual_memory_is_not_estimated():
    run = real(make_job(), workers=2)
    assert not any("estimated" in note for e in run.of(RunStarted) for note in e.notes)


def test_a_function_that_was_killed_says_how_much_it_had_and_what_to_try():
    ended = Ended(
        t=1,
        rank=1,
        attempt=0,
        invocation="i",
        status="out_of_memory",
        memory_mb=704,
        peak_memory_mb=704.0,
        error="killed at its memory quota of 704 MB",
    )
    (action,) = RunSupervisor(2).feed(ended)
    assert isinstance(action, Fail)
    assert "it had allocated 704 MB and needed more, its quota is 704 MB: use a larger --memory-mb, such as 1088" in action.cause


def test_a_compiled_model_is_measured() -> None:
    """Sizes are symbols while a model that the program has compiled is traced: "Dynamo … nbytes"."""
    torch = pytest.importorskip("torch")
    model = torch.compile(torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)), backend="eager", dynamic=True)
    found = Activations()
    with measured(model, 2, found):
        model(torch.ones(2, 6)).sum().backward()
    assert found.kept > 0
