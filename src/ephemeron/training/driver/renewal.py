"""New code for a run that is resumed: the user has corrected the model, and functions are to run the new one.

A checkpoint holds tensors by name and the optimiser's state by number, so the new model has to have the same parameters
and buffers in the same order. Anything else in the code may differ.
"""

from __future__ import annotations

import io
import logging
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from ephemeron.communication.channels import Channel
from ephemeron.communication.keys import Keys
from ephemeron.config.code_bundle import Selection, bundle, unbundle
from ephemeron.config.user_code import isolated
from ephemeron.errors import JobError, UserError
from ephemeron.training.driver.launching.bundle_check import selection_of
from ephemeron.training.driver.launching.script_trial import script_trial
from ephemeron.training.driver.launching.trial import layout_of
from ephemeron.training.driver.records import CodeSource, TensorLayout
from ephemeron.training.job import Job
from ephemeron.training.worker.spec import RunSpec

_log = logging.getLogger(__name__)

_NAMED = 5
_KEEP = "resume with --keep-code (keep_code=True) to continue with the code of the launch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """New code of a run."""

    bundle: bytes
    changed: tuple[str, ...]
    """Files that were changed, added or removed."""

    def __str__(self) -> str:
        named = ", ".join(self.changed[:_NAMED]) + (", …" if len(self.changed) > _NAMED else "")
        return f"code changed since it was sent: {len(self.changed)} file{'s' if len(self.changed) > 1 else ''} ({named})"


def source_of(job: Job, layout: tuple[TensorLayout, ...]) -> CodeSource:
    """The code of a job and the layout of its model, for `renewed`."""
    chosen = selection_of(job)
    return CodeSource(
        folders=job.code, include=chosen.include, exclude=chosen.exclude, apart=chosen.apart, closed=chosen.closed, layout=layout
    )


async def renewed(channel: Channel, source: CodeSource, spec: RunSpec) -> Renewal | None:
    """The current code of a run; None: it is unchanged.

    Args:
        channel: of the run.
        source: from `source_of`.

    Raises:
        JobError: a folder is absent, the model cannot be built, or checkpoints do not fit it; or the model is on several
            functions, whose stages were made from the old code.
    """
    chosen = Selection(include=source.include, exclude=source.exclude, apart=source.apart, closed=source.closed)
    try:
        now = bundle(source.folders, chosen)
    except JobError as e:
        raise JobError(e.problem, remedy=_KEEP) from None
    sent = await channel.fetch(Keys(spec.run_id).code)
    if sent is None:
        raise UserError(f"run {spec.run_id} has no code in its channel: the run has ended, or its objects were deleted")
    changed = differing(bytes(sent), now)
    if not changed:
        return None
    made = Renewal(bundle=now, changed=changed)
    _log.info("%s", made)
    if spec.stages is not None:
        raise JobError(
            f"{made}, and the stages of a model on several functions were made from the old code", remedy=f"start a new run, or {_KEEP}"
        )
    if spec.script is None:
        _check_fits(source, spec, made)
    else:
        _check_script_fits(source, spec, made)
    return made


def differing(a: bytes, b: bytes) -> tuple[str, ...]:
    """Files that differ between two bundles, by their paths below the folders."""
    with zipfile.ZipFile(io.BytesIO(a)) as before, zipfile.ZipFile(io.BytesIO(b)) as after:
        sums = [{i.filename: (i.CRC, i.file_size) for i in z.infolist()} for z in (before, after)]
    names = sorted(n for n in sums[0].keys() | sums[1].keys() if sums[0].get(n) != sums[1].get(n))
    return tuple(n.partition("/")[2] for n in names)


def _check_script_fits(source: CodeSource, spec: RunSpec, made: Renewal) -> None:
    assert spec.script is not None
    job = Job(name=spec.name, script=spec.script.script, seed=spec.seed, code=source.folders)
    try:
        data, loop, tried = script_trial(job, made.bundle, spec.configuration)
    except JobError as e:
        raise JobError(f"{made}; {e}", remedy=f"correct it, or {_KEEP}") from None
    if (data.epochs, loop) != (spec.epochs, spec.script):
        raise JobError(
            f"{made}, and the script has {data.epochs} epochs of {loop.epoch_length} batches of {loop.global_batch} now, not "
            f"{spec.epochs} of {spec.script.epoch_length} of {spec.script.global_batch}",
            remedy=f"start a new run, or {_KEEP}",
        )
    _compare(source.layout, tried.layout, made)


def _check_fits(source: CodeSource, spec: RunSpec, made: Renewal) -> None:
    from ephemeron.training.task.program import model_of, task_from

    with tempfile.TemporaryDirectory(prefix="ephemeron-renewal-") as name:
        place = Path(name).resolve()
        folders = unbundle(made.bundle, place / "code")
        with isolated(place, hidden=source.folders):
            try:
                model = model_of(task_from(spec, folders), spec)
            except JobError as e:
                raise JobError(f"{made}; {e}", remedy=f"correct it, or {_KEEP}") from None
            layout = layout_of(model)
    _compare(source.layout, layout, made)


def _compare(before: Sequence[TensorLayout], now: Sequence[TensorLayout], made: Renewal) -> None:
    for old, new in zip_longest(before, now):
        if old != new:
            raise JobError(
                f"{made}, and checkpoints do not fit the model any more: it had {old or 'nothing'} where it has {new or 'nothing'}",
                remedy=f"start a new run, or {_KEEP}",
            )
