"""Profile of a sparse job: steps as they were measured, the costs that follow from them, and the file that holds both."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ephemeron.config.paths import replace_file
from ephemeron.config.typed import Count, NonNegative, Positive, build, plain
from ephemeron.errors import JobError
from ephemeron.sparse.job.prediction import Line, RunCosts, StepCosts, cpu_step_s

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
