"""Operator graphs through ONNX: NetSplit's route (section 4.1.1), for comparisons and for viewing models in other tools.

Not for training. The file has no BatchNorm updates and no tied parameters, replaces dropout by draws of uniform numbers with ONNX's seed, and
fuses or renames operators; a model rebuilt from it (section 4.1.2) is different. Stages are made from `trace`.
"""

from __future__ import annotations

import copy
import io
import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ephemeron.errors import JobError, MissingExtra
from ephemeron.partition.graph.graph import Graph, Node, Tensor


def export_onnx(model: nn.Module, args: Sequence[Any], path: str | Path, *, kwargs: Mapping[str, Any] | None = None) -> None:
    """Write a model in training mode.

    Args:
        model: it does not change.
        args, kwargs: an example batch.
        path: of the file.

    Raises:
        MissingExtra: ONNX is not installed.
        JobError: the exporter does not accept the model; with its reason.
    """
    _onnx()
    clone = copy.deepcopy(model).train()
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            made = torch.onnx.export(clone, tuple(args), kwargs=dict(kwargs or {}), dynamo=True, verbose=False, optimize=False)
            assert made is not None
            made.save(str(path))
    except Exception as e:
        reason = next((line.strip() for line in str(e).splitlines() if line.strip()), "")
        raise JobError(
            f"{type(model).__name__} cannot be written as ONNX: {type(e).__name__}: {reason[:200]}",
            remedy="use trace(), which keeps code that ONNX cannot express as an opaque node",
        ) from e
    finally:
        log.setLevel(level)


def onnx_graph(path: str | Path) -> Graph:
    """Graph of an ONNX file, without times.

    Inputs are nodes, as in `graph_of`. Initialisers count for the first node that reads them. Variables of unknown shape have 0 bytes.

    Args:
        path: of the file.

    Raises:
        MissingExtra: ONNX is not installed.
        JobError: the file cannot be read.
    """
    onnx = _onnx()
    try:
        graph = onnx.load(str(path)).graph
    except Exception as e:
        raise JobError(f"{path} cannot be read as ONNX: {type(e).__name__}: {str(e)[:200]}") from e
    weights = {i.name: math.prod(i.dims) * _itemsize(onnx, i.data_type) for i in graph.initializer}
    sizes = {v.name: _nbytes(onnx, v) for v in (*graph.input, *graph.value_info, *graph.output)}
    entries = [i.name for i in graph.input if i.name not in weights]
    named = [(n.name or f"{n.op_type}_{k}", n) for k, n in enumerate(graph.node)]
    producer = {name: name for name in entries} | {o: name for name, n in named for o in n.output if o}
    nodes = [_node(name, 0) for name in entries]
    readers: dict[str, dict[str, None]] = {}
    counted: set[str] = set()
    for name, n in named:
        own = [i for i in dict.fromkeys(n.input) if i in weights and i not in counted]
        counted.update(own)
        nodes.append(_node(name, sum(weights[i] for i in own)))
        for i in n.input:
            if i in producer:
                readers.setdefault(i, {})[name] = None
    ends = {o.name for o in graph.output}
    tensors = [
        Tensor(name=v, producer=p, consumers=tuple(readers.get(v, ())), nbytes=sizes.get(v, 0))
        for v, p in producer.items()
        if v in readers or v in ends
    ]
    return Graph(
        name=str(graph.name) or "onnx", nodes=tuple(nodes), tensors=tuple(tensors), source=f"ONNX {Path(path).name}: structure only"
    )


def _node(name: str, parameter_bytes: int) -> Node:
    return Node(name=name, forward_s={"cpu": 0.0}, backward_s={"cpu": 0.0}, parameter_bytes=parameter_bytes)


def _nbytes(onnx: Any, value: Any) -> int:
    kind = value.type.tensor_type
    dims = [d.dim_value for d in kind.shape.dim]
    if not kind.elem_type or any(not d.HasField("dim_value") for d in kind.shape.dim):
        return 0
    return int(math.prod(dims)) * _itemsize(onnx, kind.elem_type)


def _itemsize(onnx: Any, elem_type: int) -> int:
    return int(onnx.helper.tensor_dtype_to_np_dtype(elem_type).itemsize)


def _onnx() -> Any:
    try:
        import onnx
        import onnxscript  # noqa: F401 - the exporter of torch needs it
    except ImportError:
        raise MissingExtra("ONNX (onnx and onnxscript), which the exporter needs,", "onnx") from None
    return onnx
