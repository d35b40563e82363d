"""Provenance of a profile's coefficients: probes, intervals, errors on measurements kept out of a fit.

The table `fit` of `profile.json`. Plans read half widths and errors from it (`planner/uncertainty`), people the rest. None: not
measured, or not finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ephemeron.config.typed import NonNegative


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One measured step: a batch at a quota."""

    batch: int
    memory_mb: int
    seconds: float
    spread: float
    """Relative scatter of the windows."""
    predicted_s: float
    half_width: float | None = None
    """Relative, of the 95 % interval of the prediction."""
    peak_mb: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProvenance:
    """Fit of a, b and m (FasDL equation 3-12)."""

    given: bool = False
    """The job's own coefficients, nothing was measured."""
    level: float | None = None
    """Level of the confidence intervals."""
    plus_minus: Mapping[str, float | None] = field(default_factory=dict)
    """Half widths of a, b and m."""
    half_width: NonNegative | None = None
    """Largest relative half width of a predicted step within the probed range."""
    wanted: float | None = None
    stopped: str = ""
    """Why probing ended."""
    residual: float | None = None
    left_out_error: float | None = None
    """Mean relative error on each probe by a fit without it."""
    kept_out_error: float | None = None
    """Mean relative error on `kept_out`."""
    kept_out_worst: float | None = None
    batches: tuple[int, ...] = ()
    quotas_mb: tuple[int, ...] = ()
    fixed: tuple[str, ...] = ()
    """Coefficients that were not fitted."""
    probes: tuple[Probe, ...] = ()
    kept_out: tuple[Probe, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProvenance:
    """Fit of k and c (FasDL equation 4-1)."""

    raised_mb: float = 0.0
    probes: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRow:
    """Forms and errors at one quota."""

    memory_mb: float
    up: str
    up_error: float | None = None
    down: str
    down_error: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferProvenance:
    """Mean relative errors on sizes kept out of the fit."""

    error_up: float | None = None
    error_down: float | None = None
    rows: tuple[TransferRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformProvenance:
    """Starts, polls and transfers that were measured."""

    transfer: TransferProvenance = field(default_factory=TransferProvenance)
    cold_starts_s: tuple[float, ...] = ()
    warm_starts_s: tuple[float, ...] = ()
    polls_s: tuple[float, ...] = ()
    overlap: float | None = None
    """Requests at once that take the time of one."""
    measured_on: str = ""
    """ISO date."""
    reused: bool = False
    """Whether it is an earlier measurement of this machine."""
    sizes_mb: tuple[int, ...] = ()
    """Memory sizes of the functions that were measured on a cloud."""
    calls: int = 0
    """Paid calls of functions."""
    billed_usd: float = 0.0
    """Bill of these calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRow:
    """One calibration run of several functions at once."""

    workers: int
    aggregators: int
    memory_mb: int
    batch: int
    iteration_s: float
    scatter: float
    predicted_s: float
    step_s: float
    first_s: float
    started_s: float
    cpu_s: float
    polls_per_get: float
    direct: bool = False
    """Over direct links."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationProvenance:
    """Corrections by runs of several functions."""

    a_scaled_by: float = 1.0
    runs: tuple[CalibrationRow, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refinement:
    """Corrections by a finished run: `profiling.refine`."""

    run: str
    iterations: int
    memory_mb: int
    a_scaled_by: float
    a_scale_10_to_90_percent: tuple[float, float]
    iteration_s: float
    unexplained_s: float | None = None
    """Seconds of an iteration that the model does not explain; None: its protocol is not predicted."""
    memory_raised_mb: float
    cold_starts: int
    warm_starts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Provenance of a profile; empty for one written by hand."""

    steps: StepProvenance = field(default_factory=StepProvenance)
    memory: MemoryProvenance = field(default_factory=MemoryProvenance)
    calibration: CalibrationProvenance = field(default_factory=CalibrationProvenance)
    platform: PlatformProvenance = field(default_factory=PlatformProvenance)
    second_vcpu_speedup: float | None = None
    too_small_quotas_mb: tuple[int, ...] = ()
    refined: tuple[Refinement, ...] = ()
    seconds: float | None = None
    """Duration of the measurement."""
