"""Results of a study: rows of its table, the job file with the best values, and pictures."""

from __future__ import annotations

import copy
import csv
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ephemeron.config.toml import toml_text
from ephemeron.tuning import pictures
from ephemeron.tuning.folder import StudyFolder, StudyStatus, TrialRecord
from ephemeron.tuning.space import Parameter
from ephemeron.tuning.study_file import StudyFile
from ephemeron.units import human_metric, human_usd

if TYPE_CHECKING:
    import optuna

_log = logging.getLogger(__name__)

BEST_FILE, TABLE_FILE = "best.toml", "trials.csv"
PARALLEL_FILE, IMPORTANCES_FILE = "parallel-coordinates.svg", "importances.svg"


def ranked(status: StudyStatus) -> list[TrialRecord]:
    """Trials, best first: finished ones, then others by their last value."""
    sign = 1 if status.mode == "min" else -1

    def key(t: TrialRecord) -> tuple[bool, bool, float, int]:
        return t.state != "finished", t.value is None, sign * (t.value or 0.0), t.number

    return sorted(status.trials, key=key)


def rows(status: StudyStatus) -> list[dict[str, Any]]:
    """Trials as rows, best first."""
    others = list(dict.fromkeys(name for t in status.trials for name in t.metrics if name not in status.parameters))
    return [
        {
            "trial": t.number,
            "state": t.state,
            status.metric: t.value,
            **{name: t.metrics.get(name) for name in others},
            **t.parameters,
            "evaluations": t.evaluations,
            "cost_usd": t.cost_usd,
            "seconds": t.seconds,
            "predicted_usd": t.predicted_usd,
            "predicted_s": t.predicted_s,
            "run": t.run,
            "reason": t.reason,
        }
        for t in ranked(status)
    ]


def write(folder: StudyFolder, file: StudyFile, status: StudyStatus, study: optuna.Study) -> list[Path]:
    """Writes the files of a study's results; returns those that could be made."""
    written = []
    table = rows(status)
    if table:
        path = folder.path / TABLE_FILE
        with path.open("w", newline="") as out:
            writer = csv.DictWriter(out, list(table[0]))
            writer.writeheader()
            writer.writerows(table)
        written.append(path)
    best = next((t for t in status.trials if t.number == status.best), None)
    if best is not None:
        path = folder.path / BEST_FILE
        path.write_text(best_values(status, best) if status.is_of_objective else best_job(file, status, best))
        written.append(path)
    return [*written, *draw(folder.path, file.space, status, study)]


def draw(place: Path, space: Sequence[Parameter], status: StudyStatus, study: optuna.Study) -> list[Path]:
    """Writes the pictures of a study into a folder; returns those that could be made."""
    drawn = {
        place / PARALLEL_FILE: pictures.parallel_coordinates(status, space),
        place / IMPORTANCES_FILE: pictures.importances(status, importances(study)),
    }
    for path, picture in drawn.items():
        if picture:
            path.write_text(picture)
    return [path for path, picture in drawn.items() if picture]


def parameters_text(parameters: Mapping[str, object]) -> str:
    """`{"a.b": 0.5} -> 'a.b = 0.5'`, shortened for people."""
    return ", ".join(f"{k} = {v:.4g}" if isinstance(v, float) else f"{k} = {v}" for k, v in parameters.items())


def trial_text(trial: TrialRecord, metric: str) -> str:
    """A trial that has ended, in a line for people."""
    value = "" if trial.value is None else f"  {metric} {human_metric(trial.value)}"
    took = f"  {trial.seconds:.1f} s  {human_usd(trial.cost_usd)}" if trial.started else ""
    reason = f"  ({trial.reason})" if trial.reason else ""
    return f"trial {trial.number} {trial.state}{value}{took}  {parameters_text(trial.parameters)}{reason}"


def hint(status: StudyStatus) -> str:
    """What the user of an objective may want to know of its trials; empty: nothing."""
    finished = [t for t in status.trials if t.state == "finished"]
    if status.is_of_objective and status.pruner != "none" and finished and not any(t.evaluations for t in status.trials):
        return f"no trial has reported a value, so pruner {status.pruner} has ended none: call trial.report(step, value)"
    return ""


def importances(study: optuna.Study) -> dict[str, float]:
    """Share of each parameter in the differences between finished trials; empty where there are too few of them."""
    from optuna.importance import get_param_importances
    from optuna.trial import TrialState

    if len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))) < 2:
        return {}
    try:
        return dict(get_param_importances(study))
    except (RuntimeError, ValueError) as e:
        _log.info("no importances: %s", e)
        return {}


def best_values(status: StudyStatus, best: TrialRecord) -> str:
    """The values of a trial of an objective, as TOML."""
    return f"# Trial {best.number} of study {status.name}: {status.metric} {best.value!r}.\n{toml_text(dict(best.parameters))}"


def best_job(file: StudyFile, status: StudyStatus, best: TrialRecord) -> str:
    """The job file with the values of a trial. Its paths are absolute, so that it can be moved."""
    document = copy.deepcopy(file.job.with_values(best.parameters))  # type: ignore[arg-type]
    folder = file.job.path.parent

    def absolute(table: Any, name: str) -> None:
        if isinstance(table, dict) and isinstance(table.get(name), str) and table[name]:
            table[name] = str((folder / Path(table[name]).expanduser()).resolve())

    document["code"] = [str((folder / Path(p).expanduser()).resolve()) for p in document["code"]]
    absolute(document, "init")
    absolute(document.get("data"), "path")
    absolute(document.get("run", {}).get("stages"), "placement")
    absolute(document.get("run", {}).get("regions"), "file")
    for logger in document.get("loggers", ()):
        absolute(logger, "folder")
    text = f"# Trial {best.number} of study {status.name}: {status.metric} {best.value!r}, run {best.run}.\n"
    return text + toml_text(document)
