"""Direct links that two functions measure between them, and what a profile makes of it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.communication.direct import LinkFailed
from ephemeron.communication.direct.memory_transport import MemoryNetwork
from ephemeron.functions import simulation
from ephemeron.functions.base import Call, Limits
from ephemeron.functions.context import Context
from ephemeron.training.job import DataSpec, Job, Target
from ephemeron.training.profiling import live
from ephemeron.training.profiling.live import fit_links, measure_direct_links
from ephemeron.training.profiling.preparation import prepared_alone
from ephemeron.training.worker.link_probe import measure_links
from ephemeron.training.worker.probe_messages import LinkProbe, LinkResult

CODE = Path(__file__).parents[2] / "training" / "code"
MB_PER_PIECE = (1 << 20) / 1e6


def context(store: MemoryChannel, network: MemoryNetwork, name: str) -> Context:
    """A function in virtual time, which connects over a simulated network."""

    async def unused(*_: Any, **__: Any) -> Any:
        raise AssertionError

    loop = asyncio.get_running_loop()
    call = Call(run="run", rank=0, attempt=0, memory_mb=512, lifetime_s=900.0, channel="", key="00" * 32)
    return Context(
        call=call,
        invocation=name,
        channel=store,
        emit=lambda event: None,
        invoke=unused,
        compute=unused,
        origin=loop.time(),
        deadline=loop.time() + 900.0,
        die=lambda: sys.exit(),
        transports=lambda: [network.transport(0 if name == "first" else 1)],
    )


def measured(network: MemoryNetwork, mb: float = 4 * MB_PER_PIECE) -> LinkResult:
    async def go() -> LinkResult:
        store = MemoryChannel()
        probes = (LinkProbe(first=first, generation=7, others=3, mb=mb, repeats=2) for first in (True, False))
        ends = zip(("first", "second"), probes, strict=True)
        found, none = await asyncio.gather(*(measure_links(context(store, network, n), p) for n, p in ends))
        assert found is not None
        assert none is None
        return found

    return simulation.run(go())


def test_two_functions_measure_the_network_between_them():
    raw = measured(MemoryNetwork(latency_s=0.005, bandwidth_mb_s=100.0))
    assert raw.transport == "simulated"
    assert raw.latency_s == pytest.approx([0.005 + 1072 / 100e6] * 200, rel=1e-3)
    # What starts an exchange travels once before the second function sends.
    assert raw.exchange_s == pytest.approx([2 * 0.005 + 4 * MB_PER_PIECE / 100] * 2, rel=1e-2)
    assert 0 < raw.one_link_s <= raw.all_links_s


def test_functions_that_cannot_connect_say_so():
    network = MemoryNetwork()
    network.partition(0, 1)
    with pytest.raises(LinkFailed, match="do not connect"):
        measured(network)


def test_coefficients_are_medians_and_links_beyond_the_first_share_the_rest():
    raw = LinkResult(
        transport="unix",
        one_link_s=0.01,
        all_links_s=0.016,
        latency_s=(1e-5, 2e-5, 9e-5),
        exchange_s=(0.02, 0.1, 0.04),
        exchange_cpu_s=(0.004, 0.006, 0.005),
    )
    found = fit_links(raw, mb=8.0, others=3)
    assert found.latency_s == 2e-5
    assert found.mb_s == pytest.approx(8.0 / 0.04)
    assert found.cpu_s_per_mb == pytest.approx(0.005 / 8.0)
    assert found.setup(4) == pytest.approx(raw.all_links_s)
    assert found.setup(2) == pytest.approx(raw.one_link_s)
    assert (found.failure, found.route) == (0.0, "private")


@pytest.mark.slow
def test_functions_of_this_machine_measure_their_links(tmp_path, monkeypatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path))
    job = Job(name="links", model=Target(target="tiny:mlp"), data=DataSpec(), epochs=1, code=(CODE,))
    limits = Limits(memory_max_mb=2048, concurrency=4)
    prepared = prepared_alone(job, channel="folder", limits=limits, platform="local")

    async def go():
        async with live.probing(prepared, channel="folder", secrets={}, limits=limits, on_progress=lambda text: None) as prober:
            return await measure_direct_links(prober, 704)

    found = asyncio.run(go())
    assert found is not None
    assert found.latency_s > 0
    assert found.mb_s > 0
    assert "over shared" in found.source or "over unix" in found.source
