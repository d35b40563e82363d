"""`examples/many-models`, small and in virtual time."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ephemeron.cli.main import main

pytest.importorskip("pyarrow", reason="tables; pip install 'ephemeron[maps]'")
from pyarrow import parquet

FOLDER = Path(__file__).parents[2] / "examples" / "many-models"


def program():
    spec = importlib.util.spec_from_file_location("example_many_models", FOLDER / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(FOLDER)
    yield
    sys.modules.pop("forecast", None)


@pytest.mark.slow
def test_models_of_many_groups(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="pictures; pip install 'ephemeron[report]'")
    run, out = program(), tmp_path / "out"
    short = sum(len(one["day"]) < 28 for one in run.sales(200))
    assert short
    run.main(["--groups", "200", "--platform", "simulated", "--folder", str(out)])
    told = capsys.readouterr().out
    assert f"200 groups were fitted, 0 before; {short} have no model" in told
    assert (out / "errors.png").read_bytes()[:4] == b"\x89PNG"
    predicted = parquet.read_table(out / "predicted.parquet")
    assert predicted.num_rows == 200 * run.AHEAD
    assert predicted["prediction"].null_count == short * run.AHEAD
    assert np.nanmin(predicted["prediction"].to_numpy()) >= 0
    command = ["fit-groups", str(out / "sales.parquet"), "--by", "store,sku", "--fit", "forecast:fit", "--out", str(out / "models")]
    ran = CliRunner().invoke(main, [*command, "--platform", "simulated"])
    assert f"{200 - short} groups with models" in ran.stderr
    assert "200 of them recorded before; no function was needed" in ran.stderr


def test_the_page_names_what_is_there():
    text = (FOLDER / "README.md").read_text()
    for command in (
        "ephemeron fit-groups out/sales.parquet --by store,sku --fit forecast:fit --out out/models",
        "ephemeron predict-groups out/models --data out/ahead.parquet --out out/predicted.parquet",
        "python run.py",
    ):
        assert command in text
    assert "`many-models/`" in (FOLDER.parent / "README.md").read_text()
