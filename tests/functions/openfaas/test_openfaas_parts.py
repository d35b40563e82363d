"""The pure parts: what a call-back tells, timeouts, quantities, and what the kernel says of memory."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ephemeron.errors import JobError
from ephemeron.functions.async_invoke.call_tracker import DEATH_S, CallTracker
from ephemeron.functions.async_invoke.log_source import Death, LogReport
from ephemeron.functions.async_invoke.provider import CapacityRequest, RunHandle
from ephemeron.functions.async_invoke.records import parse
from ephemeron.functions.base import Call
from ephemeron.functions.openfaas import preflight
from ephemeron.functions.openfaas.deploy.function import DeploymentSpec, duration, gateway_values, spec_of
from ephemeron.functions.openfaas.handler import SECRETS, secrets_in
from ephemeron.functions.openfaas.platform import parse_callback
from ephemeron.functions.openfaas.provider import OpenFaas
from ephemeron.functions.openfaas.replica import out_of_memory_kills, told_by
from ephemeron.functions.openfaas.settings import PASSWORD_ENV, OpenFaasSettings
from ephemeron.testing.openfaas_gateway.functions import cores, quantity, seconds


@given(st.integers(100, 599), st.floats(0, 1e5), st.binary(max_size=50))
def test_a_call_back_tells_of_an_end_only_where_the_function_could_not(status: int, took_s: float, body: bytes) -> None:
    told = parse_callback({"x-call-id": "c", "x-function-status": str(status), "x-duration-seconds": f"{took_s:f}"}, body)
    deaths = [t for t in told if isinstance(t, Death)]
    assert len(deaths) == (0 if 200 <= status < 300 else 1)
    assert all(t.request == "c" for t in told)
    for report in (t for t in told if isinstance(t, LogReport)):
        assert status not in (429, 503), "what was not run costs nothing"
        assert report.billed_s >= took_s - 1e-6
    if deaths:
        assert deaths[0].timed_out == (status == 504)
        assert "\n" not in deaths[0].text


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x-call-id": "c"},
        {"x-call-id": "c", "x-function-status": "no"},
        {"x-call-id": "c", "x-function-status": "500", "x-duration-seconds": "nan"},
    ],
)
def test_what_is_no_call_back_tells_nothing(headers: dict[str, str]) -> None:
    assert parse_callback(headers, b"") == []


def test_a_death_that_only_the_gateway_saw_ends_the_call_with_its_seconds() -> None:
    calls = CallTracker()
    calls.feed(
        parse(
            {
                "record": "sending",
                "id": "0.0.a",
                "run": "r",
                "rank": 0,
                "attempt": 0,
                "reason": "start",
                "memory_mb": 512,
                "lifetime_s": 60.0,
                "origin": 0.0,
                "at": 0.0,
                "copies": 1,
                "by": "",
            }
        ),
        now=0.0,
    )
    calls.feed(
        parse({"record": "begun", "id": "0.0.a", "delivery": 0, "request": "c", "stream": "", "billed_by": "supervisor", "at": 0.0}),
        now=1.0,
    )
    for said in parse_callback({"x-call-id": "c", "x-function-status": "502", "x-duration-seconds": "7.25"}, b"Bad Gateway"):
        calls.feed_log(said, now=8.0)
    assert calls.due(now=8.0) == [], "an outcome may still be in the store"
    (end,) = calls.due(now=8.0 + DEATH_S)
    assert (end.outcome.status, end.outcome.billed_s, end.outcome.gb_seconds) == ("lost", 7.25, 3.625)
    assert "502: Bad Gateway" in end.outcome.error


def test_a_supervisors_bill_is_final_and_no_other_is_waited_for() -> None:
    calls = CallTracker()
    call = Call(run="r", rank=0, attempt=0, memory_mb=1024, lifetime_s=60.0, channel="")
    calls.feed(
        parse(
            {
                "record": "sending",
                "id": "0.0.a",
                "run": "r",
                "rank": 0,
                "attempt": 0,
                "reason": "start",
                "memory_mb": call.memory_mb,
                "lifetime_s": 60.0,
                "origin": 0.0,
                "at": 0.0,
                "copies": 1,
                "by": "",
            }
        ),
        now=0.0,
    )
    calls.feed(
        parse({"record": "begun", "id": "0.0.a", "delivery": 0, "request": "c", "stream": "", "billed_by": "supervisor", "at": 0.0}),
        now=1.0,
    )
    calls.feed(
        parse(
            {
                "record": "outcome",
                "id": "0.0.a",
                "delivery": 0,
                "status": "out_of_memory",
                "error": "",
                "value": {},
                "took_s": 2.0001,
                "peak_mb": 1024.0,
                "traffic": {},
            }
        ),
        now=3.0,
    )
    for said in parse_callback({"x-call-id": "c", "x-function-status": "500", "x-duration-seconds": "9"}, b""):
        calls.feed_log(said, now=3.0)
    (end,) = calls.due(now=3.0)
    assert (end.billed_by, end.outcome.billed_s, end.outcome.peak_memory_mb) == ("supervisor", 2.001, 1024.0)


@given(st.floats(1, 86_400), st.integers(1, 1000))
def test_each_timeout_is_longer_than_the_one_within(lifetime_s: float, replicas: int) -> None:
    wanted = DeploymentSpec(image="i", memory_mb=512, lifetime_s=lifetime_s, replicas=replicas)
    told = spec_of(wanted, OpenFaasSettings(gateway="http://g")).variables
    values = dict(line.strip().split(": ") for line in gateway_values(wanted).splitlines() if not line.endswith(":"))
    chain = [lifetime_s, *(seconds(t, 0.0) for t in (told["exec_timeout"], told["write_timeout"])), seconds(values["upstreamTimeout"], 0.0)]
    assert chain[0] < chain[1] < chain[2] <= chain[3] < seconds(values["writeTimeout"], 0.0)
    assert told["read_timeout"] == told["write_timeout"]
    assert float(told["EPHEMERON_LIFETIME_S"]) == pytest.approx(lifetime_s, rel=1e-5)


@given(st.floats(0, 1e6))
def test_durations_are_rounded_up_and_read_back(s: float) -> None:
    assert s <= seconds(duration(s), -1.0) < s + 1 + 1e-9


def test_quantities() -> None:
    assert (quantity("128Mi"), quantity("128M"), quantity("64")) == (128 * 2**20, 128e6, 64)
    assert (cores("100m"), cores("1.5")) == (0.1, 1.5)
    for wrong in ("", "many", "-1", "12Q"):
        with pytest.raises(ValueError, match="quantities"):
            quantity(wrong)
    with pytest.raises(ValueError, match="quantities"):
        cores("1Gi")


def test_cpus_come_with_memory_unless_they_are_said() -> None:
    assert DeploymentSpec(image="i", memory_mb=1769).vcpus == 1.0
    assert DeploymentSpec(image="i", memory_mb=1769, cpus=2.5).vcpus == 2.5
    for wrong in ({"cpus": -1.0}, {"cpus": math.inf}, {"image": " "}):
        with pytest.raises(JobError):
            DeploymentSpec(**{"image": "i", "memory_mb": 512, **wrong})  # type: ignore[arg-type]


def test_a_handler_knows_only_what_it_was_told(tmp_path: Path) -> None:
    told = spec_of(DeploymentSpec(image="i", memory_mb=512), OpenFaasSettings(gateway="http://g", function="f")).variables
    here = told_by(dict(told))
    assert (here.memory_mb, here.lifetime_s, here.gateway.function) == (512, 900.0, "f")
    assert here.gateway.gateway.startswith("http://gateway.openfaas")
    with pytest.raises(KeyError):
        told_by({})
    for name in SECRETS:
        (tmp_path / name).write_text(f"value of {name}\n")
    (tmp_path / "somebody-elses").write_text("x")
    assert secrets_in(tmp_path) == {variable: f"value of {name}" for name, variable in SECRETS.items()}
    assert secrets_in(tmp_path / "none") == {}


def test_kills_for_memory_are_counted_where_the_kernel_says(tmp_path: Path) -> None:
    assert out_of_memory_kills(tmp_path / "none") == 0
    nowhere = tmp_path / "cgroup"
    nowhere.write_text("7:memory:/no/such/group\n0::/\n")
    assert out_of_memory_kills(nowhere) >= 0


def test_a_client_that_has_the_password_starts_nothing_at_a_gateway_that_refuses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def inspect(settings: OpenFaasSettings) -> None:
        raise JobError("the gateway refuses this user or password")

    monkeypatch.setattr(preflight, "inspect", inspect)
    monkeypatch.setenv(PASSWORD_ENV, "wrong")
    capacity = CapacityRequest(workers=1, memory_mb=512, lifetime_s=60.0, channel="s3://b/p")
    handle = RunHandle(run="r", run_dir=tmp_path, capacity=capacity, channel="s3://b/p", since=0.0, starting=True)
    with pytest.raises(JobError, match="refuses this user or password"):
        asyncio.run(OpenFaas().open(handle, OpenFaasSettings(gateway="http://g", sizes_mb=(512,), lifetime_s=60.0)))
