"""The profiler: as few probe runs as the wanted confidence needs, and what they say of a workload and a platform.

probe_design  which configurations to probe next, and when to stop (pure)
live          probes as functions of this machine
cloud         probes as functions of a cloud, in all sizes that it has, within a budget
probe_bill    what probes may cost and have cost (pure)
calibration   short real runs of several functions: what those that run alone cannot show
simulated     the simulator's own constants
store         platform profiles, measured once and kept in the home folder
refine        a profile corrected by what a finished run took
"""

from ephemeron.training.profiling.api import profile_job
from ephemeron.training.profiling.refine import refine

__all__ = ["profile_job", "refine"]
