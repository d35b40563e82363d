"""Request and result of a probe (`worker.probe`), as the profiler and the function exchange them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ephemeron.config.typed import Count, Positive, build


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProbe:
    """Steps of several batch sizes, ascending, so that the peak memory after each batch is that batch's."""

    batches: tuple[Count, ...]
    window_s: Positive
    """Seconds of steps whose mean is one value."""
    windows: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferProbe:
    """Puts and gets of objects, one alone and several at once, and reads of absent objects."""

    sizes_mb: tuple[Positive, ...]
    repeats: Count
    parallel: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldProbe:
    """CPU time of packing, unpacking and adding the exchanged vector."""

    repeats: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProbe:
    """Direct links between two calls that run at once: the second one plays all members but the first."""

    first: bool
    """Whether this is the call that measures."""
    generation: Count
    """First of three numbers of generations that no other probe of the run uses."""
    others: Count
    """Members that the first one connects to."""
    mb: Positive
    """Sent by each of two members while it receives as much."""
    repeats: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """Measurements that a call asks for."""

    probe: StepProbe | None = None
    transfer: TransferProbe | None = None
    fold: FoldProbe | None = None
    links: LinkProbe | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """Steps of one batch size."""

    batch: int
    seconds: tuple[float, ...]
    """Mean step (forward and backward) of each window."""
    cpu_s: tuple[float, ...]
    """CPU seconds of the same."""
    quickest_s: float
    apply_s: float
    """CPU seconds of one optimiser step."""
    peak_mb: float
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTiming:
    """One put and one get."""

    size_mb: float
    up_s: float
    down_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelTransferRow:
    """`parallel` puts at once, then as many gets, beside one of each alone."""

    size_mb: float
    up_s: float
    down_s: float
    up_alone_s: float
    down_alone_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferResult:
    """Times of transfers."""

    rows: tuple[TransferTiming, ...]
    together: tuple[ParallelTransferRow, ...]
    parallel: int
    polls_s: tuple[float, ...]
    """Reads of an absent object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldResult:
    """CPU seconds per repetition."""

    mb: float
    """Size of the vector."""
    pack_s: tuple[float, ...]
    unpack_add_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkResult:
    """Times of direct links."""

    transport: str
    one_link_s: float
    """Seconds from joining until there is a connection to the only other member."""
    all_links_s: float
    """The same for `LinkProbe.others` of them."""
    latency_s: tuple[float, ...]
    """Half of the time until a small message is answered."""
    exchange_s: tuple[float, ...]
    """Seconds in which both members have sent and received `LinkProbe.mb`."""
    exchange_cpu_s: tuple[float, ...]
    """CPU seconds of one of them meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """Raw measurements of one call."""

    entered_wall: float
    """Unix time at which the function's code began."""
    cold: bool
    memory_mb: int
    """Quota of the call."""
    load_s: float = 0.0
    """Seconds until the trainer was built."""
    load_peak_mb: float = 0.0
    model_bytes: int = 0
    """Size of the exchanged vector."""
    state_bytes: int = 0
    """Size of a checkpoint."""
    steps: tuple[StepTiming, ...] = ()
    transfer: TransferResult | None = None
    fold: FoldResult | None = None
    links: LinkResult | None = None

    @classmethod
    def of(cls, value: Mapping[str, object]) -> ProbeResult:
        """The result of an invocation.

        Raises:
            JobError: it is not the result of a probe.
        """
        return build(cls, value, where="result of a probe")
