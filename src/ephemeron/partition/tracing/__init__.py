"""PyTorch models as operator graphs, and back as trainable stages (NetSplit, section 4.1). Needs torch.

tracing = trace(model, (batch,))                  # a model of known operators, checked to train like the original
graph = graph_of(tracing.model)                   # input of `place`; `costs` adds costs
parts = split(tracing.model, placement)           # stages, each an nn.Module
"""

from ephemeron.errors import TraceMismatch
from ephemeron.partition.tracing.check import TracingCheck, check, mean_square
from ephemeron.partition.tracing.graph_builder import graph_of
from ephemeron.partition.tracing.operators import Operator, operators
from ephemeron.partition.tracing.split import ModelSplit, Port, SequentialPass, Stage, StageSpec, split, train_step
from ephemeron.partition.tracing.trace import Tracing, trace
from ephemeron.partition.tracing.traced import Traced

__all__ = [
    "ModelSplit",
    "Operator",
    "Port",
    "SequentialPass",
    "Stage",
    "StageSpec",
    "TraceMismatch",
    "Traced",
    "Tracing",
    "TracingCheck",
    "check",
    "graph_of",
    "mean_square",
    "operators",
    "split",
    "trace",
    "train_step",
]
