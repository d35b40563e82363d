"""What the user wants, as frozen values."""

from ephemeron.job.faults import Fault, parse_fault
from ephemeron.job.spec import (
    COMPRESSIONS,
    EXCHANGES,
    PATTERNS,
    PLATFORMS,
    SCHEDULES,
    Compression,
    Configuration,
    DataSpec,
    Exchange,
    Job,
    JobLimits,
    Pattern,
    Simulation,
    SyncName,
    Target,
    check_data,
    check_limits,
    sync_name,
)
from ephemeron.job.toml import load_job, parse_job

__all__ = [
    "COMPRESSIONS",
    "EXCHANGES",
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
