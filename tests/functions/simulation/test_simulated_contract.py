"""The platform contract, in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, ClassVar

from ephemeron.functions import simulation
from ephemeron.functions.base import Limits, Platform
from ephemeron.functions.simulated import SimulatedPlatform
from ephemeron.testing.platform_contract import PlatformContract
from ephemeron.training.job import Simulation


class TestSimulatedContract(PlatformContract):
    channel = "memory"
    cannot: ClassVar[dict[str, str]] = {
        "memory": "in the simulator all functions share this process, and no quota is enforced",
        "kill": "in the simulator a function has no process that could be killed",
    }

    def loop(self, main: Coroutine[Any, Any, None]) -> None:
        simulation.run(main)

    @asynccontextmanager
    async def open(self, limits: Limits) -> AsyncIterator[Platform]:
        platform = SimulatedPlatform(Simulation(), limits=limits)
        try:
            yield platform
        finally:
            await platform.cancel_all("")
            await platform.close()
