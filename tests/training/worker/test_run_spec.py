"""Specifications: workers read what the driver has written."""

from __future__ import annotations

import json

import pytest

from ephemeron.errors import CorruptMessage
from ephemeron.prices import load_prices
from ephemeron.training.job import Configuration, ExchangeOptions, RegionOptions, RunRegion, StageOptions, Target
from ephemeron.training.job.generation import ScheduledResize
from ephemeron.training.worker.spec import RunSpec


def make(**overrides):
    values = {
        "run_id": "run-1",
        "model": Target(target="m:f", options={"width": 3, "deep": {"a": [1, 2.5, None, True, "ü"]}}),
        "loss": Target(target="cross_entropy", options={"label_smoothing": 0.1}),
        "optimizer": Target(target="Adam", options={"betas": [0.9, 0.99]}),
        "configuration": Configuration(workers=3, aggregators=1, batch_size=8, nonaggregator_batch_size=20).resolved(),
        "epochs": 4,
        "seed": -5,
        "dtype": "float64",
        "samples": 100,
        "prices": load_prices("objects"),
        "budget_usd": 0.25,
        "faults": ("kill:rank=1,iteration=2,phase=upload", "delay:rank=0,factor=3"),
        "peer_timeout_s": 7.5,
        "cold_start_s": 1.25,
        "trainer": "synthetic",
        "trainer_options": {"elements": 9},
    }
    return RunSpec(**{**values, **overrides})


@pytest.mark.parametrize("overrides", [{}, {"budget_usd": None, "faults": (), "trainer_options": {}}], ids=["all", "few"])
def test_there_and_back(overrides):
    spec = make(**overrides)
    assert RunSpec.from_bytes(spec.to_bytes()) == spec
    assert RunSpec.from_bytes(memoryview(spec.to_bytes())) == spec


def test_names_of_an_earlier_release_are_read():
    """Runs of it are attached to, resumed and exported."""
    spec = make(
        configuration=Configuration(
            exchange=ExchangeOptions(quantity="gradients"),
            stages=StageOptions(count=2, micro_batches=4, schedule="gpipe"),
            regions=RegionOptions(region=(RunRegion(name="a", workers=2), RunRegion(name="b", workers=1)), store="s3://b/x", sync="diloco"),
        )
    )
    raw = json.loads(spec.to_bytes())
    c = raw["configuration"]
    tables = {name: c.pop(name) for name in ("exchange", "stages", "resize", "regions")}
    regions = tables["regions"]
    flat = {
        "exchange": "gradients",
        "stages": 2,
        "micro_batches": 4,
        "schedule": "gpipe",
        "placement": "",
        "resize_policy": None,
        "exchange_every": regions["exchange_every"],
        "region_sync": "diloco",
    }
    names = ("store", "communicator", "relay", "authority")
    for former in (
        {"groups": regions["region"], "regions": None, **{f"group_{name}": regions[name] for name in names}},
        {"regions": regions["region"], **{f"region_{name}": regions[name] for name in names}},
    ):
        raw["configuration"] = {**c, **flat, **former}
        assert RunSpec.from_bytes(json.dumps(raw).encode()) == spec
    raw["configuration"] = {**c, "stages": 1, "regions": None, "schedule": [{"from_epoch": 1, "workers": 2}], "resize_policy": None}
    assert RunSpec.read(raw, where="run.json").configuration.resize.schedule == (ScheduledResize(from_epoch=1, workers=2),)


def test_iterations_follow_from_the_split():
    spec = make()
    assert spec.split.batches == (8, 20, 20)
    assert spec.split.samples == 100
    assert spec.iterations == 4 * 3  # 100 samples, 48 an iteration


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"3",
        b"null",
        b"{}",
        make().to_bytes()[:-5],
        make().to_bytes().replace(b'"epochs"', b'"epoch"'),
        make().to_bytes().replace(b'"target"', b'"goal"'),
        make().to_bytes().replace(b'"checkpoint_every"', b'"checkpoints"'),
    ],
)
def test_anything_else_is_corrupt(data):
    with pytest.raises(CorruptMessage, match="not a run specification of this release"):
        RunSpec.from_bytes(data)
