"""`examples/bulk-inference`, small and in virtual time."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ephemeron.cli.main import main

FOLDER = Path(__file__).parents[2] / "examples" / "bulk-inference"


@pytest.fixture
def here(tmp_path, monkeypatch):
    for name in ("classify.py", "run.py"):
        shutil.copy(FOLDER / name, tmp_path)
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("classify", None)


def program(here):
    spec = importlib.util.spec_from_file_location("example_bulk_inference", here / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_images_are_classified_once(here, capsys, monkeypatch):
    for module, extra in (
        ("onnxruntime", "inference"),
        ("onnx", "onnx"),
        ("PIL", "inference"),
        ("sklearn", "digits"),
        ("matplotlib", "report"),
    ):
        pytest.importorskip(module, reason=f"the example needs it; pip install 'ephemeron[{extra}]'")
    parquet = pytest.importorskip("pyarrow.parquet", reason="tables; pip install 'ephemeron[maps]'")
    run = program(here)
    monkeypatch.setattr(run, "COPIES", 2)
    run.main(["--images", "200", "--platform", "simulated"])
    assert "200 images were classified in" in capsys.readouterr().out
    assert (here / "out" / "digits.png").read_bytes()[:4] == b"\x89PNG"
    rows = parquet.read_table("out/predictions.parquet").to_pylist()
    assert len({row["image"] for row in rows}) == 200
    assert sum(int(row["image"][0]) == row["digit"] for row in rows) > 150
    run.main(["--images", "210", "--platform", "simulated"])
    assert "10 images were classified in" in capsys.readouterr().out
    command = ["map", "classify:digit", "--items", "out/images", "--code-include", "digits.onnx", "--out", "out/predictions.parquet"]
    ran = CliRunner().invoke(main, [*command, "--platform", "simulated"])
    assert "210 of them recorded before; no function was needed" in ran.stderr
    assert command[-2:] == ["--out", "out/predictions.parquet"]
    assert f"ephemeron {' '.join(command)}" in (FOLDER / "README.md").read_text()


def test_a_missing_runtime_is_named_with_what_installs_it(here, monkeypatch):
    pytest.importorskip("PIL", reason="images; pip install 'ephemeron[inference]'")
    pytest.importorskip("pyarrow", reason="tables; pip install 'ephemeron[maps]'")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    (here / "x.png").touch()
    ran = CliRunner().invoke(main, ["map", "classify:digit", "--items", "*.png", "--out", "out.jsonl"])
    assert ran.exit_code == 2
    assert "ONNX Runtime is not installed; run: pip install 'ephemeron[inference]'" in ran.stderr
    assert not (here / "home").exists()


def test_the_page_is_linked():
    assert "`bulk-inference/`" in (FOLDER.parent / "README.md").read_text()
