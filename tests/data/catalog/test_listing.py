"""Which files are data, against Python's own wildcards."""

from __future__ import annotations

import glob
from pathlib import Path

import pytest

from ephemeron.data.catalog.files import matching, visible

FILES = [
    "a.csv",
    "b1.csv",
    "b2.csv",
    "c.txt",
    ".hidden.csv",
    "._a.csv",
    ".ipynb_checkpoints/a-checkpoint.csv",
    "sub/d.csv",
    "sub/deep/e.csv",
    "sub/.git/f.csv",
    "data[1].csv",
    "data1.csv",
    "_under.csv",
]


def test_hidden_files_and_prepared_datasets_are_no_data():
    own = ["out/raw/dataset.json", "out/raw/part-00000.arrow", "out/raw/x.csv"]
    others = ["site/dataset.json", "site/x.csv"]  # a file of that name alone makes no dataset of ours
    kept = [f for f in FILES if not any(part.startswith(".") for part in f.split("/"))]
    assert visible([*FILES, "__MACOSX/a.csv", *own, *others]) == sorted([*kept, *others])
    assert matching(own + others, "**/*.csv") == ["site/x.csv"]
    assert visible(["dataset.json", "part-00000.arrow", "x.csv"]) == ["dataset.json", "part-00000.arrow", "x.csv"]


@pytest.mark.parametrize(
    "pattern",
    [
        "*.csv",
        "**/*.csv",
        "sub/*.csv",
        "sub/**",
        "sub/**/*.csv",
        "*/*.csv",
        "b?.csv",
        "b[12].csv",
        "data[1].csv",
        "data[[]1].csv",
        ".*.csv",
        ".*/*.csv",
        "**",
        "*",
        "x*",
    ],
)
def test_wildcards_are_those_of_python(tmp_path: Path, pattern: str):
    for file in FILES:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    found = {f for f in glob.glob(pattern, root_dir=tmp_path, recursive=True) if (tmp_path / f).is_file()}
    assert matching(FILES, pattern) == sorted(found)
