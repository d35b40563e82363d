"""Runs that an earlier release has left are shown, listed, priced and cleaned as it did: value by value, or the difference is in differences.toml."""

from __future__ import annotations

import json
import sys
import tomllib
from collections import defaultdict
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from corpus_archive import ENTRIES, HERE, HOME_LENGTH, pack, unpack
from corpus_documents import EXPECTED, KINDS, documents
from make import PATHS, RECIPES

pytest.importorskip("msgspec", reason="the extra `dashboard` is not installed")
pytest.importorskip("starlette", reason="the extra `dashboard` is not installed")

Difference = tuple[str, str, str, str]
"""Folder, document, key, and what is different."""
_SHOWN = 60


@cache
def wanted() -> list[dict[str, Any]]:
    """Entries of differences.toml."""
    return list(tomllib.loads((HERE / "differences.toml").read_text()).get("difference", []))


@cache
def expected() -> dict[str, Any]:
    found = json.loads(EXPECTED.read_text())
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return unpack(tmp_path_factory.mktemp("c"))


def differences(was: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, Difference]]:
    """All of them, each with its manner: `added`, `removed` or `changed`. A key of a table that was not there is told once, whatever is below it."""
    found: list[tuple[str, Difference]] = []
    for name in sorted({*was, *now}):
        kind, folder, document = name.split(": ")
        found += [(manner, (folder, f"{kind}: {document}", key, said)) for manner, key, said in _compare(was, now, name, "")]
    return found


_NOTHING = object()


def _compare(was: Any, now: Any, name: Any, above: str) -> list[tuple[str, str, str]]:
    before = was[name] if isinstance(was, list) or name in was else _NOTHING
    after = now[name] if isinstance(now, list) or name in now else _NOTHING
    key = above
    if before is _NOTHING:
        return [("added", key, f"is {_short(after)}")]
    if after is _NOTHING:
        return [("removed", key, f"was {_short(before)}")]
    if isinstance(before, dict) and isinstance(after, dict):
        return [each for part in sorted({*before, *after}) for each in _compare(before, after, part, f"{key}.{part}" if key else part)]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [each for n in range(len(before)) for each in _compare(before, after, n, f"{key}[{n}]")]
    return [] if before == after else [("changed", key, f"was {_short(before)}, is {_short(after)}")]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True)
    return text if len(text) < 200 else f"{text[:200]}…"


def matches(entry: dict[str, Any], manner: str, difference: Difference) -> bool:
    folder, document, key, _ = difference
    wanted_manner, wanted_key = entry["manner"], entry["key"]
    return (
        manner == wanted_manner
        and document in entry["documents"]
        and fnmatchcase(folder, f"*{entry.get('folder', '*')}")
        and fnmatchcase(key.replace("[", "<").replace("]", ">"), wanted_key.replace("[", "<").replace("]", ">"))
    )


@pytest.mark.parametrize("kind", KINDS)
def test_documents_are_as_they_were(kind: str, homes: dict[str, Path]) -> None:
    now = {f"{kind}: {name}": value for name, value in json.loads(json.dumps(documents(kind, homes))).items()}
    was = {name: value for name, value in expected().items() if name.startswith(f"{kind}: ")}
    assert was
    entries = [(entry, document) for entry in wanted() for document in entry["documents"] if document.startswith(f"{kind}: ")]
    met: set[int] = set()
    unwanted: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    """What is different, by manner, document and key: the same in many folders is one line."""
    for manner, (folder, document, key, said) in differences(was, now):
        found = [n for n, (entry, of) in enumerate(entries) if of == document and matches(entry, manner, (folder, document, key, said))]
        met.update(found)
        if not found:
            unwanted[manner, document, key].append(f"{folder}: {document}: {key or 'all of it'}: {said}")
    lines = [
        f"{each[0]}  ({manner}{f', in {len(each)} folders' if len(each) > 1 else ''})" for (manner, _, _), each in sorted(unwanted.items())
    ]
    if lines:
        more = [f"… and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        pytest.fail("\n".join(["not in differences.toml:", *lines[:_SHOWN], *more]), pytrace=False)
    stale = [f"{of}: {entry['manner']} {entry['key']} ({entry['why']})" for n, (entry, of) in enumerate(entries) if n not in met]
    assert not stale, "differences.toml lists what is not different: " + "; ".join(stale)


def test_every_listed_difference_names_a_document_and_a_reason() -> None:
    names = {f"{name.partition(': ')[0]}: {name.rpartition(': ')[2]}" for name in expected()}
    for entry in wanted():
        assert entry.keys() <= {"documents", "key", "manner", "folder", "why"}, entry
        assert entry["why"].strip(), entry
        assert entry["manner"] in ("added", "removed", "changed"), entry
        if entry["manner"] != "added":
            assert set(entry["documents"]) <= names, entry


def test_folders_can_be_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand, with `make.py`; here one of them, packed and unpacked."""
    monkeypatch.setattr(sys, "path", [*PATHS, *sys.path])
    made = tmp_path / "made"
    home = made / "homes" / "bsp"
    home.mkdir(parents=True)
    monkeypatch.setenv("EPHEMERON_HOME", str(home))
    RECIPES["bsp"](made / "work" / "bsp")
    pack(made, tmp_path / "runs.tar.xz")
    homes = unpack(tmp_path / "o", tmp_path / "runs.tar.xz")
    (found,) = [value for name, value in documents("listing", homes).items() if name == "home/runs/bsp: row"]
    before = expected()["listing: home/runs/bsp: row"]
    assert found == {**found, **{key: value for key, value in before.items() if key in found}, "folder": found["folder"]}
    assert found["metrics"] == {"accuracy": before["accuracy"], "loss": before["test_loss"]}


def test_the_archive_names_no_machine(homes: dict[str, Path]) -> None:
    for home in homes.values():
        assert len(str(home)) == HOME_LENGTH
        for path in (each for entry in ENTRIES for each in (home / entry).rglob("*")):
            if path.is_file() and not path.is_symlink():
                text = path.read_bytes().replace(str(home).encode(), b"")
                assert b"/root/" not in text, path
                assert b"/home/" not in text, path
                assert b"wt/corpus" not in text, path


def test_a_difference_is_told_by_folder_document_and_key() -> None:
    row_name = "listing: row"
    was: dict[str, Any] = {"listing: home/runs/a: row": {"x": 1, "y": [1, {"z": 2}]}, "listing: home/runs/b: row": {"x": 1}}
    now: dict[str, Any] = {"listing: home/runs/a: row": {"x": 1, "y": [1, {"z": 3}], "kind": "training"}, "listing: home/runs/c: row": 1}
    found = differences(was, now)
    assert ("added", ("home/runs/a", row_name, "kind", 'is "training"')) in found
    assert ("changed", ("home/runs/a", row_name, "y[1].z", "was 2, is 3")) in found
    assert ("removed", ("home/runs/b", row_name, "", 'was {"x": 1}')) in found
    assert ("added", ("home/runs/c", row_name, "", "is 1")) in found
    assert len(found) == 4
    entry = {"documents": [row_name], "key": "y[*].z", "manner": "changed", "why": "…"}
    assert [matches(entry, *each) for each in found].count(True) == 1
    assert not matches({**entry, "folder": "runs/b"}, *found[1])
