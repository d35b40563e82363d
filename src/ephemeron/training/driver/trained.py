"""The trained model of a run: built from the code that its functions had, with the weights that they have written."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ephemeron.config.code_bundle import Selection, bundle, unbundle
from ephemeron.config.typed import build, plain
from ephemeron.data.sources.readers import prepared_parts
from ephemeron.data.spec import DataSpec
from ephemeron.data.tables import TableDataset
from ephemeron.data.tables.manifest import MANIFEST, PIPELINE, encode
from ephemeron.errors import DatasetError, DatasetNotFound, JobError, MissingExtra, UserError
from ephemeron.runs.folders import CODE_FILE, JOB_FILE, PREPARED, RUN_FILE, RunFolder
from ephemeron.runs.header import RunHeader, read_header
from ephemeron.training.driver import records
from ephemeron.training.driver.records import run_spec
from ephemeron.training.job import Job

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ephemeron.training.task.task import Task

_log = logging.getLogger(__name__)


@runtime_checkable
class Pretrained(Protocol):
    """A module that saves itself so that its class's `from_pretrained` reads it, such as those of transformers and peft."""

    def save_pretrained(self, save_directory: str) -> object: ...


def store_program(folder: RunFolder, job: Job | None, code: bytes | None) -> None:
    """Stores what `trained_model` and evaluations need: the job without its `[run]` table, unless JSON cannot hold it.

    Args:
        job: None: the one that is stored.
        code: bundle of its code; None: it has none.
    """
    if code is not None:
        (folder.path / CODE_FILE).write_bytes(code)
    if job is not None:
        try:
            folder.write(JOB_FILE, plain(dataclasses.replace(job, run={})))  # an address of [run] may hold a password
        except (TypeError, ValueError) as e:
            _log.info("the job is not stored with the run, since it is no JSON: %s", e)
        if job.data.source == "prepared":
            _store_pipeline(folder, job.data)


def _store_pipeline(folder: RunFolder, data: DataSpec) -> None:
    """Stores what made a run's columns of a table: predictions need it, and the dataset may be gone or another one by then."""
    url = data.options.get("train") if data.path is None else prepared_parts(data.path)[0]
    try:
        dataset = TableDataset.open(str(url))
        files = {MANIFEST: encode(dataset.manifest), PIPELINE: dataset.pipeline_bytes()}
    except (DatasetNotFound, DatasetError) as e:
        _log.warning("the pipeline is not stored with the run: %s", e)
        return
    place = folder.path / PREPARED
    place.mkdir(exist_ok=True)
    for name, content in files.items():
        if content is not None:
            (place / name).write_bytes(content)


def record_of(folder: RunFolder) -> RunHeader:
    """A run's record.

    Raises:
        UserError: there is none that can be read.
    """
    record = read_header(folder)
    if record is None:
        raise UserError(f"run {folder.run_id} has no readable {RUN_FILE}")
    return record


def stored_job(folder: RunFolder) -> Job:
    """The job of a run, as it was launched.

    Raises:
        UserError: it was not stored.
    """
    raw = folder.read(JOB_FILE)
    if raw is None:
        raise UserError(f"run {folder.run_id} has no readable {JOB_FILE}: give its job")
    return build(Job, raw, where=f"{JOB_FILE} of {folder.run_id}")


def job_of_run(folder: RunFolder) -> Job:
    """The job of a run, with the folders of its code as `code_of` finds them.

    Raises:
        UserError: it was not stored.
    """
    return dataclasses.replace(stored_job(folder), code=tuple(code_of(folder, record_of(folder))))


