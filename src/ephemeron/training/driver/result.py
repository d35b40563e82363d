"""Result of a run that has ended: what is written into its folder and returned to the caller."""

from __future__ import annotations

import base64
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ephemeron.config.typed import build
from ephemeron.errors import JobError, UserError
from ephemeron.events import Phase
from ephemeron.prices import Prices
from ephemeron.runs import verbs
from ephemeron.runs.cost import Bill, CostMeter, latest_metrics
from ephemeron.runs.folders import MODELS, RunFolder, events_of
from ephemeron.runs.header import RunHeader
from ephemeron.runs.kinds import load_kind
from ephemeron.runs.summary import RunResult, copy_results, write_summary
from ephemeron.training.driver import records
from ephemeron.training.driver.records import GenerationSummary, ResultSummary, RunTraffic, run_spec
from ephemeron.training.driver.run_driver import RunOutcome
from ephemeron.training.task.outputs import write_files
from ephemeron.training.tensors import Arrays
from ephemeron.training.worker.result import FinalState
from ephemeron.training.worker.spec import RunSpec
from ephemeron.training.worker.trainers.trainer import WeightNotes
from ephemeron.units import human_count, human_seconds, human_usd

if TYPE_CHECKING:
    import torch

    from ephemeron.training.driver.metric_table import MetricTable

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Result(RunResult):
    """A training run that has ended. Its folder has weights, events and report."""

    summary: ResultSummary

    def _repr_html_(self) -> str:
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

        if run_spec(record_of(self.folder)).sparse is not None:
            return load_kind("sparse").load_model(self.folder.path)
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


def open_run(run_id: str) -> tuple[RunFolder, RunHeader, RunSpec]:
    """A training run that can be attached to or resumed; see `runs.verbs.open_run`.

    Raises:
        UserError: it is simulated.
        JobError: it is of another kind.
    """
    folder, header, _ = verbs.open_run(run_id, kinds=MODELS)
    if header.platform == "simulated":
        raise UserError(f"run {folder.run_id} is simulated: its functions are in the process that drives it")
    return folder, header, run_spec(header)


def result_of(folder: RunFolder) -> Result:
    """The result of a run that has ended.

    Raises:
        UserError: it has none.
    """
    summary = records.read_result(folder)
    if summary is None:
        raise UserError(f"run {folder.run_id} has no result yet; watch it with: ephemeron attach {folder.run_id}")
    return Result(summary, folder)


def conclude(folder: RunFolder, spec: RunSpec, ledger: CostMeter, ending: RunOutcome, out: Path | None, *, report: bool = True) -> Result:
    """Writes result, weights and, if `report`, the report, and copies them to `out`. A run that has finished is never marked
    otherwise."""
    known = records.read_result(folder)
    if known is not None and known.status == "finished" and ending.status != "finished":
        return Result(known, folder)
    value = summarize(ledger, spec, status=ending.status, final=ending.final, causes=ending.causes)
    write_summary(folder, value)
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
    copy_results(folder, out)
    return Result(value, folder, tuple(ending.causes))


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


def summarize(meter: CostMeter, spec: RunSpec, *, status: str, final: FinalState | None, causes: Sequence[str] = ()) -> ResultSummary:
    """Result of a run.

    Args:
        meter: fed with all events of the run.
        spec: of the run.
        status: `finished`, `stopped` or `failed`.
        final: what rank 0 has written at the end; None: the run has not finished.
        causes: why it has failed, or was stopped.
    """
    c, t = spec.configuration, meter.ended_at
    done = meter.finished(c.workers)
    metrics = latest_metrics(meter)
    return ResultSummary(
        run_id=spec.run_id,
        status=status,
        causes=tuple(causes),
        seconds=round(t, 3),
        cost_usd=round(meter.cost_usd(t), 9),
        workers=c.workers,
        aggregators=c.aggregators,
        memory_mb=c.memory_mb,
        batch_size_aggregator=c.batch_size,
        batch_size_nonaggregator=c.nonaggregator_batch_size,
        stages=c.stages.count,
        replicas=c.group,
        micro_batches=c.stages.micro_batches,
        schedule=c.stages.schedule,
        pattern=c.pattern,
        sync=c.sync,
        channel=c.channel,
        exchange=c.exchanged,
        local_steps=c.exchange.local_steps,
        compression=c.exchange.compression,
        iterations=done if final is None or meter.groups else final.iterations,
        invocations=meter.invocations,
        metrics=metrics if final is None else final.metrics,
        traffic=RunTraffic.of(meter.traffic),
        billed=Bill(gb_seconds=round(meter.gb_seconds_at(t), 6), requests=meter.invocations, storage_usd=round(meter.storage_usd(t), 9)),
        weights_sha256=None if final is None else final.weights_sha256,
        generations=_generations(meter, spec),
        regions=tuple(group.region(t) for group in meter.groups),
        phases_s={phase: round(s, 3) for phase, s in meter.phases_s.items()},
        step_us=_step_us(meter, spec),
        platform="+".join(dict.fromkeys(g.started.platform for g in meter.groups)) or c.platform,
        best_iteration=None if final is None else final.best,
        budget_usd=spec.budget_usd,
        prices=f"{meter.prices.name}, {meter.prices.as_of}",
    )


def _step_us(meter: CostMeter, spec: RunSpec) -> dict[Phase, float]:
    """Of a sparse job, mean microseconds of a step by phase."""
    steps = sum(meter.done.values())
    if spec.sparse is None or not steps:
        return {}
    return {phase: round(1e6 * s / steps, 1) for phase, s in meter.phases_s.items() if s}


def _generations(meter: CostMeter, spec: RunSpec) -> tuple[GenerationSummary, ...]:
    """All generations, the first one included."""
    c, later = spec.configuration, [event for _, event in sorted(meter.members.later.items())]
    first = GenerationSummary(from_iteration=0, workers=c.workers, memory_mb=c.memory_mb)
    return (first, *(GenerationSummary(from_iteration=e.from_iteration, workers=e.workers, memory_mb=e.memory_mb) for e in later))


def result_html(summary: ResultSummary, picture: Path) -> str:
    """A run that has ended, for a notebook: a table of its figures, and the picture of its report if there is one."""
    known = {name: f"{value:.4g}" for name, value in summary.metrics.items() if value is not None}
    rows = {
        "run": summary.run_id,
        "status": summary.status,
        "time": human_seconds(summary.seconds),
        "cost": human_usd(summary.cost_usd),
        "iterations": f"{summary.iterations:,}",
        "functions": f"{summary.workers} × {summary.memory_mb} MB, {human_count(summary.invocations, 'invocation')}",
        **known,
    }
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows.items())
    table = f"<table>{cells}</table>"
    if not picture.exists():
        return table
    data = base64.b64encode(picture.read_bytes()).decode()
    return f'{table}<img alt="report of the run" style="max-width: 100%" src="data:image/png;base64,{data}">'
