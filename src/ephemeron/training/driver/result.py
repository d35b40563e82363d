"""Result of a run that has ended: what is written into its folder and returned to the caller."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ephemeron.config.typed import build
from ephemeron.errors import JobError, RunFailed, RunNotFound, UserError
from ephemeron.events import Event, RunStarted, from_json
from ephemeron.training.driver import records, run_dir
from ephemeron.training.driver.cost import CostMeter, summarize
from ephemeron.training.driver.records import RUN_FILE, ResultSummary, RunRecord
from ephemeron.training.driver.run_dir import RunFolder
from ephemeron.training.driver.run_driver import RunOutcome
from ephemeron.training.job.sparse_spec import sparse_jobs
from ephemeron.training.planner.prices import Prices
from ephemeron.training.task.outputs import write_files
from ephemeron.training.tensors import Arrays
from ephemeron.training.worker.spec import RunSpec
from ephemeron.training.worker.trainer import WeightNotes

if TYPE_CHECKING:
    import torch

    from ephemeron.training.driver.metric_table import MetricTable

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Result:
    """A run that has ended."""

    summary: ResultSummary
    """Work and cost of the run; `--json` prints it as JSON."""
    folder: RunFolder
    """Files of the run: weights, events, report."""
    causes: tuple[str, ...] = ()
    """Why it failed, if it did: one line for each function that failed for good."""

    @property
    def finished(self) -> bool:
        """Whether the run came to its regular end."""
        return self.summary.status == "finished"

    def _repr_html_(self) -> str:
        from ephemeron.training.driver.notebook import result_html

        return result_html(self.summary, self.folder.path / "report.png")

    @property
    def metrics(self) -> MetricTable:
        """Every metric that the run has reported, by iteration."""
        from ephemeron.training.driver.metric_table import metric_table

        return metric_table(events_of(self.folder))

    @property
    def output_dir(self) -> Path:
        """Folder of the files that the program has written below its `output_dir`. It need not exist."""
        return self.folder.outputs

    def state_dict(self, *, best: bool = False) -> dict[str, torch.Tensor]:
        """Trained parameters and buffers, by the names of the module's `state_dict`, on the CPU.

        Args:
            best: those of the best evaluation by the job's `keep_best`, instead of those at the end.

        Raises:
            UserError: the run has not finished, or `best` and the job keeps none.
        """
        from ephemeron.training.driver.trained import best_weights, read_weights

        path = best_weights(self.folder) if best else self.folder.weights
        if not path.exists():
            raise UserError(f"run {self.folder.run_id} has no weights: it is {self.summary.status}")
        return read_weights(path)

    def model(self, *, best: bool = False) -> Any:
        """The trained module in evaluation mode: built from the run's own code, with its weights. Of a sparse job, a
        `TrainedSparseModel`.

        Args:
            best: see `state_dict`.

        Raises:
            UserError: the run has no weights, or the module cannot be built here.
        """
        from ephemeron.training.driver.trained import record_of, trained_model

        if record_of(self.folder).run_spec().sparse is not None:
            return sparse_jobs().trained_model(self.folder.path)
        return trained_model(self.folder, self.state_dict(best=best))

    def save(self, folder: str | Path, *, best: bool = False) -> Path:
        """Saves the trained module in a folder: `model.safetensors` and `config.json`.

        A module that has `save_pretrained`, such as those of transformers and peft, saves itself, so that `from_pretrained`
        reads it.

        Args:
            folder: created if absent.
            best: see `state_dict`.

        Returns:
            The folder.

        Raises:
            UserError: see `model`, or the folder cannot be written.
        """
        from ephemeron.training.driver.trained import save

        return save(self.folder, self.model(best=best), Path(folder))

    def raise_if_failed(self) -> Result:
        """This result.

        Raises:
            RunFailed: the run failed; has this as its `result`.
        """
        if self.summary.status == "failed":
            raise RunFailed(self.folder.run_id, self.causes, result=self)
        return self


def open_run(run_id: str) -> tuple[RunFolder, RunRecord, RunSpec]:
    """A run that can be attached to or resumed.

    Raises:
        RunNotFound: no such run.
        UserError: it was simulated.
        JobError: its record is of another release.
    """
    folder = run_dir.find(run_id)
    raw = folder.read(RUN_FILE)
    if raw is None:
        raise RunNotFound(f"run {run_id!r} has no readable {RUN_FILE}")
    record = build(RunRecord, raw, where=f"{RUN_FILE} of {folder.run_id}")
    if record.platform == "simulated":
        raise UserError(f"run {folder.run_id} was simulated: its functions started and ended inside one command")
    return folder, record, record.run_spec()


def result_of(folder: RunFolder) -> Result:
    """The result of a run that has ended.

    Raises:
        UserError: it has none.
    """
    summary = records.read_result(folder)
    if summary is None:
        raise UserError(f"run {folder.run_id} has no result yet; watch it with: ephemeron attach {folder.run_id}")
    return Result(summary, folder)


def events_of(folder: RunFolder) -> Iterator[Event]:
    """Events of a run. Lines that are cut off or of another release are skipped."""
    with folder.events.open() as lines:
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                yield from_json(line)


def session_of(folder: RunFolder) -> float:
    """`wall_time` of the latest launch or resume."""
    return max((e.wall_time for e in events_of(folder) if isinstance(e, RunStarted)), default=0.0)


def last_t(folder: RunFolder) -> float:
    """Time of a run's latest event."""
    return max((e.t for e in events_of(folder)), default=0.0)


