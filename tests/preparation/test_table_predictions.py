"""A table with gaps and categories: prepared, trained on, predicted and evaluated; equal to pandas, scikit-learn and PyTorch."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ephemeron.cli.main import main
from ephemeron.data.tables.table_file import TableFile
from ephemeron.errors import JobError, UserError
from ephemeron.runs import folders
from ephemeron.training.driver.result import result_of

pa = pytest.importorskip("pyarrow", reason="tables")
torch = pytest.importorskip("torch", reason="a model")
pandas = pytest.importorskip("pandas", reason="what predictions are compared with")
impute = pytest.importorskip("sklearn.impute", reason="what predictions are compared with")
preprocessing = pytest.importorskip("sklearn.preprocessing")

RECIPE = """
source = "churn.csv"
out = "prepared"
[csv]
delimiter = ";"
missing = ["", "?"]
[label]
column = "churned"
kind = "class"
[columns]
id = "ignore"
[[steps]]
step = "impute"
columns = ["age"]
strategy = "median"
indicator = true
[[steps]]
step = "drop_missing"
columns = ["income"]
[[steps]]
step = "standardise"
columns = ["age", "income"]
[[steps]]
step = "impute"
columns = ["city"]
strategy = "constant"
fill_value = "none"
[[steps]]
step = "one_hot"
columns = ["plan"]
[[steps]]
step = "ordinal"
columns = ["city"]
[split]
test_fraction = 0.2
key = ["income", "plan", "age"]
[run]
platform = "simulated"
"""
MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self, cities):
        super().__init__()
        self.city = torch.nn.Embedding(cities, 4)
        self.out = torch.nn.Linear(10, 2)

    def forward(self, batch):
        assert batch["city"].dtype == torch.int64
        numbers = torch.stack([batch["age"], batch["income"], batch["age_missing"]], 1)
        return self.out(torch.cat([numbers, batch["plan"], self.city(batch["city"])], 1))
"""
JOB = """
model = {{ target = "net_of_tables:Net", options = {{ cities = {cities} }} }}
loss = "cross_entropy"
epochs = 1
[data]
source = "prepared"
path = "prepared"
options = {{ batch = "dict" }}
[run]
platform = "simulated"
workers = 2
batch_size = 32
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("net_of_tables", None)


def invoke(*words, code=0):
    ran = CliRunner().invoke(main, list(words))
    assert ran.exit_code == code, ran.output
    return ran


def table(count=400):
    rng = np.random.default_rng(5)
    gap = {name: rng.random(count) < 0.15 for name in ("age", "income", "city")}
    age, income = rng.integers(18, 80, count), rng.lognormal(8, 1, count).round(2)
    return pandas.DataFrame(
        {
            "id": [f"{n:05d}" for n in range(count)],
            "age": ["?" if g else str(v) for g, v in zip(gap["age"], age, strict=True)],
            "income": ["" if g else str(v) for g, v in zip(gap["income"], income, strict=True)],
            "city": ["?" if g else f"c;{rng.integers(0, 9):02d}" for g in gap["city"]],
            "plan": rng.choice(["gold", "größe ü", "NA"], count),
            "churned": rng.integers(0, 2, count).astype(str),
        }
    )


def test_a_table_is_prepared_trained_on_and_predicted(here):
    raw = table()
    raw.to_csv("churn.csv", sep=";", index=False, lineterminator="\r\n")
    Path("recipe.toml").write_text(RECIPE)
    made = json.loads(invoke("prepare", "recipe.toml", "--json").stdout)
    assert made["sizes"]["plan"] == 3
    assert made["dropped"] == (raw["income"] == "").sum()
    Path("net_of_tables.py").write_text(MODEL)
    Path("job.toml").write_text(JOB.format(cities=made["sizes"]["city"]))
    invoke("train", "job.toml")
    Path("prepared").rename("moved")  # the run keeps its pipeline
    words = ("predict", "last", "--data", "churn.csv", "--batch-size", "150", "--platform", "simulated")
    ran = invoke(*words, "--out", "pred.csv", "--json")
    found = pandas.read_csv("pred.csv", sep=";", dtype=str, keep_default_na=False)
    assert found[list(raw)].equals(raw)
    assert list(found)[len(raw.columns) :] == json.loads(ran.stdout)["columns"] == ["prediction_0", "prediction_1"]
    assert json.loads(ran.stdout)["dropped"] == made["dropped"]

    from ephemeron.data.tables import TableDataset
    from ephemeron.preparation import HashSplit
    from ephemeron.preparation.columns import from_table

    stored = TableDataset.open("moved/raw")
    split = HashSplit(0.2, key=["income", "plan", "age"])
    is_train = ~split.is_test(from_table(stored.read(0), stored.schema), ["income", "plan", "age"])
    numbers = raw[["age", "income"]].replace({"?": "nan", "": "nan"}).astype(float)
    whole = numbers["income"].notna().to_numpy()
    filled = impute.SimpleImputer(strategy="median").fit(numbers[is_train][["age"]])
    numbers["missing"] = numbers["age"].isna().astype(float)
    numbers["age"] = filled.transform(numbers[["age"]])[:, 0]
    scaler = preprocessing.StandardScaler().fit(numbers[["age", "income"]][is_train & whole])
    scaled = scaler.transform(numbers[["age", "income"]])
    city = raw["city"].replace("?", "none")
    codes = {text: n + 1 for n, text in enumerate(sorted(set(city[is_train & whole])))}
    plan = preprocessing.OneHotEncoder(sparse_output=False).fit(raw[["plan"]][is_train & whole])
    batch = {
        "age": torch.tensor(scaled[:, 0], dtype=torch.float32),
        "income": torch.tensor(scaled[:, 1], dtype=torch.float32),
        "age_missing": torch.tensor(numbers["missing"].to_numpy(), dtype=torch.float32),
        "plan": torch.tensor(plan.transform(raw[["plan"]]), dtype=torch.float32),
        "city": torch.tensor([codes.get(text, 0) for text in city]),
    }
    whole = np.array(whole)  # torch warns of those that are read-only
    with torch.inference_mode():
        logits = result_of(folders.find("last", kinds=folders.MODELS)).model()({name: value[whole] for name, value in batch.items()})
    got = found[["prediction_0", "prediction_1"]]
    assert (got[~whole] == "").all(axis=None)
    np.testing.assert_allclose(got[whole].astype(float), logits.numpy(), rtol=1e-5, atol=1e-5)

    labels = torch.tensor(raw["churned"].astype(int).to_numpy())[whole]
    metrics = json.loads(invoke("evaluate", "last", "--data", "churn.csv", "--json").stdout)["metrics"]
    assert metrics["accuracy"] == pytest.approx(float((logits.argmax(1) == labels).float().mean()))
    assert metrics["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), rel=1e-5)

    from pyarrow import parquet

    typed = raw.drop(columns="churned").assign(age=pandas.to_numeric(raw["age"], errors="coerce"), city=raw["city"].replace("?", None))
    typed["income"] = pandas.to_numeric(typed["income"], errors="coerce")
    typed.to_parquet("rows.parquet")
    words = ("predict", "last", "--data", "rows.parquet", "--out", "pred.parquet", "--prepared", "moved", "--platform", "simulated")
    invoke(*words)
    rows = parquet.read_table("pred.parquet")
    assert rows.select(list(typed)).equals(pa.Table.from_pandas(typed))
    np.testing.assert_allclose(rows.column("prediction_1").drop_null(), logits.numpy()[:, 1], rtol=1e-5, atol=1e-5)

    Path("few.csv").write_text("age;income\n1;2\n")
    Path("twice.csv").write_text("age;income;city;plan;prediction_0\n1;2;a;gold;0\n")
    wrong = "age;income;city;plan\nold;2;a;gold\n"
    Path("wrong.csv").write_text(wrong + "5;1e300;a;gold\n5;7;a;gold\n")
    for data, out, said in (
        ("few.csv", "x.csv", "few.csv has no column"),
        ("twice.csv", "x.csv", "has a column 'prediction_0' already"),
        ("churn.csv", "churn.csv", "churn.csv is the file that is read"),
        ("churn.csv", "x.npz", "x.npz is no table, and churn.csv is one"),
        ("none.csv", "x.csv", "there is no file none.csv"),
    ):
        assert said in invoke("predict", "last", "--data", data, "--out", out, "--platform", "simulated", code=2).stderr
    assert not Path("x.csv").exists()
    told = invoke("predict", "last", "--data", "wrong.csv", "--out", "w.csv", "--platform", "simulated").stderr
    assert "row 1, column age: 'old' is not a number" in told
    assert "row 2, column income: is beyond float32" in told
    assert [line.endswith(";;") for line in Path("w.csv").read_text().splitlines()] == [False, True, True, False]
    assert not list(Path.cwd().glob(".*.part"))


@pytest.mark.parametrize("size", [1, 5, 64])
def test_texts_of_csv_are_read_as_they_are_written(tmp_path, monkeypatch, size):
    from ephemeron.data.tables import table_file

    path = tmp_path / "x.csv"
    path.write_text(f"a\n{'x' * 200_000}\n")
    assert [row["a"] for part in TableFile(path).parts(2) for row in part.table.to_pylist()] == ["x" * 200_000]
    path.write_bytes(b'\xef\xbb\xbfa,"b\nc"\r\n007,"x,\r\n""y"""\r\n\r\n,5" pipe\n1e3,"\xe2\x80\xa8"')
    file = TableFile(path)
    monkeypatch.setattr(table_file, "_BLOCK", size)
    rows = [row for part in file.parts(2) for row in part.table.to_pylist()]
    assert rows == [{"a": "007", "b\nc": 'x,\r\n"y"'}, {"a": "", "b\nc": '5" pipe'}, {"a": "1e3", "b\nc": "\u2028"}]
    firsts = [part.first for part in file.parts(2)]
    assert firsts[0] == 0
    assert firsts == sorted(set(firsts))
    path.write_bytes(b'a,b\n1,2\n3,"x\n')
    with pytest.raises(JobError, match="line 3: has a quote that is not closed"):
        list(TableFile(path).parts(2))
    path.write_bytes(b"a,b\n1,2\n\n3\n")
    with pytest.raises(JobError, match="line 4: has 1 fields instead of 2"):
        list(TableFile(path).parts(2))


