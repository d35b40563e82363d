"""Coefficients of direct links, from a probe of two functions."""

from __future__ import annotations

import logging
import statistics

from ephemeron.errors import FunctionFailed
from ephemeron.training.collectives.direct_messages import ONE_PHASE_BYTES
from ephemeron.training.planner.model.direct_links import DirectLinks
from ephemeron.training.profiling import live
from ephemeron.training.worker.probe_messages import LinkResult
from ephemeron.units import MB

_log = logging.getLogger(__name__)


async def measured_links(prober: live.Prober, memory_mb: int) -> DirectLinks | None:
    """Direct links between functions of a quota; None: they cannot connect, or have no store to meet at.

    Raises:
        OutOfMemory, FunctionTimedOut, FunctionLost: a probe ended badly.
    """
    if prober.traits.service == "server":
        return None
    try:
        raw = await prober.links(memory_mb)
    except FunctionFailed as e:
        _log.warning("direct links are not planned for, because they could not be measured: %s", e)
        return None
    return links_of(raw, mb=live.LINK_MB, others=live.LINKED)


def links_of(raw: LinkResult, *, mb: float, others: int) -> DirectLinks:
    """Coefficients from measurements: medians, since a disturbance only ever makes anything longer.

    Args:
        raw: what two functions have measured.
        mb: that each of them has sent in an exchange.
        others: members that were connected to at once.
    """
    each = max(0.0, raw.all_links_s - raw.one_link_s) / (others - 1)
    return DirectLinks(
        latency_s=statistics.median(raw.latency_s),
        mb_s=mb / statistics.median(raw.exchange_s),
        cpu_s_per_mb=statistics.median(raw.exchange_cpu_s) / mb,
        setup_s=max(0.0, raw.one_link_s - each),
        setup_each_s=each,
        one_phase_mb=ONE_PHASE_BYTES / MB,
        source=f"measured between two functions of this machine, over {raw.transport}",
    )
