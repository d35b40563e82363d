"""What an executor is told, and what it tells at its end."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorOptions:
    """Time constants of an executor."""

    idle_s: float = 10.0
    """Seconds without any task after which it ends: scaling in. While others have leases, it stays up to twice as long as a lease lasts."""
    poll_s: float = 1.0
    """Longest pause between two looks into an empty queue."""
    flush_s: float = 1.0
    """Age of an unrecorded result at which it is recorded before its batch is complete, at most: less where recording takes next to no time."""
    ahead_s: float = 0.05
    """Seconds of work that are leased ahead, beside the time that leasing takes. Longer tasks are leased one ahead: another executor
    may be idle."""
    one_at_a_time: bool = False
    """Nothing is leased ahead: a task that waited behind one of minutes would be late, though another executor may be idle."""
    margin_s: float = 3.0
    """Seconds before the deadline at which the last result is to be recorded."""
    prefetch: int = 4
    """Tasks whose inputs are fetched ahead."""
    keep_bytes: int = 0
    """Inputs that several tasks had, which are kept for others; the latest one is kept in any case."""
    buffer_bytes: int = 256_000_000
    """Inputs that wait for their task, and results that wait for the writer, at most, of more than one task."""


@dataclass(slots=True, kw_only=True)
class ExecutorTotals:
    """What an executor has done."""

    taken: int = 0
    recorded: int = 0
    """Successes that are the visible result."""
    failed: int = 0
    """Failed tries."""
    dropped: int = 0
    """Results that came too late: another executor's are visible."""
    batches: int = 0
    compute_s: float = 0.0
    idle_s: float = 0.0
    ended_by: str = ""
    """`idle`, `closed`, `deadline`, or `stuck` on a task that cannot be interrupted."""