def test_texts_of_parquet_are_categories_as_in_a_load(here):
    from pyarrow import parquet

    import ephemeron.preparation as prep
    from ephemeron.data.sources.readers import PreparedOptions
    from ephemeron.preparation.predicting import Features

    texts = pa.array(["NA", "x", "", None])
    rows = pa.table({"c": texts, "y": [0, 1, 0, 1]})
    parquet.write_table(rows, "in.parquet")
    raw = prep.load_parquet("in.parquet", out="raw", label="y", pool=prep.InProcess())
    pipeline = prep.Pipeline([prep.OrdinalEncoder(["c"])]).fit(raw, pool=prep.InProcess())
    made = pipeline.transform(raw, out="made", pool=prep.InProcess())
    options = PreparedOptions(batch="dict")
    features = Features(
        schema=made.schema, pipeline=pipeline, options=options, missing=made.manifest.missing or (), delimiter=",", is_sparse=False
    )

    def codes(path):
        file = TableFile(Path(path))
        features.check(file, labelled=False)
        return [code for part in file.parts(3) for code in features.of(part.table, is_text=file.is_text).inputs["c"].tolist()]

    stored = made.read(0).column("c").to_pylist()
    for kind in (pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())):
        parquet.write_table(pa.table({"c": texts.cast(kind)}), "new.parquet")
        assert codes("new.parquet") == stored == [2, 3, 1, 0]
    Path("new.csv").write_text('c\nNA\nx\n""\n')
    assert codes("new.csv") == [0, 3, 0]
    for values in (pa.array([b"x"]), pa.array([[1]]), pa.array([0], pa.timestamp("s"))):
        parquet.write_table(pa.table({"c": values}), "odd.parquet")
        with pytest.raises(JobError, match=r"odd.parquet: column c is .*, neither numbers nor text; convert it"):
            codes("odd.parquet")


