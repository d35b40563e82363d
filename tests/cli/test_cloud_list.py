"""`ephemeron cloud list`, and the flags that belong to one platform."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ephemeron.cli.main import main
from ephemeron.training.driver.launching.launch import platform_limits
from ephemeron.training.job import PLATFORMS

DIGITS = Path(__file__).parents[2] / "examples" / "digits" / "job.toml"


def test_every_platform_is_listed_with_its_limits_and_where_prices_come_from() -> None:
    ran = CliRunner().invoke(main, ["cloud", "list", "--json"])
    assert ran.exit_code == 0, ran.output
    found = {row["name"]: row for row in map(json.loads, ran.stdout.splitlines())}
    assert tuple(found) == PLATFORMS
    for name, row in found.items():
        assert row["limits"]["lifetime_s"] == platform_limits(name).lifetime_s
        assert row["available"] == (not row["missing"])
        assert "us-east-1" in row["prices"]
        assert row["prices"].startswith("as if on AWS: ") == (name not in ("aws", "aws-microvm"))


@pytest.mark.parametrize(("module", "platform"), [("ray", "ray"), ("lithops", "lithops"), ("boto3", "aws")])
def test_what_is_missing_is_named_with_the_command_that_installs_it(module: str, platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    ran = CliRunner().invoke(main, ["cloud", "list", "--json"])
    row = next(r for r in map(json.loads, ran.stdout.splitlines()) if r["name"] == platform)
    assert (row["available"], row["missing"]) == (False, [module])
    assert row["install"] == f"pip install 'ephemeron[{platform}]'"


def test_the_table_names_all_of_them() -> None:
    out = CliRunner().invoke(main, ["cloud", "list"]).output
    assert [name for name in PLATFORMS if f"\n{name} " not in out] == []
    assert "per GB-second" in out


@pytest.mark.parametrize("flag", ["--ray-address", "--lithops-backend"])
def test_a_flag_of_another_platform_is_refused(flag: str) -> None:
    ran = CliRunner().invoke(main, ["train", str(DIGITS), "--workers", "2", flag, "x"])
    assert ran.exit_code == 2
    assert "platform local takes no" in ran.output
