"""A profile of a sparse job whose costs are known, for tests."""

from __future__ import annotations

from ephemeron.sparse.job.prediction import Line, RunCosts, SparseCell, SparseProfile, StepCosts, cpu_step_s

COSTS = StepCosts(
    rows_factor=50.0,
    rows_power=0.7,
    load=Line(fixed=5e-4, each=6e-7),
    compute=Line(fixed=2e-4, each=1e-7),
    exchange=Line(fixed=4e-4, each=2e-8),
    frame_s=1e-4,
    shard=Line(fixed=2.56e-4, each=4.4e-8),
)
RUN = RunCosts(launch_s=0.5, start_s=1.5, start_cpu_s=1.2, exit_s=0.1, partition_row_s=4e-7, read_s=0.05, evaluation_row_s=1e-6)


def profile_of(costs: StepCosts) -> SparseProfile:
    """What measurements would give that have these costs and no errors."""
    cells = []
    for size, shards in ((250, 1), (1000, 1), (4000, 1), (4000, 2)):
        load_s, compute_s = costs.load.at(size), costs.compute.at(size)
        cells.append(
            SparseCell(
                batch_size=size,
                shards=shards,
                steps=200,
                rows=costs.rows(size),
                load_cpu_s=load_s,
                compute_cpu_s=compute_s,
                function_cpu_s=load_s + compute_s + costs.exchange_s(size, shards),
                shard_cpu_s=costs.shard_s(size, shards),
                step_us={"compute": 1e6 * cpu_step_s(costs, size, shards)},
            )
        )
    return SparseProfile(
        job="job", program="logistic", machine="a machine", measured_on="2026-11-24", load_average=0.5, cells=tuple(cells), run=RUN
    )