@pytest.mark.slow
def test_a_sparse_run_is_predicted_and_evaluated(here):
    pytest.importorskip("scipy")
    from ephemeron.preparation import Pipeline
    from ephemeron.preparation.predicting import features_of
    from ephemeron.sparse.job import trained_model

    raw = table()
    raw.to_csv("churn.csv", sep=";", index=False)
    recipe = RECIPE.replace('kind = "class"\n', "")
    steps = '[[steps]]\nstep = "standardise"\n[[steps]]\nstep = "hash"\nn_features = 512\n'
    Path("recipe.toml").write_text(recipe[: recipe.index("[[steps]]")] + steps + '[run]\nplatform = "simulated"\n')
    invoke("prepare", "recipe.toml")
    job = 'epochs = 1\n[sparse]\nmodel = "logistic"\n[data]\nsource = "prepared"\npath = "prepared"\n[run]\nworkers = 1\nbatch_size = 50\n'
    Path("job.toml").write_text(job)
    invoke("train", "job.toml")
    invoke("predict", "last", "--data", "churn.csv", "--out", "pred.csv", "--max-workers", "1")
    found = pandas.read_csv("pred.csv", sep=";", dtype=str, keep_default_na=False)
    assert found[list(raw)].equals(raw)
    pipeline = Pipeline.load("prepared/train/pipeline.json")
    frame = raw.replace({"?": None, "": None})
    want = trained_model("last").predict(pipeline.transform(dict(frame))["features"])
    np.testing.assert_allclose(found["prediction"].astype(float), want, rtol=1e-6)
    metrics = json.loads(invoke("evaluate", "last", "--data", "churn.csv", "--json").stdout)["metrics"]
    assert metrics == pytest.approx(trained_model("last").evaluate("prepared/train"), rel=1e-6)
    Path("x.jsonl").write_text("[1]\n")
    said = invoke("predict", "last", "--data", "x.jsonl", "--out", "y.jsonl", code=2).stderr
    assert "is of a sparse job, whose inputs are rows of a table" in said
    folder = folders.find("last", kinds=folders.MODELS)
    (folder.path / "prepared/dataset.json").unlink()
    with pytest.raises(UserError, match="name the folder of its dataset by --prepared"):
        features_of(folder)
