"""`ephemeron partition` on the example, from the command line to the documents and pictures; and what it refuses."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ephemeron.cli.main import main
from ephemeron.partition import Device, Graph, Node, Tensor, graph_to_json, parse_graph, parse_plan, parse_topology, replay

pytest.importorskip("scipy", reason="no SciPy; pip install 'ephemeron[partition]'")
pytest.importorskip("ortools", reason="no OR-tools; pip install 'ephemeron[partition]'")

EXAMPLE = Path(__file__).parents[2] / "examples" / "partition"
DEVICES = str(EXAMPLE / "devices.toml")
CHAIN = Graph(
    name="chain",
    batch_size=16,
    nodes=tuple(Node(name=f"n{i}", forward_s={"cpu": 0.01}, backward_s={"cpu": 0.02}, parameter_bytes=1 << 20) for i in range(6)),
    tensors=tuple(Tensor(name=f"t{i}", producer=f"n{i}", consumers=(f"n{i + 1}",), nbytes=16 << 20) for i in range(5)),
)
TWO = """
[[devices]]
name = "a"
memory_mb = {memory}

[[devices]]
name = "b"
memory_mb = {memory}
speed = 2

[links]
bandwidth_mb_s = 1000
"""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["partition", *map(str, arguments)])


@pytest.fixture
def files(tmp_path):
    (tmp_path / "graph.json").write_text(graph_to_json(CHAIN))
    (tmp_path / "devices.toml").write_text(TWO.format(memory=4096))
    return tmp_path


def placed(files: Path, *more: object) -> dict:
    done = run(files / "graph.json", "--devices", files / "devices.toml", "--time-limit-s", 5, "--json", *more)
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The example as the README says, with fewer samples and repetitions."""
    pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")
    out = tmp_path_factory.mktemp("partition") / "cut"
    done = run(
        f"{EXAMPLE}/nets.py:transformer",
        "--devices",
        DEVICES,
        "--batch-size",
        4,
        "--micro-batches",
        4,
        "--repeats",
        3,
        "--time-limit-s",
        5,
        "--threads",
        1,
        "--out",
        out,
        "--json",
    )
    assert done.exit_code == 0, done.stderr
    return done, out


@pytest.mark.slow
def test_the_example_is_traced_measured_placed_and_proved(example):
    done, _ = example
    printed = json.loads(done.stdout)
    assert [s["stage"] for s in printed["stages"]] == list(range(len(printed["stages"])))
    assert sum(s["operators"] for s in printed["stages"]) == len(printed["placement"]) > 60
    assert all(s["peak_bytes"] <= s["needed_bytes"] <= s["memory_bytes"] for s in printed["stages"])
    assert 0 < printed["bound_s"] <= printed["value_s"]
    assert printed["gap"] == pytest.approx(1 - printed["bound_s"] / printed["value_s"])
    assert printed["value_s"] == pytest.approx(max(r["busy_s"] for r in (*printed["stages"], *printed["links"])))
    assert printed["samples_s"] == pytest.approx(4 / (4 * printed["value_s"]))
    assert {"m-TOPO", "m-ETF", "m-SCT", "Pesto", "NetSplit"} <= {m["method"] for m in printed["methods"]}
    assert all(m["longer"] >= -1e-12 for m in printed["methods"] if m["longer"] is not None)
    for step in ("tracing Transformer", "measuring", "placing", "bottleneck", "proved", "against the plan"):
        assert step in done.stderr


@pytest.mark.slow
def test_its_documents_can_be_read_and_replayed(example):
    done, out = example
    plan = parse_plan((out / "placement.json").read_text())
    graph = parse_graph((out / "graph.json").read_text())
    topology = parse_topology((out / "topology.json").read_text())
    again = replay(graph, topology, plan.placement, schedule=plan.schedule)
    assert again.bottleneck_s == pytest.approx(plan.value_s)
    assert graph.batch_size == 4
    assert {n.module for n in graph.nodes} > {"blocks.0", "blocks.5.down", "head"}
    assert json.loads(done.stdout)["files"] == [
        str(out / n) for n in ("placement.json", "graph.json", "topology.json", "schedule.svg", "report.html")
    ]


