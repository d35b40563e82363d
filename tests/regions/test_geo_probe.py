"""`ephemeron regions probe`: links measured by functions of the regions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ephemeron.cli.main import main
from ephemeron.errors import JobError
from ephemeron.regions.probing import with_links
from ephemeron.regions.region_files import RegionLink, load_regions, parse_regions

REGIONS = """# two regions of this machine
communicator = "tcp"

[[region]]
name = "east"
platform = "local"
workers = 1
listen = "127.0.0.1:0"

[[link]]
source = "east"
target = "west"
bandwidth_mbit_s = 1
usd_per_gb = 0.05

[[region]]   # only connects outwards
name = "west"
platform = "local"
workers = 1
"""


@pytest.mark.slow
def test_links_are_measured_and_written(tmp_path: Path) -> None:
    path = tmp_path / "regions.toml"
    path.write_text(REGIONS)
    ran = CliRunner().invoke(main, ["regions", "probe", str(path), "--mb", "2", "--write", "--json"], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    links = json.loads(ran.output)["link"]
    assert [(link["source"], link["target"]) for link in links] == [("east", "west"), ("west", "east")]
    assert all(link["bandwidth_mbit_s"] > 1 and 0 < link["latency_s"] < 5 for link in links)
    found = load_regions(path).link_of("west", "east")
    assert found is not None
    assert found.bandwidth_mbit_s == links[1]["bandwidth_mbit_s"]
    assert found.usd_per_gb == 0.05


def test_other_tables_and_comments_stay() -> None:
    link = RegionLink(source="west", target="east", bandwidth_mbit_s=80.0, latency_s=0.02, one_way=True)
    text = with_links(REGIONS, [link])
    assert text.startswith("# two regions")
    assert "# only connects outwards" in text
    assert parse_regions(text).link == (link,)
    assert parse_regions(text).region == parse_regions(REGIONS).region


@pytest.mark.parametrize(
    ("change", "said"), [(("local", "simulated"), "is simulated"), (('platform = "local"', 'platform = "openfaas"'), "need a store")]
)
def test_regions_that_cannot_be_measured_are_refused(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    path = tmp_path / "regions.toml"
    path.write_text(REGIONS.replace(*change))
    ran = CliRunner().invoke(main, ["regions", "probe", str(path)])
    assert ran.exit_code != 0
    assert said in (str(ran.exception) if isinstance(ran.exception, JobError) else ran.output)
