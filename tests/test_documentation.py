"""The pages of the repository: links resolve, and commands, flags, job tables, modules and names exist."""

from __future__ import annotations

import importlib
import re
import shlex
import tomllib
from pathlib import Path

import click
import pytest

from ephemeron import load_job
from ephemeron.cli.main import main
from ephemeron.regions.region_files import parse_regions

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks/README.md", ROOT / "examples/README.md"]
)
FENCE = re.compile(r"^( *)```.*?^ *```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
MODULE = re.compile(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.py)`")
IMPORT = re.compile(r"^ *from (ephemeron[.\w]*) import ([\w, ]+)", re.MULTILINE)
DOTTED = re.compile(r"`(?:python -m )?((?:ephemeron|benchmarks)\.[a-z]\w*(?:\.\w+)*)[ `]")
TOML = re.compile(r"```toml\n(.*?)```", re.DOTALL)
MINIMAL = """
name = "x"
model = "m:build"
loss = "cross_entropy"
optimizer = { target = "SGD", options = { lr = 0.1 } }
epochs = 1
"""
DATA = """
[data]
source = "digits"
"""
HISTORY = {"CHANGELOG.md"}  # names of earlier states are right there


def anchors_of(page: Path) -> set[str]:
    """Anchors of the headings of `page`, as GitHub makes them."""
    titles = HEADING.findall(FENCE.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", title.lower().replace("`", "")).replace(" ", "-") for title in titles}


def commands_of(page: Path) -> list[list[str]]:
    """Words of every `ephemeron …` command in code spans, fenced and indented code of `page`."""
    text = page.read_text().replace("\\\n", " ")
    code = [line for block in FENCE.finditer(text) for line in block.group().splitlines()]
    text = FENCE.sub("", text)
    code += [line for line in text.splitlines() if line.startswith("    ephemeron ")]
    code += re.findall(r"`(ephemeron [^`]*)`", text)
    found = []
    for line in code:
        for part in re.split(r"  +#|;|&&| # ", line):
            if part.strip().startswith("ephemeron "):
                found.append(shlex.split(part.strip().replace("'", ""))[1:])
    return found


def faults_of(words: list[str]) -> list[str]:
    """Unknown flags of one command line; empty where all exist."""
    command: click.Command = main
    flags: set[str] = set()
    for word in words:
        if word == "--":  # arguments of a script follow
            break
        if isinstance(command, click.Group) and word in command.commands:
            command = command.commands[word]
        if word.startswith("--"):
            flags.add(word.strip("[]").split("=")[0])
    if command.name == "partition":
        command = main.commands["partition"].commands["place"]  # its default
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    known |= {"--help"}
    faults = [f"{command.name} has no {flag}" for flag in sorted(flags - known)]
    if command is main and words and words[0].isalpha() and words[0].islower():
        faults.append(f"no command {words[0]}")
    return faults


def is_name(dotted: str) -> bool:
    """True for a module, a file of the benchmarks, or an attribute of a module."""
    if dotted.startswith("benchmarks."):
        return (ROOT / dotted.replace(".", "/")).with_suffix(".py").exists()
    module, _, attribute = dotted.rpartition(".")
    try:
        return hasattr(importlib.import_module(module), attribute) or bool(importlib.import_module(dotted))
    except ImportError:
        return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_and_their_anchors_resolve(page: Path) -> None:
    missing = []
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name) if name else page
        if not file.exists() or (anchor and anchor not in anchors_of(file)):
            missing.append(target)
    assert not missing


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in HISTORY], ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_flags_exist(page: Path) -> None:
    faults = [fault for words in commands_of(page) for fault in faults_of(words)]
    assert not faults


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in HISTORY], ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_of_modules_exist(page: Path) -> None:
    places = [ROOT, ROOT / "src/ephemeron", *(ROOT / "src/ephemeron" / name for name in ("communication", "training"))]
    named = MODULE.findall(page.read_text())
    assert not [name for name in named if not any((place / name).exists() for place in places)]


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in HISTORY], ids=lambda page: str(page.relative_to(ROOT)))
def test_imported_names_exist(page: Path) -> None:
    pytest.importorskip("torch")
    missing = []
    for module, names in IMPORT.findall(page.read_text()):
        found = importlib.import_module(module)
        missing += [f"{module}.{name.strip()}" for name in names.split(",") if not hasattr(found, name.strip())]
    assert not missing


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in HISTORY], ids=lambda page: str(page.relative_to(ROOT)))
def test_dotted_names_exist(page: Path) -> None:
    pytest.importorskip("torch")
    assert not [name for name in DOTTED.findall(page.read_text()) if not is_name(name)]


@pytest.mark.parametrize("page", [p for p in PAGES if TOML.search(p.read_text())], ids=lambda page: page.name)
def test_tables_of_jobs_are_accepted(page: Path, tmp_path: Path) -> None:
    """Fragments are completed to a job, or are regions; files that a job names are created."""
    for block in TOML.findall(page.read_text()):
        tables = tomllib.loads(block)
        if "region" in tables:
            assert parse_regions(block).names
            continue
        for name in (tables.get("init"), tables.get("data", {}).get("path"), tables.get("run", {}).get("stages", {}).get("placement")):
            if name:
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name).touch()
        job = tmp_path / "job.toml"
        job.write_text(("" if {"name", "sparse"} & tables.keys() else MINIMAL) + block + ("" if "data" in tables else DATA))
        assert load_job(job).epochs > 0


def test_the_index_of_decisions_is_complete() -> None:
    folder = ROOT / "docs/decisions"
    listed = set(LINK.findall((folder / "README.md").read_text()))
    assert {page.name for page in folder.glob("0*.md")} <= listed


def test_the_commands_are_found() -> None:
    """The other tests cannot pass because nothing was found."""
    assert sum(len(commands_of(page)) for page in PAGES) > 40
    assert faults_of(["train", "job.toml", "--no-such-flag"]) == ["train has no --no-such-flag"]
    assert faults_of(["trian"]) == ["no command trian"]
