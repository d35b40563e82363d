"""The jobs in `examples/` train."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from training_runs import WORLD, real

import ephemeron
from ephemeron.cli.main import main
from ephemeron.events import GenerationStarted, Measured
from ephemeron.training.driver.launching.programs import job_of

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def job():
    loaded = ephemeron.load_job(EXAMPLES / "superresolution" / "job.toml")
    return dataclasses.replace(
        loaded,
        epochs=2,
        model=dataclasses.replace(loaded.model, options={"width": 4, "blocks": 1}),
        data=dataclasses.replace(loaded.data, options={"count": 40, "size": 16}),
    )


def test_superresolution_learns_and_reports_no_accuracy(job, home):
    configuration = ephemeron.configure(job, platform="simulated", workers=2, batch_size=4)
    seen = []
    result = ephemeron.train(job, configuration, on_event=seen.append)
    losses = [e.sums["loss"][0] / e.samples for e in seen if e.kind == "evaluated"]
    assert result.summary.metrics.get("accuracy") is None
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_the_elastic_run_changes_its_functions_and_learns_as_a_fixed_one(home):
    pytest.importorskip("sklearn", reason="no sklearn, which the example needs")
    job = dataclasses.replace(ephemeron.load_job(EXAMPLES / "elastic" / "job.toml"), dtype="float64", simulation=WORLD)
    elastic = real(job, **job.run)
    fixed = real(job, **{**job.run, "resize": {}})
    assert [e.workers for e in elastic.of(GenerationStarted)] == [3, 1]
    assert elastic.ending.final.iterations == fixed.ending.final.iterations
    assert elastic.ending.final.metrics["accuracy"] > 0.9
    for name, array in fixed.ending.arrays.items():
        np.testing.assert_allclose(elastic.ending.arrays[name], array, rtol=1e-6, atol=1e-8)


PROGRAMS = [
    ("gpt", "gpt:Characters", (), 3, {"loss", "perplexity"}),
    ("resnet-plateau", "resnet:Digits", ("sklearn",), 5, {"loss", "accuracy"}),
    ("gan", "gan:Ring", (), 20, {"loss", "radius"}),
    ("lora", "lora:task", ("peft", "datasets"), 2, {"loss"}),
    ("tabular", "tabular:Diabetes", ("sklearn",), 10, {"loss", "mae", "mse", "rmse"}),
    ("lightning", "lightning:module:Classifier,module:Digits", ("lightning", "sklearn"), 2, {"loss", "val_loss", "val_acc"}),
    ("transformers", "sentiment:task", ("transformers", "datasets", "torchmetrics"), 3, {"loss", "accuracy"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "target", "needs", "epochs", "names"), PROGRAMS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_program_learns_and_reports_its_metrics(folder, target, needs, epochs, names, home, monkeypatch):
    for name in needs:
        pytest.importorskip(name, reason=f"no {name}, which the example needs")
    monkeypatch.chdir(EXAMPLES / folder)
    assert f"`cd examples/{folder} && ephemeron train {target}`" in (EXAMPLES / "README.md").read_text()
    job = job_of(target, {"epochs": epochs})
    workers = 4 if folder == "gan" else 2
    run = real(dataclasses.replace(job, simulation=WORLD), **{**job.run, "workers": workers, "aggregators": 2})
    assert run.ending.status == "finished", run.ending.causes
    assert run.ending.final.metrics.keys() == names
    losses = [e.metrics["loss"] for e in run.of(Measured)]
    assert not losses or losses[-1] < losses[0]
    assert f"{run.ending.final.metrics['loss']:.3f}" != "nan"


@pytest.mark.slow
def test_the_first_command_of_the_readme_prints_what_it_shows(home, capfd, monkeypatch):
    """Numbers that depend on the machine are left out: seconds, gets and polls, cost, and the last digits of what was learned."""
    pytest.importorskip("sklearn", reason="no sklearn, which the example needs")
    shown = (EXAMPLES.parent / "README.md").read_text().partition("ends like this:\n\n```\n")[2].partition("```")[0]
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main(["train", str(EXAMPLES / "digits" / "job.toml")])
    assert ended.value.code == 0
    printed = "\n".join(capfd.readouterr())

    def what_repeats(text: str) -> list[str]:
        patterns = (
            r"on local: .* iterations$",
            r"^epoch 15/15  iteration \d+",
            r"finished after .*, (\d+ iterations, \d+ invocations)",
            r"\d+ puts",
            r"[\d.]+ MB up",
        )
        found = [re.search(pattern, text, re.MULTILINE) for pattern in patterns]
        return [match[match.lastindex or 0] if match else f"{pattern}: not there" for match, pattern in zip(found, patterns, strict=True)]

    assert what_repeats(printed) == what_repeats(shown)
    for text in (printed, shown):
        accuracy = re.search(r"^finished .* accuracy ([\d.]+)$", text, re.MULTILINE)
        assert accuracy is not None
        assert float(accuracy[1]) > 0.98


@pytest.mark.slow
def test_the_plans_of_the_readme_are_those_of_the_profile_beside_the_job(home, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    folder = EXAMPLES / "superresolution"
    rows = re.findall(
        r"^\| (\d+) s \| (\d+ × [\d,]+ MB).* \| ([\d.]+ \w+) \| (\$[\d.]+) \|$", (EXAMPLES.parent / "README.md").read_text(), re.MULTILINE
    )
    assert [row[0] for row in rows] == ["600", "120", "60"]
    for deadline, functions, seconds, cost in rows:
        with pytest.raises(SystemExit) as ended:
            main(
                ["plan", str(folder / "job.toml"), "--profile", str(folder / "profile.json"), "--platform", "aws", "--deadline-s", deadline]
            )
        assert ended.value.code == 0
        printed = capfd.readouterr().out
        assert functions in printed
        assert f"{seconds} for {cost}" in printed
