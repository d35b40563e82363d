"""`make test-changed` selects what a change can touch, in a small repository of git and in this one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import affected
from affected import READERS, ROOT, Graph, main

FILES = {
    "pyproject.toml": "",
    "docs/guide.md": "A guide.",
    "src/ephemeron/__init__.py": """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from ephemeron.training.driver import train
_HOME = {"train": "training.driver"}
def __getattr__(name):
    from importlib import import_module
    return getattr(import_module(f"ephemeron.{_HOME[name]}"), name)
""",
    "src/ephemeron/errors.py": "class EphemeronError(Exception): ...\n",
    "src/ephemeron/leaf.py": '"""Nothing of `ephemeron.errors` is used here."""\nimport math\n',
    "src/ephemeron/registry.py": 'from ephemeron import errors\nENTRIES = {"worker": "ephemeron.training.worker:run"}\n',
    "src/ephemeron/training/__init__.py": "",
    "src/ephemeron/training/driver.py": "from ephemeron.errors import EphemeronError\ndef train(): ...\n",
    "src/ephemeron/training/worker.py": "from ephemeron.training.driver import train\nfrom typing import TYPE_CHECKING\n"
    "if TYPE_CHECKING:\n    from ephemeron.leaf import math\n",
    "src/ephemeron/pages/__init__.py": "from ephemeron.errors import EphemeronError\n",
    "src/ephemeron/pages/templates/page.html": "<p>",
    "tests/conftest.py": "",
    "tests/geo/conftest.py": "from worlds import world\n",
    "tests/geo/test_links.py": "def test_it(): ...\n",
    "tests/worlds.py": "import ephemeron.pages\nworld = 1\n",
    "tests/test_leaf.py": "from ephemeron.leaf import math\ndef test_it(): ...\n",
    "tests/test_lazy.py": "import pytest\nfrom ephemeron import train\n@pytest.mark.slow\ndef test_it(): ...\n",
    "tests/test_registry.py": "def test_it():\n    from ephemeron.registry import ENTRIES\n",
    "tests/test_program.py": 'PROGRAM = "import sys\\nfrom ephemeron.leaf import math"\ndef test_it(): ...\n',
}
ALL = ["tests/geo/test_links.py", "tests/test_lazy.py", "tests/test_leaf.py", "tests/test_program.py", "tests/test_registry.py"]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """FILES, committed on `main`."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "--quiet", "--initial-branch", "main")
    commit(tmp_path)
    return tmp_path


def git(root: Path, *words: str) -> None:
    identity = ("-c", "user.name=Test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *identity, *words], cwd=root, check=True, capture_output=True)


def commit(root: Path) -> None:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "A change")


def change(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        with (root / name).open("a") as file:
            file.write("\n")


def selected(root: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[list[str], str]:
    """Test modules, and what was said before them."""
    assert main(["--list", *options], root) == 0
    said = capsys.readouterr().out
    return [line for line in said.splitlines() if line.startswith("tests/")], said


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("src/ephemeron/errors.py", ["tests/geo/test_links.py", "tests/test_lazy.py", "tests/test_registry.py"]),
        ("src/ephemeron/leaf.py", ["tests/test_leaf.py", "tests/test_program.py"]),
        ("src/ephemeron/training/driver.py", ["tests/test_lazy.py", "tests/test_registry.py"]),
        ("src/ephemeron/training/worker.py", ["tests/test_registry.py"]),
        ("src/ephemeron/__init__.py", ALL),
        ("src/ephemeron/pages/templates/page.html", ["tests/geo/test_links.py"]),
        ("tests/worlds.py", ["tests/geo/test_links.py"]),
        ("tests/test_lazy.py", ["tests/test_lazy.py"]),
        ("tests/conftest.py", ALL),
        ("pyproject.toml", ALL),
        ("docs/guide.md", []),
        ("tests/geo/test_new.py", ["tests/geo/test_new.py"]),
    ],
)
def test_a_change_selects_the_tests_that_depend_on_it(
    repository: Path, capsys: pytest.CaptureFixture[str], changed: str, tests: list[str]
) -> None:
    change(repository, changed)
    found, said = selected(repository, capsys)
    assert found == tests
    assert f"    {changed}\n" in said
    assert (f"no test reaches {changed}\n" in said) == (not tests)


