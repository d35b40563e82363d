"""Newer prices from the price list of AWS, served from this machine as AWS serves it, cut to what is read."""

from __future__ import annotations

import functools
import http.server
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ephemeron.cli.main import main
from ephemeron.cli.prices import SERVICES as OFFERED
from ephemeron.prices import load_machines, load_prices
from ephemeron.prices.aws_list import SERVICES, file_text
from ephemeron.prices.reading import read

LISTS = Path(__file__).parent / "price_list"
LAMBDA = "offers/v1.0/aws/AWSLambda/20261116190258/us-east-1/index.csv"
INDEX = "offers/v1.0/aws/AWSLambda/current/region_index.json"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        cut = Path(self.translate_path(self.path)).with_suffix(".cut")
        if not cut.exists():
            return super().do_GET()
        data = cut.read_bytes()  # of what is announced, half
        self.send_response(200)
        self.send_header("Content-Length", str(2 * len(data)))
        self.end_headers()
        self.wfile.write(data)
        return None


@pytest.fixture
def lists(tmp_path: Path) -> Path:
    """A copy of the lists that may be changed."""
    return Path(shutil.copytree(LISTS, tmp_path / "lists"))


@pytest.fixture
def url(lists: Path) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(lists))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def refresh(url: str, out: Path, *more: str) -> Result:
    return CliRunner().invoke(main, ["prices", "refresh", "--base-url", url, "--out", str(out), *more], catch_exceptions=False)


def test_newest_prices_are_written_as_a_file_that_every_command_reads(url: str, tmp_path: Path) -> None:
    out = tmp_path / "prices.toml"
    done = refresh(url, out)
    assert done.exit_code == 0, done.output
    assert "functions.gb_second_usd  1.66667e-05, as before  (2026-11-16)" in done.stdout
    assert f"use it with: --prices {out}" in done.stdout
    made, before = read(out), read()
    assert (made.name, made.as_of) == ("aws-us-east-1", "2026-11-16")
    assert made.functions is not None
    assert made.functions.source == "AWS price list, AWSLambda, us-east-1, first tier, on demand"
    assert made.fargate is not None
    assert made.fargate.as_of == "2026-11-20"
    for service in ("objects", "cache", "memory"):
        new, old = load_prices(service, out), load_prices(service)
        assert new.gb_second_usd == old.gb_second_usd
        assert (new.put_usd, new.get_usd, new.byte_usd, new.gb_hour_usd) == (old.put_usd, old.get_usd, old.byte_usd, old.gb_hour_usd)
    assert made.machine == before.machine, "what was not fetched keeps its date and source"
    planned = CliRunner().invoke(main, ["prices", "list", "--prices", str(out), "--json"])
    functions = json.loads(planned.stdout.splitlines()[0])
    assert functions["list"] == "aws-us-east-1"
    assert functions["as_of"] == "2026-11-16"


