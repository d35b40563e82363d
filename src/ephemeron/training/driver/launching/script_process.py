"""The process of a script's trial. See `script_trial`.

The script gets the first two batches of the first epoch, and then the same two again from a copy of the registered state: both passes
have to end alike. After that its loops have no batches, so that it comes to its end and its epochs are counted.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import torch

from ephemeron.config.typed import build, plain
from ephemeron.config.user_code import put_in_front
from ephemeron.errors import EphemeronError, JobError
from ephemeron.training.driver.launching.memory import Activations, measured
from ephemeron.training.driver.launching.script_changes import changed, described, variables
from ephemeron.training.driver.launching.script_trial import TrialAnswer, TrialFindings, TrialProblem, TrialRequest
from ephemeron.training.driver.launching.trial import described_optimizer, layout_of
from ephemeron.training.task.eager import eager_optimizers
from ephemeron.training.task.outputs import Outputs
from ephemeron.training.task.script import Run, active
from ephemeron.training.task.script_batches import LoaderBatches, Part
from ephemeron.training.tensors import encode_state
from ephemeron.training.worker.trainers.flat_parameters import FlatParameters
from ephemeron.training.worker.trainers.script_thread import run_file
from ephemeron.training.worker.trainers.script_trainer import ScriptState
from ephemeron.training.worker.trainers.torch_state import RandomState
from ephemeron.user_code import where_raised

_REPLAYED = 2
"""Batches of each of the two passes."""


class TrialRun(Run):
    """A run that has two batches, twice. See `Run`."""

    _loads_in_processes = False

    def __init__(self, *, seed: int, workers: int, folders: tuple[Path, ...], stage: Path) -> None:
        super().__init__(seed=seed)
        self._workers, self._folders, self._stage = workers, folders, stage
        stage.write_text("what comes before its loop")
        self.loop_epochs = 0
        self._outputs = Outputs()
        self.arrays: dict[str, np.ndarray] = {}
        self.initial: Mapping[str, object] = {}
        self.findings: dict[str, Any] = {}
        self.notes: list[str] = []
        self._losses: list[float] = []
        self._rss = psutil.Process().memory_info().rss
        self._activations = Activations()

    @property
    def output_dir(self) -> Path:
        return self._outputs.folder

    def _skips(self, epoch: int) -> bool:
        self.loop_epochs += epoch > 0
        return epoch > 0

    def _epoch(self, batches: LoaderBatches, epoch: int) -> Iterator[Any]:
        self.epoch = epoch
        self.loop_epochs += 1
        if epoch:
            return
        batches.draw(epoch)
        sizes = batches.sizes(epoch, self._workers)
        if not sizes:
            raise JobError("the loader of run.steps has no batch", remedy="give it samples, and a batch size below them")
        grew = psutil.Process().memory_info().rss - self._rss
        registered = self._registered
        flat = FlatParameters([p for _, p in registered.parameters()])
        objects = registered.state(self.arrays)
        self.initial = plain(ScriptState(objects=objects))
        state_bytes = sum(t.nbytes for module in registered.modules.values() for t in (*module.parameters(), *module.buffers()))
        self.findings = {
            "epoch_length": len(sizes),
            "global_batch": max(sizes),
            "samples": sum(sizes),
            "size": flat.size,
            "itemsize": flat.dtype.itemsize,
            "state_bytes": state_bytes,
            "held_bytes": max(0, grew - state_bytes),
            "layout": tuple(part for module in registered.modules.values() for part in layout_of(module)),
        }
        yield from self._replayed(batches, objects)
        self._stage.write_text("what comes after its first epoch")
        optimizers = [o for o in registered.objects.values() if isinstance(o, torch.optim.Optimizer)]
        states = [s for o in optimizers for s in o.state.values()]
        held = sum(t.numel() for s in states for t in s.values() if isinstance(t, torch.Tensor))
        self.findings |= {
            "optimizers": tuple(described_optimizer(o, group) for o in optimizers for group in o.param_groups),
            "optimizer_copies": round(held / flat.size),
            "kept": self._activations.kept,
            "widest": self._activations.widest,
        }

    def _replayed(self, batches: LoaderBatches, initial: Mapping[str, object]) -> Iterator[Any]:
        frame = sys._getframe()
        objects = list(self._registered.objects.values())
        before = variables(frame, self._folders, objects)
        self._stage.write_text("its first two steps")
        random, arrays = RandomState.now(), {name: array.copy() for name, array in self.arrays.items()}
        yield from self._pass(batches, 0)
        after = variables(frame, self._folders, objects)
        in_place, numbers, others = changed(before, after)
        if in_place:
            named = ", ".join(f"{name.rpartition('.')[2]}={name}" for name in in_place)
            raise JobError(
                f"the loop changes {described(in_place, after)}, which {'are' if len(in_place) > 1 else 'is'} not registered",
                remedy=f"call run.register({named}) before the loop",
            )
        first, ended = self._losses, self._weights()
        self._registered.load(initial, arrays)
        self._stage.write_text("the same steps from the restored state")
        RandomState.set(random)
        self._losses = []
        yield from self._pass(batches, 0)
        if not np.array_equal(first, self._losses, equal_nan=True) or any(
            not np.array_equal(a, b, equal_nan=True) for a, b in zip(ended, self._weights(), strict=True)
        ):
            candidates = described([*others, *numbers], after)
            raise JobError(
                f"the same steps from the same registered state have the losses {first} and then {self._losses}"
                + (f"; what has changed and is not registered: {candidates}" if candidates else ""),
                remedy="register every object that the loop changes, and draw random numbers from seeded generators",
            )
        if numbers:
            self.notes.append(
                f"{', '.join(numbers)} change{'' if len(numbers) > 1 else 's'} in the loop, and a restarted function begins with "
                "the first value: register an object with state_dict() if it matters"
            )

    def _pass(self, batches: LoaderBatches, epoch: int) -> Iterator[Any]:
        for number, part in enumerate(batches.parts(epoch, 0)):
            if number == _REPLAYED:
                return
            self.iteration = number
            with self._measuring(part):
                yield self._given(part)
            self._check_stepped()

    def _measuring(self, part: Part) -> AbstractContextManager[None]:
        if self._losses or len(self._registered.modules) != 1:
            return nullcontext()
        (module,) = self._registered.modules.values()
        return measured(module, max(1, part.samples), self._activations)

    def _weights(self) -> list[np.ndarray]:
        return [t.detach().cpu().float().numpy().copy() for t in self._registered.tensors().values()]

    def _step(self, name: str, optimizer: torch.optim.Optimizer, loss: Any, part: Part, *rest: Any) -> None:
        self._losses.append(float(loss.detach()) if isinstance(loss, torch.Tensor) else float(loss))
        super()._step(name, optimizer, loss, part, *rest)


def _tried(request: TrialRequest) -> tuple[dict[str, np.ndarray], TrialAnswer]:
    put_in_front(request.folders)
    sys.argv = [str(request.file), *request.arguments]
    RandomState.set(RandomState.seeded(request.seed % 2**63))
    run = TrialRun(seed=request.seed, workers=request.workers, folders=request.folders, stage=request.stage)
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    try:
        with active(run), eager_optimizers():
            run_file(request.file, module)
    except SystemExit as e:
        if e.code not in (None, 0):
            return {}, TrialAnswer(problem=TrialProblem(problem=f"it ended with exit code {e.code}"))
    except EphemeronError as e:
        return {}, TrialAnswer(problem=TrialProblem(problem=getattr(e, "problem", str(e)), remedy=getattr(e, "remedy", "") or ""))
    except BaseException as e:  # noqa: BLE001 - whatever the script raises is its answer
        traceback.print_exc()
        missing = isinstance(e, (ImportError, FileNotFoundError))
        remedy = ""
        if run.loop_epochs > 1 and not missing:
            remedy = "this trial has batches in the first epoch only: write `for epoch in run.epochs(N)`, whose other epochs it leaves out"
        return {}, TrialAnswer(problem=TrialProblem(problem=where_raised(e, request.folders), remedy=remedy, missing=missing))
    if not run.loop_epochs:
        return {}, TrialAnswer(
            problem=TrialProblem(
                problem="it ended without a loop over run.steps",
                remedy="write `for batch in run.steps(loader):` with run.step(optimizer, loss), where run = ephemeron.current()",
            )
        )
    if "kept" not in run.findings:
        return {}, TrialAnswer(
            problem=TrialProblem(problem="it left the loop over run.steps", remedy="let each loop come to its last batch")
        )
    findings = TrialFindings(epochs=run.loop_epochs, notes=tuple(run.notes), **run.findings)
    return run.arrays, TrialAnswer(findings=findings, initial=run.initial)


def _main() -> None:
    request = build(TrialRequest, json.loads(sys.argv[1]), where="request")
    arrays, answer = _tried(request)
    request.out.write_bytes(encode_state(arrays, plain(answer)))


if __name__ == "__main__":
    from ephemeron.training.driver.launching import script_process as module

    module._main()
