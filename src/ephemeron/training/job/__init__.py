"""Jobs, configurations and faults as frozen values."""

from ephemeron.data.spec import DataSpec, check_data
from ephemeron.functions.world import ComputeModel, Simulation
from ephemeron.training.job.faults import Fault, parse_fault
from ephemeron.training.job.job_file import load_job, parse_job
from ephemeron.training.job.spec import (
    COMPRESSIONS,
    EXCHANGES,
    ON_NON_FINITE,
    PATTERNS,
    PLATFORMS,
    SCHEDULES,
    Compression,
    Configuration,
    Exchange,
    Job,
    JobLimits,
    Pattern,
    PlatformName,
    ScheduleName,
    SyncName,
    Target,
    check_limits,
    sync_name,
)

__all__ = [
    "COMPRESSIONS",
    "EXCHANGES",
    "ON_NON_FINITE",
    "PATTERNS",
    "PLATFORMS",
    "SCHEDULES",
    "Compression",
    "ComputeModel",
    "Configuration",
    "DataSpec",
    "Exchange",
    "Fault",
    "Job",
    "JobLimits",
    "Pattern",
    "PlatformName",
    "ScheduleName",
    "Simulation",
    "SyncName",
    "Target",
    "check_data",
    "check_limits",
    "load_job",
    "parse_fault",
    "parse_job",
    "sync_name",
]