def test_changes_are_told_and_prices_of_another_region_are_marked(url: str, tmp_path: Path) -> None:
    out = tmp_path / "prices.toml"
    done = refresh(url, out, "--region", "eu-central-1", "--service", "lambda", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["name"] == "aws-eu-central-1"
    assert {each["price"]: (each["before_usd"], each["usd"]) for each in told["prices"]} == {
        "functions.gb_second_usd": (0.0000166667, 0.000017),
        "functions.arm64_gb_second_usd": (0.0000133334, 0.0000133334),
        "functions.invocation_usd": (0.0000002, 0.00000022),
    }
    made = read(out)
    assert made.functions is not None
    assert made.functions.verified
    assert made.objects is not None
    assert not made.objects.verified
    assert made.objects.source.endswith("; of aws-us-east-1, not of eu-central-1")
    assert not any(machine.verified for machine in made.machine)
    assert (
        "functions.gb_second_usd  1.66667e-05 → 1.7e-05  (2026-11-16)"
        in refresh(url, out, "--region", "eu-central-1", "--service", "lambda").stdout
    )
    again = refresh(url, out, "--region", "eu-central-1", "--service", "lambda", "--from", str(out))
    assert "functions.gb_second_usd  1.7e-05, as before" in again.stdout
    assert read(out) == made


def test_machines_are_those_of_the_file_on_demand_linux_and_shared(url: str, tmp_path: Path) -> None:
    base = tmp_path / "base.toml"
    base.write_text(file_text(read()).replace("0.1008", "0.2"))
    done = refresh(url, tmp_path / "prices.toml", "--service", "ec2", "--from", str(base))
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[:-1] == [
        "server.hour_usd  0.096, as before  (2026-11-16)",
        "machine m5.large.hour_usd  0.096, as before  (2026-11-16)",
        "machine m7i.large.hour_usd  0.2 → 0.1008  (2026-11-16)",
        "gpu g5.xlarge.hour_usd  1.006 → 1.01  (2026-11-16)",
    ]
    dates = {machine.name: machine.as_of for machine in load_machines(tmp_path / "prices.toml")}
    assert (dates["m7i.large"], dates["c7i.large"]) == ("2026-11-16", "2025-06-01")


def test_a_written_file_is_the_one_that_was_read(tmp_path: Path) -> None:
    (tmp_path / "prices.toml").write_text(file_text(read()))
    assert read(tmp_path / "prices.toml") == read()


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        (
            LAMBDA,
            "AWS-Lambda-Requests",
            "AWS-Lambda-Calls",
            "price list of AWSLambda for us-east-1 has no price for functions.invocation_usd",
        ),
        (LAMBDA, '"6000000000","15000000000"', '"0","15000000000"', "has 2 prices for functions.gb_second_usd: 1.5e-05, 1.66667e-05"),
        (LAMBDA, '"Group"', '"Groups"', "has no column Group"),
        (LAMBDA, '"SKU"', '"Name"', "has no row of column names"),
        (LAMBDA, '"0.0000133334"', '"free"', "'free' is no price"),
        (LAMBDA, "2026-11-16T19", "yesterday", "'yesterday:02:58Z' is no date of publication"),
        (INDEX, "regions", "places", "is no index of regions"),
        (INDEX, "{", "<html>", "is no index of regions"),
    ],
)
def test_a_list_that_is_not_as_expected_is_refused_in_one_line(
    file: str, old: str, new: str, says: str, lists: Path, url: str, tmp_path: Path
) -> None:
    text = (lists / file).read_text()
    assert old in text
    (lists / file).write_text(text.replace(old, new))
    done = refresh(url, tmp_path / "prices.toml")
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert says in line
    assert line.endswith("write the prices by hand, into a file for --prices")
    assert not (tmp_path / "prices.toml").exists()


def test_a_price_list_that_does_not_answer_as_a_whole_is_told_in_one_line(lists: Path, url: str, tmp_path: Path) -> None:
    out = tmp_path / "prices.toml"
    nobody = refresh("http://127.0.0.1:9", out)
    assert (nobody.exit_code, "cannot be reached: Connection refused; write the prices by hand" in nobody.stderr) == (1, True)
    (lists / INDEX).rename(lists / "offers/v1.0/aws/AWSLambda/current/region_index.cut")
    half = refresh(url, out)
    assert half.exit_code == 1
    assert "bytes; try again, or write the prices by hand" in half.stderr
    (lists / "offers/v1.0/aws/AWSLambda/current/region_index.cut").unlink()
    gone = refresh(url, out)
    assert (gone.exit_code, "answers 404 File not found" in gone.stderr) == (1, True)
    assert not out.exists()
    assert {len(done.stderr.splitlines()) for done in (nobody, half, gone)} == {1}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--region", "us-eats-1"], "price list of AWSLambda has no region 'us-eats-1'; did you mean us-east-1?"),
        (["--base-url", "http://prices.example"], "is no address of a price list; give https://HOST; http is for this machine alone"),
        (["--base-url", "ftp://127.0.0.1"], "is no address of a price list"),
        (["--from", "no-such.toml"], "price file no-such.toml does not exist"),
        (["--out", "no-such/prices.toml"], "--out no-such/prices.toml cannot be written: No such file or directory"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(more: list[str], says: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = refresh(url, tmp_path / "prices.toml", *more)
    assert (done.exit_code, says in done.stderr) == (2, True), done.output


def test_the_built_in_list_is_shown_with_dates_and_sources() -> None:
    shown = CliRunner().invoke(main, ["prices", "list"])
    assert shown.exit_code == 0, shown.output
    assert "aws-us-east-1, 2025-06-01 (built in)" in shown.stdout
    assert "spot" in shown.stdout
    assert "share 0.4" in shown.stdout
    rows = {row["table"]: row for row in map(json.loads, CliRunner().invoke(main, ["prices", "list", "--json"]).stdout.splitlines())}
    assert rows["machine m7g.xlarge"]["verified"] is False
    assert rows["limits"]["values"] == {"burst": 1000, "burst_s": 10.0}
    assert rows["functions"]["values"]["gb_second_usd"] == 0.0000166667


def test_services_of_the_command_are_those_of_the_list() -> None:
    assert tuple(SERVICES) == OFFERED
