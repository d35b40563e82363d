"""A study as it is kept with its run, so that functions elsewhere drive it, which have neither its file nor the folders of its job.

PROGRAM/study.json     the study file, with the names of the other files
PROGRAM/job.json       the job, with its channel without credentials
PROGRAM/code.zip       the folders of its code
PROGRAM/profile.json   with what trials are predicted, if they are
"""

from __future__ import annotations

import atexit
import copy
import dataclasses
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ephemeron.communication.channels import public_address
from ephemeron.config.code_bundle import unbundle
from ephemeron.config.typed import plain
from ephemeron.errors import JobError
from ephemeron.training.driver.launching.bundle_check import bundled
from ephemeron.training.job import Configuration, Job
from ephemeron.tuning import prediction
from ephemeron.tuning.folder import StudyFolder
from ephemeron.tuning.study_file import StudyFile, parse_study

PROGRAM = "program"
_STUDY, _JOB, _CODE, _PROFILE = "study.json", "job.json", "code.zip", "profile.json"


def check(file: StudyFile) -> None:
    """Refuses a study that functions elsewhere cannot drive.

    Raises:
        JobError: its job reads files of this machine, beside its code.
    """
    job, c = prediction.any_of(file)
    where = file.job.path.name
    if job.sparse is not None:
        raise JobError(f"{where}: trials of a sparse job are driven where their shards are", remedy="leave --detach out")
    for key, path in _paths(job, c):
        raise JobError(
            f"{where}: {key} = {str(path)!r} is on this machine, and the study would be driven on {c.platform}",
            remedy="have the code of the job read it from a store, or leave --detach out",
        )
    for parameter in file.space:
        if parameter.key == "run.channel" and any(public_address(str(value))[1] for value in parameter.edges):
            raise JobError(f"{where}: an address of run.channel has a password, which is not stored", remedy="leave --detach out")


def keep(file: StudyFile, folder: StudyFolder) -> None:
    """Keeps a study in its folder.

    Raises:
        JobError: see `check`, or its code is too large.
    """
    check(file)
    job, _ = prediction.any_of(file)
    place = folder.path / PROGRAM
    place.mkdir(exist_ok=True)
    (place / _CODE).write_bytes(bundled(job))
    profile = prediction.profile_of(file)
    if profile is not None:
        profile.save(place / _PROFILE)
    document: dict[str, Any] = copy.deepcopy(dict(file.job.document))
    document["code"] = [f"code/{number}" for number in range(len(job.code))]
    run = document.get("run", {})
    if "channel" in run:
        run["channel"] = public_address(str(run["channel"]))[0]
    (place / _JOB).write_text(json.dumps(document))
    spec = dataclasses.replace(file.spec, job=Path(_JOB), predict=profile is not None, profile=None if profile is None else Path(_PROFILE))
    (place / _STUDY).write_text(json.dumps(plain(spec)))


def kept(folder: StudyFolder) -> StudyFile:
    """The study that is kept in a folder. Its job and its code are unpacked into another one, which goes with this process.

    Raises:
        JobError: there is none.
    """
    place = folder.path / PROGRAM
    if not (place / _STUDY).exists():
        raise JobError(f"the folder of study {folder.path.name} has no study to drive", remedy="go on with it by its file: --resume")
    work = Path(tempfile.mkdtemp(prefix="ephemeron-study-"))
    atexit.register(shutil.rmtree, work, ignore_errors=True)
    for name in (_JOB, _PROFILE):
        if (place / name).exists():
            shutil.copy2(place / name, work / name)
    unbundle((place / _CODE).read_bytes(), work / "code")
    return parse_study(json.loads((place / _STUDY).read_text()), folder=work)


def _paths(job: Job, c: Configuration) -> Iterator[tuple[str, Path]]:
    """What a job reads of this machine, beside its code."""
    found = {"data.path": job.data.path, "init": job.init, "run.stages.placement": Path(c.stages.placement) if c.stages.placement else None}
    yield from ((key, path) for key, path in found.items() if path is not None)
