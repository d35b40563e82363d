"""Virtual time, and what stands for reality in it."""

from ephemeron.functions.simulation.virtual_time import Deadlock, VirtualTimeLoop, run

__all__ = ["Deadlock", "VirtualTimeLoop", "run"]
