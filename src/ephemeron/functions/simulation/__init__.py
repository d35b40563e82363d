"""Virtual time, and what stands for reality in it."""

from ephemeron.errors import SimulationDeadlock
from ephemeron.functions.simulation.virtual_time import VirtualTimeLoop, run

__all__ = ["SimulationDeadlock", "VirtualTimeLoop", "run"]
