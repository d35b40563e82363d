"""The model of a partition command: imported, built, traced and measured, or read as a graph, with progress on standard error."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ephemeron.cli.terminal import make_console, text_of
from ephemeron.errors import JobError, MissingExtra
from ephemeron.units import human_count

if TYPE_CHECKING:
    from torch import nn

    from ephemeron.partition import Graph, PlacementPlan
    from ephemeron.partition.costs.profile import ModelProfile

Tell = Callable[[str], None]
OPTIMIZERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "adam": ("Adam", {}),
    "adamw": ("AdamW", {}),
    "sgd": ("SGD", {"lr": 0.1}),
    "momentum": ("SGD", {"lr": 0.1, "momentum": 0.9}),
}
"""Class in `torch.optim`, and its options."""
FORM = "write module:function or path/file.py:function; it takes the batch size and returns (nn.Module, example inputs)"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRequest:
    """Options of the measurement of a model."""

    batch_size: int
    optimizer: str = "adam"
    kind: str | None = None
    """Name of this kind of device; None: cpu or cuda."""
    repeats: int = 9
    threads: int | None = None
    """Threads of PyTorch; None: unchanged."""
    seed: int = 0


@contextmanager
def telling() -> Iterator[Tell]:
    """Progress on standard error: one changing line on a terminal, plain lines elsewhere."""

    console = make_console(to_stderr=True)
    if not console.is_terminal:
        yield lambda text: console.print(text, style="dim", soft_wrap=True)
        return
    with console.status("partition") as status:
        yield lambda text: status.update(text_of(text))


def graph_or_model(target: str, wanted: PartitionRequest | None, tell: Tell) -> tuple[Graph, ModelProfile | None]:
    """A graph from `graph.json`, or from a model that is measured now.

    Args:
        target: a file in JSON, or a model, see `FORM`.
        wanted: how to measure; not used for a file. None: the batch size is not known.
        tell: progress.

    Raises:
        JobError: the file is no graph; the target names no function or the function no model; the model cannot be traced.
        MissingExtra: PyTorch is not installed.
    """
    from ephemeron.partition import parse_graph
    from ephemeron.partition.serialization.documents import load

    if target.endswith(".json"):
        graph = load(parse_graph, target)
        if wanted is not None and graph.batch_size is not None and graph.batch_size != wanted.batch_size:
            raise JobError(
                f"--batch-size {wanted.batch_size} does not go with {target}, which was measured with {graph.batch_size}",
                remedy="leave it out, or measure again with `ephemeron partition measure`",
            )
        if wanted is not None and graph.batch_size is None:
            graph = dataclasses.replace(graph, batch_size=wanted.batch_size)
        return graph, None
    if wanted is None:
        raise JobError(f"--batch-size is missing, and {target} is to be measured", remedy="say how many samples a batch has")
    measured = measure(target, wanted, tell)
    return measured.graph, measured


def measure(target: str, wanted: PartitionRequest, tell: Tell) -> ModelProfile:
    """Builds, traces and measures a model. Raises as `graph_or_model`."""
    try:
        import torch
    except ImportError:
        raise MissingExtra("PyTorch, which runs the model,", "torch") from None
    from ephemeron.partition.costs.profile import profile_model
    from ephemeron.partition.tracing import trace

    if wanted.threads is not None:
        torch.set_num_threads(wanted.threads)
    torch.manual_seed(wanted.seed)
    tell(f"building {target} for a batch of {wanted.batch_size}")
    model, args, kwargs = build(target, wanted.batch_size)
    tell(f"tracing {type(model).__name__}")
    traced = trace(model, args, kwargs)
    for failure in traced.failures:
        tell(f"note: {failure}")
    if traced.remedy:
        tell(f"note: to cut it finer, {traced.remedy}")
    steps = len(traced.model.program.steps)
    tell(f"measuring {human_count(steps, 'step')}, {wanted.repeats} times after a warm-up")
    name, options = OPTIMIZERS[wanted.optimizer]
    make: Any = getattr(torch.optim, name)
    measured = profile_model(
        traced.model, args, kwargs, optimizer=lambda p: make(p, **options), kind=wanted.kind, name=_name(target), repeats=wanted.repeats
    )
    return dataclasses.replace(measured, graph=dataclasses.replace(measured.graph, batch_size=wanted.batch_size))


def check_placed(measured: ModelProfile, plan: PlacementPlan) -> None:
    """Compares the model, cut as planned, with the whole one, see `check_stages`.

    Raises:
        TraceMismatch: the stages do not train as the whole model does.
    """
    from ephemeron.partition.runtime import check_stages
    from ephemeron.partition.tracing import split

    if len(measured.graph.nodes) > 1:
        check_stages(split(measured.traced, plan.placement, stages=plan.stages), schedule=plan.schedule)


def build(target: str, batch_size: int) -> tuple[nn.Module, tuple[Any, ...], dict[str, object]]:
    """The result of the user's function as model, arguments and keyword arguments.

    Raises:
        JobError: as `graph_or_model`.
    """
    from torch import nn

    from ephemeron.config.user_code import resolve
    from ephemeron.data.user_function import call

    place, colon, name = target.rpartition(":")
    folder = Path.cwd()
    if not colon or not place or not name:
        raise JobError(f"MODEL {target} names no function", remedy=FORM)
    module = place
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise JobError(f"MODEL {target}: {path} does not exist", remedy=FORM)
        if not path.stem.isidentifier():
            raise JobError(f"MODEL {target}: {path.name} cannot be imported", remedy="name the file like a variable")
        folder, module = path.resolve().parent, path.stem
    function = resolve(f"{module}:{name}", [folder])
    made = call(target, function, {"batch_size": batch_size}, [folder])
    said = f"{target} returned {_told(made)}"
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        raise JobError(said, remedy="return (nn.Module, example inputs), the inputs a tensor, or a tuple or dict of arguments")
    args: Any = made[1]
    kwargs: Any = made[2] if len(made) == 3 else {}
    if isinstance(args, Mapping) and len(made) == 2:
        args, kwargs = (), args
    if isinstance(args, list):
        args = tuple(args)
    if not isinstance(args, tuple):
        args = (args,)
    if not isinstance(kwargs, Mapping):
        raise JobError(said, remedy="the third, keyword arguments, should be a dict")
    return made[0], args, dict(kwargs)


def _told(made: Any) -> str:
    if isinstance(made, tuple):
        return "(" + ", ".join(type(x).__name__ for x in made) + ")"
    return type(made).__name__


def _name(target: str) -> str:
    """`examples/partition/nets.py:convnet -> 'convnet'`; of the usual names of functions, the module's."""
    place, _, function = target.rpartition(":")
    return Path(place).stem.rpartition(".")[2] if function in ("build", "make", "model") else function
