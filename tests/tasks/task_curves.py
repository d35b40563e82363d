"""Loss curves of an example on a flow, and on a DataLoader that knows nothing of flows (DPFlow, table 5-3)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from fitting import fit
from torch.utils.data import DataLoader

from ephemeron.data.flow import BatchStream, Flow, LocalReader
from ephemeron.training.driver import configure, train
from ephemeron.training.job import DataSpec, Job, Simulation, Target, parse_fault

EXAMPLES = Path(__file__).parents[2] / "examples"
SEED = 5
EPOCHS = 3


def curve(example: Any, epochs: Iterable[Any], *, lr: float = 2e-3, **options: Any) -> list[float]:
    """The loss of every batch of a training that begins with the same weights."""
    torch.manual_seed(0)
    model = example.build(**options)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    return [value for batches in epochs for value in fit(model, example.loss, batches, optimizer)]


def on_flow(example: Any, flow: Flow, *, batch_size: int, loaders: int = 2, epochs: int = EPOCHS, **options: Any) -> list[float]:
    read = flow.prepare_read(LocalReader(loaders))
    with read.to_shuffled(batch_size, getattr(example, "collate", None), seed=SEED) as batches:
        return curve(example, [batches] * epochs, **options)


def on_dataloader(example: Any, dataset: Any, *, batch_size: int, epochs: int = EPOCHS, **options: Any) -> list[float]:
    """The same order; samples from a Dataset, or from a flow's view that is told the epoch."""

    def loader(epoch: int) -> Iterable[Any]:
        order = BatchStream(samples=len(dataset), batch_size=batch_size, seed=SEED, epoch=epoch).order()
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        yield from DataLoader(dataset, batch_size, sampler=[int(i) for i in order], collate_fn=getattr(example, "collate", None))

    return curve(example, (loader(epoch) for epoch in range(epochs)), **options)


def seeded_view(flow: Flow) -> Any:
    return flow.prepare_read().to_mapped(seed=SEED)


def falls(losses: list[float], to: float) -> bool:
    """Whether the last quarter's mean is below a part of the first quarter's."""
    n = max(1, len(losses) // 4)
    return sum(losses[-n:]) < to * sum(losses[:n])


def weights_as_job(module: str, store: Path, *faults: str, collate: bool = True, **model: Any) -> str:
    """SHA-256 of what three simulated functions train, reading the flow themselves. Needs a home folder."""
    job = Job(
        name=module,
        model=Target(target=f"{module}:build", options=model),
        loss=Target(target=f"{module}:loss"),
        optimizer=Target(target="Adam", options={"lr": 2e-3}),
        code=(EXAMPLES,),
        data=DataSpec(flow=f"{module}:train", path=store, collate=f"{module}:collate" if collate else None),
        simulation=Simulation(compute={"a": 50.0, "b": 4.0, "m": 0.0}),
        epochs=1,
    )
    how = configure(job, platform="simulated", workers=3, batch_size=4, checkpoint_every=2)
    result = train(job, how, faults=[parse_fault(fault) for fault in faults])
    assert result.finished, result.causes
    assert result.summary.metrics["loss"] > 0
    return str(result.summary.weights_sha256)
