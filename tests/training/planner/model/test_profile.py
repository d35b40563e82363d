"""Profiles: parsed once, strictly; written as they are read; three platforms built in."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from ephemeron.errors import JobError
from ephemeron.prices import load_prices
from ephemeron.training.planner.model.builtin import BUILTIN, CACHE_LATENCY_S, LINKS, builtin_platform
from ephemeron.training.planner.model.profile import PlatformProfile, load_profile, parse_profile
from ephemeron.training.planner.model.provenance import Provenance, StepProvenance
from ephemeron.training.planner.model.rates import Affine, Knee, Power, Saturating, Transfer

RAW: dict[str, Any] = {
    "workload": {
        "model_mb": 97.49,
        "a": 37.19,
        "b": 12.48,
        "m": -111.46,
        "memory_slope_mb": 12,
        "memory_base_mb": 700,
        "dataset_mb": 147,
        "samples": 50000,
    },
    "platform": {
        "name": "aws-lambda",
        "memory_mb": {"min": 128, "max": 10240, "step": 128},
        "lifetime_s": 900,
        "cold_start_s": 3,
        "price_gb_s": 1.66667e-5,
        "price_invocation": 2e-7,
        "price_put": 5e-6,
        "price_get": 4e-7,
        "poll_s": 0.02,
        "transfer": [
            {"memory_mb": 1024, "up": {"p_mb_s": 73, "t_per_mb": 0.11}, "down": {"latency_s": 0.02, "mb_s": 82}},
            {
                "memory_mb": 512,
                "up": {"latency_s": 0.1, "s_per_mb": 0.06, "exponent": 0.9},
                "down": {"latency_s": 0, "s_per_mb": 0.06, "knee_mb": 17, "s_per_mb_beyond": 0},
            },
        ],
    },
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """RAW with one value set; `...` deletes it."""
    raw = copy.deepcopy(RAW)
    *parents, last = [int(p) if p.isdecimal() else p for p in path.split(".")]
    at: Any = raw
    for p in parents:
        at = at.setdefault(p, {}) if isinstance(at, dict) else at[p]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return raw


def test_all_four_forms_are_told_apart_by_their_names():
    low, high = parse_profile(RAW).platform.transfer
    assert (low.memory_mb, high.memory_mb) == (512, 1024)
    assert [type(r) for r in (high.up, high.down, low.up, low.down)] == [Saturating, Affine, Power, Knee]


def test_a_profile_is_read_as_it_was_written(tmp_path):
    profile = dataclasses.replace(parse_profile(RAW), fit=Provenance(steps=StepProvenance(half_width=0.03)))
    profile.save(tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == profile


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("workload.a", ..., "workload: missing key a"),
        ("workload.a", 0, "workload.a = 0.0 should be more than 0"),
        ("workload.b", -1, "workload.b = -1.0 should be at least 0"),
        ("workload.m", float("-inf"), "workload.m = -inf"),
        ("workload.samples", 1.5, "whole number"),
        ("workload.model_mb", "97", "workload.model_mb = '97'"),
        ("workload.model_mb", float("nan"), "workload.model_mb = nan"),
        ("workload.colour", 1, "unknown key colour"),
        ("platform.name", ..., "platform: missing key name"),
        ("platform.price_put", ..., "platform: missing key price_put"),
        ("platform.memory_mb", ..., "platform: missing key memory_mb"),
        ("platform.channel", "pigeon", "channel = 'pigeon'"),
        ("platform.memory_mb.step", 0, "memory_mb.step = 0 should be at least 1"),
        ("platform.memory_mb.min", 20480, "min ≤ max"),
        ("platform.price_put", -1, "price_put = -1"),
        ("platform.lifetime_s", 0, "lifetime_s"),
        ("platform.transfer", [], "transfer"),
        ("platform.transfer.0.memory_mb", 512, "two rows"),
        ("platform.transfer.0.up", {"p_mb_s": 73}, "transfer[0].up: missing key t_per_mb"),
        ("platform.transfer.0.up", {"mb": 73}, "transfer[0].up has {mb}"),
        ("platform.transfer.0.up.p_mb_s", 0, "transfer[0].up.p_mb_s = 0"),
        ("platform.transfer.1.down.s_per_mb_beyond", -1, "s_per_mb_beyond = -1"),
        ("platform.transfer.1.down.knee_mb", 0, "knee_mb = 0"),
        ("fit.steps.half_width", "wide", "fit.steps.half_width"),
        ("platform", ..., "missing key platform"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(path, value, named):
    with pytest.raises(JobError) as e:
        parse_profile(changed(path, value), where="profile.json")
    assert named in str(e.value)
    assert str(e.value).startswith("profile.json")


@pytest.mark.parametrize(("text", "named"), [(None, "cannot be read"), ("{", "not JSON"), ("[]", "expected a table")])
def test_a_file_that_is_no_profile_is_named(tmp_path, text, named):
    path = tmp_path / "profile.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(JobError, match=named) as e:
        load_profile(path)
    assert str(path) in str(e.value)


def test_a_knee_has_two_rates():
    rate = Knee(latency_s=0.1, s_per_mb=0.06, knee_mb=10, s_per_mb_beyond=0.01)
    assert rate.seconds(np.array([0.0, 10.0, 20.0])) == pytest.approx([0.1, 0.7, 0.8])
    assert rate.bandwidth_mb_s == pytest.approx(50 / (0.6 + 0.4))


@pytest.mark.parametrize("name", BUILTIN)
def test_built_in_platforms_have_a_source_a_date_and_today_s_prices(name):
    p = builtin_platform(name)
    prices = load_prices(p.service)
    assert p.name == name
    assert p.source
    assert p.as_of == prices.as_of
    assert (p.price_gb_s, p.price_invocation) == (prices.gb_second_usd, prices.invocation_usd)
    assert p.price_mb == pytest.approx(prices.byte_usd * 1e6)
    assert any("assumed" in note for note in p.notes)
    assert p.quotas()[[0, -1]].tolist() == [128, 10240]
    s = np.array([0.001, 1.0, 10.0, 50.0])
    for direction in ("up", "down"):
        for quota in (128, 1000, 10240):
            seconds = p.seconds(direction, s, np.full(4, quota))
            assert (np.diff(seconds) > 0).all()


def test_built_in_prices_and_the_file_agree():
    p, prices = builtin_platform("aws-lambda-s3"), load_prices("objects")
    assert (p.price_put, p.price_get, p.price_list) == (prices.put_usd, prices.get_usd, prices.list_usd)


def test_the_derived_platforms_share_the_link_and_do_not_poll():
    objects, cache, server = (builtin_platform(name) for name in BUILTIN[:3])
    assert objects.poll_s > 0 == cache.poll_s == server.poll_s
    assert cache.seconds_per_mb("down", np.array(2048.0)) == objects.seconds_per_mb("down", np.array(2048.0))
    assert float(cache.seconds("up", np.array(1e-6), np.array(2048.0))) == pytest.approx(CACHE_LATENCY_S, rel=0.01)
    assert server.server_mb_s > 0
    assert server.price_server_hour == load_prices("server").server_hour_usd


def test_links_of_built_in_platforms_cost_what_their_route_costs():
    vpc, punched, microvm = (builtin_platform(name) for name in LINKS)
    assert vpc.links is not None
    assert punched.links is not None
    assert microvm.links is not None
    assert (vpc.links.price_mb, vpc.links.price_service_hour, vpc.links.failure) == (0, 0, 0)
    assert punched.links.price_mb == microvm.links.price_mb == pytest.approx(0.02 / 1000)
    assert punched.links.price_service_hour == pytest.approx(0.25 * 0.04048 + 0.5 * 0.004445)
    assert microvm.links.price_service_hour == 0
    assert {p.channel for p in (vpc, punched, microvm)} == {"direct"}
    assert microvm.quotas()[-1] == 8192


def test_an_unknown_platform_is_named_with_those_there_are():
    with pytest.raises(JobError, match=r"'azure'.*aws-lambda-s3"):
        builtin_platform("azure")


def test_the_file_of_a_profile_is_plain_json():
    assert json.loads(parse_profile(RAW).to_json())["platform"]["memory_mb"] == {"min": 128, "max": 10240, "step": 128, "sizes": []}


def test_larger_objects_than_were_measured_move_at_the_bandwidth_of_the_largest():
    """A power of the size above one would make a large object ever slower, a flat rate ever faster."""
    rows = tuple(
        Transfer(
            memory_mb=m,
            up=Knee(latency_s=0.1, s_per_mb=0.02, knee_mb=20, s_per_mb_beyond=0.0),
            down=Power(latency_s=0.02, s_per_mb=0.006, exponent=1.2),
        )
        for m in (512, 1024)
    )
    p = PlatformProfile(name="p", transfer=rows, measured_mb=50.0, price_gb_s=0, price_invocation=0)
    for direction, latency in (("up", 0.1), ("down", 0.02)):
        at_50, at_100, at_400 = (float(p.seconds(direction, s, 768.0)) for s in (50.0, 100.0, 400.0))
        assert at_100 - at_50 == pytest.approx(at_50 - latency)
        assert at_400 - at_50 == pytest.approx(7 * (at_50 - latency))
    many = p.seconds("down", np.array([[10.0], [400.0]]), np.array([[512.0, 768.0, 1024.0]]))
    assert many.shape == (2, 3)
    assert many[1, 1] == pytest.approx(float(p.seconds("down", 400.0, 768.0)))
