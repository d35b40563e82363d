"""Time and cost of a sparse run, from the parts of its steps. Pure: no clock, no I/O.

A step of a function has four parts (Cirrus, survey 2.1, figure 3): it takes a minibatch, gets its rows of the model, computes,
and sends the gradient. Of each the model knows the CPU time, as lines over the batch size or over the rows that a minibatch
needs. The rest is a closed queueing network: W functions take turns at the shards, all of which have a part of every step.
Three rates bound the steps per second:

- of the functions: the CPU time of a step at a function's share of a vCPU, where loading ahead uses the time in which the function
  waits for the shards;
- of the shards: mean value analysis (Reiser and Lavenberg, 1980) of W customers and one station. More shards divide what rows
  cost, and never the fixed cost of a request, since every shard has a part of every request;
- of this machine's cores, where functions, shards and the client's evaluations share them.

The lowest of them, divided by the pace at which the machine was measured, is the rate.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from ephemeron.config.paths import replace_file
from ephemeron.config.typed import AtLeast, Count, NonNegative, Positive, build, plain
from ephemeron.errors import JobError
from ephemeron.events import Traffic
from ephemeron.prices import Prices
from ephemeron.sparse.job.function import LAST_S
from ephemeron.sparse.store.journal import JournalOptions

Bottleneck = Literal["functions", "shards", "cores"]
CACHED_PARTITIONS = 2
"""Partitions of which a function keeps the rows; a dataset that has more is decoded again in each epoch."""
LOOK_S = 0.2
"""Interval at which a client looks at the reports of functions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A cost that grows with a size: `fixed + each * size`."""

    fixed: NonNegative = 0.0
    each: NonNegative = 0.0

    def at(self, size: float) -> float:
        """Of one size."""
        return self.fixed + self.each * size


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """What a step costs. All times are CPU seconds."""

    rows_factor: Positive
    rows_power: NonNegative
    """A minibatch of B samples needs `rows_factor * B ** rows_power` rows of the model: frequent features are shared."""
    load: Line
    """At the function, over samples: cuts a minibatch and finds its rows."""
    compute: Line
    """At the function, over samples: the gradient."""
    exchange: Line
    """At the function, over rows: gets the rows and sends the gradient."""
    frame_s: NonNegative = 0.0
    """At the function, for each shard beyond the first."""
    shard: Line
    """At each shard, over its part of the rows: answers the get and applies the gradient."""
    pace: Annotated[float, AtLeast(1)] = 1.0
    """Seconds by the clock that a step of one function took when it was measured, over those that follow from its CPU times: what
    waking up costs, and other work on the machine."""

    def rows(self, batch: float) -> float:
        """Rows that a minibatch needs."""
        return float(self.rows_factor * batch**self.rows_power)

    def exchange_s(self, batch: float, shards: int) -> float:
        """CPU seconds of a function for the requests of a step."""
        return self.exchange.at(self.rows(batch)) + self.frame_s * (shards - 1)

    def shard_s(self, batch: float, shards: int) -> float:
        """CPU seconds of each shard for a step."""
        return self.shard.at(self.rows(batch) / shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCosts:
    """What a run costs beside its steps."""

    launch_s: NonNegative
    """Seconds until the shards and tables are there."""
    start_s: NonNegative
    """Seconds from the call of a function to its first request for a minibatch."""
    start_cpu_s: NonNegative
    """CPU seconds of that."""
    exit_s: NonNegative
    """Seconds from a function's last report to the end of its bill."""
    partition_row_s: NonNegative
    """CPU seconds to read and decode a row of a partition."""
    read_s: NonNegative
    """Seconds to read all tables for an evaluation."""
    evaluation_row_s: NonNegative
    """CPU seconds to evaluate a row of the test data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseWork:
    """What is trained."""

    rows: tuple[int, ...]
    """Of each partition of the training data."""
    test_rows: int = 0
    """0: no test data, and evaluations cost nothing."""
    epochs: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseConfiguration:
    """How it is trained, and where."""

    workers: int
    shards: int
    batch_size: int
    """Samples of a step of one function."""
    memory_mb: int
    lifetime_s: float
    """Time limit of an invocation."""
    servers: int
    """Shards that are paid by the hour; 0: the store is given."""
    mb_per_vcpu: float = 1769.0
    cores: float | None = None
    """Of the machine that functions, shards and client share; None: each has its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparsePrediction:
    """Time and cost of a run to its end."""

    seconds: float
    """From the run's start to its end."""
    cost_usd: float
    functions_usd: float
    servers_usd: float
    """Of the shards that the client starts: a server each, and requests for their log."""
    start_s: float
    """Until the first step."""
    epoch_s: float
    evaluation_s: float
    """Of one epoch; the last one is waited for."""
    steps_per_s: float
    """Of all functions together."""
    bottleneck: Bottleneck
    cpu_s: float
    """CPU seconds of all functions together."""
    invocations: int
    """More than functions where a share takes longer than the time limit."""


