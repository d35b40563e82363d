"""Imports are free: a function that starts cold pays for each, and nothing happens on the way."""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import ephemeron

pytestmark = pytest.mark.cold_start

ROOT = Path(ephemeron.__file__).parent
DIGITS = Path(__file__).parents[1] / "examples" / "digits" / "job.toml"
MODULES = sorted(["ephemeron", *(m.name for m in pkgutil.walk_packages([str(ROOT)], prefix="ephemeron.") if "__main__" not in m.name)])

NAMES = [
    "Configuration",
    "DataSpec",
    "EphemeronError",
    "EpochMeasurements",
    "Fault",
    "FunctionExecutor",
    "Job",
    "JobError",
    "JobLimits",
    "Plan",
    "PlanInfeasible",
    "Profile",
    "Resize",
    "Result",
    "RunFailed",
    "Schedule",
    "Session",
    "Simulation",
    "Target",
    "Task",
    "TrialPruned",
    "UserError",
    "attach",
    "configure",
    "current",
    "fit_groups",
    "launch",
    "load_job",
    "load_plan",
    "load_profile",
    "map_partitions",
    "plan_job",
    "predict_groups",
    "profile_job",
    "resize",
    "resume",
    "stop",
    "train",
    "train_async",
    "tune",
]


def fresh(program: str) -> subprocess.CompletedProcess[str]:
    """A program in a Python that has imported nothing, without variables of ours: libraries look through all that there are."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("EPHEMERON_")}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


def imported_by(module: str) -> set[str]:
    return set(json.loads(fresh(f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))").stdout))


def belongs(module: str, to: str) -> bool:
    return module == to or module.startswith(f"{to}.")


def found(modules: set[str], unwanted: list[str]) -> list[str]:
    return sorted(m for m in modules if any(belongs(m, u) for u in unwanted))


def test_the_package_itself_imports_nothing():
    modules = imported_by("ephemeron")
    assert found(modules, ["torch", "numpy", "click", "rich", "obstore", "safetensors", "xxhash", "psutil"]) == []
    assert {m for m in modules if belongs(m, "ephemeron")} == {"ephemeron"}


@pytest.mark.parametrize("module", ["ephemeron.training.worker.loop", "ephemeron.functions.function_main", "ephemeron.sparse.job.function"])
def test_a_function_imports_neither_cli_nor_client_nor_report(module):
    unwanted = [
        "ephemeron.cli",
        "ephemeron.training.driver",
        "ephemeron.training.report",
        "ephemeron.training.planner.planner",
        "ephemeron.training.planner.search",
        "ephemeron.training.profiling",
        "ephemeron.dashboard",
        "ephemeron.functions.simulation",
        "ephemeron.testing",
        "matplotlib",
        "rich",
        "click",
        "sklearn",
    ]
    assert found(imported_by(module), unwanted) == []


@pytest.mark.parametrize("module", ["function_main", "daemon_process", "aws.handler", "aws_microvm.handler", "openfaas.handler"])
def test_what_only_runs_functions_starts_without_numpy(module):
    assert found(imported_by(f"ephemeron.functions.{module}"), ["numpy", "torch"]) == []


def test_workers_move_vectors_without_pytorch():
    assert found(imported_by("ephemeron.training.worker.loop"), ["torch"]) == []


def test_help_does_not_wait_for_pytorch():
    assert found(imported_by("ephemeron.cli.main"), ["torch", "numpy", "matplotlib", "sklearn"]) == []


UNUSED = [
    "sklearn",
    "scipy",
    "pandas",
    "matplotlib",
    "torch._dynamo",
    "torch._inductor",
    "sympy",
    "ephemeron.data.flow",
    "ephemeron.data.scheduler",
    "ephemeron.partition",
    "ephemeron.functions.simulated",
    "ephemeron.functions.simulation",
    "ephemeron.training.report",
    "ephemeron.testing",
]
"""Packages that neither the client nor the functions of an ordinary run on this machine need before its first iteration."""


def test_a_command_ends_without_a_search_for_garbage():
    program = """
