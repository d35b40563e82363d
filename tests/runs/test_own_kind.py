"""The example of a kind that another package adds: found by its entry point, killed, stopped and gone on with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ephemeron.errors import JobError
from ephemeron.functions.local import is_hosted
from ephemeron.runs import folders
from ephemeron.runs.kinds import RunKind, find_kind, load_kind
from ephemeron.runs.status import status_of
from ephemeron.runs.summary import read_summary
from running import until

EXAMPLE = Path(__file__).parents[2] / "examples" / "own-kind"


def installed(place: Path, *points: str) -> Path:
    """A folder as `pip install` would leave it, with these entry points."""
    metadata = place / "monte_carlo-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: monte-carlo\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[ephemeron.kinds]\n" + "\n".join(points) + "\n")
    return place


@pytest.fixture
def fresh():
    load_kind.cache_clear()
    yield
    load_kind.cache_clear()


def test_kinds_of_other_packages_are_found_by_entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    points = ("monte-carlo = monte_carlo:MonteCarloRuns", "broken = no_such_module:Kind", "wrong = monte_carlo:Share")
    monkeypatch.syspath_prepend(installed(tmp_path, *points))
    monkeypatch.syspath_prepend(EXAMPLE)
    assert isinstance(find_kind("monte-carlo"), RunKind)
    with pytest.raises(JobError, match="kind 'broken' of runs cannot be loaded from no_such_module:Kind: ModuleNotFoundError"):
        find_kind("broken")
    with pytest.raises(JobError, match="kind 'wrong' of runs cannot be loaded from monte_carlo:Share: TypeError"):
        find_kind("wrong")
    with pytest.raises(JobError, match="known kinds: broken, monte-carlo, profile, regions, service, sparse, study, tasks"):
        find_kind("weather")


def test_the_example_is_as_short_as_it_says() -> None:
    assert len((EXAMPLE / "monte_carlo.py").read_text().splitlines()) < 100
    assert "monte_carlo:MonteCarloRuns" in (EXAMPLE / "pyproject.toml").read_text()


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    site = installed(tmp_path / "site", "monte-carlo = monte_carlo:MonteCarloRuns")
    return {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{EXAMPLE}", "OMP_NUM_THREADS": "1"}


def command(env: dict[str, str], *arguments: str) -> str:
    code = "from ephemeron.cli.main import main; main()"
    ran = subprocess.run([sys.executable, "-c", code, *arguments], env=env, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode in (0, 3), ran.stderr
    return ran.stdout


def begun(env: dict[str, str], batches: int) -> subprocess.Popen[str]:
    """A client whose first batches are there."""
    before = {folder.run_id for folder in folders.all_runs()}
    client = subprocess.Popen(
        [sys.executable, "monte_carlo.py", "2", str(batches)], cwd=EXAMPLE, env=env, stdout=subprocess.PIPE, text=True
    )
    assert client.stdout is not None
    new = lambda: [folder for folder in folders.all_runs() if folder.run_id not in before]  # noqa: E731
    until(lambda: any(path.is_file() for folder in new() for path in folder.objects.rglob("*")))
    return client


def estimate(told: str) -> str:
    return told.splitlines()[-1].partition(": ")[2].partition(",")[0]


@pytest.mark.slow
@pytest.mark.cold_start
def test_functions_that_fail_fail_the_run(env: dict[str, str]) -> None:
    code = "import monte_carlo; monte_carlo.ENV['PYTHONPATH'] = ''; print(monte_carlo.launch(2, 2)[0].summary.status)"
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=200)
    assert ran.stdout.splitlines()[-1] == "failed", ran.stderr
    [cause] = read_summary(folders.find("last")).causes  # type: ignore[union-attr]
    assert "ModuleNotFoundError: No module named 'monte_carlo'" in cause


@pytest.mark.slow
@pytest.mark.cold_start
def test_whatever_dies_or_is_stopped_the_result_is_the_same(env: dict[str, str]) -> None:
    whole = subprocess.run([sys.executable, "monte_carlo.py", "2", "30"], cwd=EXAMPLE, env=env, capture_output=True, text=True, check=False)
    assert estimate(whole.stdout).startswith("3.14")
    killed = begun(env, 30)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    command(env, "attach", "last")
    again = "import asyncio, monte_carlo as m; from ephemeron.runs import folders; print(asyncio.run(m.pi(m.open_header(folders.find('last')))))"
    told = subprocess.run([sys.executable, "-c", again], env=env, capture_output=True, text=True, check=True).stdout
    assert f"{float(told):.6f}" == estimate(whole.stdout)
    stopped = begun(env, 4000)
    name = folders.find("last").run_id
    command(env, "stop", name)
    assert "stopped:" in stopped.communicate(timeout=120)[0]
    rows = [json.loads(line) for line in command(env, "runs", "--json").splitlines()]
    assert [(row["kind"], row["status"]) for row in rows] == [
        ("monte-carlo", "stopped"),
        ("monte-carlo", "finished"),
        ("monte-carlo", "finished"),
    ]
    first = read_summary(folders.find(name))
    assert first is not None
    assert first.cost_usd > 0
    assert "wrote" in command(env, "report", name)
    invoked = lambda: folders.find(name).events.read_text().count('"kind":"invoked"')  # noqa: E731
    before = invoked()
    code = "from ephemeron.cli.main import main; main()"
    again = subprocess.Popen([sys.executable, "-c", code, "resume", name], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: read_summary(folders.find(name)) is None and is_hosted(folders.find(name).path) and invoked() >= before + 2)
    os.kill(again.pid, signal.SIGKILL)
    again.wait()
    command(env, "stop", name)
    assert status_of(folders.find(name)) == "interrupted"
