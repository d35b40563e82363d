"""The list of mutants that `make test-nightly` checks: each can be made, and names tests that exist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mutation import ROOT, Mutant, mutants

MUTANTS = mutants()


def test_the_list_is_long_enough_and_its_names_are_distinct() -> None:
    assert len(MUTANTS) >= 30
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_made_and_its_tests_exist(mutant: Mutant) -> None:
    ast.parse(mutant.mutated((ROOT / "src" / "ephemeron" / mutant.file).read_text()))
    for test in mutant.tests:
        path, _, name = test.partition("::")
        text = Path(ROOT, "tests", path).read_text()
        assert not name or f"def {name.partition('[')[0]}(" in text, test
