"""Virtual time for simulated functions."""

from ephemeron.errors import SimulationDeadlock
from ephemeron.functions.simulation.virtual_time import VirtualTimeLoop, run

__all__ = ["SimulationDeadlock", "VirtualTimeLoop", "run"]