def code_of(folder: RunFolder, record: RunHeader) -> list[Path]:
    """Folders of a run's code: those of the job if nothing in them has changed, else ones that hold what functions had.

    Raises:
        UserError: the run has no code.
    """
    stored, source = folder.path / CODE_FILE, records.code_source(record)
    if not stored.exists():
        raise UserError(f"run {folder.run_id} has no {CODE_FILE}: its code was not stored")
    sent = stored.read_bytes()
    if source is not None:
        chosen = Selection(include=source.include, exclude=source.exclude, apart=source.apart, closed=source.closed)
        with contextlib.suppress(JobError):
            if bundle(source.folders, chosen) == sent:
                return list(source.folders)
    return unbundle(sent, folder.path / f"code-{hashlib.sha256(sent).hexdigest()[:12]}")


def trained_task(folder: RunFolder) -> tuple[Task, nn.Module]:
    """A run's task, and its model as it was initialised.

    Raises:
        UserError: it cannot be built.
        MissingExtra: PyTorch is not installed.
    """
    _need_torch()
    from ephemeron.training.task.program import model_of, task_from

    record = record_of(folder)
    spec = run_spec(record)
    task = task_from(spec, code_of(folder, record))
    return task, model_of(task, spec)


def trained_model(folder: RunFolder, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """A run's model with weights, in evaluation mode.

    Raises:
        UserError: it cannot be built, or the weights are of another one.
    """
    _, model = trained_task(folder)
    put_weights(model, tensors)
    return model.eval()


def best_weights(folder: RunFolder) -> Path:
    """File with the weights of the best evaluation, by the job's `keep_best`.

    Raises:
        UserError: the job keeps none, or no evaluation has been kept.
    """
    from ephemeron.runs.folders import events_of
    from ephemeron.training.driver.metric_table import metric_table

    keep = run_spec(record_of(folder)).options.keep_best
    if keep is None:
        raise UserError(f"run {folder.run_id} keeps no best weights: set keep_best in its job")
    values = dict(metric_table(events_of(folder)).column(f"evaluation/{keep.monitor}"))
    kept = [i for i in values if folder.kept_weights(i).exists()]
    if not kept:
        raise UserError(f"run {folder.run_id} has kept no weights of an evaluation")
    best = (min if keep.mode == "min" else max)(kept, key=lambda i: values[i])
    return folder.kept_weights(best)


def put_weights(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Gives a model all its weights.

    Raises:
        JobError: names or shapes differ.
    """
    tensors_of = model.state_dict()
    wanted = {n for n, t in tensors_of.items() if hasattr(t, "shape")}
    wrong = sorted(wanted ^ tensors.keys())
    if wrong:
        raise JobError(
            f"the weights are of another model: {len(wrong)} names differ, the first is {wrong[0]}", remedy="give the weights of this job"
        )
    try:
        model.load_state_dict(dict(tensors), strict=False)
    except RuntimeError as e:
        raise JobError(f"the weights are of another model: {str(e).splitlines()[-1].strip()}") from None


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Tensors of a safetensors file.

    Raises:
        UserError: it cannot be read.
        MissingExtra: PyTorch is not installed.
    """
    _need_torch()
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(str(path))
    except (OSError, SafetensorError) as e:
        raise UserError(f"weights {path} cannot be read: {e}") from None


def save(folder: RunFolder, model: nn.Module, out: Path) -> Path:
    """Writes a trained model: as its class's `save_pretrained` does, or as `model.safetensors` with `config.json`.

    Raises:
        UserError: the folder cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"cannot make {out}: {e.strerror}") from None
    if isinstance(model, Pretrained):
        model.save_pretrained(str(out))
        return out
    from safetensors.torch import save_model

    record = record_of(folder)
    spec, result = run_spec(record), records.read_result(folder)
    config = {
        "run_id": folder.run_id,
        "job": record.name,
        **({"model": plain(spec.model)} if spec.task is None else {"task": plain(spec.task)}),
        "dtype": spec.dtype,
        "seed": spec.seed,
        "metrics": {} if result is None else plain(result.metrics),
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_model(model, str(out / "model.safetensors"))  # a tensor that has several names is written once
    return out


def _need_torch() -> None:
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        raise MissingExtra("PyTorch", "torch") from None
