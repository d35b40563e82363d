"""What the pages show runs as it is written: Python blocks in order, in one namespace for each page, and short commands after them.

A block that cannot run alone says so in its first line: `# fragment: …`. A page is one program, with the line numbers of the page,
in a scratch folder beside a copy of the examples. What this machine cannot run is in `NOT_RUN`, with the reason.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
FRAGMENT = "# fragment: "
LIMIT_S = 900
"""For a program or a command, on a machine that is busy with others: a page takes 1 to 20 s on a quiet one, all of them two minutes."""
NOT_RUN = {
    "datasets": "images, COCO and CIFAR of the reader's own",
    "flows": "CIFAR-100, which no machine of these tests has",
    "tuning": "a study of 40 trials, which measures for a minute before; run by tests/tuning",
}
"""Pages whose blocks are not run, and what they need."""
COMMANDS = {
    "linalg-running": ("ephemeron linalg qr A.npy --out factors", "ephemeron linalg lu A.npy --out factors --dry-run"),
    "programs": ("ephemeron train tasks:Classifier --workers 4",),
    "results": ("ephemeron evaluate last", "ephemeron export last", "ephemeron export last --format torchscript --out model.pt"),
    "openfaas": ("ephemeron cloud workflow validate counting.json",),
}
"""Commands of a page that are run after its blocks, as they stand there."""


def blocks_of(page: Path) -> list[tuple[int, str]]:
    """Line before each Python block, and its text."""
    text = page.read_text()
    return [(text[: found.start(1)].count("\n"), found[1]) for found in BLOCK.finditer(text)]


WITH_BLOCKS = sorted(page for page in DOCS.glob("*.md") if blocks_of(page))
RUN = [page.stem for page in WITH_BLOCKS if page.stem not in NOT_RUN and not all(text.startswith(FRAGMENT) for _, text in blocks_of(page))]


@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: page.stem)
def test_blocks_are_python(page: Path) -> None:
    for at, text in blocks_of(page):
        flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        compile("\n" * at + text, str(page), "exec", flags)
        assert "…" not in re.sub(r"#.*|\"[^\"\n]*\"", "", text), f"{page.name}:{at}: what stands for …?"


def test_what_is_not_run_exists() -> None:
    assert set(NOT_RUN) <= {page.stem for page in WITH_BLOCKS}
    for name, commands in COMMANDS.items():
        text = (DOCS / f"{name}.md").read_text()
        assert [command for command in commands if command not in text] == []


def program_of(page: Path, replaced: dict[str, str]) -> str:
    """A program that executes the blocks in its own namespace; tracebacks and sources are those of the page."""
    blocks = [(at, text) for at, text in blocks_of(page) if not text.startswith(FRAGMENT)]
    for old, new in replaced.items():
        blocks = [(at, text.replace(old, new)) for at, text in blocks]
    run = "exec(compile('\\n' * at + text, PAGE, 'exec'))"
    return f"PAGE = {str(page)!r}\nfor at, text in {blocks!r}:\n    {run}\n"


def execute(*command: str, env: dict[str, str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=env)
    assert result.returncode == 0, f"{shlex.join(command)[:200]}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"


def ephemeron(command: str, env: dict[str, str]) -> None:
    words = shlex.split(command)[1:]
    execute(sys.executable, "-c", "from ephemeron.cli.main import main; main()", *words, env=env)


@contextmanager
def a_store(env: dict[str, str]) -> Iterator[dict[str, str]]:
    """The store that docs/sparse.md says how to start, at free ports."""
    Path("token").write_text("a token of these tests\n")
    words = ["serve", "sparse", "--listen", "127.0.0.1:0", "--shards", "2", "--token-file", "token", "--json"]
    command = [sys.executable, "-c", "from ephemeron.cli.main import main; main()", *words, "--store", Path.cwd().as_uri(), "--log"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, "the store did not start"
            ports = [address.rpartition(":")[2] for address in json.loads(line)["addresses"]]
            yield dict(zip(("7090", "7091"), ports, strict=True))
        finally:
            process.terminate()


@contextmanager
def a_partition(env: dict[str, str]) -> Iterator[dict[str, str]]:
    """The command before the block, which writes what the block reads."""
    line = next(line for line in (DOCS / "partition.md").read_text().splitlines() if line.startswith("ephemeron partition "))
    ephemeron(f"{line} --time-limit-s 2", env)
    yield {}


@contextmanager
def files(env: dict[str, str]) -> Iterator[dict[str, str]]:
    """Files that the pages name and do not show how to make."""
    import json

    import numpy as np

    np.save("A.npy", np.random.default_rng(0).standard_normal((90, 60)))
    np.save("S.npy", np.eye(60))
    Path("tasks.py").write_text(blocks_of(DOCS / "programs.md")[0][1])
    document = ast.parse(blocks_of(DOCS / "openfaas.md")[0][1]).body[-1]
    assert isinstance(document, ast.Assign)
    assert isinstance(document.value, ast.Call)
    Path("counting.json").write_text(json.dumps(ast.literal_eval(document.value.args[0])))
    yield {}


GIVEN: dict[str, Callable[[dict[str, str]], AbstractContextManager[dict[str, str]]]] = {"sparse": a_store, "partition": a_partition}
"""What a page has before its first block, and texts to replace in its blocks."""


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_a_page_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    if name == "sparse" or name.startswith("linalg"):
        pytest.importorskip("scipy")
    if name.startswith("partition"):
        pytest.importorskip("ortools")
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    job = tmp_path / "examples/digits/job.toml"
    assert "\nepochs = 15\n" in job.read_text()
    job.write_text(job.read_text().replace("\nepochs = 15\n", "\nepochs = 3\n"))  # the same, in less time
    monkeypatch.chdir(tmp_path)
    env = {**os.environ, "EPHEMERON_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    with GIVEN.get(name, files)(env) as replaced:
        Path("page.py").write_text(program_of(DOCS / f"{name}.md", replaced))
        execute(sys.executable, "page.py", env=env)
        for command in COMMANDS.get(name, ()):
            ephemeron(command, env)
