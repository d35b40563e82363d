"""`ephemeron evaluate` and `ephemeron export`: trained weights on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ephemeron.cli.predictions import TABLES, prepared_option, show_left_out
from ephemeron.errors import UserError

if TYPE_CHECKING:
    import torch

    from ephemeron.runs.metrics import Metrics
    from ephemeron.training.job import Job

_FORMATS = ("torchscript", "onnx", "safetensors")


@click.command(short_help="Evaluate trained weights on this machine.")
@click.argument("weights", metavar="RUN|WEIGHTS")
@click.option("--job", "job_file", type=click.Path(path_type=Path), help="Job whose model and data are used.  [default: RUN's own]")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Rows of a table with the label, .csv, .tsv or .parquet, in place of the job's data: of a run on a prepared dataset.",
)
@prepared_option
@click.option("--best", is_flag=True, help="RUN's weights of the best evaluation (keep_best), not those at its end.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
def evaluate(weights: str, job_file: Path | None, data: Path | None, prepared: Path | None, best: bool, as_json: bool) -> None:
    """Evaluate trained weights on all evaluation data of a job, on this machine.

    \b
    ephemeron evaluate last                                    the newest run
    ephemeron evaluate last --best --json
    ephemeron evaluate weights.safetensors --job job.toml      a file, which a run or another program has written
    ephemeron evaluate RUN --job other-data.toml               a run's weights on the data of another job
    ephemeron evaluate RUN --data customers.csv                a run's weights on rows of a table, through its pipeline

    RUN is a name, its beginning, or `last`. A run's own job is the one that was launched, with the code of its functions.
    """
    from ephemeron.training.driver.launching.evaluation import evaluate as evaluated

    if prepared is not None and data is None:
        raise UserError("--prepared is for rows of a table: give --data, too")
    table = None if data is None else _table_metrics(weights, job_file, data, prepared, best=best)
    sparse = table or _sparse_metrics(weights, job_file, best=best)
    if sparse is None:
        job, tensors = _job_and_weights(weights, job_file, best)
        name, metrics = job.name, evaluated(job, tensors)
    else:
        name, metrics = sparse
    if as_json:
        click.echo(json.dumps({"weights": weights, "job": name, "metrics": metrics}))
    else:
        click.echo("  ".join(f"{name} {'-' if value is None else f'{value:.6g}'}" for name, value in metrics.items()))


def _table_metrics(weights: str, job_file: Path | None, data: Path, prepared: Path | None, *, best: bool) -> tuple[str, Metrics]:
    """Name of the job, and metrics on rows of a table."""
    from ephemeron.preparation.predicting import evaluate_table
    from ephemeron.runs import folders
    from ephemeron.training.driver.result import result_of
    from ephemeron.training.driver.trained import record_of

    if job_file is not None or Path(weights).suffix == ".safetensors":
        raise UserError("--data is for runs, with the job that they were launched with")
    if data.suffix not in TABLES:
        raise UserError(f"{data} is no table: give a file *{', *'.join(TABLES)}")
    result = result_of(folders.find(weights, kinds=folders.MODELS))
    metrics, report = evaluate_table(result, data, prepared=prepared, best=best)
    show_left_out(report)
    return record_of(result.folder).name, metrics


def _sparse_metrics(weights: str, job_file: Path | None, *, best: bool) -> tuple[str, Metrics] | None:
    """Name of the job and metrics, if it is the run of a sparse job; else None."""
    from ephemeron.runs import folders
    from ephemeron.runs.header import read_header
    from ephemeron.runs.kinds import load_kind
    from ephemeron.training.driver.records import run_spec

    if Path(weights).suffix == ".safetensors":
        return None
    folder = folders.find(weights, kinds=folders.MODELS)
    record = read_header(folder)
    program = None if record is None else run_spec(record).sparse
    if record is None or program is None:
        return None
    if job_file is not None or best:
        raise UserError("--job and --best are for jobs of PyTorch; see ephemeron.sparse.job.trained_model")
    if program.test is None:
        raise UserError(f"run {folder.run_id} has no test data; see ephemeron.sparse.job.trained_model")
    return record.name, load_kind("sparse").load_model(folder.path).evaluate(program.test)


def _job_and_weights(weights: str, job_file: Path | None, best: bool) -> tuple[Job, dict[str, torch.Tensor]]:
    from ephemeron.runs import folders
    from ephemeron.training.driver.launching.programs import job_of
    from ephemeron.training.driver.result import result_of
    from ephemeron.training.driver.trained import job_of_run, read_weights

    given = None if job_file is None else job_of(str(job_file))
    if Path(weights).suffix == ".safetensors":
        if given is None:
            raise UserError(f"{weights} is a file of weights: say by --job whose model and data it is evaluated with")
        if best:
            raise UserError("--best is for runs, and a file has one set of weights")
        return given, read_weights(Path(weights))
    folder = folders.find(weights, kinds=folders.MODELS)
    return given or job_of_run(folder), result_of(folder).state_dict(best=best)


@click.command(short_help="Write the trained model of a run for other programs.")
@click.argument("run")
@click.option("--format", "form", type=click.Choice(_FORMATS), default="safetensors", show_default=True, help="Form of the file.")
@click.option("--out", type=click.Path(path_type=Path), help="File to write.  [default: named like RUN, in this folder]")
@click.option("--best", is_flag=True, help="Weights of the best evaluation (keep_best), not those at the run's end.")
def export(run: str, form: str, out: Path | None, best: bool) -> None:
    """Write the trained model of RUN to a file for other programs.

    \b
    ephemeron export last                                      weights only, as safetensors
    ephemeron export last --format torchscript --out model.pt  weights and calculation, for libtorch
    ephemeron export last --format onnx --out model.onnx       weights and calculation, for ONNX runtimes

    The calculation is what the first call of the model in `evaluation_step` does, in evaluation mode. Batches may have another
    size than the one that it is recorded with.
    """
    from ephemeron.runs import folders
    from ephemeron.training.driver.export import SUFFIXES, Format
    from ephemeron.training.driver.export import export as exported
    from ephemeron.training.driver.result import result_of

    result = result_of(folders.find(run, kinds=folders.MODELS))
    wanted: Format = form  # type: ignore[assignment]
    path = exported(result, wanted, out or Path(f"{result.folder.run_id}{SUFFIXES[form]}"), best=best)
    click.echo(f"wrote {path}")