def conclude(folder: RunFolder, spec: RunSpec, ledger: CostMeter, ending: RunOutcome, out: Path | None, *, report: bool = True) -> Result:
    """Writes result, weights and, if `report`, the report, and copies them to `out`. A run that has finished is never marked
    otherwise."""
    known = records.read_result(folder)
    if known is not None and known.status == "finished" and ending.status != "finished":
        return Result(known, folder)
    value = summarize(ledger, spec, status=ending.status, final=ending.final, causes=ending.causes)
    records.write(folder, value)
    _log.info("wrote result of run %s: %s", folder.run_id, ending.status)
    if ending.arrays is not None:
        write_weights(folder.weights, ending.arrays, () if ending.final is None else ending.final.bf16)
    if ending.files:
        write_files(folder.outputs, ending.files)
    for iteration, (arrays, notes) in ending.kept.items():
        write_weights(folder.kept_weights(iteration), arrays, build(WeightNotes, notes, where="kept weights").bf16)
    if report:
        try:
            write_report(folder, ledger.prices)
        except UserError as e:  # the result is there, and the report can be made again
            _log.warning("%s", e)
    copy(folder, out)
    return Result(value, folder, tuple(ending.causes))


def copy(folder: RunFolder, out: Path | None) -> None:
    """Copies those of result, weights, report and files of the program that exist."""
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    kept = [path.name for path in folder.all_kept()]
    for name in (records.RESULT_FILE, folder.weights.name, *kept, "report.html", "report.png"):
        if (folder.path / name).exists():
            shutil.copy2(folder.path / name, out / name)
    if folder.outputs.exists():
        shutil.copytree(folder.outputs, out / folder.outputs.name, dirs_exist_ok=True)


def write_report(folder: RunFolder, prices: Prices, out: Path | None = None) -> list[Path]:
    """Writes `report.html` and, if matplotlib is installed, `report.png`; returns their paths.

    Raises:
        UserError: they cannot be written.
    """
    from ephemeron.training import report

    try:
        return report.write_report(folder.path, out, prices=prices)
    except OSError as e:
        raise JobError(
            f"the report of run {folder.run_id} cannot be written to {out or folder.path}: {e.strerror or e}",
            remedy=f"make room, then: ephemeron report {folder.run_id}",
        ) from None


def write_weights(path: Path, arrays: Arrays, bf16: Sequence[str]) -> None:
    """A safetensors file with the names of the module's `state_dict`, loadable by any tool."""
    if bf16:
        import torch
        from safetensors.torch import save_file

        tensors = {n: torch.from_numpy(a) for n, a in arrays.items()}
        save_file({n: t.view(torch.bfloat16) if n in bf16 else t for n, t in tensors.items()}, str(path))
    else:
        from safetensors.numpy import save_file as save_numpy

        save_numpy(arrays, str(path))
