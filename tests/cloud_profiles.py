"""A profile measured on a platform that `TrainingWorld` has, with what holds on each."""

from __future__ import annotations

import pytest

from checking import left
from ephemeron.runs import folders
from ephemeron.runs.header import open_header
from ephemeron.testing import TrainingWorld
from ephemeron.training.planner.model.profile import Profile
from ephemeron.training.profiling import cloud, profile_job
from tiny_job import JOB

FEW = {"BATCHES": 3, "WINDOWS": 2, "MORE": 1}
"""Of what is measured: how well it fits is no matter here."""


def measured(world: TrainingWorld, sizes: tuple[int, ...]) -> Profile:
    """The profile of the tests' job; nothing is left in the channel."""
    channel = world.configured()["channel"]
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name, count in FEW.items():
            patch.setattr(cloud, name, count)
        profile = profile_job(
            JOB, platform=world.platform, channel=channel, cloud=world.settings, sizes_mb=sizes, budget_usd=0.2, on_budget=told.append
        )
    found = profile.fit.platform
    assert profile.platform.name == world.platform
    assert found.sizes_mb == sizes
    assert {t.memory_mb for t in profile.platform.transfer} == {p.memory_mb for p in profile.fit.steps.probes} == set(sizes)
    assert 0 < found.billed_usd <= 0.2
    assert found.calls >= 1 + 2 * len(sizes)
    assert len(told) == 1
    assert f"{1 + 2 * len(sizes)} calls of functions of" in told[0]
    assert not [key for key in left(channel) if "profile-" in key]
    run = next(folder for folder in folders.all_runs() if open_header(folder).kind == "profile")
    result = run.read("result.json")
    assert result is not None
    assert (result["status"], result["platform"], result["budget_usd"]) == ("finished", world.platform, 0.2)
    assert (result["cost_usd"], result["invocations"]) == (pytest.approx(found.billed_usd, abs=1e-6), found.calls)
    return profile
