"""The simulation behind `benchmarks.linalg_scale`: it runs every task once, and no faster than its world allows."""

from __future__ import annotations

import pytest
from benchmarks.linalg_scale_model import Simulated, World, curve

from ephemeron.functions.tasks.scaling import ScalingLimits
from ephemeron.linalg.algorithms.cholesky import cholesky
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
    ]  # fmt: skip
    graph = UnrolledGraph(cholesky, {"N": 5})
    inputs = {tile for node in graph.nodes for tile in graph.reads(node) if tile[0] == "A"}
    assert runs[1].bytes_read == len(inputs) * 8 * 1024**2
    assert runs[1].bytes_read < runs[0].bytes_read
