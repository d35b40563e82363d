"""Training of split models: schedules, stages, devices, checkpoints (NetSplit, section 4.5). Needs torch.

split(traced, plan.placement) → Pipeline(...) → step, step, ... → state_dict
"""

from ephemeron.errors import StageFailed
from ephemeron.partition.runtime.boundaries import StageBoundary, boundary_bytes, stage_boundaries
from ephemeron.partition.runtime.checking import StagesCheck, check_stages
from ephemeron.partition.runtime.dispatcher import Dispatcher, Operation, in_flight, sequences
from ephemeron.partition.runtime.micro_batches import cut, sizes
from ephemeron.partition.runtime.pipeline import Pipeline, PipelineStepResult
from ephemeron.partition.runtime.stage_costs import StageSamples, StageTimes, measure_stages, stage_graph, stage_placement

__all__ = [
    "Dispatcher",
    "Operation",
    "Pipeline",
    "PipelineStepResult",
    "StageBoundary",
    "StageFailed",
    "StageSamples",
    "StageTimes",
    "StagesCheck",
    "boundary_bytes",
    "check_stages",
    "cut",
    "in_flight",
    "measure_stages",
    "sequences",
    "sizes",
    "stage_boundaries",
    "stage_graph",
    "stage_placement",
]
