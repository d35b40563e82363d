"""Prices: dated files, read strictly, and the formulas they go into."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ephemeron.errors import JobError
from ephemeron.events import Traffic
from ephemeron.prices import Prices, load_prices

BUILT_IN = Path(__file__).parents[2] / "src/ephemeron/prices/aws-us-east-1.toml"


@pytest.fixture
def price_file(tmp_path):
    def edited(old, new):
        text = BUILT_IN.read_text()
        assert old in text
        path = tmp_path / "prices.toml"
        path.write_text(text.replace(old, new))
        return path

    return edited


def test_the_built_in_ones_are_those_of_aws():
    p = load_prices("objects")
    assert (p.name, p.as_of) == ("aws-us-east-1", "2025-06-01")
    assert (p.gb_second_usd, p.invocation_usd) == (0.0000166667, 0.0000002)
    assert (p.put_usd, p.get_usd, p.list_usd, p.delete_usd) == (5e-6, 4e-7, 5e-6, 0)
    assert (p.byte_usd, p.server_hour_usd) == (0, 0)
    assert load_prices("objects", BUILT_IN) == p


def test_a_cache_bills_requests_and_volume():
    p = load_prices("cache")
    assert p.put_usd == p.get_usd == p.delete_usd == p.list_usd == pytest.approx(2.3e-9)
    assert p.byte_usd == pytest.approx(2.3e-12), "one unit per kB"
    assert p.server_hour_usd == 0


def test_a_server_bills_hours_and_memory_nothing():
    everything = Traffic(puts=9, gets=9, polls=9, deletes=9, lists=9, bytes_up=9, bytes_down=9)
    assert load_prices("server").server_hour_usd == 0.096
    assert load_prices("server").storage_usd(everything) == 0
    beside = load_prices("objects", servers=True)
    assert beside.server_hour_usd == 0.096
    assert beside.storage_usd(everything) == load_prices("objects").storage_usd(everything) > 0
    assert load_prices("memory").storage_usd(everything) == 0
    assert load_prices("memory").server_hour_usd == 0


def test_bytes_between_functions_are_free_in_one_zone_and_billed_at_public_endpoints():
    sent = Traffic(direct_bytes_sent=10**9, direct_bytes_received=10**9)
    assert load_prices("objects").storage_usd(sent) == 0
    assert load_prices("objects", platform="aws-microvm").storage_usd(sent) == pytest.approx(0.02)


def test_a_price_file_without_them_has_links_for_nothing(tmp_path):
    text = BUILT_IN.read_text()
    start, end = text.index("[direct]"), text.index("[egress]")
    (tmp_path / "old.toml").write_text(text[:start] + text[end:])
    assert load_prices("objects", tmp_path / "old.toml", platform="aws-microvm").direct_byte_usd == 0


def test_a_poll_costs_a_read():
    p = load_prices("objects")
    assert p.storage_usd(Traffic(polls=7)) == p.storage_usd(Traffic(gets=7)) == pytest.approx(7 * 4e-7)


money = st.floats(0, 1e3)
counts = st.integers(0, 10**6)


@given(
    st.builds(
        Prices,
        name=st.just("x"),
        as_of=st.just("x"),
        gb_second_usd=money,
        invocation_usd=money,
        put_usd=money,
        get_usd=money,
        list_usd=money,
        delete_usd=money,
        byte_usd=money,
    ),
    st.builds(Traffic, puts=counts, gets=counts, polls=counts, deletes=counts, lists=counts, bytes_up=counts, bytes_down=counts),
)
@settings(deadline=None)
def test_storage_is_the_sum_over_operations(p, t):
    expected = (
        t.puts * p.put_usd
        + t.gets * p.get_usd
        + t.polls * p.get_usd
        + t.lists * p.list_usd
        + t.deletes * p.delete_usd
        + t.bytes_up * p.byte_usd
        + t.bytes_down * p.byte_usd
    )
    assert p.storage_usd(t) == pytest.approx(expected)


def test_functions_cost_memory_by_time_and_each_call():
    p = load_prices("objects")
    assert p.functions_usd(1e6, 1000) == pytest.approx(16.6667 + 0.0002)


# -- files of one's own -----------------------------------------------------------------------------------


def test_another_price_is_taken_from_a_file(price_file):
    assert load_prices("objects", price_file("put_usd = 0.000005", "put_usd = 0.25")).put_usd == 0.25
    assert load_prices("objects", str(price_file("put_usd = 0.000005", "put_usd = 1"))).put_usd == 1.0


@pytest.mark.parametrize("written", ["2001-02-03", "'2001-02-03'", "2001-02-03T00:00:00", "'long ago'"])
def test_prices_do_not_age(price_file, written):
    p = load_prices("objects", price_file("as_of = 2025-06-01", f"as_of = {written}"))
    assert p.as_of.startswith(written.strip("'"))


@pytest.mark.parametrize("section", ["functions", "objects"])
def test_a_file_needs_only_what_its_channel_needs(price_file, section):
    def without(name):
        return price_file(re.search(rf"\[{name}\].*?(?=\n\n)", BUILT_IN.read_text(), re.DOTALL)[0], "")

    assert load_prices("objects", without("cache")).put_usd == 5e-6
    with pytest.raises(JobError, match=rf"the table \[{section}\] is missing"):
        load_prices("objects", without(section))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("\ngb_second_usd = 0.0000166667", "", ": functions: missing key gb_second_usd"),
        ("invocation_usd", "invocations_usd", ": functions: unknown key invocations_usd"),
        ("put_usd = 0.000005", "put_usd = 'cheap'", ": objects.put_usd = 'cheap'"),
        ("put_usd = 0.000005", "put_usd = [1]", ": objects.put_usd = [1]"),
        ("put_usd = 0.000005", "put_usd =", "Invalid value"),
        ("as_of = 2025-06-01", "", ": missing key as_of"),
        ('name = "aws-us-east-1"', "", ": name is missing"),
        (
            re.search(r"\[functions\].*?(?=\n\n)", BUILT_IN.read_text(), re.DOTALL)[0],
            "functions = 3",
            ": functions: expected a table, got 3",
        ),
    ],
)
def test_a_mistake_names_the_file_and_the_remedy(price_file, old, new, says):
    path = price_file(old, new)
    with pytest.raises(JobError) as caught:
        load_prices("objects", path)
    assert f"price file {path}" in str(caught.value)
    assert says in str(caught.value)
    assert "compare it with the built-in one" in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(JobError, match=r"price file .*none.toml does not exist"):
        load_prices("objects", tmp_path / "none.toml")
    with pytest.raises(JobError, match="cannot be read: Is a directory"):
        load_prices("objects", tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(JobError, match=r"price file .*binary is not text in UTF-8"):
        load_prices("objects", tmp_path / "binary")
