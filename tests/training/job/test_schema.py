"""The JSON schema of job files: current, shipped, and right about jobs that work and jobs that do not."""

from __future__ import annotations

import json
import tomllib
from importlib import resources
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner

from ephemeron.cli.main import main
from ephemeron.config.schema import descriptions
from ephemeron.training.job import Configuration, Job
from ephemeron.training.job.schema import job_schema

ROOT = Path(__file__).parents[3]
VALIDATOR = jsonschema.Draft202012Validator(json.loads(job_schema()))
JOBS = sorted(ROOT.glob("examples/**/job*.toml"))


def test_the_shipped_file_is_current() -> None:
    shipped = resources.files("ephemeron").joinpath("schemas", "job.schema.json").read_text()
    assert shipped == job_schema(), "run: ephemeron schema job > src/ephemeron/schemas/job.schema.json"
    assert CliRunner().invoke(main, ["schema", "job"]).stdout == shipped


def test_it_is_a_schema_and_describes_every_field() -> None:
    schema = json.loads(job_schema())
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["required"] == []
    assert schema["oneOf"] == [{"required": ["model"]}, {"required": ["task"]}, {"required": ["script"]}, {"required": ["sparse"]}]
    described = {name for name, text in descriptions(Configuration).items() if text}
    assert described == set(schema["properties"]["run"]["properties"])
    assert set(descriptions(Job)) == set(schema["properties"]) - {"$schema"}


@pytest.mark.parametrize("path", JOBS, ids=lambda p: p.parent.name)
def test_it_accepts_the_example_jobs(path: Path) -> None:
    VALIDATOR.validate(tomllib.loads(path.read_text()))


def test_examples_name_the_schema() -> None:
    assert len(JOBS) >= 2
    for path in JOBS:
        first = path.read_text().partition("\n")[0]
        assert first.startswith("#:schema ")
        assert (path.parent / first.removeprefix("#:schema ")).samefile(ROOT / "src/ephemeron/schemas/job.schema.json")


@pytest.mark.parametrize(
    "text",
    [
        "epochs = 3",
        "model = 'm:f'\ntask = 'm:T'",
        "model = 3",
        "model = 'm:f'\nepoch = 3",
        "model = 'm:f'\nepochs = 0",
        "model = 'm:f'\nepochs = '3'",
        "model = 'm:f'\ncode = '.'",
        "model = { options = { a = 1 } }",
        "model = 'm:f'\ndtype = 'float16'",
        "model = 'm:f'\n[run]\nworker = 4",
        "model = 'm:f'\n[run]\nsync = 'ssp'",
        "model = 'm:f'\n[limits]\nbudget_usd = 0",
        "model = 'm:f'\n[data]\ntest_fraction = 1.0",
        "model = 'm:f'\n[simulation]\ncompute = { a = 1, b = 1 }",
    ],
)
def test_it_refuses_broken_jobs(text: str) -> None:
    assert not VALIDATOR.is_valid(tomllib.loads(text))
