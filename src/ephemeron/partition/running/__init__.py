"""Split models in training: schedules, stages, devices, checkpoints. Needs torch (NetSplit, section 4.5).

split(traced, plan.placement) → Pipeline(...) → step, step, ... → state_dict
"""

from ephemeron.partition.running.borders import Border, border_bytes, borders
from ephemeron.partition.running.checking import StagesChecked, check_stages
from ephemeron.partition.running.errors import StageFailed
from ephemeron.partition.running.micro_batches import cut, sizes
from ephemeron.partition.running.pipeline import Pipeline, Step
from ephemeron.partition.running.stage_costs import (
    StageSamples,
    StageTimes,
    measure_stages,
    stage_graph,
    stage_placement,
)
from ephemeron.partition.running.turns import Operation, Turns, in_flight, sequences

__all__ = [
    "Border",
    "Operation",
    "Pipeline",
    "StageFailed",
    "StageSamples",
    "StageTimes",
    "StagesChecked",
    "Step",
    "Turns",
    "border_bytes",
    "borders",
    "check_stages",
    "cut",
    "in_flight",
    "measure_stages",
    "sequences",
    "sizes",
    "stage_graph",
    "stage_placement",
]
