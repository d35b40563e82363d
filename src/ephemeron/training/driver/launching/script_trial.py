"""Trial of a script with a loop of its own, before anything is paid for.

The script runs once from its bundle, in a process of its own (`script_process`), with two batches only. What the run needs to know
comes from there: lengths, the initial state, sizes; or what is wrong with the script.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ephemeron.communication.channels.base import Buffer
from ephemeron.config.code_bundle import left_out, unbundle
from ephemeron.config.typed import build, plain
from ephemeron.data.batch_source import BatchSource
from ephemeron.data.flow_spec import FlowSpec
from ephemeron.data.shuffle import Indices
from ephemeron.errors import JobError
from ephemeron.runs.probe_process import run_probe
from ephemeron.training.driver.launching.bundle_check import selection_of
from ephemeron.training.driver.launching.memory import Activations
from ephemeron.training.driver.launching.trial import Trial
from ephemeron.training.driver.records import TensorLayout
from ephemeron.training.job import Configuration, Job, Script, Target, TrainingOptions
from ephemeron.training.tensors import Arrays, decode_state, encode_state
from ephemeron.training.worker.spec import ScriptLoop

_LONGEST_S = 900.0
_SAY_EVERY_S = 5.0
_NAMED = 5
_ALLOWED = frozenset({"evaluate_every", "early_stopping", "keep_best", "keep_last", "staleness"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRequest:
    """What the process of a trial is asked."""

    file: Path
    arguments: tuple[str, ...] = ()
    folders: tuple[Path, ...]
    """Of the unpacked bundle."""
    seed: int
    workers: int
    out: Path
    """File for the answer."""
    stage: Path
    """File for what it is doing, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFindings:
    """What a trial found out about a script."""

    epochs: int
    epoch_length: int
    """Iterations of an epoch."""
    global_batch: int
    """Samples of the largest batch over all workers."""
    samples: int
    """Samples of an epoch."""
    size: int
    """Elements of the exchanged vector."""
    itemsize: int
    """Bytes of an element."""
    optimizer_copies: int
    """Vectors of that size in the optimisers' states."""
    optimizers: tuple[Target, ...] = ()
    """Of each parameter group."""
    layout: tuple[TensorLayout, ...]
    kept: float
    """Bytes per sample that a step keeps for its backward pass."""
    widest: float
    """Bytes per sample of the largest module's inputs and outputs."""
    state_bytes: int
    """Bytes of parameters and buffers."""
    held_bytes: int
    """Memory that the script takes before the first batch, apart from these."""
    notes: tuple[str, ...] = ()
    """Remarks for the reader of the run's output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialProblem:
    """Why a trial has failed."""

    problem: str
    remedy: str = ""
    missing: bool = False
    """Whether a file or a module is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialAnswer:
    """What the process of a trial answers."""

    findings: TrialFindings | None = None
    problem: TrialProblem | None = None
    initial: Mapping[str, object] = field(default_factory=dict)
    """Plain values of the initial state; its arrays are beside them."""


class ScriptData:
    """The samples of a script, which loads them itself. See `TrainingData`."""

    flow: FlowSpec | None = None
    test_samples = 0

    def __init__(self, findings: TrialFindings) -> None:
        self.samples, self.epochs, self._held_bytes = findings.samples, findings.epochs, findings.held_bytes

    def share(self, positions: Indices) -> list[Buffer]:
        return []

    def test_share(self, positions: Indices) -> list[Buffer]:
        return []

    def held_bytes(self, owned: int, batch: int) -> int:
        return self._held_bytes

    def trial(self, most: int = 0) -> BatchSource:
        raise JobError(
            "a script loads its samples itself, so no batch can be taken outside of it",
            remedy="use result.state_dict(), or a Task whose train_data and evaluation_data return the samples",
        )

    def described(self) -> str:
        return "a batch of the script"


