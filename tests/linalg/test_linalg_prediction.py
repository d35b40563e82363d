"""Predictions: exact in tasks, and in bytes where tiles are whole; the same shapes of tiles as the kernels make."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from ephemeron import FunctionExecutor, linalg
from ephemeron.cli.main import main
from ephemeron.errors import JobError
from ephemeron.linalg.algorithms import equations, jacobi, products, qr, spectral
from ephemeron.linalg.analysis.unrolled import UnrolledGraph
from ephemeron.linalg.interpret import run_node
from ephemeron.linalg.language.kernel import load_kernel
from ephemeron.linalg.language.program import TileReference
from ephemeron.linalg.matrices.stored import StoredMatrix
from ephemeron.linalg.prediction.planner import MOST_TASKS, TaskSeconds, scheduled
from ephemeron.linalg.prediction.program_work import ProgramWork, output_shapes

TILE = 4
PROGRAMS = [
    (equations.cholesky, {"N": 4}, {"A": (4, 4)}),
    (products.matmul, {"M": 2, "N": 3, "K": 3}, {"A": (2, 3), "B": (3, 3)}),
    (equations.lu, {"M": 4, "N": 4}, {"A": (4, 4)}),
    (qr.qr, {"M": 4, "N": 3}, {"A": (4, 3)}),
    (spectral.upper_band, {"M": 3, "N": 3}, {"A": (3, 3)}),
    (spectral.hermitian_band, {"N": 3}, {"A": (3, 3)}),
    (qr.tsqr, {"M": 5}, {"A": (5, 1)}),
    (jacobi.jacobi_svd, {"M": 3, "N": 4, "W": 2}, {"A": (3, 4)}),
    (spectral.randomized_svd, {"M": 3, "N": 2, "R": 2, "L": 2}, {"A": (3, 2), "O": (2, 1)}),
]


def matrix(name, tiles, *, tile=TILE):
    return StoredMatrix(
        store="planned:", name=name, rows=tiles[0] * tile, columns=tiles[1] * tile, tile_rows=tile, tile_columns=tile, dtype="float64"
    )


@pytest.mark.parametrize(("program", "sizes", "inputs"), PROGRAMS, ids=[p[0].name for p in PROGRAMS])
def test_work_is_that_of_the_kernels(program, sizes, inputs):
    rng = np.random.default_rng(1)
    matrices = {name: matrix(name, tiles) for name, tiles in inputs.items()}
    work = ProgramWork(program, sizes, matrices, {}, 8)
    graph, tiles = UnrolledGraph(program, sizes), {}
    for name, (down, across) in inputs.items():
        g = rng.standard_normal((down * TILE, across * TILE))
        g = g @ g.T + np.eye(len(g)) if program.name in ("cholesky", "hermitian_band") else g
        tiles |= {(name, (i, j)): g[i * TILE : (i + 1) * TILE, j * TILE : (j + 1) * TILE] for i in range(down) for j in range(across)}
    flops = read = written = 0.0
    for node in graph.nodes:
        call, given = graph.call(node), iter(graph.reads(node))
        kernel = load_kernel(dict(program.kernels)[call.kernel])
        arguments = [
            tiles[next(given)].shape if isinstance(a, TileReference) else work.analysis.bindings(node).get(str(a), 0)
            for a in call.arguments
        ]
        options = dict(call.options)
        made = run_node(graph, node, tiles)
        assert output_shapes(kernel, arguments, options) == tuple(t.shape for t in made.values()), node
        flops += kernel.flops(*arguments, **options)
        read += sum(tiles[tile].nbytes for tile in dict.fromkeys(graph.reads(node)))
        written += sum(t.nbytes for t in made.values())
        tiles |= made
    statements = work.statements
    assert sum(s.tasks for s in statements) == graph.count()
    assert sum(s.tasks * s.flops for s in statements) == pytest.approx(flops, rel=0.02)
    assert sum(s.tasks * s.bytes_read for s in statements) == pytest.approx(read, rel=0.02)
    assert sum(s.tasks * s.bytes_written for s in statements) == pytest.approx(written, rel=0.02)


def second(line):
    return TaskSeconds(busy=1.0, latency=1.0)


def test_schedules_of_small_and_large_graphs():
    n = 12
    one = scheduled(equations.cholesky, {"N": n}, second, work_s=364, executors=1)
    assert one.seconds == n * (n + 1) * (n + 2) // 6 == 364
    many = scheduled(equations.cholesky, {"N": n}, second, work_s=364, executors=1000)
    assert many.seconds == many.chain_s == 3 * n - 2
    n = 64
    tasks = n * (n + 1) * (n + 2) // 6
    assert tasks > 8 * MOST_TASKS
    large = scheduled(equations.cholesky, {"N": n}, second, work_s=tasks, executors=8)
    assert large.chain_s == pytest.approx(3 * n - 2, rel=0.05)
    assert tasks / 8 < large.seconds < tasks / 8 + 3 * n
    assert large.temporary_tiles == pytest.approx(n * (n - 1) / 2, rel=0.3)


def test_a_prediction_reads_nothing_and_takes_no_longer_for_large_matrices():
    huge = linalg.BigMatrix(matrix("no-such-matrix", (1000, 1000), tile=512))
    with FunctionExecutor("simulated", max_workers=100) as executor:
        p = linalg.predict(linalg.cholesky, huge, executor=executor)
        less = linalg.predict("cholesky", linalg.BigMatrix(matrix("a", (10, 10), tile=512)), executor=executor)
    assert p.tasks == 1000 * 1001 * 1002 // 6
    assert p.flops == pytest.approx((1000 * 512) ** 3 / 3, rel=0.01)
    assert p.output_bytes == pytest.approx((1000 * 512) ** 2 * 4, rel=0.01)
    assert p.seconds > p.chain_s > less.chain_s
    assert p.cost_usd > 1000 * less.cost_usd > 0
    with pytest.raises(JobError, match="no computation 'choleski'"):
        linalg.predict("choleski", huge)
    with pytest.raises(JobError, match="square"):
        linalg.predict("cholesky", huge[:512, :])


@pytest.mark.slow
def test_what_was_predicted_is_what_was_done(tmp_path):
    rng = np.random.default_rng(0)
    g, store = rng.standard_normal((96, 96)), (tmp_path / "m").as_uri()
    a = linalg.BigMatrix.from_numpy(g @ g.T + np.eye(96), tile=32, store=store)
    b = linalg.BigMatrix.from_numpy(g[:, :32].copy(), tile=32, store=store)
    cases = {"matmul": (a, b), "lu": (a,), "solve": (a, b), "lstsq": (a, b)}  # solve computes the factors of lu again
    with FunctionExecutor("local", progress=False, max_workers=2) as executor:
        for name, matrices in cases.items():
            p = linalg.predict(name, *matrices, executor=executor)
            made = getattr(linalg, name)(*matrices, executor=executor)
            report = (made if isinstance(made, linalg.BigMatrix) else made[1]).report
            assert report.tasks == p.tasks, name
            if not report.resumed:
                assert report.bytes_read == pytest.approx(p.bytes_read, rel=0.05), name
                assert report.bytes_written == pytest.approx(p.bytes_written, rel=0.05), name
        x = linalg.solve(a, b, executor=executor).to_numpy()
    np.testing.assert_allclose(a.to_numpy() @ x, b.to_numpy(), atol=1e-9)
    assert executor.bill().cost_usd == pytest.approx(
        sum(linalg.predict(n, *m, executor=executor).cost_usd for n, m in cases.items()), rel=2
    )


def test_the_command_predicts(tmp_path):
    np.save(tmp_path / "A.npy", np.eye(600))
    run = CliRunner().invoke(
        main, ["linalg", "cholesky", str(tmp_path / "A.npy"), "--out", str(tmp_path / "L.npy"), "--tile", "100", "--dry-run", "--json"]
    )
    assert run.exit_code == 0, run.output
    found = json.loads(run.output)
    assert found["tasks"] == 6 * 7 * 8 // 6
    assert (found["functions"], found["cost_usd"] > 0) == (found["executors"], True)
    assert not (tmp_path / "L.npy").exists()
    run = CliRunner().invoke(main, ["linalg", "cholesky", str(tmp_path / "A.npy"), "--out", str(tmp_path / "L.npy"), "--dry-run"])
    assert "nothing was started" in run.output
    old = CliRunner().invoke(main, ["linalg", "cholesky", str(tmp_path / "A.npy"), "--predict"])
    assert (old.exit_code, old.output.strip()) == (2, "error: there is no --predict; use --dry-run")
