"""Regions in a TOML file: what is read, and what is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from ephemeron.errors import JobError
from ephemeron.regions.region_files import credentials_of, functions_of, groups_of, load_regions, parse_regions
from ephemeron.regions.scheduling.devices import KINDS, TABLE_1, power_of

TWO = """
[[region]]
name = "shanghai"
platform = "local"
data_share = 2
devices = [{ kind = "cascade-lake", cores = 12 }, { kind = "own", cores = 2, power = 1.5 }]
prices = { egress_usd_per_gb = 0.1 }

[[region]]
name = "chongqing"
platform = "local"
devices = [{ kind = "skylake", cores = 12 }]
memory_mb = 3538
"""


def test_regions_with_devices_shares_and_links() -> None:
    link = '\n[[link]]\nsource = "shanghai"\ntarget = "chongqing"\nbandwidth_mbit_s = 100\nusd_per_gb = 0.02\none_way = true\n'
    regions = parse_regions(TWO + link)
    assert regions.names == ("shanghai", "chongqing")
    assert regions.shares() == pytest.approx((2 / 3, 1 / 3))
    first, second = regions.named("shanghai").devices
    assert (regions.power_of(first), regions.power_of(second)) == (0.666, 1.5)
    assert regions.egress_usd("shanghai", "chongqing", 5e9) == pytest.approx(0.1)
    assert regions.link_of("chongqing", "shanghai") is None, "one way"
    assert regions.egress_usd("chongqing", "shanghai", 5e9) == 0.0


def test_a_link_without_a_price_costs_what_leaves_the_region_and_goes_both_ways() -> None:
    regions = parse_regions(TWO + '\n[[link]]\nsource = "chongqing"\ntarget = "shanghai"\nbandwidth_mbit_s = 10\n')
    back = regions.link_of("shanghai", "chongqing")
    assert back is not None
    assert (back.source, back.bandwidth_mbit_s) == ("shanghai", 10)
    assert regions.egress_usd("shanghai", "chongqing", 1e9) == pytest.approx(0.1)


def test_the_column_of_rated_power() -> None:
    regions = parse_regions('power = "rated"\n' + TWO)
    assert regions.power_of(regions.named("shanghai").devices[0]) == 0.938


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        (
            'kind = "cascade-lake", ',
            'kind = "cascade-lak", ',
            "region shanghai: device kind 'cascade-lak' has no power.*did you mean cascade-lake",
        ),
        ('platform = "local"\ndata_share', "data_share", r"region\[0\]: missing key platform"),
        ('platform = "local"\ndata_share', 'platform = "mars"\ndata_share', "'mars' is not known; use one of local"),
        ('name = "chongqing"', 'name = "shanghai"', "two regions have the name 'shanghai'; give each"),
        ('name = "chongqing"', 'name = "Chong qing"', "small letters"),
        ("data_share = 2", "data_share = 0", "should be more than 0"),
        ("cores = 12 }, {", "cores = 0 }, {", "should be at least 1"),
        ("power = 1.5", "power = -1", "should be more than 0"),
        ("\n[[region]]", 'plan = "greedy"\n\n[[region]]', "plan = 'greedy' is not known; use one of match, cheapest, fastest, all"),
        ("power = 1.5", "powr = 1.5", "unknown key powr; did you mean power"),
        ('devices = [{ kind = "skylake", cores = 12 }]', "", "region chongqing has neither devices nor workers"),
        ('kind = "own"', 'kind = "cascade-lake"', "two devices of kind 'cascade-lake'; add their cores up"),
        ("memory_mb = 3538", "data = { collate = 'a:b' }", "is for flows"),
        ("memory_mb = 3538", 'credentials = "a-b"', "beginning of names of environment variables"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(old: str, new: str, match: str) -> None:
    assert old in TWO
    with pytest.raises(JobError, match=match) as refused:
        parse_regions(TWO.replace(old, new, 1))
    assert str(refused.value).startswith("regions.toml")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("link", "match"),
    [
        ('source = "shanghai"\ntarget = "beijing"', "a link names 'beijing', which is no region; regions are shanghai, chongqing"),
        ('source = "shanghai"\ntarget = "shanghai"', "joins 'shanghai' to itself"),
    ],
)
def test_links_join_two_regions(link: str, match: str) -> None:
    with pytest.raises(JobError, match=match):
        parse_regions(f"{TWO}\n[[link]]\n{link}\nbandwidth_mbit_s = 10\n")


def test_fractions_add_up_and_relative_shares_need_not() -> None:
    def shares(first: str, second: str) -> tuple[float, ...]:
        text = TWO.replace("data_share = 2", f"data_share = {first}")
        return parse_regions(text.replace("memory_mb = 3538", f"data_share = {second}")).shares()

    assert shares("0.67", "0.33") == pytest.approx((0.67, 0.33))
    assert shares("1", "1") == (0.5, 0.5)
    with pytest.raises(JobError, match=r"add up to 0\.8; give fractions"):
        shares("0.5", "0.3")


def test_no_region_and_no_file(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="missing key region"):
        parse_regions("")
    with pytest.raises(JobError, match="there is no region"):
        parse_regions("region = []")
    with pytest.raises(JobError, match=r"no\.toml cannot be read: No such file"):
        load_regions(tmp_path / "no.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(JobError, match="no UTF-8"):
        load_regions(tmp_path / "binary.toml")


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    text = TWO.replace("egress_usd_per_gb = 0.1", 'file = "prices.toml"')
    (tmp_path / "regions.toml").write_text(text + '\n[region.data]\nsource = "npz"\npath = "own.npz"\n')
    first, second = load_regions(tmp_path / "regions.toml").region
    assert first.prices.file == tmp_path / "prices.toml"
    assert second.data is not None
    assert second.data.path == tmp_path / "own.npz"


def test_groups_have_the_planned_cores() -> None:
    regions = parse_regions(TWO)
    near, far = groups_of(regions)
    assert (near.name, near.platform, near.workers, near.share) == ("shanghai", "local", 14, pytest.approx(2 / 3))
    assert (far.workers, far.memory_mb) == (6, 3538), "functions of two vCPUs each"
    assert [functions_of(region, 5) for region in regions.region] == [5, 3], "of one core, and of two"
    fixed = parse_regions(TWO.replace("memory_mb = 3538", "workers = 4"))
    assert groups_of(fixed)[1].workers == 4
    with pytest.raises(JobError, match="needs two regions"):
        groups_of(parse_regions(TWO.partition("\n\n")[0]))


def test_credentials_are_found_by_name() -> None:
    [region, _] = parse_regions(TWO.replace("data_share = 2", 'credentials = "SH"')).region
    given = {"SH_AWS_ACCESS_KEY_ID": "a", "AWS_ACCESS_KEY_ID": "b", "SHX_AWS": "c", "SH_": "d"}
    assert credentials_of(region, given) == {"AWS_ACCESS_KEY_ID": "a"}
    with pytest.raises(JobError, match="region shanghai: no environment variable begins with SH_; set them"):
        credentials_of(region, {"AWS_ACCESS_KEY_ID": "b"})


def test_table_1() -> None:
    ratios = [round(factor.ratio, 3) for factor in TABLE_1]
    assert ratios == [1.0, 0.71, 0.834, 1.031, 1.108], "the last column of the table"
    for factor in TABLE_1:
        assert factor.rated == pytest.approx(factor.tflops / TABLE_1[0].tflops, rel=0.002)
        assert factor.measured == pytest.approx(TABLE_1[0].iteration_s / factor.iteration_s, rel=0.001)
    assert power_of("t4", source="rated") == 2 * KINDS["t4"].rated, "a GPU over one core, not two"
