"""Processes of emulated services."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from ephemeron.functions.cgroups import detect
from ephemeron.testing._emulation.limited_process import LimitedProcess


def test_whatever_is_killed_takes_no_process_of_another_service_along(tmp_path: Path) -> None:
    async def start() -> LimitedProcess:
        command = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
        up = asyncio.Event()
        process = await LimitedProcess.start(command, detect(), memory_mb=128, env={}, folder=tmp_path, on_line=lambda line: up.set())
        await up.wait()
        return process

    async def main() -> None:
        one, two = await start(), await start()
        try:
            one.group.kill()
            one.kill()
            await one.wait()
            assert two.returncode is None
        finally:
            for each in (one, two):
                await each.dispose()

    asyncio.run(asyncio.wait_for(main(), 240))
