"""Virtual machines of a price file, and what is said of old prices."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from ephemeron.errors import JobError
from ephemeron.prices import age_warning, load_machines, load_prices

BUILT_IN = Path(__file__).parents[2] / "src/ephemeron/prices/aws-us-east-1.toml"

ONE = """
as_of = 2020-02-02
[[machine]]
name = "small"
vcpus = 2
memory_mb = 4096
hour_usd = 0.1
boot_s = 30
source = "a list"
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "prices.toml"
    path.write_text(text)
    return path


def test_the_built_in_ones_have_sources_and_one_date() -> None:
    machines = {m.name: m for m in load_machines()}
    assert (machines["m5.large"].vcpus, machines["m5.large"].memory_mb, machines["m5.large"].hour_usd) == (2, 8192, 0.096)
    assert load_prices("server").server_hour_usd == machines["m5.large"].hour_usd
    for m in machines.values():
        assert m.name in m.source
        assert m.as_of >= load_prices("objects").as_of
        assert 0 < m.boot_s < 300
    assert load_machines(BUILT_IN) == tuple(machines.values())


@pytest.mark.parametrize("family", ["m7i", "c7i", "m7g", "c7g"])
def test_within_a_family_price_goes_by_vcpus(family: str) -> None:
    per_vcpu = {round(m.hour_usd / m.vcpus, 6) for m in load_machines() if m.name.startswith(family)}
    assert len(per_vcpu) == 1


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    (m,) = load_machines(written(tmp_path, ONE))
    assert (m.name, m.vcpus, m.memory_mb, m.hour_usd, m.boot_s) == ("small", 2, 4096, 0.1, 30)
    assert (m.source, m.as_of) == ("a list", "2020-02-02")


def test_a_file_without_machines_has_none(tmp_path: Path) -> None:
    assert load_machines(written(tmp_path, "as_of = 2020-02-02\n")) == ()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("vcpus = 2", "", "machine[0]: missing key vcpus"),
        ("vcpus = 2", "vcpus = 0", "machine[0].vcpus = 0.0 should be more than 0"),
        ("memory_mb = 4096", "memory_mb = 'much'", "memory_mb = 'much'"),
        ("hour_usd = 0.1", "hour_usd = -1", "machine[0].hour_usd = -1.0 should be at least 0"),
        ("hour_usd = 0.1", "hour_usd = nan", "hour_usd = nan"),
        ("hour_usd = 0.1", "hour_usd = true", "hour_usd = True"),
        ("boot_s = 30", "boot = 30", "unknown key boot"),
        ('name = "small"', "", "machine[0]: missing key name"),
        ('source = "a list"', "", "machine[0] (small): source should say where the price is from"),
        ("[[machine]]", "[machine]", "machine = {"),
        ("as_of = 2020-02-02", "", "as_of"),
        ("vcpus = 2", "vcpus =", "Invalid value"),
    ],
)
def test_a_mistake_names_the_value_and_the_remedy(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in ONE
    path = written(tmp_path, ONE.replace(old, new))
    with pytest.raises(JobError) as caught:
        load_machines(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert "compare it with the built-in one" in str(caught.value)


def test_the_same_name_twice(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="small is there twice"):
        load_machines(written(tmp_path, ONE + ONE.split("2020-02-02")[1]))


def test_absent_file(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="does not exist"):
        load_machines(tmp_path / "none.toml")


TODAY = datetime.date(2025, 7, 1)


@pytest.mark.parametrize("as_of", ["2025-06-01", "2024-01-02", "2024-01-02T10:00:00", "2026-01-01"])
def test_prices_of_the_last_eighteen_months_are_not_spoken_of(as_of: str) -> None:
    assert age_warning(as_of, TODAY) is None


@pytest.mark.parametrize(("as_of", "years"), [("2015-07-01", "10.0 years"), ("2023-12-01", "1.6 years")])
def test_older_ones_are(as_of: str, years: str) -> None:
    said = age_warning(as_of, TODAY)
    assert said is not None
    assert years in said
    assert as_of in said
    assert "--prices FILE" in said


def test_prices_without_a_date_are_spoken_of_too() -> None:
    said = age_warning("long ago", TODAY)
    assert said is not None
    assert "'long ago'" in said
    assert "--prices FILE" in said
