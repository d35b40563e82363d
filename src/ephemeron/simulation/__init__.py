"""Virtual time, and what stands for reality in it."""

from ephemeron.simulation.loop import Deadlock, VirtualTimeLoop, run

__all__ = ["Deadlock", "VirtualTimeLoop", "run"]