def test_the_longest_chain_says_why(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(repository, "src/ephemeron/training/driver.py")
    _, said = selected(repository, capsys)
    assert "2 of 5 test modules can be touched by it" in said
    assert (
        "the longest chain: tests/test_registry.py -> src/ephemeron/registry.py -> src/ephemeron/training/worker.py"
        " -> src/ephemeron/training/driver.py\n"
    ) in said


def test_the_base_is_where_the_branch_left_main(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git(repository, "checkout", "--quiet", "-b", "branch")
    change(repository, "src/ephemeron/leaf.py")
    commit(repository)
    change(repository, "tests/test_registry.py")
    commit(repository)
    change(repository, "docs/guide.md")
    assert selected(repository, capsys)[0] == ["tests/test_leaf.py", "tests/test_program.py", "tests/test_registry.py"]
    assert selected(repository, capsys, "--base", "HEAD~1")[0] == ["tests/test_registry.py"]
    git(repository, "stash")
    git(repository, "checkout", "--quiet", "-B", "main")
    assert selected(repository, capsys)[0] == ["tests/test_registry.py"], "on main, with nothing uncommitted: the last commit"


def test_a_module_that_is_gone_selects_those_who_still_name_it(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git(repository, "rm", "--quiet", "src/ephemeron/leaf.py", "tests/test_lazy.py")
    assert selected(repository, capsys)[0] == ["tests/test_leaf.py", "tests/test_program.py"]


def test_without_a_change_nothing_runs(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--base", "HEAD"], repository) == 0
    assert "nothing changed" in capsys.readouterr().out


def test_fast_tests_run_before_slow_ones_and_a_failure_is_the_end(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, list[str]]] = []
    statuses = {"not slow": 0, "slow": 0}

    def call(command: list[str], cwd: Path) -> int:
        lane = command[command.index("-m", 3) + 1]
        ran.append((lane, [word for word in command if word.startswith("tests/")]))
        return statuses[lane]

    monkeypatch.setattr(affected.subprocess, "call", call)
    change(repository, "src/ephemeron/training/driver.py")
    both = [("not slow", ["tests/test_lazy.py", "tests/test_registry.py"]), ("slow", ["tests/test_lazy.py"])]
    assert main([], repository) == 0
    assert ran == both
    assert main(["--lane", "fast"], repository) == 0
    assert ran[2:] == both[:1]
    statuses["not slow"] = 5  # no test of this lane in them
    assert main([], repository) == 0
    assert ran[3:] == both
    statuses["not slow"] = 1
    assert main([], repository) == 1
    assert ran[5:] == both[:1]


def test_those_who_read_files_exist() -> None:
    assert [test for test in READERS if not (ROOT / test).exists()] == []


@pytest.mark.slow
def test_in_this_repository_errors_select_all_and_a_leaf_a_few() -> None:
    graph = Graph(ROOT, subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines())
    everything = len(graph.tests)
    assert len(graph.affected(["src/ephemeron/errors.py"])) > 0.9 * everything
    assert len(graph.affected(["tests/conftest.py"])) == everything
    assert len(graph.affected(["src/ephemeron/functions/entries.py"])) > 0.3 * everything, "by strings it leads to workers"
    assert len(graph.affected(["src/ephemeron/dashboard/output.py"])) < 0.25 * everything
    few = graph.affected(["benchmarks/siren_oracle.py"])
    assert "tests/tuning/siren/test_oracle.py" in few
    assert len(few) < 0.03 * everything
    assert "tests/dashboard/test_browser.py" in graph.affected(["src/ephemeron/dashboard/static/app.js"])
    assert "tests/training/test_examples.py" in graph.affected(["examples/gan/gan.py"])