def steps_per_second(workers: int, think_s: float, service_s: float) -> float:
    """Throughput of a closed network with one station, by mean value analysis (Reiser and Lavenberg, 1980).

    Args:
        workers: customers.
        think_s: seconds of a customer between two requests.
        service_s: seconds of the station for a request.
    """
    waiting, rate = 0.0, 0.0
    for customers in range(1, workers + 1):
        response = service_s * (1.0 + waiting)
        rate = customers / (think_s + response)
        waiting = rate * response
    return rate


def cpu_step_s(steps: StepCosts, batch: int, shards: int) -> float:
    """Seconds of a step of one function alone with a whole vCPU, as far as CPU times explain it."""
    own_s = steps.compute.at(batch) + steps.exchange_s(batch, shards)
    return max(steps.load.at(batch) + own_s, own_s + steps.shard_s(batch, shards))


def predict(steps: StepCosts, run: RunCosts, work: SparseWork, c: SparseConfiguration, prices: Prices) -> SparsePrediction:
    """Time and cost of a run.

    Args:
        steps, run: measured costs.
        work: what is trained.
        c: how.
        prices: of functions, and of a server for each shard that the client starts.
    """
    vcpus = min(1.0, c.memory_mb / c.mb_per_vcpu)
    total = sum(-(-rows // c.batch_size) for rows in work.rows)
    share = -(-total // c.workers)
    decode_s = run.partition_row_s * _decoded_rows(work.rows, c.workers)
    again = len(work.rows) > CACHED_PARTITIONS
    each_epoch_s, once_s = (decode_s, 0.0) if again else (0.0, decode_s)
    load_s = steps.load.at(c.batch_size) + each_epoch_s / share
    own_s = steps.compute.at(c.batch_size) + steps.exchange_s(c.batch_size, c.shards)
    shard_s = steps.shard_s(c.batch_size, c.shards)
    evaluation_s = 0.0 if not work.test_rows else run.read_s + run.evaluation_row_s * work.test_rows
    rates: dict[Bottleneck, float] = {
        "functions": c.workers * vcpus / (load_s + own_s),
        "shards": steps_per_second(c.workers, own_s / vcpus, shard_s),
    }
    if c.cores is not None:
        cpu_s = load_s + own_s + c.servers * shard_s + evaluation_s / total
        rates["cores"] = c.cores / cpu_s
    # The epoch is over when the largest share is, and each function has its part of the rate.
    bottleneck = min(rates, key=lambda name: rates[name])
    rate = rates[bottleneck] / steps.pace
    epoch_s = share * c.workers / rate
    start_s = run.start_s + once_s / vcpus
    if c.cores is not None:
        start_s = max(start_s, c.workers * (run.start_cpu_s + once_s) / c.cores)
    train_s = work.epochs * epoch_s
    useful_s = max(1e-3, c.lifetime_s - min(LAST_S, c.lifetime_s / 4) - start_s)
    calls = max(1, math.ceil(train_s / useful_s))
    function_s = train_s + calls * (start_s + run.exit_s)
    last_s = max(run.exit_s, evaluation_s + (LOOK_S if evaluation_s else 0.0))
    begun_s = run.launch_s + calls * start_s + (calls - 1) * run.exit_s
    seconds = begun_s + max(train_s + last_s, epoch_s + work.epochs * evaluation_s)
    functions_usd = prices.functions_usd(c.workers * function_s * c.memory_mb / 1024, c.workers * calls)
    logged = round(c.servers * train_s * min(rate, 1 / JournalOptions().log_interval_s))
    log = Traffic(puts=logged, gets=logged, polls=logged)  # read back, then a look whether it is still the shard's
    servers_usd = c.servers * prices.server_hour_usd * seconds / 3600 + prices.storage_usd(log)
    return SparsePrediction(
        seconds=seconds,
        cost_usd=functions_usd + servers_usd,
        functions_usd=functions_usd,
        servers_usd=servers_usd,
        start_s=run.launch_s + start_s,
        epoch_s=epoch_s,
        evaluation_s=evaluation_s,
        steps_per_s=rate,
        bottleneck=bottleneck,
        invocations=c.workers * calls,
        cpu_s=c.workers * (calls * run.start_cpu_s + once_s) + work.epochs * total * (load_s + own_s),
    )


def _decoded_rows(rows: Sequence[int], workers: int) -> float:
    """Rows of the partitions that one function reads in an epoch: its share, and the other rows of those at its ends."""
    touched = min(len(rows), len(rows) / workers + (workers > 1))
    return touched * sum(rows) / len(rows)


# -- profile of a sparse job --------------------------------------------------------------------------------------


FORMAT: Literal["ephemeron sparse profile 1"] = "ephemeron sparse profile 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseCell:
    """Mean of some hundred steps of one function."""

    batch_size: Count
    shards: Count
    steps: Count
    """Of which it is the mean."""
    rows: Positive
    """Rows of all tables that a step needs."""
    load_cpu_s: NonNegative
    compute_cpu_s: NonNegative
    function_cpu_s: NonNegative
    """All of the function: loading, computing, and its part of the requests."""
    shard_cpu_s: NonNegative
    """Of one shard."""
    step_us: dict[str, float]
    """Microseconds of a step by phase, as the function saw them: `get_minibatch`, `get_model`, `compute`, `send_gradient`."""

    @property
    def exchange_cpu_s(self) -> float:
        """CPU seconds of the function for a step's requests."""
        return max(0.0, self.function_cpu_s - self.load_cpu_s - self.compute_cpu_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseProfile:
    """What was measured of a sparse job on one machine."""

    format: Literal["ephemeron sparse profile 1"] = FORMAT
    job: str
    program: str
    """Model, optimiser and dataset, for people."""
    machine: str
    measured_on: str
    """ISO date."""
    load_average: NonNegative
    """Of the machine over the minute before."""
    cells: tuple[SparseCell, ...]
    run: RunCosts

    @property
    def batches(self) -> tuple[int, int]:
        """The smallest and the largest batch size that was measured."""
        sizes = [cell.batch_size for cell in self.cells]
        return min(sizes), max(sizes)

    def to_json(self) -> str:
        """As in a file."""
        return json.dumps(plain(self), indent=2) + "\n"

    def save(self, path: Path) -> None:
        """Writes the file, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, self.to_json())

    def costs(self) -> StepCosts:
        """Costs by non-negative least squares over the cells; errors are relative."""
        found = self._cpu_costs()
        modelled = ((cell, cpu_step_s(found, cell.batch_size, cell.shards)) for cell in self.cells)
        paces = [1e-6 * sum(cell.step_us.values()) / step_s for cell, step_s in modelled if step_s]
        return replace(found, pace=max(1.0, statistics.median(paces or [1.0])))

    def _cpu_costs(self) -> StepCosts:
        power, factor = _power(self.cells)
        one = [cell for cell in self.cells if cell.shards == 1] or list(self.cells)
        call, each, frame = _fitted(self.cells, lambda cell: (1.0, cell.rows, cell.shards - 1.0), lambda cell: cell.exchange_cpu_s)
        request, row = _fitted(self.cells, lambda cell: (1.0, cell.rows / cell.shards), lambda cell: cell.shard_cpu_s)
        return StepCosts(
            rows_factor=factor,
            rows_power=power,
            load=_line(one, lambda cell: cell.load_cpu_s),
            compute=_line(one, lambda cell: cell.compute_cpu_s),
            exchange=Line(fixed=call, each=each),
            frame_s=frame,
            shard=Line(fixed=request, each=row),
        )


def load_sparse_profile(path: str | Path) -> SparseProfile:
    """Reads a file that `ephemeron profile` has written of a sparse job.

    Raises:
        JobError: it is absent, no JSON, or not such a profile.
    """
    path = Path(path)
    try:
        raw = json.loads(path.read_text())
    except OSError as e:
        raise JobError(f"profile {path} cannot be read: {e.strerror}", remedy="make it with: ephemeron profile JOB") from None
    except ValueError as e:
        raise JobError(f"profile {path} is no JSON: {e}", remedy="make it with: ephemeron profile JOB") from None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise JobError(f"{path} is no profile of a sparse job", remedy="make one with: ephemeron profile JOB")
    found = build(SparseProfile, raw, where=f"profile {path}")
    if not found.cells:
        raise JobError(f"profile {path} has no cells", remedy="make one with: ephemeron profile JOB")
    return found


def _power(cells: Sequence[SparseCell]) -> tuple[float, float]:
    """Exponent, from 0 to 1, and factor of the rows over the batch size."""
    sizes, rows = np.log([c.batch_size for c in cells]), np.log([c.rows for c in cells])
    spread = float(np.sum((sizes - sizes.mean()) ** 2))
    power = float(np.sum((sizes - sizes.mean()) * (rows - rows.mean()))) / spread if spread else 1.0
    power = min(1.0, max(0.0, power))
    return power, float(np.exp(rows.mean() - power * sizes.mean()))


def _line(cells: Sequence[SparseCell], value: Callable[[SparseCell], float]) -> Line:
    fixed, each = _fitted(cells, lambda cell: (1.0, float(cell.batch_size)), value)
    return Line(fixed=fixed, each=each)


def _fitted(
    cells: Sequence[SparseCell], terms: Callable[[SparseCell], tuple[float, ...]], value: Callable[[SparseCell], float]
) -> list[float]:
    """Coefficients of the terms, none below 0, with the least squares of relative errors."""
    from scipy.optimize import nnls

    matrix, wanted = np.array([terms(cell) for cell in cells], float), np.array([value(cell) for cell in cells], float)
    if not wanted.max():
        return [0.0] * matrix.shape[1]
    weights = 1 / np.maximum(wanted, 1e-3 * wanted.max())
    scale = np.maximum(np.abs(matrix).max(axis=0), 1.0)
    found: Any = nnls(matrix / scale * weights[:, None], wanted * weights)[0] / scale
    return [float(x) for x in found]