import atexit, gc
from ephemeron.cli.main import main
atexit.register(lambda: print("frozen", gc.get_freeze_count() > 0))  # runs after what the command registers
main(["schema", "--help"])
"""
    assert fresh(program).stdout.endswith("frozen True\n")


def test_a_client_imports_little_until_it_knows_what_the_run_needs():
    assert found(imported_by("ephemeron.training.driver.api"), ["torch", *UNUSED]) == []


def test_a_client_that_has_prepared_a_run_has_imported_nothing_that_it_does_not_need(tmp_path):
    pytest.importorskip("sklearn", reason="no scikit-learn; pip install 'ephemeron[digits]'")
    program = f"""
import json, os, sys
os.environ["EPHEMERON_HOME"] = {str(tmp_path)!r}
from ephemeron.training.driver import api
from ephemeron.training.driver.launching.launch import prepared_run
ready = prepared_run(api.launch_request({str(DIGITS)!r}, workers=2, aggregators=2))
assert ready.prepared.spec.samples == 1438
print(json.dumps(sorted(sys.modules)))
"""
    modules = set(json.loads(fresh(program).stdout))
    assert "torch" in modules
    assert found(modules, UNUSED) == []


def test_a_simulated_run_needs_no_pytorch_to_be_imported():
    assert found(imported_by("ephemeron.functions.simulation"), ["torch", "click", "rich", "ephemeron.cli"]) == []


@pytest.mark.slow
def test_no_module_prints_or_reads_our_environment_when_it_is_imported():
    program = f"""
import importlib, json, os, sys

read = []
environ = type(os.environ)
for name in ("__getitem__", "__contains__"):
    def watched(self, key, original=getattr(environ, name)):
        if str(key).startswith("EPHEMERON_"):
            read.append(key)
        return original(self, key)
    setattr(environ, name, watched)
os.environ.get("EPHEMERON_CANARY")

absent, done = [], []
for module in {MODULES!r}:
    try:
        importlib.import_module(module)
        done.append(module)
    except ModuleNotFoundError as e:
        if e.name.partition(".")[0] == "ephemeron":
            raise
        absent.append(module)
sys.stderr.write(json.dumps([read, done, absent]))
"""
    ran = fresh(program)
    assert ran.stdout == ""
    read, done, absent = json.loads(ran.stderr)  # anything else that was written there would not be JSON
    assert read == ["EPHEMERON_CANARY"], "the watch has to work, and to see nothing else"
    assert len(done) + len(absent) == len(MODULES) > 60
    assert "ephemeron.training.worker.loop" in done


def test_the_root_names_are_these_and_all_are_there():
    assert sorted(ephemeron.__all__) == NAMES
    assert dir(ephemeron) == ephemeron.__all__
    for name in ephemeron.__all__:
        assert getattr(ephemeron, name).__module__.startswith("ephemeron.")
    with pytest.raises(AttributeError, match="module 'ephemeron' has no attribute 'Trainer'"):
        ephemeron.Trainer  # noqa: B018


def test_public_names_of_linear_algebra():
    linalg = pytest.importorskip("scipy") and __import__("ephemeron.linalg", fromlist=["*"])
    stable = {"BigMatrix", "cholesky", "qr", "svd", "lu", "solve", "lstsq", "eigh", "lambdapack"}
    assert stable <= set(linalg.__all__)
    for name in linalg.__all__:
        assert getattr(linalg, name).__module__.startswith("ephemeron.linalg.")


@pytest.mark.parametrize(
    "package",
    [
        "communication.channels",
        "communication.rpc",
        "data",
        "data.cache",
        "data.catalog",
        "data.flow",
        "data.sampling",
        "data.scheduler",
        "data.service",
        "functions",
        "functions.simulation",
        "partition",
        "partition.costs",
        "partition.runtime",
        "partition.tracing",
        "testing",
        "training",
        "training.collectives",
        "training.driver",
        "training.job",
        "training.planner",
        "training.profiling",
        "training.report",
        "training.tensors",
    ],
)
def test_every_name_that_a_package_promises_is_there(package):
    module = __import__(f"ephemeron.{package}", fromlist=["__all__"])
    assert module.__all__ == list(dict.fromkeys(module.__all__))
    for name in module.__all__:
        assert hasattr(module, name)
