"""One training of the digits in one process, with the samples in the order of the job of `benchmarks.tuning`: for the peer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def train_digits(
    values: dict[str, Any],
    report: Callable[[float, Callable[[Path], None]], None],
    *,
    job_file: Path,
    epochs: int,
    batch: int = 64,
    resume: Path | None = None,
) -> None:
    """Trains with values by their keys in the job file.

    Args:
        report: called after each epoch with the accuracy, and a function that saves the state to a file.
        resume: such a file; training goes on after its epoch.
    """
    import torch
    from torch.nn import functional

    from ephemeron.config.user_code import resolve
    from ephemeron.data import load
    from ephemeron.data.iteration_samples import global_batch
    from ephemeron.data.split import assign, plan_split
    from ephemeron.training.job import load_job

    torch.set_num_threads(1)
    job = load_job(job_file)
    data = load(job.data, seed=job.seed, code=job.code)
    inputs, labels = torch.tensor(data.train.inputs), torch.tensor(data.train.targets)
    test_inputs, test_labels = torch.tensor(data.test.inputs), torch.tensor(data.test.targets)
    split = plan_split(len(inputs), [batch])
    owned = assign(len(inputs), split, job.seed)
    torch.manual_seed(job.seed)
    model = resolve(job.model.target, job.code)(width=values["model.options.width"])
    optimizer = torch.optim.SGD(model.parameters(), lr=values["optimizer.options.lr"], momentum=0.9)
    begin = 0
    if resume is not None:
        begin, model_state, optimizer_state = torch.load(resume)
        model.load_state_dict(model_state)
        optimizer.load_state_dict(optimizer_state)
    for epoch in range(begin, epochs):
        for iteration in range(split.iterations):
            part = torch.from_numpy(global_batch(split, owned, epoch, iteration, seed=job.seed))
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs[part]), labels[part]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        with torch.no_grad():
            right = model(test_inputs).argmax(1) == test_labels

        def save(path: Path, done: int = epoch + 1) -> None:
            torch.save((done, model.state_dict(), optimizer.state_dict()), path)

        report(float(right.double().mean()), save)
