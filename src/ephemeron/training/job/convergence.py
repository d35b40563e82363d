"""Region in which HAP, SSP and ASP were measured to be as accurate as BSP, and the factor of epochs of HAP.

Source: `python -m benchmarks.hap_convergence --json`, in benchmarks/results/hap_convergence.json; docs/convergence.md has the tables.
"""

from __future__ import annotations

from dataclasses import dataclass

from ephemeron.training.job.spec import Staleness, Target, sync_name

HAP_EPOCHS_FACTOR = 1.03
"""Epochs until HAP is as accurate as BSP, divided by BSP's: mean over the tested region."""
MOST_PROVISIONAL = 4
"""Versions that a rank may lack, and that provisional steps stand in for; of more, the latest count."""
TESTED_WORKERS = 16
TESTED_STALENESS = 2
"""Largest N of SSP(N) that was tested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestedOptimizer:
    """Largest hyperparameters with which the protocols were within 0.5 points of BSP."""

    rate: float
    """Learning rate divided by (1 − momentum) for SGD, learning rate for others."""
    momentum: float = 0.0


TESTED = {"SGD": TestedOptimizer(rate=1.0, momentum=0.95), "Adam": TestedOptimizer(rate=0.01), "AdamW": TestedOptimizer(rate=0.01)}


def outside_region(
    optimizer: Target, *, sync: str, workers: int, exchange: str = "gradients", pattern: str = "k-reduce", staleness: Staleness = "auto"
) -> str:
    """A sentence that says why a configuration may be less accurate than under BSP; empty within the tested region.

    Args:
        optimizer: name in `torch.optim` and its options.
        sync, workers, exchange, pattern: of the configuration; `workers` share a batch.
        staleness: option of the job.
    """
    name, bound = sync_name(sync)
    if name == "bsp" or workers == 1 or sync == "ssp:0":
        return ""
    reason = _reason(optimizer)
    if pattern == "parameter-server" and name == "asp":
        reason = "changes of an asynchronous parameter server were not tested"
    elif exchange != "gradients":
        reason = f"exchange '{exchange}' was not tested"
    elif staleness == "none":
        reason = "staleness = 'none' computes gradients at stale parameters"
    elif name == "ssp" and bound > TESTED_STALENESS:
        reason = f"the tested staleness is at most {TESTED_STALENESS}"
    elif workers > TESTED_WORKERS:
        reason = f"at most {TESTED_WORKERS} workers were tested"
    if not reason:
        return ""
    return (
        f"sync '{sync}' may be less accurate than bsp here: {reason}. Within the tested region it is within 0.5 points "
        "(docs/convergence.md); compare with a run under bsp, or use a smaller learning rate"
    )


def _reason(optimizer: Target) -> str:
    tested = TESTED.get(optimizer.target)
    if tested is None:
        return f"optimizer {optimizer.target} was not tested"
    rate, momentum = (_number(optimizer.options.get(key)) for key in ("lr", "momentum"))
    if optimizer.target != "SGD":
        largest, what = tested.rate, "learning rate"
    else:
        if momentum > tested.momentum:
            return f"momentum {momentum:g} is above {tested.momentum:g}"
        rate, largest, what = rate / (1 - momentum), tested.rate, "learning rate / (1 − momentum)"
    return f"{what} {rate:g} is above {largest:g}" if rate > largest * (1 + 1e-9) else ""


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
