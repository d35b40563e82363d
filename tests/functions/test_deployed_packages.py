"""What code needs and functions of a deployment do not have is named before anything is started."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ephemeron.errors import JobError
from ephemeron.executor import FunctionExecutor
from ephemeron.functions.base import Limits
from ephemeron.functions.deployed_packages import check_extra, check_modules
from ephemeron.functions.source_bundle import FunctionEnvironment, packages_in
from ephemeron.linalg import BigMatrix, cholesky

NONE = Limits(packages=frozenset())


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose modules can be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").is_relative_to(tmp_path):
            del sys.modules[name]


def imported(folder: Path, **files: str) -> None:
    """Writes modules, `__` for a slash, and imports the first."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    importlib.invalidate_caches()
    importlib.import_module(next(iter(files)).replace("__", "."))


def test_a_deployment_says_which_packages_were_added() -> None:
    made = FunctionEnvironment(python="3.12", packages=("--extra-index-url https://x.example", "SciPy>=1.11", "scikit_learn==1.7"))
    assert packages_in(made.release) == {"scipy", "scikit-learn"}
    assert packages_in(FunctionEnvironment().release) == frozenset()
    assert packages_in("abc") is None, "of a deployment of another release"


def test_a_package_that_the_module_imports_is_named(modules: Path) -> None:
    imported(modules, fits="import helpers\n", helpers="import json\nfrom scipy import stats\nimport numpy as np\n")
    with pytest.raises(JobError, match=r"helpers imports scipy, which functions on aws do not have; put scipy into a file of requirements"):
        check_modules(["fits"], NONE, "aws")
    check_modules(["fits"], Limits(packages=frozenset({"scipy"})), "aws")
    check_modules(["fits"], Limits(packages=frozenset({"scikit-learn"})), "aws")  # which requires it
    check_modules(["fits"], Limits(packages=frozenset({"not-installed-here"})), "aws")  # it may bring anything
    check_modules(["fits"], Limits(), "local")


@pytest.mark.parametrize(
    "text",
    [
        "import numpy, torch, pyarrow, cloudpickle\n",
        "try:\n    import scipy\nexcept ImportError:\n    scipy = None\n",
        "def f():\n    import scipy\n",
    ],
)
def test_what_functions_have_or_may_do_without_is_no_reason(modules: Path, text: str) -> None:
    imported(modules, modest=text)
    check_modules(["modest"], NONE, "aws")


def test_folders_of_the_user_and_relative_imports_are_followed(modules: Path) -> None:
    imported(
        modules,
        pack__entry="from . import middle\n",
        pack__middle="from .deep import X\n",
        pack__deep="import scipy.linalg\nX = 1\n",
        pack____init__="",
    )
    with pytest.raises(JobError, match=r"pack\.deep imports scipy"):
        check_modules(["pack.entry"], NONE, "openfaas")


def test_boto3_is_in_functions_on_aws_alone(modules: Path) -> None:
    imported(modules, uploads="import boto3\n")
    check_modules(["uploads"], NONE, "aws")
    with pytest.raises(JobError, match="uploads imports boto3"):
        check_modules(["uploads"], NONE, "openfaas")


def test_what_ephemeron_itself_needs_is_named_with_its_extra() -> None:
    with pytest.raises(JobError, match=r"a sparse job needs scipy, which functions on aws do not have; run: .* --extra sparse"):
        check_extra("sparse", NONE, "aws", what="a sparse job")
    check_extra("sparse", Limits(packages=frozenset({"scipy"})), "aws", what="a sparse job")
    check_extra("sparse", Limits(), "aws", what="a sparse job")


def test_matrices_are_refused_where_functions_lack_scipy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    with FunctionExecutor("simulated", progress=False) as pool:
        a = BigMatrix.from_numpy(np.eye(8), tile=4)
        pool._limits = dataclasses.replace(pool._limits, packages=frozenset())
        with pytest.raises(JobError, match=r"linalg needs scipy, which functions on simulated do not have; run: .* --extra linalg"):
            cholesky(a, executor=pool)
