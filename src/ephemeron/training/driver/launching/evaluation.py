"""Evaluation of weights on a job's evaluation data, on this machine, with the trainer that functions have."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ephemeron.data import decode, plan_split
from ephemeron.data.batch_source import ArrayBatchSource, BatchSource
from ephemeron.data.iteration_samples import Timeline
from ephemeron.errors import EphemeronError, JobError
from ephemeron.runs.metrics import Metrics
from ephemeron.training.driver.launching.training_data import TrainingData, training_data
from ephemeron.training.driver.trained import put_weights
from ephemeron.training.job import Job
from ephemeron.training.worker.trainers.factory import rank_seed
from ephemeron.user_code import guarded, where_raised

if TYPE_CHECKING:
    import torch


def evaluate(job: Job, tensors: Mapping[str, torch.Tensor], feed: BatchSource | None = None) -> Metrics:
    """Metrics of weights on all evaluation data of a job.

    Args:
        job: with its task or model, and data.
        tensors: weights by the names of the model's `state_dict`.
        feed: evaluation data in place of the job's.

    Raises:
        UserError: the job has no evaluation data, the weights are of another model, or the program raises.
    """
    from ephemeron.training.task.program import Program, model_of, task_from
    from ephemeron.training.worker.trainers.torch_trainer import TorchTrainer

    if feed is None:
        data = training_data(job)
        if not data.test_samples:
            raise JobError("the job has no evaluation data", remedy="give it some, or data.test_fraction above 0")
        feed = _all_of(job, data)
    task = task_from(job, job.code)
    model = model_of(task, job)
    put_weights(model, tensors)
    # The weights that a run has written are the averaged ones already.
    options = dataclasses.replace(job.options, ema_decay=0.0, compile=False)
    try:
        trainer = TorchTrainer(
            Program(task=task, model=model, optimizers=[], options=options),
            feed=feed,
            sampler=_Nothing(),
            exchange="gradients",
            seed=rank_seed(job.seed, 0),
            alone=True,
        )
        with guarded():
            return trainer.metrics([trainer.evaluate()])
    except EphemeronError:
        raise
    except Exception as e:
        raise JobError(f"the evaluation raised {where_raised(e, job.code)}") from e
    finally:
        feed.close()


class _Nothing:
    """Positions of no training samples."""

    def batch(self, iteration: int) -> np.ndarray:
        return np.arange(0)


def _all_of(job: Job, data: TrainingData) -> BatchSource:
    """The whole evaluation data, and no training data."""
    train = b"".join(data.share(np.arange(0)))
    test = b"".join(data.test_share(np.arange(data.test_samples)))
    if data.flow is None:
        return ArrayBatchSource(decode(bytearray(train)), decode(bytearray(test)))
    from ephemeron.data.flow.batch_source import FlowBatchSource, decode_indices

    return FlowBatchSource(
        data.flow,
        train_indices=decode_indices(train),
        test_indices=decode_indices(test),
        seed=job.seed,
        iterations=0,
        timeline=Timeline(split=plan_split(1, [1])),
        code=job.code,
        own_process=False,
    )
