"""`ephemeron prepare`: recipes, their results, and what is said of wrong ones."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ephemeron.cli.main import main
from ephemeron.data.tables import TableDataset, csr_batch
from ephemeron.errors import JobError
from ephemeron.preparation import Pipeline
from ephemeron.preparation.preparing import prepare
from ephemeron.preparation.recipe import load_recipe

pa = pytest.importorskip("pyarrow", reason="prepared datasets are Arrow files")

EXAMPLE = Path(__file__).parents[2] / "examples" / "clicks"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def generated(folder, rows):
    spec = importlib.util.spec_from_file_location("clicks_generate", EXAMPLE / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.generate(folder, rows, 0)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clicks")
    generated(folder, 3000)
    return folder


RECIPE = """
source = "{source}/clicks-*.csv"
out = "prepared"
partition_mb = 0.2
on_error = "quarantine"
[label]
column = "click"
[[steps]]
step = "standardise"
[[steps]]
step = "hash"
n_features = 4096
[split]
test_fraction = 0.2
[run]
platform = "simulated"
"""


def written(tmp_path, source, text=RECIPE):
    path = tmp_path / "clicks.toml"
    path.write_text(text.replace("{source}", str(source)))
    return path


def run(path, *flags):
    return CliRunner().invoke(main, ["prepare", str(path), *flags])


def test_a_recipe_makes_training_and_test_data(tmp_path, data):
    path = written(tmp_path, data)
    ran = run(path, "--json")
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert found["name"] == "clicks"
    assert (found["rows"], found["rejected"]) == (3000, 0)
    assert found["datasets"]["train"]["rows"] + found["datasets"]["test"]["rows"] == 3000
    assert 450 < found["datasets"]["test"]["rows"] < 750
    assert found["cost_usd"] > 0
    assert found["predicted"]["cost_usd"] > 0
    assert found["collisions"] > 0
    assert [s["stage"] for s in found["stages"]] == ["load", "fit", "train", "test"]
    train = TableDataset.open(str(tmp_path / "prepared/train"))
    assert len(train.partitions) > 1
    batch = csr_batch(train.read(0))
    assert batch.indices.max() < 4096
    assert 0.1 < batch.labels.mean() < 0.5
    pipeline = Pipeline.load(train)
    assert pipeline.version_ == found["pipeline"] == Pipeline.load(TableDataset.open(str(tmp_path / "prepared/test"))).version_
    again = json.loads(run(path, "--json").stdout)
    assert again["datasets"] == found["datasets"]
    assert again["invocations"] == 0


def test_only_training_rows_are_fitted(tmp_path, data):
    prepare(load_recipe(written(tmp_path, data)), progress=False)
    raw = pa.concat_tables(TableDataset.open(str(tmp_path / "prepared/raw")).tables())
    pipeline = Pipeline.load(TableDataset.open(str(tmp_path / "prepared/train")))
    split = load_recipe(written(tmp_path, data)).hash_split()
    from ephemeron.preparation.columns import from_table

    rows = from_table(raw, pipeline.schema_in_)
    train = split.side(rows, pipeline.schema_in_, "train")
    np.testing.assert_allclose(pipeline.steps[0].mean_[0], np.nanmean(train["I1"]), rtol=1e-12)
    assert pipeline.steps[0].mean_[0] != np.nanmean(rows["I1"])


def test_what_is_prepared_is_told(tmp_path, data):
    (tmp_path / "in").mkdir()
    text = (data / "clicks-000.csv").read_text().splitlines(keepends=True)
    (tmp_path / "in/clicks-000.csv").write_text("".join([*text[:5], "7" + text[5][1:], *text[6:50]]))
    ran = run(written(tmp_path, tmp_path / "in"))
    assert ran.exit_code == 0, ran.output
    assert "raw   48 rows, 1 left out, 1 partitions" in ran.output
    assert "collisions of hashed features" in ran.output
    assert "predicted: " in ran.output
    assert json.loads((tmp_path / "prepared/raw/rejected.jsonl").read_text())["line"] == 6


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("n_features = 4096", "n_features = 0", "hash: n_features = 0 should be from 1 to"),
        ("n_features = 4096", "features = 4096", r"steps\[1\]: hash has no option features; did you mean n_features"),
        ('"standardise"', '"standardize"', r"steps\[0\]: step 'standardize' is not known; did you mean standardise"),
        ('step = "hash"', "", r"steps\[1\] has no step"),
        ('"click"', '"clik"', "has no column 'clik'; did you mean click"),
        ('"click"', '"I2"', r"line \d+, column I2: \d+ is no binary label: 0 or 1"),
        ("test_fraction = 0.2", "test_fraction = 2", "split: test_fraction = 2.0 should be between 0 and 1"),
        ("test_fraction = 0.2", 'key = ["id"]', "split: unknown column id"),
        ("clicks-*.csv", "clicks-*.tsv", "names no file"),
        ("clicks-*.csv", "clicks-000", "does not tell its format; set format"),
        ("partition_mb = 0.2", "partition_gb = 1", "unknown key partition_gb; did you mean partition_mb"),
        ("[run]", "[run]\nbudget_usd = 1e-12", "is predicted to cost .* above budget_usd = 1e-12"),
    ],
)
def test_wrong_recipes_are_refused_in_one_line(tmp_path, data, old, new, message):
    text = RECIPE.replace(old, new).replace('on_error = "quarantine"', "")
    with pytest.raises(JobError, match=message) as e:
        prepare(load_recipe(written(tmp_path, data, text)), progress=False)
    assert "\n" not in str(e.value)


def test_other_steps_need_another_folder(tmp_path, data):
    prepare(load_recipe(written(tmp_path, data)), progress=False)
    with pytest.raises(JobError, match="train holds what was prepared from other data or steps; delete it, or name"):
        prepare(load_recipe(written(tmp_path, data, RECIPE.replace("4096", "8192"))), progress=False)


def test_steps_may_change_until_they_are_applied(tmp_path, data):
    wrong = RECIPE.replace('step = "standardise"', 'step = "standardise"\ncolumns = ["I77"]')
    with pytest.raises(JobError, match="unknown column I77"):
        prepare(load_recipe(written(tmp_path, data, wrong)), progress=False)
    made = prepare(load_recipe(written(tmp_path, data)), progress=False)
    assert len(made.datasets["train"]) > 2000


def test_a_recipe_that_is_absent_is_refused(tmp_path):
    ran = run(tmp_path / "none.toml")
    assert ran.exit_code == 2
    assert "none.toml does not exist; give the path of a TOML file" in ran.output


def test_the_example_is_learnable_and_the_same_each_time(tmp_path):
    first, second = generated(tmp_path / "a", 4000), generated(tmp_path / "b", 4000)
    assert (tmp_path / "a/clicks-000.csv").read_bytes() == (tmp_path / "b/clicks-000.csv").read_bytes()
    share = first["clicks"]
    constant = -(share * np.log(share) + (1 - share) * np.log(1 - share))
    assert first["best_log_loss"] == second["best_log_loss"] < 0.8 * constant
    recipe = load_recipe(EXAMPLE / "recipe.toml")
    assert recipe.pipeline().steps[1].n_features == 1 << 20
    header = (tmp_path / "a/clicks-000.csv").read_text().splitlines()[0].replace('"', "").split(",")
    assert header == ["click", *(f"I{n}" for n in range(1, 14)), *(f"C{n}" for n in range(1, 27))]


def test_the_recipe_of_the_page_is_accepted(tmp_path):
    page = (EXAMPLE.parents[1] / "docs/preparation.md").read_text()
    path = tmp_path / "recipe.toml"
    path.write_text(page.partition("```\nsource")[2].partition("```")[0].join(["source", ""]))
    recipe = load_recipe(path)
    assert [step.step for step in recipe.pipeline().steps] == ["standardise", "hash"]
    assert recipe.hash_split().key == ["user"]


@pytest.mark.slow
def test_the_blocks_of_the_page_run_one_after_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (EXAMPLE.parents[1] / "docs/preparation.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    whole = [block for block in blocks if not block.startswith("# fragment")]
    assert len(whole) == 4
    scope = {}
    for block in whole:
        exec(compile(block, "docs/preparation.md", "exec"), scope)
    assert len(scope["raw"].partitions) > 1
    assert 0.7 < len(scope["train"]) / len(scope["raw"]) < 0.9
    (tmp_path / "recipe.toml").write_text(page.partition("```\nsource")[2].partition("```")[0].join(["source", ""]))
    ran = CliRunner().invoke(main, ["prepare", "recipe.toml", "--json"])
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["datasets"]["train"]["rows"] == len(scope["train"])


def test_options_of_the_command_are_before_those_of_the_recipe(tmp_path, data, monkeypatch):
    seen = []
    monkeypatch.setattr("ephemeron.preparation.preparing.dry_run", lambda recipe, **_: seen.append(recipe.run))
    monkeypatch.setattr("ephemeron.cli.prepare.show_prediction", lambda predictor, **_: predictor())
    path = written(tmp_path, data)
    assert run(path, "--dry-run").exit_code == 0
    flags = ("--platform", "local", "--channel", "file:///x", "--max-workers", "3", "--budget-usd", "0.5")
    assert run(path, "--dry-run", *flags).exit_code == 0
    assert seen[0].platform == "simulated"
    assert (seen[1].platform, seen[1].channel, seen[1].max_workers, seen[1].budget_usd) == ("local", "file:///x", 3, 0.5)
