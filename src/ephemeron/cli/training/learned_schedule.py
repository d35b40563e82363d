"""The options of `ephemeron train --schedule learned` and `--schedule POLICY.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ephemeron.cli.clouds import cloud_settings
from ephemeron.errors import MissingExtra, UserError
from ephemeron.training.job import SCHEDULES

if TYPE_CHECKING:
    from ephemeron.training.job import Job
    from ephemeron.tuning.siren.workflow import LearnedRun

LEARNED = "learned"


def wanted_schedule(flags: dict[str, object]) -> str | None:
    """Takes a learned schedule out of the options; None: there is none.

    Raises:
        UserError: neither an order of micro-batches, nor `learned`, nor a file.
    """
    given = flags.get("schedule")
    if given is None or given in SCHEDULES:
        return None
    name = str(given)
    if name != LEARNED and not Path(name).exists() and Path(name).suffix != ".json":
        raise UserError(f"--schedule {name} is neither one of {', '.join(SCHEDULES)}, nor {LEARNED}, nor the file of a saved policy")
    flags["schedule"] = None
    return name


def options_of(job: Job, schedule: str, flags: Mapping[str, object], plan_file: Path | None, where: dict[str, str]) -> LearnedRun:
    """The run of a job by a learned schedule, said in one line.

    Raises:
        UserError: the job does not allow it, or an option contradicts it.
    """
    if plan_file is not None:
        raise UserError("--plan and --schedule both say how to run; give one of them")
    if job.sparse is not None:
        raise UserError("the functions of a sparse job do not change; leave --schedule out")
    try:
        from ephemeron.tuning.siren import workflow
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] != "gymnasium":
            raise
        raise MissingExtra("Gymnasium", "siren") from None
    from ephemeron.training.planning_workflow import deployed_sizes

    platform = str(flags.get("platform") or job.run.get("platform") or "local")
    sizes, _ = deployed_sizes(platform, cloud_settings(platform, where))
    found = workflow.learned_run(job, schedule, flags, sizes_mb=sizes, on_progress=lambda text: click.echo(text, err=True))
    click.echo(found.note, err=True)
    return found
