"""The simulation behind `benchmarks.linalg_scale`: it runs every task once, and no faster than its world allows."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from benchmarks.linalg_scale import simulate
from benchmarks.linalg_scale_control import queries_of
from benchmarks.linalg_scale_model import Simulated, World, curve
from benchmarks.linalg_scale_picture import parallelism
from benchmarks.provisioner import ScalingLimits

from ephemeron.linalg.algorithms.equations import cholesky
from ephemeron.linalg.analysis.unrolled import UnrolledGraph


@pytest.mark.parametrize("static", [True, False])
def test_a_factorisation_on_simulated_functions(static):
    world = World(functions=4, lifetime_s=60.0, cached_tiles=0)
    limits = ScalingLimits(most=4, hold_s=20.0)
    out = Simulated(cholesky, {"N": 5}, tile=4096, world=world, limits=limits, static=static).run()
    graph = UnrolledGraph(cholesky, {"N": 5})
    tile = 8 * 4096**2
    assert out.tasks == graph.count() == 35
    assert out.bytes_written == sum(len(graph.writes(node)) for node in graph.nodes) * tile
    assert out.bytes_read == sum(len(set(graph.reads(node))) for node in graph.nodes) * tile
    assert out.computing_s == pytest.approx(out.flops / world.flops)
    assert out.seconds > max(out.computing_s / 4, out.bytes_read / 75e6 / 4)
    assert out.computing_s < out.active_s <= 4 * out.seconds
    assert out.most_functions <= 4
    assert out.starts == 4 if static else out.starts > 4, "lifetimes end"
    rows = curve(out, world, parts=8)
    assert sum(row["computing"] for row in rows) / 8 * out.seconds * 4 == pytest.approx(out.computing_s, rel=0.01)


def test_tiles_that_a_function_keeps_are_not_read_again():
    runs = [
        Simulated(cholesky, {"N": 5}, tile=1024, world=World(functions=1, cached_tiles=n), limits=ScalingLimits(most=1), static=True).run()
        for n in (0, 100)
    ]
    graph = UnrolledGraph(cholesky, {"N": 5})
    inputs = {tile for node in graph.nodes for tile in graph.reads(node) if tile[0] == "A"}
    assert runs[1].bytes_read == len(inputs) * 8 * 1024**2
    assert runs[1].bytes_read < runs[0].bytes_read


def test_followers_do_not_wait_for_the_store():
    runs = [
        Simulated(
            cholesky,
            {"N": 6},
            tile=2048,
            world=World(functions=8, followers=followers, cached_tiles=6),
            limits=ScalingLimits(most=8),
            static=True,
        ).run()
        for followers in (False, True)
    ]
    assert runs[1].seconds < 0.9 * runs[0].seconds
    assert [r.tasks for r in runs] == [56, 56]
    assert runs[1].computing_s == pytest.approx(runs[0].computing_s)
    assert runs[1].bytes_written == runs[0].bytes_written
    chain_s = sum(k * 2048**3 / 3e10 for k in [1 / 3] * 6 + [1, 1] * 5)  # factors, solutions, updates of the diagonal
    assert runs[1].seconds > chain_s


def test_the_picture_of_parallelism_has_both_panels_for_each_run():
    row = simulate("qr", 4, 256, functions=8, parts=6)
    root = ElementTree.fromstring(parallelism([row, row]))
    classes = [path.get("class") for path in root.iter("{http://www.w3.org/2000/svg}path")]
    assert classes == ["tasks", "functions", "running", "computing"] * 2
    assert all(p["computing"] <= p["functions"] / 8 + 1e-6 for p in row["utilisation"])
    assert row["core_seconds"]["computing"] <= row["core_seconds"]["functions"]


def test_queries_take_the_same_memory_at_any_size_and_number():
    rows = [queries_of(cholesky, tiles, 20) for tiles in (10, 10**6)]
    few, many = (row["peak_memory_kb"]["peak"] for row in rows)
    assert rows[1]["tasks"] > 10**17
    assert many[1] < 1.5 * few[1]
    assert many[1] < 2.5 * many[0], "20 queries instead of 2"
