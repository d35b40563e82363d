"""The worked example of docs/linalg.md does what the page says."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from tiling import count, epsilon, joined, random, tiled

from ephemeron.linalg.algorithms.equations import cholesky
from ephemeron.linalg.analysis.dependencies import Analysis
from ephemeron.linalg.interpret import interpret

PAGE = (Path(__file__).parents[2] / "docs" / "linalg.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The module of the worked example."""
    file = tmp_path / "ldl_example.py"
    file.write_text(next(b for b in BLOCKS if "def ldl(" in b))
    spec = importlib.util.spec_from_file_location("ldl_example", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "ldl_example", module)
    spec.loader.exec_module(module)
    return module


def test_the_cholesky_of_the_page_is_the_shipped_one():
    shown = next(b for b in BLOCKS if "def cholesky(" in b).partition("@lambdapack\n")[2]
    assert shown.replace(" -> None", "") == str(cholesky)


@pytest.mark.parametrize("n", [5, 8, 29])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex128"])
def test_blocked_ldl(example, n, dtype):
    b = random((n, n), dtype)
    a = (b + b.conj().T + np.diag(np.where(np.arange(n) % 2, 4 * n, -4 * n))).astype(dtype)  # indefinite
    made = interpret(example.ldl, {"N": count(n, 8)}, {"A": tiled(a, 8)})
    lower = joined(made["L"], (n, n), 8, dtype)
    d = np.concatenate([made["D"][i, 0][0] for i in range(count(n, 8))])
    assert np.array_equal(lower, np.tril(lower))
    assert (d.real < 0).any()
    assert (d.real > 0).any()
    assert np.linalg.norm((lower * d) @ lower.conj().T - a) <= 20 * n * epsilon(dtype) * np.linalg.norm(a)
    Analysis(example.ldl, {"N": 10**6}).verify()
