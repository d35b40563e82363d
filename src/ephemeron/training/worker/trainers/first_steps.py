"""Two steps of a run in a process of their own, from the objects that functions will read: `python -m … FOLDER`.

The steps are done three times: from the initial state; again, which shows whether they are deterministic; and with the state
saved and restored between them, as a successor would have it, which shows whether it is complete.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ephemeron.communication.keys import Keys
from ephemeron.config.code_bundle import unbundle
from ephemeron.config.own_processes import peak_mb
from ephemeron.config.typed import plain
from ephemeron.errors import EphemeronError, JobError
from ephemeron.training.tensors import decode_state, digest, encode_state
from ephemeron.training.worker.spec import RunSpec
from ephemeron.training.worker.trainers.factory import build_script_trainer, build_torch_trainer, open_feed
from ephemeron.training.worker.trainers.torch_trainer import TorchTrainer
from ephemeron.training.worker.trainers.trainer import Trainer
from ephemeron.user_code import frames_of, guarded, line_of

STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstSteps:
    """Result of the process, on its standard output as JSON."""

    losses: tuple[float | None, ...] = ()
    """Of each step."""
    metrics: tuple[dict[str, float], ...] = ()
    """What the steps report beside the loss."""
    evaluation: dict[str, float | None] = field(default_factory=dict)
    """Metrics of rank 0's slice, after the steps."""
    step_s: float = 0.0
    """Seconds of the last step, optimiser included."""
    evaluation_s: float = 0.0
    samples: int = 0
    """In rank 0's batch."""
    vector_mb: float = 0.0
    """Size of what is exchanged, MB."""
    state_mb: float = 0.0
    """Size of a checkpoint, MB."""
    device: str = "cpu"
    peak_mb: float = 0.0
    """Largest resident size, MiB."""
    error: str = ""
    """Why the steps failed; empty: they did not."""
    remedy: str = ""
    traceback: str = ""
    """Frames of the user's code."""


def objects_of(keys: Keys) -> dict[str, str]:
    """Key of each object that rank 0 reads, by its file name in the folder. A script has no `data` and no `test`."""
    return {"spec": keys.spec, "code": keys.code, "init": keys.init, "data": keys.data(0), "test": keys.test(0)}


def run_first_steps(folder: Path) -> FirstSteps:
    """Does the steps.

    Args:
        folder: with the objects.

    Raises:
        JobError: two executions differ, or a restored state gives another step than the state itself.
    """
    held = {name: (folder / name).read_bytes() for name in objects_of(Keys("")) if (folder / name).exists()}
    spec = RunSpec.from_bytes(held["spec"])
    folders = unbundle(held["code"], folder / "unpacked")

    def fresh() -> Trainer:
        trainer: Trainer
        if spec.script is not None:
            trainer = build_script_trainer(spec, 0, folders=folders)
        else:
            feed = open_feed(spec, held["data"], held["test"], folders=folders)
            trainer = build_torch_trainer(spec, 0, folders=folders, feed=feed)
        trainer.load(*decode_state(held["init"]))
        return trainer

    first, again = fresh(), fresh()
    losses, metrics, saved, step_s, samples = [], [], b"", 0.0, 0
    for t in range(min(STEPS, spec.iterations)):
        began = time.perf_counter()
        step = first.compute(t)
        mean = _mean(step.vector, step.samples if step.weight is None else step.weight)
        first.apply(mean)
        step_s, samples = time.perf_counter() - began, step.samples
        losses.append(step.loss)
        metrics.append(dict(step.metrics))
        other = again.compute(t)
        if not np.array_equal(mean, _mean(other.vector, other.samples if other.weight is None else other.weight)):
            raise JobError(
                f"step {t} gave other gradients when it was repeated from the same state{_which(first, mean, other.vector)}",
                remedy="draw random numbers from torch, numpy or random (they are seeded), and keep nothing between steps "
                "outside of the model and the optimisers",
            )
        again.apply(mean)
        if t == 0:
            arrays, meta = again.state()
            saved = encode_state(arrays, meta)
            again.close()
            again = fresh()
            again.load(*decode_state(saved))
    if digest(first.weights()[0]) != digest(again.weights()[0]):
        raise JobError(
            "a step from a restored state gave other weights than from the state itself",
            remedy="give the task state_dict() and load_state_dict() for what changes while it trains",
        )
    began = time.perf_counter()
    tested = isinstance(first, TorchTrainer) and first.feed.test_samples  # a script evaluates when an epoch ends
    evaluation = first.metrics([first.evaluate()]) if tested else {}
    evaluation_s = time.perf_counter() - began
    first.close()
    again.close()
    return FirstSteps(
        losses=tuple(losses),
        metrics=tuple(metrics),
        evaluation=dict(evaluation),
        step_s=step_s,
        evaluation_s=evaluation_s,
        samples=samples,
        vector_mb=first.size * first.dtype.itemsize / 1e6,
        state_mb=len(saved) / 1e6,
        device=str(first.device) if isinstance(first, TorchTrainer) else "cpu",
    )


def _mean(vector: np.ndarray, weight: float) -> np.ndarray:
    mean: np.ndarray = vector / vector.dtype.type(weight or 1)
    return mean


def _which(trainer: Trainer, mean: np.ndarray, other: np.ndarray) -> str:
    """The first parameter whose gradients differ."""
    start = 0
    for name, p in trainer.named if isinstance(trainer, TorchTrainer) else ():
        stop = start + p.numel()
        if not np.array_equal(mean[start:stop], other[start:stop]):
            return f", first in {name}"
        start = stop
    return ""


def main(folder: Path) -> None:
    """Writes a `FirstSteps` to standard output; what the user's code prints goes to standard error."""
    out, sys.stdout = sys.stdout, sys.stderr
    try:
        with guarded():
            result = run_first_steps(folder)
    except JobError as e:
        result = FirstSteps(error=e.problem, remedy=e.remedy or "")
    except EphemeronError as e:
        result = FirstSteps(error=str(e))
    except Exception as e:  # noqa: BLE001 - the user's
        result = FirstSteps(error=line_of(e), traceback=frames_of(e, (folder / "unpacked").resolve()))
    json.dump({**plain(result), "peak_mb": peak_mb()}, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
