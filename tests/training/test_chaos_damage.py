"""A short form of the schedules of `benchmarks.chaos_damage`: runs end, right or with an error that names the damaged key."""

from __future__ import annotations

import pytest
from benchmarks import chaos_damage

from ephemeron.testing.damage import flipped


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 48])
def test_a_damaged_object_is_named_or_survived(seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path))
    wrong, happened = chaos_damage.run(seed)
    assert not wrong
    assert happened


def test_every_verdict_can_be_wrong() -> None:
    verdict = chaos_damage._verdict
    assert verdict("bsp", flipped, False, "run/init", "whole", "other", "")[0][0].startswith("silent")
    assert verdict("bsp", flipped, False, "run/init", "whole", "", "run/spec")[0][0].startswith("unnamed")
    assert verdict("bsp", flipped, False, "run/init", "whole", "", "key run/init")[0] == []
    assert verdict("bsp", flipped, False, "run/init", "whole", "whole", "")[0] == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_live(seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path))
    assert chaos_damage.run_live(seed, s3_port=0)[0] == []