@pytest.mark.slow
def test_its_schedule_is_drawn_within_its_frame(example):
    _, out = example
    printed = json.loads(example[0].stdout)
    svg = ET.parse(out / "schedule.svg").getroot()
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    rects = [r for r in svg.iter("{http://www.w3.org/2000/svg}rect") if r.find("{*}title") is not None]
    assert len(rects) >= 2 * 4 * len(printed["stages"])
    for r in rects:
        x, y, w, h = (float(r.attrib[n]) for n in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height
    said = [r.find("{*}title").text for r in rects]
    for device in (s["device"] for s in printed["stages"]):
        assert any(s.startswith(f"{device}: forward pass") for s in said)
        assert any(s.startswith(f"{device}: backward pass") for s in said)


@pytest.mark.slow
def test_its_report_needs_nothing_else(example):
    page = (example[1] / "report.html").read_text()
    assert not re.search(r"""(src|href)=["']""", page)
    assert "default-src 'none'" in html.unescape(page)
    for words in ("transformer on three functions", "One simulated iteration", "Operators by device", "m-ETF"):
        assert words in page


@pytest.mark.slow
def test_measure_writes_a_graph_that_can_be_placed(tmp_path):
    pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")
    out = tmp_path / "graph.json"
    done = run(
        "measure",
        f"{EXAMPLE}/nets.py:convnet",
        "--batch-size",
        3,
        "--optimizer",
        "sgd",
        "--repeats",
        3,
        "--threads",
        1,
        "--out",
        out,
        "--json",
    )
    assert done.exit_code == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["graph"] == "convnet"
    assert printed["alpha"] == pytest.approx(2.0), "SGD keeps nothing but gradients"
    assert printed["heaviest"][0]["share"] == max(r["share"] for r in printed["heaviest"])
    assert "sum of operators / whole model" in done.stderr
    graph = parse_graph(out.read_text())
    assert (graph.batch_size, len(graph.nodes)) == (3, printed["operators"])
    (tmp_path / "devices.toml").write_text(TWO.format(memory=512))
    printed = placed(tmp_path, "--schedule", "gpipe")
    assert printed["schedule"]["micro_batches"] == 3, "no more than samples"


@pytest.mark.slow
def test_links_between_processes_are_measured_on_demand(tmp_path):
    pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")
    done = run(
        "measure",
        f"{EXAMPLE}/nets.py:convnet",
        "--batch-size",
        3,
        "--repeats",
        3,
        "--links",
        2,
        "--kind",
        "tiny",
        "--out",
        tmp_path / "g.json",
    )
    assert done.exit_code == 0, done.stderr
    topology = parse_topology((tmp_path / "topology.json").read_text())
    assert [d.kind for d in topology.devices] == ["tiny", "tiny"]
    assert len(topology.links) == 2
    done = run(tmp_path / "g.json", "--devices", tmp_path / "topology.json", "--time-limit-s", 3)
    assert done.exit_code == 0, done.stderr
    assert "process0" in done.stdout


def test_a_faster_device_gets_more_and_the_table_says_so(files):
    printed = placed(files)
    assert {s["device"]: s["operators"] for s in printed["stages"]} == {"a": 2, "b": 4}
    done = run("--devices", files / "devices.toml", files / "graph.json", "--time-limit-s", 3)
    assert done.exit_code == 0
    assert "bottleneck" in done.stdout
    assert done.stderr.startswith("placing 6 operators on 2 devices")


def test_recomputing_takes_less_memory_and_more_time(files):
    kept, again = (placed(files, "--schedule", "gpipe", *more) for more in ([], ["--recompute"]))
    assert again["schedule"]["recompute"]
    assert again["value_s"] > kept["value_s"]
    assert max(s["needed_bytes"] for s in again["stages"]) < max(s["needed_bytes"] for s in kept["stages"])


def test_an_iteration_takes_the_batch_whole(files):
    printed = placed(files, "--objective", "iteration")
    assert printed["schedule"] == {"kind": "plain", "micro_batches": 1, "overlap": True, "recompute": False}
    assert printed["value_s"] == printed["iteration_s"]
    assert printed["samples_s"] == pytest.approx(16 / printed["iteration_s"])


def test_too_little_memory_is_reported_with_suggestions(files):
    (files / "devices.toml").write_text(TWO.format(memory=60))
    done = run(files / "graph.json", "--devices", files / "devices.toml", "--micro-batches", 2)
    assert done.exit_code == 2
    said = " ".join(done.stderr.split())
    assert "bytes) over, most of it on" in said
    found = re.search(r"a plan fits .*micro_batches=(\d+)(.*?), or for a batch of (\d+) of 16 samples", said)
    assert found, said
    flags = ["--no-overlap"] * ("overlap=False" in found[2]) + ["--recompute"] * ("recompute" in found[2])
    assert placed(files, "--micro-batches", found[1], *flags)["stages"], "what it says is true"
    samples = int(found[3])
    smaller = replace(CHAIN, batch_size=samples, tensors=tuple(replace(t, nbytes=t.nbytes * samples // 16) for t in CHAIN.tensors))
    (files / "graph.json").write_text(graph_to_json(smaller))
    assert placed(files, "--micro-batches", 2)["stages"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nets.py:transformer"], "--batch-size is missing"),
        (["nets.py", "--batch-size", 4], "MODEL nets.py names no function; write module:function"),
        (["nowhere.py:net", "--batch-size", 4], "nowhere.py does not exist"),
        (["no_such_module:net", "--batch-size", 4], "no_such_module"),
        (["graph.json", "--batch-size", 4], "--batch-size 4 does not go with"),
        (["graph.json", "--micro-batches", 32], "--micro-batches 32 of a batch of 16"),
        (["graph.json", "--schedule", "plain"], "--schedule plain, in which nothing overlaps"),
        (["graph.json", "--objective", "iteration", "--schedule", "plain", "--recompute"], "recompute would save nothing"),
        (["absent.json"], "cannot be read"),
        (["models_of_test.py:none", "--batch-size", 4], "returned NoneType; return (nn.Module, example inputs)"),
        (["models_of_test.py:wrong", "--batch-size", 4], "cannot be trained on its example batch: RuntimeError"),
        (["models_of_test.py:raises", "--batch-size", 4], "ValueError: too small (models_of_test.py, line"),
        (["models_of_test.py:absent", "--batch-size", 4], "absent"),
    ],
)
def test_what_is_wrong_with_the_model_is_one_line(files, monkeypatch, arguments, said):
    pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")
    monkeypatch.chdir(files)
    (files / "models_of_test.py").write_text(
        "import torch\n"
        "def none(batch_size): pass\n"
        "def wrong(batch_size): return torch.nn.Linear(3, 2), torch.zeros(batch_size, 4)\n"
        "def raises(batch_size): raise ValueError('too small')\n"
    )
    done = run(*arguments, "--devices", "devices.toml")
    assert done.exit_code == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert said in lines[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("devices = 3", "devices = 3 should be a list"),
        ("[[devices]]\nname = 'a'", "devices[0]: missing key memory_mb"),
        ("[[devices]]\nname = 'a'\nmemory_mb = -1", "devices[0].memory_mb = -1.0 should be more than 0"),
        ("[[devices]]\nname = 'a'\nmemory_mb = inf", "devices[0].memory_mb = inf"),
        ("[[devices]]\nname = 'a'\nmemory = 1", "devices[0]: unknown key memory; did you mean memory_mb?"),
        ("[[devices]]\nname = 'a'\nmemory_mb = 1\nspeed = 0", "devices[0].speed = 0.0 should be more than 0"),
        ("[[devices]]\nname = 'a'\nmemory_mb = 1\nkind = 3", "kind = 3 should be text"),
        ("[[devices]]\nname = 'a'\nmemory_mb = 999\nkind = 'gpu'", "device a is of the kind gpu"),
        (TWO.format(memory=9).replace("[links]", "[elsewhere]"), "unknown key elsewhere; known keys: name, devices, links"),
        (TWO.format(memory=9).replace("bandwidth_mb_s", "bandwidth"), "links: unknown key bandwidth"),
        (TWO.format(memory=9).replace("1000", "0"), "links.bandwidth_mb_s = 0.0 should be more than 0"),
        (TWO.format(memory=9).replace('"b"', '"a"'), "device a is there twice"),
        (TWO.format(memory=9).partition("[links]")[0], "there is no link a → b"),
        (TWO.format(memory=9) + "[[links.between]]\nsource='a'\ntarget='c'\nbandwidth_mb_s=1", "links: between[0]: c is no device"),
        ("[[devices", "is not valid TOML"),
    ],
)
def test_what_is_wrong_with_the_devices_is_one_line(files, text, said):
    (files / "devices.toml").write_text(text)
    done = run(files / "graph.json", "--devices", files / "devices.toml")
    assert done.exit_code == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert "devices.toml" in lines[0] or "kind" in lines[0]
    assert said in lines[0]


def test_pairs_of_devices_may_differ_and_directions_too():
    from ephemeron.partition.graph.devices import parse_devices

    text = TWO.format(memory=9) + "[[links.between]]\nsource='b'\ntarget='a'\nbandwidth_mb_s=10\nlatency_s=0.5\n"
    both, one = parse_devices(text), parse_devices(text + "one_way = true\n")
    assert [both.link(*p).bandwidth_bytes_s for p in ("ab", "ba")] == [1e7, 1e7]
    assert [one.link(*p).bandwidth_bytes_s for p in ("ab", "ba")] == [1e9, 1e7]
    assert one.link("b", "a").latency_s == 0.5
    assert both.devices[1] == Device(name="b", kind="cpu", memory_bytes=9 << 20, speed=2.0)


@pytest.mark.parametrize("arguments", [["--help"], ["place", "--help"], ["measure", "--help"], []])
def test_help_teaches(arguments):
    done = run(*arguments)
    said = done.output
    assert "ephemeron partition" in said or "partition place" in said
    if arguments in (["--help"], []):
        for words in ("--devices", "--recompute", "devices.toml", "measure", "memory_mb"):
            assert words in said


def test_what_solvers_print_by_themselves_is_not_in_the_output() -> None:
    code = """
import ctypes
from scipy import optimize
from ephemeron.partition.placement.milp_model import MilpProgram

plain = optimize.milp

def loud(*args, **kwargs):
    ctypes.CDLL(None).puts(b"HiGHS says")
    print("another thread says")
    return plain(*args, **kwargs)

optimize.milp = loud
print("before")
program = MilpProgram()
program.row({program.variable(cost=1.0): 1.0}, least=2.0)
assert program.solve().value == 2.0
ctypes.CDLL(None).puts(b"C says")
print("after")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert sorted(done.stdout.splitlines()) == ["C says", "after", "another thread says", "before"]
    assert done.stderr == ""
