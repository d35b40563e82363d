"""What a step of a pipeline can raise besides what the user got wrong.

EphemeronError
└── StageFailed      a stage raised, or its process died: names stage, device, pass and operator as far as they are
known
"""

from __future__ import annotations

from types import TracebackType

from ephemeron.errors import EphemeronError
from ephemeron.partition.runtime.dispatcher import Operation
from ephemeron.partition.tracing.traced_module import TracedModule


class StageFailed(EphemeronError):
    """A device of a pipeline failed. The pipeline has ended, with all its processes; its last checkpoint stands.

    Args:
        message: what happened, in one line.
        device: where.
        iteration: which step, from 0.
        operation: in which pass; None: between passes, or not known.
        operator: in which operator of the model; empty: not known.
    """

    def __init__(
        self, message: str, *, device: str, iteration: int, operation: Operation | None = None, operator: str = ""
    ) -> None:
        where = f"device {device}"
        if operation is not None:
            where = f"stage {operation.stage} on {where}, {operation.direction} of micro-batch {operation.micro_batch}"
        at = f", operator {operator}" if operator else ""
        super().__init__(f"{where}{at}, iteration {iteration}: {message}")
        self.message = message
        self.device = device
        self.stage = None if operation is None else operation.stage
        self.iteration = iteration
        self.operation = operation
        self.operator = operator


def operator_of(trace: TracebackType | None) -> str:
    """The operator in which an exception arose, from the innermost call of a step; empty: in none."""
    found = ""
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code is TracedModule.call_step.__code__:
            step = frame.f_locals["step"]
            found = f"{step.name} ({step.operator}{', in ' + step.origin if step.origin else ''})"
        trace = trace.tb_next
    return found
