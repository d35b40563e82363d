"""Price files are read strictly, and what they say beyond functions."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path

import pytest

from ephemeron.errors import JobError
from ephemeron.prices import load_beyond, load_gpus, load_machines, load_prices, load_rented
from ephemeron.prices.reading import Dated, read

BUILT_IN = (Path(__file__).parents[2] / "src/ephemeron/prices/aws-us-east-1.toml").read_text()


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "prices.toml"
    path.write_text(text)
    return path


def test_every_figure_of_the_built_in_file_is_dated_and_sourced() -> None:
    raw = read()
    values = [getattr(raw, f.name) for f in dataclasses.fields(raw) if f.name not in ("name", "as_of")]
    assert all(values)
    for table in (t for value in values for t in (value if isinstance(value, tuple) else (value,))):
        assert isinstance(table, Dated)
        assert table.source
        assert datetime.date.fromisoformat(table.as_of) >= datetime.date(2025, 6, 1)
        unsure = any(words in table.source for words in ("not compared", "assumed", "MicroVMs"))  # these from reports only
        assert table.verified != unsure


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("gb_second_usd = 0.0000166667", "gb_seconds_usd = 1", "functions: unknown key gb_seconds_usd; did you mean gb_second_usd"),
        ("\ngb_second_usd = 0.0000166667", "", "functions: missing key gb_second_usd"),
        ("put_usd = 0.000005", "put_usd = -1", "objects.put_usd = -1.0 should be at least 0"),
        ("get_usd = 0.0000004", "get_usd = 'free'", "objects.get_usd = 'free' should be a number"),
        ("gb_hour_usd = 0.084", "gb_hour_usd = inf", "cache.gb_hour_usd = inf"),
        ("[egress]", "[egres]", "unknown key egres; did you mean egress"),
        ("share = 0.4", "share = 0", "spot.share = 0.0 should be more than 0"),
        ("burst = 1000", "", "limits: missing key burst"),
        ("\nverified = false", "\nverified = 0", "microvms.verified = 0 should be true or false"),
        ("arm64 = true", "arm64 = 'yes'", "machine[9].arm64 = 'yes' should be true or false"),
        ("memory_mb = 24576", "memory_mb = 0", "gpu[1].memory_mb = 0.0 should be more than 0"),
        ("as_of = 2025-06-01", "as_of = 3", "as_of = 3 should be text"),
    ],
)
def test_a_mistake_anywhere_is_refused_whatever_was_asked_for(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in BUILT_IN
    path = written(tmp_path, BUILT_IN.replace(old, new, 1))
    for load in (lambda p: load_prices("memory", p), load_machines, load_rented, load_gpus, load_beyond):
        with pytest.raises(JobError) as caught:
            load(path)
        assert says in str(caught.value)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("service", ["objects", "cache", "server"])
def test_a_missing_table_is_named(tmp_path: Path, service: str) -> None:
    text = 'name = "own"\nas_of = 2026-01-01\n[functions]\ngb_second_usd = 1\ninvocation_usd = 0\n'
    path = written(tmp_path, text)
    assert load_prices("memory", path).gb_second_usd == 1
    with pytest.raises(JobError, match=rf"\[{service}\] is missing"):
        load_prices(service, path)
    with pytest.raises(JobError, match="name is missing"):
        load_prices("memory", written(tmp_path, text.replace('name = "own"\n', "")))


def test_spot_machines_cost_their_share_and_containers_their_vcpus_and_memory() -> None:
    rented = {m.name: m for m in load_rented()}
    spot, demand = rented["c7i.large spot"], rented["c7i.large"]
    assert (spot.kind, demand.kind, spot.verified) == ("spot", "on demand", False)
    assert spot.hour_usd == pytest.approx(0.4 * demand.hour_usd)
    box = rented["Fargate 4 vCPU 8 GB"]
    assert box.hour_usd == pytest.approx(4 * 0.04048 + 8 * 0.004445)
    assert (box.vcpus, box.memory_mb, box.kind, box.arm64) == (4, 8192, "fargate", False)
    assert rented["Fargate 4 vCPU 8 GB arm64"].hour_usd == pytest.approx(4 * 0.03238 + 8 * 0.00356)
    assert rented["c7g.large"].arm64
    assert not rented["c7g.large"].verified


def test_a_gpu_s_speed_is_known_only_where_the_file_says_it(tmp_path: Path) -> None:
    assert {g.name: g.speedup for g in load_gpus()} == {"g4dn.xlarge": None, "g6.xlarge": None, "g5.xlarge": None}
    own = BUILT_IN.replace("hour_usd = 1.006", "hour_usd = 1.006\nspeedup = 30")
    assert load_gpus(written(tmp_path, own))[-1].speedup == 30
