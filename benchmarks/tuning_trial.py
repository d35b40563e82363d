"""One training of the digits in one process, as the job of `benchmarks.tuning` does it: for the peer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def train_digits(
    values: dict[str, Any], report: Callable[[float], None], *, job_file: Path, epochs: int, batch: int = 64
) -> None:
    """Trains with values by their keys in the job file; reports the accuracy after each epoch."""
    import torch
    from torch.nn import functional

    from ephemeron.config.user_code import resolve
    from ephemeron.data import load
    from ephemeron.training.job import load_job

    torch.set_num_threads(1)
    job = load_job(job_file)
    data = load(job.data, seed=job.seed, code=job.code)
    inputs, labels = torch.tensor(data.train.inputs), torch.tensor(data.train.targets)
    test_inputs, test_labels = torch.tensor(data.test.inputs), torch.tensor(data.test.targets)
    torch.manual_seed(job.seed)
    model = resolve(job.model.target, job.code)(width=values["model.options.width"])
    optimizer = torch.optim.SGD(model.parameters(), lr=values["optimizer.options.lr"], momentum=0.9)
    for _ in range(epochs):
        order = torch.randperm(len(inputs))
        for start in range(0, len(inputs), batch):
            part = order[start : start + batch]
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs[part]), labels[part]).backward()
            optimizer.step()
        with torch.no_grad():
            right = model(test_inputs).argmax(1) == test_labels
        report(float(right.float().mean()))
