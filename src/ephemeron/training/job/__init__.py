"""What the user wants, as frozen values."""

from ephemeron.data.spec import DataSpec, check_data
from ephemeron.functions.world import Simulation
from ephemeron.training.job.faults import Fault, parse_fault
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
    SyncName,
    Target,
    check_limits,
    sync_name,
)
from ephemeron.training.job.toml import load_job, parse_job

__all__ = [
    "COMPRESSIONS",
    "EXCHANGES",
    "ON_NON_FINITE",
    "PATTERNS",
    "PLATFORMS",
    "SCHEDULES",
    "Compression",
    "Configuration",
    "DataSpec",
    "Exchange",
    "Fault",
    "Job",
    "JobLimits",
    "Pattern",
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
