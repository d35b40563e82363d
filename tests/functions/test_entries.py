"""Entries: the table has typed requests and results, a deployment adds its own, and what it does not have is not imported."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, cast, get_type_hints

import pytest

from ephemeron.errors import InvocationRefused, JobError
from ephemeron.functions.base import Call
from ephemeron.functions.context import Context
from ephemeron.functions.entries import ENTRIES, VARIABLE, check_entry, known, load, serve


@dataclass(frozen=True, slots=True, kw_only=True)
class SumRequest:
    """Numbers."""

    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SumResult:
    """Their sum, and the rank that added them."""

    total: int
    rank: int


async def add(context: Context, request: SumRequest) -> SumResult:
    return SumResult(total=sum(request.numbers), rank=context.call.rank)


async def echo(context: Context, request: SumRequest) -> Any:
    return request.numbers


def context(entry: str, **request: Any) -> Context:
    call = Call(run="r", rank=3, attempt=0, memory_mb=256, lifetime_s=9.0, channel="", entry=entry, request=request)
    return cast("Context", type("OfCall", (), {"call": call}))


def served(entry: str, **request: Any) -> Mapping[str, object]:
    return asyncio.run(serve(context(entry, **request)))


@pytest.fixture(autouse=True)
def _deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, f"add={__name__}:add, echo={__name__}:echo")


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_of_the_table_takes_and_returns_a_frozen_dataclass(entry: str) -> None:
    if entry == "stage":
        pytest.importorskip("torch", reason="stages are made of PyTorch's modules")
    function = load(entry)
    first, second = signature(function).parameters
    hints = get_type_hints(function)
    assert hints[first] is Context
    for kind in (hints[second], hints["return"]):
        assert dataclasses.is_dataclass(kind)
        assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]


def test_a_deployments_entry_gets_its_own_request_and_returns_json() -> None:
    assert served("add", numbers=[1, 2]) == {"total": 3, "rank": 3}


def test_a_request_of_a_wrong_type_names_entry_and_place() -> None:
    with pytest.raises(JobError, match=r"request of entry add\.numbers\[0\] = '1' should be a whole number"):
        served("add", numbers=["1"])


def test_a_result_that_is_no_object_is_an_error() -> None:
    with pytest.raises(TypeError, match="an entry returns a dataclass or a dict, not list"):
        served("echo", numbers=[1])


@pytest.mark.parametrize("entry", ["nothing", "antigravity:fly_away", "", "add "])
def test_what_is_not_in_the_table_is_refused_and_not_imported(entry: str) -> None:
    with pytest.raises(InvocationRefused, match="no entry"):
        served(entry)
    assert "antigravity" not in sys.modules


def test_a_refusal_names_the_nearest_entry() -> None:
    with pytest.raises(InvocationRefused, match="did you mean worker") as refused:
        check_entry("wroker")
    assert refused.value.binding == "entry"


def test_a_deployment_may_replace_an_entry_of_the_table() -> None:
    assert known({VARIABLE: "worker=mine:run"})["worker"] == "mine:run"
    assert set(known({})) == set(ENTRIES)


@pytest.mark.parametrize("text", ["add", "add=", "add=module", "add=:f", "a:b=module:f", "=m:f"])
def test_a_declaration_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(JobError, match=VARIABLE):
        known({VARIABLE: text})
