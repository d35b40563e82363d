"""The list of tests that may be tried a second time: its entries are whole, of tests that exist, and young."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from quarantine import Entry, entry_of, quarantined

ENTRY = """
[[test]]
test = "tests/test_quarantined_tests.py::test_all_entries_are_in_order"
reason = "1 of 200 runs ends late"
date = 2026-11-28
owner = "ephemeron.regions.region_files"
"""
TODAY = datetime.date(2026, 12, 1)


def listed(folder: Path, text: str) -> dict[str, Entry]:
    (folder / "list.toml").write_text(text)
    return quarantined(folder / "list.toml")


def test_all_entries_are_in_order() -> None:
    today = datetime.date.today()
    assert [problem for entry in quarantined().values() for problem in entry.problems(today)] == []


def test_an_entry_is_found_with_and_without_its_parameters(tmp_path: Path) -> None:
    entries = listed(tmp_path, ENTRY)
    [(name, entry)] = entries.items()
    assert (entry.reason, entry.owner) == ("1 of 200 runs ends late", "ephemeron.regions.region_files")
    assert entry.problems(TODAY) == []
    assert entry_of(name, entries) is entry_of(f"{name}[memory-4]", entries) is entry
    assert entry_of(f"{name}_too", entries) is None


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("_in_order", "_in_no_order", "there is no such test"),
        ("test_quarantined_tests", "test_that_is_gone", "there is no such test"),
        ("::test_all_entries_are_in_order", "", "there is no such test"),
        ("2026-11-28", "2026-10-31", "it is 31 days old: mend it (most: 30)"),
        ("2026-11-28", "2026-12-02", "2026-12-02 is not here yet"),
        ("regions.region_files", "regions.nowhere", "owner: there is no module ephemeron.regions.nowhere"),
        ("1 of 200 runs ends late", " ", "it has no reason"),
    ],
)
def test_a_stale_entry_is_named(tmp_path: Path, old: str, new: str, problem: str) -> None:
    [entry] = listed(tmp_path, ENTRY.replace(old, new)).values()
    assert entry.problems(TODAY) == [f"{entry.test}: {problem}"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ENTRY.replace('owner = "ephemeron.regions.region_files"', ""), "in_order\\): owner is missing"),
        (ENTRY + 'until = "never"', "in_order\\): until is not a field"),
        (ENTRY.replace("2026-11-28", '"2026-11-28"'), "in_order\\): date has to be a date"),
        (ENTRY.replace('"1 of 200 runs ends late"', "1"), "in_order\\): reason has to be a string"),
        (ENTRY + ENTRY, "entry 2 .*in_order\\): it is in the list twice"),
    ],
)
def test_an_entry_that_is_not_whole_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        listed(tmp_path, text)


def test_a_test_that_a_class_inherits_from_a_kit_exists() -> None:
    name = "tests/communication/channels/test_contract.py::TestMemory::{}"
    kit = Entry(name.format("test_what_was_put_is_fetched"), "x", TODAY, "ephemeron.regions")
    gone = Entry(name.format("test_of_no_kit"), "x", TODAY, "ephemeron.regions")
    assert (kit.problems(TODAY), len(gone.problems(TODAY))) == ([], 1)
