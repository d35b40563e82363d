"""Functions that are called by another one where they run."""

from __future__ import annotations

import numpy as np
import pytest

from ephemeron.executor.executor import FunctionExecutor
from ephemeron.executor.shipping import Adapted
from ephemeron.functions.tasks.item_calls import WithData, call_item, generator


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("function", [len, "builtins:len", lambda value: 2 * len(value)])
def test_the_adapter_is_given_the_function_and_the_arguments(function):
    adapted = Adapted(function, sorted_by)
    with FunctionExecutor(platform="simulated", max_workers=1) as pool:
        found = pool.submit(adapted, ["ccc", "a", "bb"]).result()
    assert found == adapted(["ccc", "a", "bb"]) == ["a", "bb", "ccc"]


def sorted_by(function, values):
    return sorted(values, key=function)


def test_a_result_may_be_json_and_bytes():
    outcome = call_item(lambda n: WithData({"n": np.int64(n)}, b"x"), "0" * 32, (3,), {}, seed=None, interval_s=0.0)
    assert (outcome.text, outcome.data, outcome.refused) == ('{"n": 3}', b"x", "")
    outcome = call_item(lambda n: WithData({n}, b"x"), "0" * 32, (3,), {}, seed=None, interval_s=0.0)
    assert "no JSON" in outcome.refused
    assert outcome.data is None
    assert generator(0, "0" * 32).uniform() == generator(0, "0" * 32).uniform()
