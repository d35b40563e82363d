"""What an unfinished preparation knows, damaged: an error that names the file, and no other dataset."""

from __future__ import annotations

from pathlib import Path

import pytest

from ephemeron.errors import DatasetDamaged
from ephemeron.preparation.stages import State
from ephemeron.testing.damage import another, flipped, truncated


@pytest.mark.parametrize("damage", [flipped, truncated, another])
def test_a_damaged_value_is_named(tmp_path: Path, damage) -> None:
    state = State(str(tmp_path))
    state.create("parts/00000", {"rows": 17, "mean": 0.25})
    path = tmp_path / "state/parts/00000.json"
    whole = path.read_bytes()
    found = damage("parts/00000", whole, {"parts/00000": whole, "other": b'{"rows":18,"mean":0.25}'})
    path.write_bytes(found)
    for read in (lambda: state.read("parts/00000"), lambda: state.read_all("parts/"), lambda: state.create("parts/00000", 1)):
        with pytest.raises(DatasetDamaged, match=r"state/parts/00000\.json"):
            read()
    path.unlink()
    assert state.read("parts/00000") is None
    assert state.create("parts/00000", {"rows": 17}) == state.read("parts/00000") == {"rows": 17}
    assert state.read_all("parts/") == {"00000": {"rows": 17}}