def refuse_with_script(job: Job, c: Configuration, *, calibrates: bool) -> None:
    """Refuses what is the script's to say, and what its loop does not support.

    Raises:
        JobError: names the option.
    """
    name = job.program.target
    if calibrates:
        raise JobError(f"script {name} cannot be profiled", remedy="choose --workers yourself")
    if c.stages.count > 1:
        raise JobError(f"script {name} cannot be divided into stages", remedy="use stages = 1")
    if c.exchange.local_steps > 1:
        raise JobError(f"local_steps are not for scripts, whose run.step merges gradients: {name}", remedy="use exchange.local_steps = 1")
    if c.exchanged != "gradients" or c.pattern == "parameter-server":
        option = "pattern 'parameter-server'" if c.exchanged == "gradients" else f"exchange '{c.exchanged}'"
        raise JobError(f"{option} is not for scripts, whose run.step merges gradients", remedy="use pattern k-reduce")
    usual = TrainingOptions()
    given = [f.name for f in dataclasses.fields(usual) if getattr(job, f.name) != getattr(usual, f.name)]
    given = [name for name in given if name not in _ALLOWED]
    given += ["dtype"] if job.dtype != "float32" else []
    given += ["init"] if job.init is not None else []
    if given:
        raise JobError(f"{given[0]} is not an option of a script", remedy=f"say it in {name}; see docs/programs.md")


def script_trial(
    job: Job, code: bytes, configuration: Configuration, on_progress: Callable[[str], None] = lambda text: None
) -> tuple[ScriptData, ScriptLoop, Trial]:
    """Tries a job's script from its bundle.

    Args:
        code: the bundle.
        configuration: of the run.
        on_progress: told what is done, at the start and every few seconds.

    Raises:
        JobError: the script raises, has no loop, changes state that is not registered, or lacks a file; or its batches are too
            small for so many workers.
    """
    assert job.script is not None
    arrays, answer = _answer(job, job.script, code, configuration.workers, on_progress)
    if answer.findings is None:
        problem = answer.problem or TrialProblem(problem="its trial found nothing")
        others = left_out(job.code, selection_of(job)) if problem.missing else ()
        listed = ", ".join(str(p) for p in others[:_NAMED])
        remedy = f"files that are not sent: {listed}; name what is needed in code_include" if others else ""
        raise JobError(f"script {job.script.file}: {problem.problem}", remedy=problem.remedy or remedy)
    found = answer.findings
    if found.global_batch < configuration.workers:
        raise JobError(
            f"script {job.script.file}: a batch of {found.global_batch} samples is too small for {configuration.workers} workers",
            remedy="let its loader make larger batches; they are divided among the workers",
        )
    loop = ScriptLoop(script=job.script, epoch_length=found.epoch_length, global_batch=found.global_batch)
    return (
        ScriptData(found),
        loop,
        Trial(
            initial=encode_state(arrays, answer.initial),
            model_bytes=found.size * found.itemsize,
            optimizer_copies=found.optimizer_copies,
            layout=found.layout,
            activations=Activations(kept=found.kept, widest=found.widest),
            state_bytes=found.state_bytes,
            shares_evaluations=job.options.decides,
            optimizers=found.optimizers,
            note="; ".join(found.notes),
        ),
    )


def _answer(job: Job, script: Script, code: bytes, workers: int, on_progress: Callable[[str], None]) -> tuple[Arrays, TrialAnswer]:
    with tempfile.TemporaryDirectory(prefix="ephemeron-trial-") as name:
        place = Path(name).resolve()
        folders = unbundle(code, place / "code")
        request = TrialRequest(
            file=script.find(folders),
            arguments=script.arguments,
            folders=tuple(folders),
            seed=job.seed,
            workers=workers,
            out=place / "answer",
            stage=place / "stage",
        )
        said_s, stage = 0.0, "starting"

        def on_wait(waited_s: float) -> None:
            nonlocal said_s, stage
            if waited_s >= said_s + _SAY_EVERY_S:
                said_s = waited_s
                if request.stage.exists():
                    stage = request.stage.read_text() or stage  # it may be written just now
                on_progress(f"checking {script.file}: {stage} ({waited_s:.0f} s)")

        on_progress(f"checking {script.file}: two steps, which are repeated from its registered state, before a function is started")
        done = run_probe("script-trial", json.dumps(plain(request)), cwd=place / "cwd", most_s=_LONGEST_S, on_wait=on_wait)
        if done.ended == "time":
            raise JobError(
                f"script {script.file}: four steps, and what is not in the loop, take more than {_LONGEST_S:g} s",
                remedy="put what belongs to each epoch into a loop over run.epochs",
            )
        if not request.out.exists():
            raise JobError(f"script {script.file} ended its process early: {done.last_error}")
        arrays, raw = decode_state(request.out.read_bytes(), key="trial")
    return arrays, build(TrialAnswer, raw, where="trial")
